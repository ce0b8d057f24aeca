"""What the guard of a training loop says: a failure to get memory, the result of a step, and how a run can end."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from memfit.core.errors import BadFile, MemfitError
from memfit.core.settings import Settings
from memfit.core.shown import Shown
from memfit.core.units import format_size


class Where(StrEnum):
    """Whose memory ran out."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """One failure to get memory.

    Args:
        where: whose memory it was.
        source: who said so: "torch", "cuda", "cublas", "cudnn", "nccl", "numpy", "python", "threads", "shared memory".
        requested_bytes: what was asked for; None where the message doesn't say.
        free_bytes: what was left; None where the message doesn't say.
        text: first line of the message.
    """

    where: Where
    source: str
    requested_bytes: int | None = None
    free_bytes: int | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The size of a batch.

    Args:
        num_samples: None where it can't be split.
        elements_per_sample: elements of its tensors, over its samples.
    """

    num_samples: int | None
    elements_per_sample: float = 1.0


@dataclass(frozen=True, slots=True, repr=False)
class StepResult(Shown):
    """What one call of `guard.step` did.

    Args:
        loss: of the batch, detached.
        micro_batches: parts in which the batch was run.
        retries: how often the step was run again because memory ran out.
        updated: whether the parameters were updated: not before the last batch of an accumulation window.
        skipped: whether the update was left out, because the gradient scaler found infinities or nothing counted.
        settings: how the step was run.
        approximate: what differs from the step with the whole batch at once, or "".
        failures: what ran out, in order.
        extra_bytes: memory that the guard itself took, for what a replay would need back.
    """

    loss: Any
    micro_batches: int
    retries: int
    updated: bool
    skipped: bool
    settings: Settings
    approximate: str = ""
    failures: tuple[OutOfMemory, ...] = ()
    extra_bytes: int = 0

    def summary(self) -> str:
        """The loss, and how the step was run."""
        try:
            loss = f"{float(self.loss):.6g}"
        except (TypeError, ValueError, RuntimeError):
            # Several losses, or none.
            loss = "unknown" if self.loss is None else type(self.loss).__name__
        parts = "1 pass" if self.micro_batches == 1 else f"{self.micro_batches} micro-batches"
        retries = {0: "no retry", 1: "1 retry"}.get(self.retries, f"{self.retries} retries")
        update = "update skipped" if self.skipped else "updated" if self.updated else "accumulating"
        own = f", {format_size(self.extra_bytes)} for a replay" if self.extra_bytes else ""
        approximate = f", approximate: {self.approximate}" if self.approximate else ""
        return f"loss {loss}: {parts}, {retries}, {update}{own}{approximate}"


class CannotFit(MemfitError):
    """Memory ran out, and nothing is left to try; model, optimizer and data are as they were before the step.

    Args:
        message: what was tried, what would be needed, what to do.
        failure: what ran out last; None where that isn't known.
    """

    exit_code = 3

    def __init__(self, message: str, failure: OutOfMemory | None = None) -> None:
        super().__init__(message)
        self.failure = failure


class BrokenUpdate(MemfitError):
    """Memory ran out in the middle of an update that could not be finished: parameters are between two steps."""

    exit_code = 3


class BadCheckpoint(BadFile):
    """A checkpoint that is damaged, incomplete or of another model."""
