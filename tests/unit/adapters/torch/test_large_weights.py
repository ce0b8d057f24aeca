import pytest
import torch
from torch import nn

from memfit.adapters.torch.large_weights import AS_SHAPES, LargeWeights
from memfit.core.timeline import Category
from memfit.core.units import MIB
from tests.unit.adapters.torch.sessions import codes, made, really, running


class Weight(nn.Module):
    """A module that asks about its weights while it is being built."""

    def __init__(self, ask, *size, **options):
        super().__init__()
        self.large = ask(size, options)


@pytest.fixture
def notes():
    return []


@pytest.fixture
def weights(notes):
    return LargeWeights(lambda code, text: notes.append((code, text)), 10 * MIB)


def test_weights_beyond_the_budget_are_shapes(weights, notes):
    sizes = [4 * MIB, 4 * MIB, 4 * MIB, 2 * MIB, 2 * MIB]
    found = [Weight(weights, size // 4).large for size in sizes]

    # What still fits into the budget is real.
    assert found == [False, False, True, False, True]
    ((code, text),) = notes
    assert code == AS_SHAPES
    assert "10.0 MiB" in text


@pytest.mark.parametrize(
    ("size", "options", "large"),
    [
        ((3 * MIB,), {}, True),
        ((1024, 3 * 1024), {}, True),
        (((1024, 3 * 1024),), {}, True),
        ((), {"size": (1024, 3 * 1024)}, True),
        ((2 * MIB,), {}, False),
        ((5 * MIB,), {"dtype": torch.float16}, False),
        ((6 * MIB,), {"dtype": torch.float16}, True),
        ((), {}, False),
    ],
    ids=str,
)
def test_sizes_however_they_are_given(weights, size, options, large):
    assert Weight(weights, *size, **options).large is large


def test_small_weights_are_real_and_not_counted(weights):
    assert not any(Weight(weights, 200_000).large for _ in range(100))
    assert not Weight(weights, 10 * MIB // 4).large


def test_other_tensors_of_the_host_are_real(weights):
    assert not weights((100 * MIB,), {})


def test_a_large_model_is_built_as_shapes_and_comes_to_the_device():
    # GIVEN a model of 1 GiB, of which the first 256 MiB are real
    with running() as session:
        model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(16)))
        real = [really(layer.weight) for layer in model]
        shown = {str(layer.weight.device) for layer in model}
        assert session.memory.allocated_bytes == 0
        model.cuda()
        model(torch.zeros(1, 4096).cuda()).sum().backward()

    assert real == ["cpu"] * 4 + ["meta"] * 12
    assert shown == {"cpu"}
    assert len(made(session, category=Category.PARAMETER)) == 16
    assert codes(session) == [AS_SHAPES]
