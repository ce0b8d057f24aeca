"""A trace: what a step asks for, whichever framework runs it.

Each framework's adapter makes a `Tracer` of a job; what it traces is turned into estimates and plans by the same parts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from memfit.core.estimate import Note
from memfit.core.profile import Work
from memfit.core.settings import Settings
from memfit.core.timeline import Category, Timeline


class Serving(StrEnum):
    """Who hands out a GPU's memory to the blocks of a timeline."""

    CACHING = "PyTorch's caching allocator"
    BEST_FIT = "best fit with coalescing"
    """TensorFlow's and JAX's allocator."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The allocations of a traced step.

    Args:
        timeline: every allocation.
        notes: what had to be assumed.
        num_parameters: elements of all parameters.
        parameter_bytes: memory of all parameters.
        batch_bytes: memory of the batch.
        host_bytes: host memory for what waits there, as the settings say.
        managed_bytes: memory of paged optimizer states, which CUDA keeps where there is room.
        gives_weight: whether the loss function returned (loss, weight).
        serving: who hands out a GPU's memory.
        assigned_bytes: all that a compiler laid out for the step ahead of time, arguments and results included; the
            timeline then says what is inside. None where every block is asked for when it is needed.
        state_bytes: parameters, buffers, gradients and optimizer state, each in full, whether or not all of it lives
            at once; empty where the timeline tells.
        spread: the least and the greatest peak of steps that run in another order, where operators run side by side,
            each as a multiple of the timeline's.
        work: every operator of a step in order, forward and backward pass of the first, update of the second; empty
            where a framework doesn't tell.
        grouped_bytes: the most that a grouped convolution may take beside what the timeline has.
        has_regimes: whether kernels take other memory from some batch sizes on, so that a trace tells only of sizes
            near its own.
    """

    timeline: Timeline
    notes: tuple[Note, ...]
    num_parameters: int
    parameter_bytes: int
    batch_bytes: int
    host_bytes: int = 0
    managed_bytes: int = 0
    gives_weight: bool = False
    serving: Serving = Serving.CACHING
    assigned_bytes: int | None = None
    state_bytes: Mapping[Category, int] = field(default_factory=dict)
    spread: tuple[float, float] = (1.0, 1.0)
    work: tuple[Work, ...] = ()
    grouped_bytes: int = 0
    has_regimes: bool = False


class Tracer(Protocol):
    """A job that can be traced at any batch size."""

    @property
    def name(self) -> str:
        """The job's name in reports."""

    @property
    def batch_size(self) -> int | None:
        """Samples of the job's own batch; None where its arrays share no first dimension."""

    @property
    def notes(self) -> tuple[Note, ...]:
        """What had to be assumed when the job was opened."""

    def trace(self, batch_size: int | None, settings: Settings | None = None) -> Trace:
        """The trace of the step.

        Args:
            batch_size: samples of one update; None: the batch as it was given.
            settings: how the step is run; None: as it is.
        """
