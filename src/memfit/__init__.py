"""memfit ends out-of-memory errors in deep-learning training.

`import memfit` is light: no framework is loaded until a verb needs one, nor what only a training run needs.
"""

from memfit import _interrupts  # noqa: F401  # isort: skip - before anything that takes time

from importlib import import_module
from typing import TYPE_CHECKING, Any

from memfit._api import MaxBatch, compare, dryrun, estimate, max_batch, named_job
from memfit._plan import load_plan, plan
from memfit._simulate import SimulatedDevice, simulate
from memfit.catalogue import find_device, list_devices
from memfit.core.device import Device
from memfit.core.dryrun import DryRun
from memfit.core.errors import BadInput, MemfitError, StepFailed
from memfit.core.estimate import Estimate
from memfit.core.guarding import BrokenUpdate, CannotFit, StepResult
from memfit.core.job import Job
from memfit.core.plan import Plan, PlanNotFound
from memfit.core.replay import AllocatorOptions
from memfit.core.supervised import SupervisedRun
from memfit.core.timeline import Timeline

if TYPE_CHECKING:
    from memfit import jax, keras
    from memfit._guard import Guard
    from memfit._keras_fit import fit
    from memfit._run import run
    from memfit._search import ensemble, search
    from memfit._stream import ArrayFile, Stream, open_array, stream

__version__ = "0.1.0"

__all__ = [
    "AllocatorOptions",
    "ArrayFile",
    "BadInput",
    "BrokenUpdate",
    "CannotFit",
    "Device",
    "DryRun",
    "Estimate",
    "Guard",
    "Job",
    "MaxBatch",
    "MemfitError",
    "Plan",
    "PlanNotFound",
    "SimulatedDevice",
    "StepFailed",
    "StepResult",
    "Stream",
    "SupervisedRun",
    "Timeline",
    "__version__",
    "compare",
    "dryrun",
    "ensemble",
    "estimate",
    "find_device",
    "fit",
    "jax",
    "keras",
    "list_devices",
    "load_plan",
    "max_batch",
    "named_job",
    "open_array",
    "plan",
    "run",
    "search",
    "simulate",
    "stream",
]

_LATE = {
    "ArrayFile": "memfit._stream",
    "Guard": "memfit._guard",
    "Stream": "memfit._stream",
    "ensemble": "memfit._search",
    "fit": "memfit._keras_fit",
    "open_array": "memfit._stream",
    "run": "memfit._run",
    "search": "memfit._search",
    "stream": "memfit._stream",
}


_MODULES = ("jax", "keras")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"memfit.{name}")
    if name not in _LATE:
        raise AttributeError(f"module 'memfit' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LATE[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE, *_MODULES})
