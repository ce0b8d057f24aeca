"""The public API, name by name: adding or removing one is a deliberate edit of this list."""

import importlib
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PUBLIC = [
    "AllocatorOptions",
    "ArrayFile",
    "BadInput",
    "BrokenUpdate",
    "CannotFit",
    "ConvertOptions",
    "Device",
    "DryRun",
    "DryRunOptions",
    "Estimate",
    "Guard",
    "GuardOptions",
    "Job",
    "MaxBatch",
    "MemfitError",
    "Plan",
    "PlanNotFound",
    "PlanOptions",
    "SimulatedDevice",
    "StepFailed",
    "StepResult",
    "Stream",
    "StreamOptions",
    "SupervisedRun",
    "Timeline",
    "Verification",
    "__version__",
    "bench_data",
    "calibrate",
    "compare",
    "convert_data",
    "diff",
    "dryrun",
    "ensemble",
    "estimate",
    "find_device",
    "fit",
    "inspect_data",
    "jax",
    "keras",
    "list_devices",
    "load_plan",
    "max_batch",
    "named_job",
    "open_array",
    "plan",
    "plan_script",
    "rescue",
    "run",
    "search",
    "simulate",
    "stream",
    "verify",
]


@pytest.fixture
def memfit():
    return importlib.import_module("memfit")


def test_all_is_the_public_api(memfit):
    assert sorted(memfit.__all__) == PUBLIC


def test_every_public_name_is_there(memfit):
    assert [name for name in PUBLIC if not hasattr(memfit, name)] == []


def test_version_is_that_of_the_project(memfit):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert memfit.__version__ == project["version"]
