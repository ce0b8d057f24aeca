"""Predictions against a sample of memory measured on real GPUs; `python -m benchmarks.run_all` scores all of it."""

import importlib.util
from statistics import fmean

import pytest

MISSING = [name for name in ("torch", "timm", "torchvision", "transformers") if importlib.util.find_spec(name) is None]
if MISSING:
    pytest.skip(f"not installed: {', '.join(MISSING)}", allow_module_level=True)

from benchmarks import rows, t4_runs, timm_rtx3090, xmem_cnn  # noqa: E402

if not rows.DATA.is_dir():
    pytest.skip("the measured rows (../shared/data) are not beside this repository", allow_module_level=True)

# Small, and of several kinds: dense layers, depthwise and grouped convolutions, group norm, attention.
XMEM = (("ConvNeXtTiny", "Adam"), ("VGG16", "SGD"), ("RegNetX400MF", "AdamW"), ("MnasNet", "AdamW"))

# Rows whose two ends are far from the capacity: right with any reading of the unknown size of the CUDA context.
TIMM = (
    ("vgg13_bn", "nhwc"),
    ("vgg19", "nchw"),
    ("deit_small_patch16_224", "nchw"),
    ("mobilenetv2_120d", "nchw"),
    ("resnetv2_50d_gn", "nhwc"),
    ("efficientnet_b3", "nhwc"),
    ("regnetx_320", "nhwc"),
    ("cspresnext50", "nhwc"),
)


@pytest.fixture(scope="module")
def t4_outcomes():
    return [t4_runs.predict(row) for row in rows.read_rows(t4_runs.DEFAULT_CSV)]


def test_t4_allocated_peaks_are_within_two_percent(t4_outcomes):
    errors = {outcome.label: outcome.allocated_error for outcome in t4_outcomes}

    assert {label: error for label, error in errors.items() if abs(error) > t4_runs.ALLOCATED_LIMIT} == {}


def test_t4_reserved_and_context_are_within_four_percent_on_average(t4_outcomes):
    assert fmean(abs(outcome.total_error) for outcome in t4_outcomes) <= t4_runs.TOTAL_LIMIT


def test_t4_models_are_the_measured_ones(t4_outcomes):
    assert [outcome.label for outcome in t4_outcomes if not outcome.is_same_model] == []


@pytest.mark.parametrize(("model", "optimizer"), XMEM)
def test_cnn_reserved_peaks_are_within_eight_percent_and_their_interval(model, optimizer):
    row = next(
        row for row in rows.read_rows(xmem_cnn.DEFAULT_CSV) if (row["model"], row["optimizer"]) == (model, optimizer)
    )

    outcome = xmem_cnn.predict(row)
    assert abs(outcome.error) <= xmem_cnn.WORST_LIMIT
    assert outcome.is_inside


@pytest.mark.parametrize(("model", "layout"), TIMM)
def test_the_batch_that_ran_fits_and_the_one_that_failed_does_not(model, layout):
    path = rows.DATA / f"timm_train_rtx3090_{layout}.csv"
    row = next(row for row in rows.read_rows(path) if row["model"] == model)

    outcome = timm_rtx3090.predict(row)

    assert isinstance(outcome, timm_rtx3090.Outcome)
    assert outcome.ends_right == 2
