import pytest
import torch

from memfit.frameworks.torch.apply.tensor_memory import dense, simulated


def test_shapes_are_told_from_values():
    assert simulated(torch.empty(2, device="meta"))
    assert not simulated(torch.empty(2))


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.ones(3, 4), True),
        (torch.ones(3, 4).t(), True),
        (torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last), True),
        (torch.ones(3, 4)[:, :2], False),
        (torch.ones(3, 1).expand(3, 4), False),
    ],
    ids=["plain", "transposed", "channels last", "part", "expanded"],
)
def test_dense_tensors_have_no_gaps(tensor, expected):
    assert dense(tensor) is expected
