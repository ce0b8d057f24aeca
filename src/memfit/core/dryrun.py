"""The answer of `memfit.dryrun`: how an unmodified script fared on a simulated device, and what would help.

The child process that runs the script writes a `DryRun` as JSON; `Request` is what the parent asks of it. Both sides
import this module and nothing of each other.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, ClassVar

from memfit.core.device import Device, Origin
from memfit.core.estimate import Estimate
from memfit.core.profile import Work
from memfit.core.replay import AllocatorOptions, OutOfMemory
from memfit.core.reporters import Reported, Reporters
from memfit.core.settings import Settings
from memfit.core.timeline import Phase
from memfit.core.typed_data import Saved
from memfit.core.units import format_size


class Outcome(StrEnum):
    """How a dry run ended."""

    COMPLETED = "completed"  # all the steps asked for were taken
    ENDED = "ended"  # the script ended by itself before that many, after at least one
    NO_STEP = "no step"  # the script ended without an optimizer step
    OUT_OF_MEMORY = "out of memory"  # the simulated device was full and the script died of it
    FAILED = "failed"  # any other exception, or an exit code other than 0
    CRASHED = "crashed"  # the process died and left no result
    INTERRUPTED = "interrupted"  # the user ended it, or memfit because disk room ran short


EXIT_CODES = {
    Outcome.COMPLETED: 0,
    Outcome.ENDED: 0,
    Outcome.OUT_OF_MEMORY: 3,
    Outcome.FAILED: 4,
    Outcome.CRASHED: 4,
    Outcome.NO_STEP: 5,
    Outcome.INTERRUPTED: 130,
}
"""What `memfit dryrun` returns for each outcome, where no scan says otherwise."""

_RAN = (Outcome.COMPLETED, Outcome.ENDED)


@dataclass(frozen=True, slots=True)
class Failure:
    """One simulated `torch.OutOfMemoryError`."""

    message: str  # PyTorch's text
    tick: int  # of the timeline, at which the allocation was refused
    requested_bytes: int  # what was asked for
    allocated_bytes: int  # what the program held at that moment
    reserved_bytes: int  # what the allocator had taken from the device
    source: str  # line of the user's code, "train.py:88", or ""
    code: str  # the text of that line, or ""
    module: str  # dotted path of the module, or ""
    op: str  # operator that asked, or ""
    phase: Phase  # part of the step
    step: int  # number of the step, from 1; 0 is set-up
    by_category: dict[str, int] = field(default_factory=dict)  # live bytes at that moment
    handled: bool = False  # whether the script caught the error and went on
    other_bytes: int = 0  # what other processes held on the device at that moment

    @property
    def out_of_memory(self) -> OutOfMemory:
        """The failure as a replay notes it."""
        return OutOfMemory(self.tick, self.requested_bytes, self.allocated_bytes, self.reserved_bytes)


@dataclass(frozen=True, slots=True)
class ScannedLeaf:
    """How one tensor of the batch varies over a scan."""

    name: str  # its place in the batch: "input_ids", "labels", "0"
    dtype: str  # "int64"
    smallest_shape: tuple[int, ...]  # its shape where it has fewest elements
    largest_shape: tuple[int, ...]  # its shape where it has most


@dataclass(frozen=True, slots=True)
class Scan:
    """How the batches of the script's own loader vary, and whether a step with the largest fits."""

    num_batches: int = 0  # how many were looked at
    total: int | None = None  # how many the loader has; None when it doesn't say
    leaves: tuple[ScannedLeaf, ...] = ()  # each tensor of the batch
    smallest_bytes: int = 0  # of the smallest batch
    median_bytes: int = 0  # of the batch in the middle
    largest_bytes: int = 0  # of the largest batch
    largest_index: int = 0  # its place in the loader, from 0
    # elements of its largest integer tensor of two or more dimensions; None without one
    largest_tokens: int | None = None
    fits: bool | None = None  # whether the step with it fits; None when no such step was run
    peak_bytes: int | None = None  # what the device must provide for it; None when unknown
    failure: Failure | None = None  # where that step ran out of memory, or None
    problem: str = ""  # why there is nothing above, or ""


@dataclass(frozen=True, slots=True)
class Advice:
    """A change that would save memory."""

    title: str  # the change in words
    saves_bytes: int  # what it saves at the peak
    peak_bytes: int  # what the device must provide after it
    keeps: str  # "exact": the same numbers; "rounding": the same mathematics; or "changes training"
    how: str  # one line of code or the setting
    origin: Origin  # simulated where only the order of events or the allocator changes, assumed where sizes are guessed


@dataclass(frozen=True, slots=True)
class ProgramFacts:
    """What a run showed of the program beside its memory, for those who plan another run of it."""

    # class names of the models called, in order; parts of the first have paths without a prefix, those of the others
    # begin with the class name
    models: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()  # class names of the optimizers that stepped, in order
    fusable: bool = False  # whether every one of them has a fused kernel
    # first dimension of the tensors that the training loop's loader gave, or that the loop copied to the device where
    # there is no loader; None where they share none
    batch_size: int | None = None
    work: tuple[Work, ...] = ()  # the operators of the last whole step, in order
    recomputed: tuple[str, ...] = ()  # modules that were computed again because the request's settings say so
    autocast: bool = False  # whether operators ran in lower precision under autocast
    # lines of the script at which a loop without a loader copies its batches to the device
    batch_lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DryRunOptions:
    """What a dry run can be asked for beside the device and the number of steps.

    Args:
        scan: batches of the script's loader to look at for the largest; 0: none.
        checkpoint_folder: where the files that the script writes are kept; they are not by default.
        writable: folders in which what the script writes is real, such as downloads; made where they are missing.
        quiet_output: send what the script prints to standard error.
    """

    scan: int = 0
    checkpoint_folder: str | os.PathLike[str] | None = None
    writable: Iterable[str | os.PathLike[str]] = ()
    quiet_output: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class DryRun(Saved, Reported):
    """How a script fared on a simulated device.

    Args:
        script: its name, or that of the module.
        arguments: what it was given.
        estimate: peak, timeline and notes; of an unlimited device where the script died of the limited one. None when
            the process left no result.
        outcome: how it ended.
        num_steps: optimizer steps taken.
        steps_wanted: optimizer steps asked for.
        num_devices: devices simulated; the figures are those of one of them.
        failures: every simulated out-of-memory error, in order.
        error: exception and line of the user's code in one line, or "".
        exit_code: the script's own; None when it didn't get to one.
        advice: changes that would save most.
        redirected: files by the path the script gave, and where they are; "" where they were not kept.
        scan: how the batches vary, when that was asked for.
        seconds: how long all runs took.
        allocator: settings of the allocator that were in force.
        seen: what else the run showed of the program; None where nobody asked.
        suspicion: why the simulation, and not the script, may be the reason of its failure, or "".
        module: whether `script` is the name of a module, as for `python -m`.
        processes: what each process of the script held on the device when all together held most, where there are
            several; by name, in the order in which they began.
        compiler_failed: whether it failed in the compiler, or in what that made of it.
    """

    reporters: ClassVar = Reporters[Any]()
    saved_as = "dryrun", "a dry run"

    script: str
    arguments: tuple[str, ...]
    estimate: Estimate | None
    outcome: Outcome
    num_steps: int
    steps_wanted: int
    num_devices: int = 1
    failures: tuple[Failure, ...] = ()
    error: str = ""
    exit_code: int | None = None
    advice: tuple[Advice, ...] = ()
    redirected: dict[str, str] = field(default_factory=dict)
    scan: Scan | None = None
    seconds: float = 0.0
    allocator: AllocatorOptions = field(default_factory=AllocatorOptions)
    seen: ProgramFacts | None = None
    suspicion: str = ""
    module: bool = False
    processes: dict[str, int] = field(default_factory=dict)
    compiler_failed: bool = False

    def summary(self) -> str:
        """How it ended, and the peak."""
        peak = "" if self.estimate is None else f", {format_size(self.estimate.peak_bytes)}"
        return f"of {self.script}: {self.outcome} after {self.num_steps} steps{peak}"

    @property
    def fatal(self) -> Failure | None:
        """The out-of-memory error that ended the script, or None."""
        if self.outcome is not Outcome.OUT_OF_MEMORY:
            return None
        return next((failure for failure in reversed(self.failures) if not failure.handled), None)

    @property
    def fits(self) -> bool | None:
        """Whether the script runs on the device; None when it ended too early to tell."""
        if self.outcome is Outcome.OUT_OF_MEMORY or (self.scan is not None and self.scan.fits is False):
            return False
        if self.outcome not in _RAN or self.estimate is None or self.estimate.capacity_bytes is None:
            return None
        return None if self.is_off_device else True

    @property
    def is_off_device(self) -> bool:
        """Whether the script ran and put nothing on the device."""
        return self.outcome in _RAN and self.estimate is not None and not self.estimate.timeline.blocks

    @property
    def exit_code_of_command(self) -> int:
        """What `memfit dryrun` returns: 0 fits, 3 does not fit, 4 the script failed, 5 can't be told, 130."""
        if self.is_off_device:
            return EXIT_CODES[Outcome.NO_STEP]
        return 3 if self.fits is False else EXIT_CODES[self.outcome]

    def to_json(self) -> dict[str, Any]:
        """A plain structure that `json` can write, and `from_json` read back."""
        data = Saved.to_json(replace(self, estimate=None))
        for name in ("seen", "suspicion"):
            if not data[name]:
                del data[name]
        return {
            **data,
            "estimate": None if self.estimate is None else self.estimate.to_json(),
            "fits": self.fits,
            "exit_code_of_command": self.exit_code_of_command,
        }


@dataclass(frozen=True, slots=True)
class Request(Saved):
    """What the parent asks of the child that runs the script."""

    saved_as = "dryrun request", "a request"

    script: str  # path of the file, or dotted name of the module
    module: bool  # whether it is a module, as for `python -m`
    arguments: tuple[str, ...]  # of the script
    device: Device  # what to simulate
    count: int = 1  # how many of them
    steps: int = 3  # optimizer steps after which to end
    scan: int = 0  # batches of the loader to look at; 0: none
    unlimited: bool = False  # give the device no limit; it still says it had its own
    checkpoint_folder: str = ""  # where checkpoints go, and whatever else of the script's files is kept; "" for nowhere
    result_path: str = ""  # where to write the `DryRun`
    largest_first: bool = False  # look at `scan` batches first and begin with the largest
    # which of the script's loaders, in order of their making; None when not known yet
    loader_ordinal: int | None = None
    batch_lines: tuple[str, ...] = ()  # lines at which a script without a loader copies its batches to the device
    batch_size: int | None = None  # samples of a batch; None when not known
    # how the script's steps are to be run, as far as that can be changed from outside; None: as they are
    settings: Settings | None = None
    # whether the micro-batches of the settings make up one update; each makes one of its own otherwise
    accumulates: bool = True
    compiles: bool = True  # compile what the script has compiled; it runs as it is otherwise
    watch: bool = False  # tell what else the run shows of the program, the work of its operators included
    # run the script, which trains with Keras, until its first `fit`, and estimate a step of that
    until_fit: bool = False
    writable: tuple[str, ...] = ()  # folders in which what the script writes is real
    # folders in which to keep what the script writes, the first that can; none: its writes are real
    layers: tuple[str, ...] = ()

    def after(self, seen: ProgramFacts, loader_ordinal: int | None) -> "Request":
        """The request of a later run, with what the first run has seen of the script's batches."""
        return replace(self, loader_ordinal=loader_ordinal, batch_lines=seen.batch_lines, batch_size=seen.batch_size)

    @property
    def splits(self) -> bool:
        """Whether the script's batches can be split from outside."""
        return self.batch_size is not None and (self.loader_ordinal is not None or bool(self.batch_lines))
