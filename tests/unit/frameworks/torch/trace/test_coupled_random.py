import subprocess
import sys

import pytest
import torch
from torch.nn import functional

from memfit.frameworks.torch.trace.coupled_random import CoupledRandom

SAMPLES = 8
VALUES = torch.linspace(0.1, 0.9, SAMPLES * 4).view(SAMPLES, 4)

DRAWS = {
    "randn": lambda rows: torch.randn(len(rows), 4),
    "rand": lambda rows: torch.rand(len(rows), 4, dtype=torch.float64),
    "randint": lambda rows: torch.randint(0, 100, (len(rows),)),
    "randn_like": torch.randn_like,
    "rand_like": torch.rand_like,
    "normal": lambda rows: torch.normal(0.0, 2.0, (len(rows), 3)),
    "normal of tensors": lambda rows: torch.normal(rows, 1.0),
    "bernoulli": torch.bernoulli,
    "bernoulli in place": lambda rows: torch.empty_like(rows).bernoulli_(0.5),
    "uniform in place": lambda rows: torch.empty(len(rows)).uniform_(-1, 1),
    "exponential in place": lambda rows: torch.empty_like(rows).exponential_(),
    "dropout": lambda rows: functional.dropout(rows, 0.5, training=True),
    "two rows of each sample": lambda rows: torch.randn(2 * len(rows), 3).view(len(rows), 6),
    "a generator of the user's": lambda rows: torch.randn(len(rows), 2, generator=torch.Generator().manual_seed(1)),
}


def drawn(draw, start, stop, before=lambda: None):
    before()
    with CoupledRandom(start, stop, SAMPLES), torch.no_grad():
        return draw(VALUES[start:stop])


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("cut", [1, 3, 4])
def test_a_sample_draws_the_same_in_any_company(name, cut):
    whole = drawn(DRAWS[name], 0, SAMPLES)
    parts = [drawn(DRAWS[name], 0, cut, lambda: torch.randn(5)), drawn(DRAWS[name], cut, SAMPLES)]

    assert torch.equal(torch.cat(parts), whole)
    # Samples don't all draw the same.
    assert len(whole.unique(dim=0)) > 1


def test_without_the_mode_they_differ():
    torch.manual_seed(0)
    whole = torch.randn(SAMPLES, 4)
    torch.manual_seed(0)
    parts = [torch.randn(3, 4), torch.randn(5, 4)]

    assert not torch.equal(torch.cat(parts), whole)


def test_draws_of_one_run_differ():
    def twice(rows):
        return torch.randn(len(rows), 4) - torch.randn(len(rows), 4)

    assert drawn(twice, 0, SAMPLES).abs().min() > 0


def test_rows_that_are_not_samples_are_drawn_as_ever():
    with CoupledRandom(0, 3, SAMPLES):
        torch.manual_seed(5)
        inside = torch.randn(4, 2), torch.randn(())
    torch.manual_seed(5)

    assert torch.equal(inside[0], torch.randn(4, 2))
    assert torch.equal(inside[1], torch.randn(()))


def test_the_global_state_stays():
    before = torch.get_rng_state()

    drawn(DRAWS["randn"], 0, SAMPLES)

    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_narrowest_type_is_noted(dtype):
    with CoupledRandom(0, 2, 2) as mode:
        torch.ones(2, dtype=torch.float64).to(dtype).add(1).double()

    assert mode.narrowest is dtype


def test_operators_that_do_not_check_indices_are_noted():
    frames = torch.randn(5, 2, 3).log_softmax(-1)
    with CoupledRandom(0, 2, 2) as mode:
        functional.cross_entropy(torch.randn(2, 3), torch.tensor([0, 1]))
        assert mode.checks_indices
        functional.ctc_loss(frames, torch.ones(2, 2).long(), torch.tensor([5, 5]), torch.tensor([2, 2]))
        assert not mode.checks_indices


def test_the_compiler_is_not_imported():
    """It takes seconds, and nothing here is compiled."""
    code = (
        "import sys, torch; from memfit.frameworks.torch.trace.coupled_random import CoupledRandom\n"
        "with CoupledRandom(0, 2, 4): torch.randn(2) + 1\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
