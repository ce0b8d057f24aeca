import gc

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from memfit.adapters.torch.addresses import Pinned, address_replacements
from memfit.adapters.torch.replacement import replaced
from tests.unit.adapters.torch.machines import machine


@pytest.fixture
def _replaced():
    with replaced(address_replacements()):
        yield


@pytest.mark.usefixtures("_replaced")
def test_tensors_without_memory_have_addresses_of_their_own():
    first, second = torch.empty(4, 4, device="meta"), torch.empty(4, 4, device="meta")

    assert first.data_ptr() != second.data_ptr()
    assert first.data_ptr() == first.view(16).data_ptr() == first.untyped_storage().data_ptr()
    assert first[1].data_ptr() - first.data_ptr() == 16
    assert first.data_ptr() % 16 == 0
    assert torch.empty(0, device="meta").data_ptr() == 0


@pytest.mark.usefixtures("_replaced")
def test_real_addresses_stay():
    tensor = torch.zeros(3)

    assert tensor.data_ptr() == tensor.untyped_storage().data_ptr() == tensor.numpy().ctypes.data


@pytest.mark.usefixtures("_replaced")
def test_a_pinned_tensor_remembers_it_and_is_not_copied():
    tensor = torch.arange(4.0)
    assert not tensor.is_pinned()

    pinned = tensor.pin_memory()

    assert pinned.is_pinned()
    assert pinned[1:].is_pinned()
    assert pinned.untyped_storage().is_pinned()
    assert pinned.data_ptr() == tensor.data_ptr()
    assert pinned.pin_memory() is pinned
    assert not torch.arange(4.0).is_pinned()


@pytest.mark.usefixtures("_replaced")
def test_a_storage_can_be_pinned():
    storage = torch.zeros(3).untyped_storage()

    assert storage.pin_memory().is_pinned()


@pytest.mark.usefixtures("_replaced")
def test_device_tensors_cannot_be_pinned():
    tensor = torch.empty(2, device="meta")

    assert not tensor.is_pinned()
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        tensor.pin_memory()


def test_what_is_gone_is_forgotten():
    pinned = Pinned()
    tensor = torch.zeros(3)
    pinned.add(tensor.untyped_storage())
    pinned.add(tensor.untyped_storage())
    assert tensor.untyped_storage() in pinned

    del tensor
    gc.collect()

    assert pinned._references == {}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_pins_in_any_thread(num_workers):
    dataset = TensorDataset(torch.arange(4.0))

    with machine():
        batches = list(DataLoader(dataset, batch_size=2, pin_memory=True, num_workers=num_workers))

        assert [batch.is_pinned() for (batch,) in batches] == [True, True]
    assert [batch.tolist() for (batch,) in batches] == [[0, 1], [2, 3]]


def test_afterwards_methods_are_inherited_again():
    with replaced(address_replacements()):
        assert "data_ptr" in vars(torch.Tensor)

    for owner in (torch.Tensor, torch.UntypedStorage):
        assert "data_ptr" not in vars(owner)
    assert torch.empty(2, device="meta").data_ptr() == 0
