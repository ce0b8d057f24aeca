import gc

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import DataLoader, TensorDataset

from memfit.core.patching import replaced
from memfit.frameworks.torch.shapes.device_labels import BARE, DeviceLabels, address_replacements
from tests.unit.frameworks.torch.machines import machine

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def places():
    return DeviceLabels(FIRST)


def empty(*size):
    return torch.empty(*size, device="meta")


def test_a_shape_only_tensor_is_on_the_simulated_device(places):
    tensor = empty(4)

    assert places.of(tensor) == FIRST
    assert not places.has(tensor.untyped_storage())
    assert not places


@pytest.mark.parametrize("device", [BARE, SECOND], ids=str)
def test_another_place_is_remembered(places, device):
    marked, other = empty(4), empty(4)

    places.mark(marked, device)

    assert (places.of(marked), places.of(other)) == (device, FIRST)
    assert places.has(marked.untyped_storage())
    assert not places.has(other.untyped_storage())
    assert places


def test_views_are_where_their_base_is(places):
    base = empty(4, 4)
    places.mark(base[1:], SECOND)

    assert places.of(base) == places.of(base.t()[0]) == SECOND


def test_a_tensor_that_comes_back_is_no_exception_any_more(places):
    tensor = empty(4)
    places.mark(tensor, BARE)
    places.mark(tensor, FIRST)

    assert places.of(tensor) == FIRST
    assert not places


def test_a_storage_that_is_gone_is_forgotten(places):
    # GIVEN a marked tensor, of which a view is held
    tensor = empty(4)
    places.mark(tensor, SECOND)
    view = tensor[1:]
    del tensor
    assert places

    # WHEN the last holder goes, the number of its storage may be used again
    del view
    gc.collect()

    assert not places
    assert [places.of(empty(4)) for _ in range(100)] == [FIRST] * 100


def test_marking_twice_keeps_the_last(places):
    tensor = empty(4)
    places.mark(tensor, SECOND)
    places.mark(tensor, BARE)

    assert places.of(tensor) == BARE
    del tensor
    assert not places


def test_a_tensor_made_of_others_is_where_its_first_part_is(places):
    wrapper = TwoTensor(empty(4), empty(4))
    places.mark(wrapper, SECOND)

    assert places.of(wrapper) == places.of(wrapper.a) == SECOND


def test_a_tensor_without_a_storage_is_on_the_simulated_device(places):
    sparse = torch.sparse_coo_tensor(empty(1, 2).long(), empty(2), (4,), check_invariants=False)
    places.mark(empty(4), SECOND)
    kept = empty(4)
    places.mark(kept, SECOND)

    places.mark(sparse, SECOND)

    assert places.of(sparse) == FIRST


def test_what_is_requested_lasts_as_long_as_the_block(places):
    assert places.requested is None
    with places.requesting(SECOND):
        assert places.requested == SECOND
        assert places
        with pytest.raises(KeyError), places.requesting(None):
            assert places.requested is None
            raise KeyError
        assert places.requested == SECOND
    assert places.requested is None
    assert not places


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
