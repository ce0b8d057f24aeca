"""What a guard and the training loop that it guards tell each other, and how a guarded run can end."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from memfit.core.errors import BadFile, BadInput, MemfitError
from memfit.core.settings import Settings, Weighting
from memfit.core.shown import Shown
from memfit.core.units import format_size

AUTO = "auto"
NEVER = 2**62  # more steps than any run has


@dataclass(frozen=True, slots=True)
class GuardOptions:
    """Options of a guard that are rarely needed.

    Args:
        scaler: a `torch.amp.GradScaler`, where the loss runs under float16 autocast.
        ema: a `torch.optim.swa_utils.AveragedModel`, updated after every real update.
        clip_value: greatest value of an element of a gradient.
        clip: called with the model to clip its gradients in another way.
        state: further objects with `state_dict` and `load_state_dict` that checkpoints hold, by name.
        checkpoint_every: updates between two checkpoints; None: as often as costs 1% of the time, after 5 s at first
            and in the end once a minute.
        keep: how many checkpoints are kept.
        micro_batch_size: samples of a micro-batch to begin with; None: the whole batch.
        approximate: whether a batch may be split although its samples see each other, in the loss or in batch norms.
        grow_after: good updates after which a larger micro-batch is tried again.
        remember: whether what is found out is kept for later runs of the same model, shapes and device.
    """

    scaler: Any = None
    ema: Any = None
    clip_value: float | None = None
    clip: Callable[[Any], Any] | None = None
    state: dict[str, Any] | None = None
    checkpoint_every: int | None = None
    keep: int = 3
    micro_batch_size: int | None = None
    approximate: bool = False
    grow_after: int = 100
    remember: bool = True

    def __post_init__(self) -> None:
        check_counts(keep=self.keep, grow_after=self.grow_after)
        optional = {"checkpoint_every": self.checkpoint_every, "micro_batch_size": self.micro_batch_size}
        check_counts(**{name: value for name, value in optional.items() if value is not None})

    def refuse(self, whose: str, instead: dict[str, str]) -> None:
        """Refuses options that a guard doesn't take, with what to use in place of each."""
        for name, text in instead.items():
            if getattr(self, name) != getattr(GuardOptions(), name):
                raise BadInput(f"{whose} takes no {name}: {text}.")


def check_counts(**counts: object) -> None:
    """Refuses what isn't a whole number from 1 up."""
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadInput(f"{name} must be a whole number from 1 up, but {value!r} was given.")


class Where(StrEnum):
    """Whose memory ran out."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class MemoryFailure:
    """One failure to get memory."""

    where: Where  # whose memory it was
    source: str  # who said so: "torch", "cuda", "tensorflow", "xla", "numpy", "python", "worker", "shared memory"
    requested_bytes: int | None = None  # what was asked for; None where the message doesn't say
    free_bytes: int | None = None  # what was left; None where the message doesn't say
    total_bytes: int | None = None  # what the device has or may use; None where the message doesn't say
    text: str = ""  # the line of the message that says so


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The size of a batch."""

    num_samples: int | None  # None where it can't be split
    elements_per_sample: float = 1.0  # elements of its tensors, over its samples


@dataclass(frozen=True, slots=True)
class Fallbacks:
    """What a loop can do where memory runs out."""

    # settings to put on one after the other, each in place of the last one's fields
    stronger: tuple[dict[str, Any], ...] = ()
    whole_first: bool = False  # whether these come before smaller micro-batches
    grow_after: int = 100  # good steps after which a larger micro-batch is tried
    least_samples: int = 1  # that a micro-batch must have
    # whether settings must serve batches of all sizes, for others mean a step that is compiled again
    one_size: bool = False


@dataclass(frozen=True, slots=True)
class Splitting:
    """How batches can be split."""

    weighting: Weighting | None = None  # how the losses of micro-batches add up; None: as the settings say
    refused: str = ""  # why batches aren't split, or ""
    remark: str = ""  # what is approximate, or ""


class Blame(StrEnum):
    """What an error that isn't about memory says about the settings in use."""

    MOVES = "moves"  # the model can't have the stronger moves
    PARTS = "parts"  # its batches can't be split
    SINGLE_SAMPLES = "single samples"  # micro-batches need two samples


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
    failures: tuple[MemoryFailure, ...] = ()
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

    def __init__(self, message: str, failure: MemoryFailure | None = None) -> None:
        super().__init__(message)
        self.failure = failure


class BrokenUpdate(MemfitError):
    """Memory ran out in the middle of an update that could not be finished: parameters are between two steps."""

    exit_code = 3


class BadCheckpoint(BadFile):
    """A checkpoint that is damaged, incomplete or of another model."""
