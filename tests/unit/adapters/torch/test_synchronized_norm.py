import pytest
import torch

from memfit.adapters.torch.synchronized_norm import RULES

ATEN = torch.ops.aten


def shapes(name, *args):
    made = RULES[f"aten::{name}"](None, args, {}, None)
    return [None if t is None else (tuple(t.shape), t.dtype) for t in (made if isinstance(made, tuple) else (made,))]


@pytest.mark.parametrize(("dtype", "kept"), [(torch.float16, torch.float32), (torch.float64, torch.float64)])
def test_statistics_are_one_number_per_channel(dtype, kept):
    data = torch.empty(2, 5, 4, 4, dtype=dtype, device="meta")

    assert shapes("batch_norm_stats", data, 1e-5) == [((5,), kept)] * 2
    assert shapes("batch_norm_gather_stats_with_counts", data) == [((5,), kept)] * 2


def test_the_output_is_like_the_input():
    data = torch.empty(2, 5, 4, 4, dtype=torch.float16, device="meta")

    assert shapes("batch_norm_elemt", data) == [((2, 5, 4, 4), torch.float16)]
    assert shapes("batch_norm_backward_elemt", torch.empty(2, 5, 4, 4, device="meta"), data) == [
        ((2, 5, 4, 4), torch.float16)
    ]


def test_only_gradients_that_are_asked_for_are_made():
    data = torch.empty(2, 5, 4, 4, device="meta")
    channel = ((5,), torch.float32)

    assert shapes("batch_norm_backward_reduce", data, data, None, None, None, True, True, False) == [
        channel,
        channel,
        channel,
        None,
    ]
    assert shapes("batch_norm_backward_reduce", data, data, None, None, None, False, False, True) == [
        None,
        None,
        None,
        channel,
    ]


def test_the_operators_exist():
    for name in RULES:
        assert hasattr(ATEN, name.removeprefix("aten::"))
