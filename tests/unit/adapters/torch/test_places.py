import gc

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from memfit.adapters.torch.places import BARE, Places

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def places():
    return Places(FIRST)


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
