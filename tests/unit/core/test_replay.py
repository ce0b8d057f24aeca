import pytest

from memfit.core.errors import BadInput
from memfit.core.replay import AllocatorOptions, Replay


@pytest.mark.parametrize("threshold", [-0.1, 1, 1.5])
def test_a_threshold_is_a_share(threshold):
    with pytest.raises(BadInput, match=f"from 0 up to, not including, 1, but {threshold} was given"):
        AllocatorOptions(garbage_collection_threshold=threshold)


@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.99])
def test_a_share_is_taken(threshold):
    assert AllocatorOptions(garbage_collection_threshold=threshold).garbage_collection_threshold == threshold


@pytest.mark.parametrize(("allocated", "reserved", "share"), [(0, 0, 0.0), (75, 100, 0.25), (100, 100, 0.0)])
def test_fragmentation_is_what_was_reserved_and_never_handed_out(allocated, reserved, share):
    replay = Replay((allocated,), (reserved,), allocated, reserved, allocated, num_segments=1)

    assert replay.fragmentation == share
