import dataclasses
from pathlib import Path

import optuna
import pytest

import memfit
from memfit.core.device import Device, Kind, Origin
from memfit.core.guarding import StepResult
from memfit.core.settings import Settings
from memfit.core.shown import Shown
from memfit.data.convert import Conversion
from memfit.data.inspection import InspectedField, Inspection
from memfit.data.speed import StreamSpeed
from memfit.guard.search import Search
from tests.unit.reports.builders import RTX_3090, make_estimate
from tests.unit.reports.plan_builders import make_plan
from tests.unit.reports.run_builders import make_dead_run

HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m\u202e"

ESTIMATE = make_estimate()
STUDY = optuna.create_study()
ENDED = {"position": 0, "outcome": "finished", "seconds": 0.1, "memory_bytes": None, "held": "", "error": ""}
STUDY.add_trial(optuna.trial.create_trial(value=0.25, user_attrs=ENDED))
SPEED = StreamSpeed("x.npy", 10, 160, 32, 0, 2**20, 12000.4, 1e5, 2e5, 0.5, None, 10, 0.1, True)
FIELDS = tuple(InspectedField(name, "float32", (4,), False, False, 160, None) for name in ("x", "z"))
INSPECTION = Inspection("x.npy", 10, FIELDS, (), 160, 160, (), None, False, {}, None, ())
CONVERSION = Conversion("x.npy", "y.npy", 10, (), 1024, 512, 1.0)
RESULTS = {
    "<Estimate of ResNet: 1.13 GiB on rtx-3090, fits>": ESTIMATE,
    "<Plan of ResNet: 900.0 MiB of 900.0 MiB on rtx-3090, 4 moves, 1.19 times as long>": make_plan(),
    "<MaxBatch of ResNet: batch size 8 fits with 95%; 9 at best, 1.13 GiB of 23.7 GiB on rtx-3090>": memfit.MaxBatch(
        8, ESTIMATE, ((8, 9, True),), 9
    ),
    "<MaxBatch of ResNet: no batch size fits, 1.13 GiB of 23.7 GiB on rtx-3090>": memfit.MaxBatch(None, ESTIMATE, ()),
    "<StepResult loss 0.5: 4 micro-batches, 1 retry, updated, 1.00 MiB for a replay>": StepResult(
        0.5, 4, 1, True, False, Settings(), extra_bytes=2**20
    ),
    "<StepResult loss tuple: 1 pass, no retry, accumulating>": StepResult((1, 2), 1, 0, False, False, Settings()),
    "<Device rtx-3090: NVIDIA GeForce RTX 3090, 23.7 GiB usable (measured)>": RTX_3090,
    "<Device x: X, memory unknown>": Device("x", "X", Kind.CUDA, None, None, Origin.ASSUMED),
    "<Search of 1 trials: best 0.25 in trial 0>": Search(STUDY, Path("missing"), None),
    "<Job of a function: training, precision as given>": memfit.Job(lambda: None),
    "<StreamSpeed of x.npy: 12,000 samples/s in batches of 32>": SPEED,
    "<Conversion of x.npy to y.npy: 10 samples, 1.00 KiB -> 512 B>": Conversion(
        "x.npy", "y.npy", 10, (), 1024, 512, 1.0
    ),
    "<Inspection of x.npy: 10 samples of x float32 [4] and 1 more>": INSPECTION,
}


@pytest.mark.parametrize("line", RESULTS)
def test_the_repr_is_a_line_with_the_figures_that_matter(line):
    assert repr(RESULTS[line]) == line


@pytest.mark.parametrize("result", [*RESULTS.values(), make_dead_run(), ESTIMATE.timeline, ESTIMATE.replay])
def test_nothing_is_dumped(result):
    assert len(repr(result)) < 160
    assert "\n" not in repr(result)
    assert len(str(result)) < 6000
    assert "dataclass" not in str(result) and "Origin." not in str(result)
    page = result._repr_html_()
    assert page.startswith("<div") and page.endswith("</div>")
    assert len(page) < 8000


def test_what_is_printed_of_a_batch_search_is_its_table():
    text = str(memfit.MaxBatch(8, ESTIMATE, ((8, 2**30, True), (16, 2**36, False)), 9))

    assert text.startswith(
        "Batch size 8 fits with 95%; 9 at best (23.7 GiB usable on NVIDIA GeForce RTX 3090, measured)\n"
    )
    assert "64.0 GiB" in text


@pytest.mark.parametrize(
    "result",
    [
        dataclasses.replace(ESTIMATE, subject=HOSTILE),
        make_plan(subject=HOSTILE),
        dataclasses.replace(make_dead_run(), script=HOSTILE),
        dataclasses.replace(RTX_3090, title=HOSTILE),
        memfit.Job(None, name=HOSTILE),
    ],
)
def test_a_hostile_name_stays_a_name(result):
    for text in (repr(result), str(result), result._repr_html_()):
        assert "\x1b" not in text
        assert "\u202e" not in text
    assert "<img" not in result._repr_html_()
    assert "&lt;img" in result._repr_html_()


def test_a_result_must_say_something():
    with pytest.raises(NotImplementedError):
        repr(Shown())
