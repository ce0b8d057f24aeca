"""What a guarded fit may be given."""

import pytest

from memfit._fit_options import FitOptions, left_of
from memfit.catalogue.host import resident_bytes
from memfit.core.errors import BadInput
from memfit.core.guarding import CannotFit
from memfit.core.run_events import RunRequest


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"keep": None}, "keep must be a whole number from 1 up, but None was given"),
        ({"checkpoint_every": 0}, "checkpoint_every must be a whole number from 1 up, but 0 was given"),
        ({"micro_batch_size": True}, "micro_batch_size must be a whole number from 1 up, but True was given"),
        ({"plan": "fast"}, "plan must be 'auto', a Plan or None, but 'fast' was given"),
    ],
)
def test_what_can_not_be_used_is_refused(options, text):
    with pytest.raises(BadInput, match=text):
        FitOptions(**options)


def test_a_budget_of_ones_own_comes_before_that_of_a_supervisor():
    request = RunRequest(attempt=1, budget_bytes=5)

    assert FitOptions(budget="1KiB").budget_bytes(request) == 1024
    assert FitOptions().budget_bytes(request) == 5
    assert FitOptions().budget_bytes(None) is None


@pytest.mark.skipif(resident_bytes() is None, reason="what a process holds isn't known here")
def test_a_budget_is_for_all_that_the_process_holds():
    held = resident_bytes()
    assert 0 < left_of(held + 2**40) <= 2**40 + held
    assert left_of(held + 2**40, 0.5) == pytest.approx(2**39, rel=0.01)
    # A device's memory is the training's alone.
    assert left_of(1000, 0.75, on_host=False) == 750
    with pytest.raises(CannotFit, match=r"the process holds .* before the first step, .* is 1\.00 MiB\. Give a larger"):
        left_of(2**20)
