"""The time of steps on real GPUs, of families that nothing was fitted to; `benchmarks.step_times` scores all rows."""

import importlib.util

import pytest

MISSING = [name for name in ("torch", "timm", "torchvision") if importlib.util.find_spec(name) is None]
if MISSING:
    pytest.skip(f"not installed: {', '.join(MISSING)}", allow_module_level=True)

from benchmarks import rows, step_times  # noqa: E402

if not step_times.DEFAULT_CSV.is_file():
    pytest.skip("the measured rows (../shared/data) are not beside this repository", allow_module_level=True)

# Depthwise convolutions, grouped ones, attention, plain ones.
SUBJECTS = (
    ("mobilenetv2_100", "224", "nhwc", "training", "0"),
    ("dla60x", "224", "nchw", "training", "0"),
    ("vovnet39a", "224", "nchw", "inference", "0"),
    ("levit_256", "224", "nchw", "inference", "0"),
)


@pytest.fixture(scope="module")
def outcomes():
    population = rows.read_rows(step_times.DEFAULT_CSV)
    chosen = [[row for row in population if step_times.subject_of(row) == subject] for subject in SUBJECTS]
    return [outcome for some in chosen for outcome in step_times.predict(some)]


def test_nothing_was_fitted_to_these(outcomes):
    assert {step_times.half_of(outcome.row["model"]) for outcome in outcomes} == {step_times.HELD_OUT}


def test_times_are_within_a_third(outcomes):
    assert len(outcomes) >= 10
    assert {outcome.row["model"]: outcome.ratio for outcome in outcomes if not 0.67 < outcome.ratio < 1.5} == {}


def test_intervals_hold_most(outcomes):
    assert step_times.score(outcomes).covered >= 0.8
