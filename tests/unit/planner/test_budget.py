import pytest

from memfit.catalogue import find_device
from memfit.core.errors import BadInput
from memfit.planner.budget import Patience, autocast_of


@pytest.mark.parametrize(("name", "width"), [("t4", "amp-fp16"), ("a100-40gb", "amp-bf16"), ("24GiB", "amp-bf16")])
def test_autocast_by_device(name, width):
    assert autocast_of(find_device(name)) == width


def test_patience_ends():
    assert Patience(0).is_over
    assert Patience(0).left(20.0) == 0.0
    assert 0 < Patience(3600).left(20.0) <= 20.0
    assert not Patience().is_over
    assert Patience().left(20.0) == 20.0


@pytest.mark.parametrize("seconds", [-1, "5", True, float("nan")])
def test_patience_is_a_number_of_seconds(seconds):
    with pytest.raises(BadInput, match="seconds must be a number from 0 up, such as seconds=10, but"):
        Patience(seconds)
