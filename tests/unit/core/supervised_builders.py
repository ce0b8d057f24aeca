"""Supervised runs made by hand."""

from memfit.core.supervised import (
    Attempt,
    Cause,
    Configuration,
    Ending,
    ProcessMemory,
    RunMark,
    RunOutcome,
    Sample,
    SupervisedRun,
)
from memfit.core.units import GIB, MIB


def make_attempts():
    first = Attempt(
        number=1,
        configuration=Configuration(),
        ending=Ending(
            Cause.KILLED,
            "the kernel killed it: process 70 (python); it held 990.0 MiB when seen last, the container's limit is "
            "1.00 GiB",
            signal="SIGKILL",
            process=ProcessMemory(70, "python", 990 * MIB, 4.1),
            limit_bytes=GIB,
        ),
        started=0.1,
        seconds=4.2,
        peak=ProcessMemory(70, "python", 990 * MIB, 4.1),
        steps=7,
        guarded=True,
    )
    second = Attempt(
        number=2,
        configuration=Configuration(8, rescue=True),
        ending=Ending(Cause.ENDED, "it ended by itself", 0),
        started=4.4,
        seconds=5.6,
        peak=ProcessMemory(91, "python", 600 * MIB, 7.0),
        steps=20,
        resumed_from="runs/first/step-6",
        guarded=True,
        swapped_bytes=2 * MIB,
    )
    return first, second


def make_supervised(**changes):
    """A run that was killed once and then got through."""
    defaults = {
        "script": "train.py",
        "arguments": ("--lr", "1"),
        "attempts": make_attempts(),
        "outcome": RunOutcome.COMPLETED,
        "exit_code": 0,
        "history": (
            Sample(0.2, 100 * MIB, 0, 150 * MIB),
            Sample(4.1, 990 * MIB, 20 * MIB, 1010 * MIB),
            Sample(7.0, 600 * MIB, 0, None),
        ),
        "marks": (
            RunMark(0.1, "start", "attempt 1: as it is"),
            RunMark(4.3, "killed", "attempt 1: the kernel killed it"),
        ),
        "limit_bytes": GIB,
        "limit_of": "container",
        "seconds": 10.0,
        "notes": ("attempt 2 was to use micro-batches of at most 8 but used 16",),
    }
    return SupervisedRun(**{**defaults, **changes})


def make_lost():
    """A run that gave up after one attempt."""
    first, _ = make_attempts()
    return make_supervised(
        attempts=(first,), outcome=RunOutcome.OUT_OF_MEMORY, exit_code=3, notes=("nothing is left to try",)
    )
