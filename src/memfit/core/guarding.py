"""What the guard of a training loop says: a failure to get memory, the result of a step, and how a run can end."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from memfit.core.errors import BadFile, MemfitError
from memfit.core.settings import Settings


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


@dataclass(frozen=True, slots=True)
class StepResult:
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
