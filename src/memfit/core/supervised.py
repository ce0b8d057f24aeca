"""The answer of `memfit.run`: how a script fared under supervision, attempt by attempt, and its memory over time."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, ClassVar

from memfit.core.reporters import Reported, Reporters
from memfit.core.typed_data import Saved
from memfit.core.units import format_size


class RunOutcome(StrEnum):
    """How a supervised run ended."""

    COMPLETED = "completed"  # the script ended by itself with exit code 0
    FAILED = "failed"  # the script ended for a reason of its own, with another exit code or by another exception
    OUT_OF_MEMORY = "out of memory"  # memory ran out, and nothing was left to try
    INTERRUPTED = "interrupted"  # the user ended it
    SIGNALLED = "ended by a signal"  # somebody else ended it


class Cause(StrEnum):
    """Why an attempt ended."""

    ENDED = "ended by itself"
    FAILED = "failed for another reason than memory"
    EXCEPTION = "an allocation failed"
    RESERVED = "refused address space, with memory left"
    KILLED = "killed for its memory"
    WORKER_KILLED = "one of its processes was OOM-killed"
    SHARED_MEMORY = "shared memory was full"
    CRASHED = "crashed close to the limit"
    INTERRUPTED = "interrupted"
    SIGNALLED = "ended by a signal"

    @property
    def is_memory(self) -> bool:
        """Whether memory was the reason."""
        return self in _OF_MEMORY


_OF_MEMORY = {Cause.EXCEPTION, Cause.RESERVED, Cause.KILLED, Cause.WORKER_KILLED, Cause.SHARED_MEMORY, Cause.CRASHED}


@dataclass(frozen=True, slots=True)
class Configuration:
    """What an attempt was told; no two attempts of a run are told the same."""

    micro_batch_size: int | None = None  # most samples at once; None: as the script has it
    rescue: bool = False  # whether operations that run out of memory are rescued from outside
    eager: bool = False  # whether the rescue moves all it can, before memory runs out
    share: float = 1.0  # of the memory that there is, what a plan may use
    reserves: bool = False  # whether it may map what it likes until it holds half of what it may

    def __str__(self) -> str:
        words = [] if self.micro_batch_size is None else [f"micro-batches of at most {self.micro_batch_size}"]
        if self.rescue:
            words.append("rescue of everything" if self.eager else "rescue")
        if self.share < 1:
            words.append(f"a plan for {self.share:.0%} of the memory")
        if self.reserves:
            words.append("no limit on address space")
        return " and ".join(words) or "as it is"


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """A process and the memory it held at some moment."""

    pid: int  # its number
    name: str = ""  # of its program, or "" where that isn't known
    # memory that the kernel can't take back, shared memory included; None where that isn't known
    held_bytes: int | None = None
    seconds: float = 0.0  # when, from the start of the run on


@dataclass(frozen=True, slots=True)
class Ending:
    """How and why an attempt ended."""

    cause: Cause  # why
    text: str  # the same in one sentence, with what is known of it
    exit_code: int | None = None  # of the script; None where a signal ended it
    signal: str = ""  # name of the signal that ended it, or ""
    process: ProcessMemory | None = None  # the one that memory ran out for; None where it isn't known
    limit_bytes: int | None = None  # the limit that was reached; None where it isn't known
    importing: str = ""  # name of the module whose import ran out of memory, or ""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of the script."""

    number: int  # from 1 on
    configuration: Configuration  # what it was told
    ending: Ending  # how and why it ended
    started: float  # seconds from the start of the run on
    seconds: float  # how long it took
    peak: ProcessMemory | None = None  # the process that held most, and when; None where nothing was seen
    steps: int | None = None  # optimizer steps that the script is known to have got to; None where nobody tells
    resumed_from: str = ""  # checkpoint that it began with, or ""
    guarded: bool = False  # whether a guard or an integration was at work in it
    swapped_bytes: int = 0  # most that was seen of it in swap


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory at one moment."""

    seconds: float  # from the start of the run on
    script_bytes: int  # what the script's own process held
    others_bytes: int = 0  # the same of the processes that it started, pages that they share counted for each
    # what everything in the container holds and can't give back; None without a container
    group_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class RunMark:
    """Something that happened, for the page."""

    seconds: float  # from the start of the run on
    kind: str  # "start", "settings", "out of memory", "killed", "checkpoint", "restart", "end"
    text: str  # what


@dataclass(frozen=True, slots=True, repr=False)
class SupervisedRun(Saved, Reported):
    """How a script fared under supervision.

    Args:
        script: its path, or the name of the module.
        arguments: what it was given.
        attempts: every start, in order.
        outcome: how it all ended.
        exit_code: what `memfit run` returns: the script's own where it ended by itself, 3 where memory ran out and
            nothing is left to try, 128 and the number of the signal that ended it, 130 where it was interrupted.
        history: memory over time, thinned where a run is long.
        marks: what happened, in order.
        budget_bytes: what the user allowed; None where all there is.
        limit_bytes: what the script could have: that of the container or machine, or the budget; None if unknown.
        limit_of: whose limit that is: "container", "machine", "budget", or "".
        seconds: how long it all took.
        notes: what the user should know beside that.
    """

    reporters: ClassVar = Reporters[Any]()
    saved_as = "run", "a run"

    script: str
    arguments: tuple[str, ...]
    attempts: tuple[Attempt, ...]
    outcome: RunOutcome
    exit_code: int
    history: tuple[Sample, ...] = ()
    marks: tuple[RunMark, ...] = ()
    budget_bytes: int | None = None
    limit_bytes: int | None = None
    limit_of: str = ""
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    def summary(self) -> str:
        """How it ended, and the peak."""
        peak = "" if self.peak is None else f", peak {format_size(self.peak.held_bytes)}"
        return f"of {self.script}: {self.outcome}, {len(self.attempts)} attempts{peak}"

    @property
    def peak(self) -> ProcessMemory | None:
        """The process that held most in any attempt, and when; None where nothing was seen."""
        peaks = [attempt.peak for attempt in self.attempts if attempt.peak is not None]
        return max(peaks, key=lambda peak: peak.held_bytes or 0, default=None)

    def to_json(self) -> dict[str, Any]:
        """A plain structure that `json` can write, and `from_json` read back."""
        # Thousands of them.
        history = [[s.seconds, s.script_bytes, s.others_bytes, s.group_bytes] for s in self.history]
        return {**Saved.to_json(replace(self, history=())), "history": history}
