"""memfit ends out-of-memory errors in deep-learning training.

`import memfit` is light: each name is loaded when it is first used, a framework when a verb needs one.
"""

from memfit.core import interrupts as _interrupts  # noqa: F401  # isort: skip - before anything that takes time

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memfit import jax, keras
    from memfit.api.compare import compare
    from memfit.api.data import ConvertOptions, bench_data, convert_data, inspect_data
    from memfit.api.diff import diff
    from memfit.api.dryrun import dryrun
    from memfit.api.estimate import estimate
    from memfit.api.fit import fit
    from memfit.api.guard import Guard
    from memfit.api.max_batch import MaxBatch, max_batch
    from memfit.api.named_job import named_job
    from memfit.api.plan import PlanOptions, load_plan, plan
    from memfit.api.rescue import rescue
    from memfit.api.run import run
    from memfit.api.script_plan import plan_script
    from memfit.api.search import ensemble, search
    from memfit.api.simulate import SimulatedDevice, simulate
    from memfit.api.stream import ArrayFile, Stream, StreamOptions, open_array, stream
    from memfit.api.verify import calibrate, verify
    from memfit.catalogue import find_device, list_devices
    from memfit.core.device import Device
    from memfit.core.dryrun import DryRun, DryRunOptions
    from memfit.core.errors import BadInput, MemfitError, StepFailed
    from memfit.core.estimate import Estimate
    from memfit.core.guarding import BrokenUpdate, CannotFit, GuardOptions, StepResult
    from memfit.core.job import Job
    from memfit.core.plan import Plan, PlanNotFound
    from memfit.core.replay import AllocatorOptions
    from memfit.core.supervised import SupervisedRun
    from memfit.core.timeline import Timeline
    from memfit.core.verification import Verification

__version__ = "0.1.0"

__all__ = [
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

_LATE = {
    name: module
    for module, names in {
        "memfit.api.compare": ("compare",),
        "memfit.api.data": ("ConvertOptions", "bench_data", "convert_data", "inspect_data"),
        "memfit.api.diff": ("diff",),
        "memfit.api.dryrun": ("dryrun",),
        "memfit.api.estimate": ("estimate",),
        "memfit.api.fit": ("fit",),
        "memfit.api.guard": ("Guard",),
        "memfit.api.max_batch": ("MaxBatch", "max_batch"),
        "memfit.api.named_job": ("named_job",),
        "memfit.api.plan": ("PlanOptions", "load_plan", "plan"),
        "memfit.api.rescue": ("rescue",),
        "memfit.api.run": ("run",),
        "memfit.api.script_plan": ("plan_script",),
        "memfit.api.search": ("ensemble", "search"),
        "memfit.api.simulate": ("SimulatedDevice", "simulate"),
        "memfit.api.stream": ("ArrayFile", "Stream", "StreamOptions", "open_array", "stream"),
        "memfit.api.verify": ("calibrate", "verify"),
        "memfit.catalogue": ("find_device", "list_devices"),
        "memfit.core.device": ("Device",),
        "memfit.core.dryrun": ("DryRun", "DryRunOptions"),
        "memfit.core.errors": ("BadInput", "MemfitError", "StepFailed"),
        "memfit.core.estimate": ("Estimate",),
        "memfit.core.guarding": ("BrokenUpdate", "CannotFit", "GuardOptions", "StepResult"),
        "memfit.core.job": ("Job",),
        "memfit.core.plan": ("Plan", "PlanNotFound"),
        "memfit.core.replay": ("AllocatorOptions",),
        "memfit.core.supervised": ("SupervisedRun",),
        "memfit.core.timeline": ("Timeline",),
        "memfit.core.verification": ("Verification",),
    }.items()
    for name in names
}

_MODULES = ("integrations", "jax", "keras")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"memfit.{name}")
    if name not in _LATE:
        raise AttributeError(f"module 'memfit' has no attribute {name!r}")
    # Results print themselves and write pages by what this sets.
    import_module("memfit.api")
    value = globals()[name] = getattr(import_module(_LATE[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE, *_MODULES})
