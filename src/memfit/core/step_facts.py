"""What a planner must know of a step that is slow to trace, such as a graph or a compiled program.

An adapter finds it out once; what can be chosen, and what each choice is computed to need, follows from it without
another trace.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

_TIMED_SAMPLES = 8
_NUM_TIMED = 3


@dataclass(frozen=True, slots=True)
class StepPart:
    """A part of the step that can be computed again, with what it keeps and computes for one sample.

    `path` is as in `Settings.checkpoint`; work is that of its forward pass, in any unit that all parts share.
    """

    path: str
    kept_bytes: float
    work: float


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The facts; reasons are "" where there is none.

    Args:
        precisions: mixed precisions in which the step can run, the one for current devices first.
        moves: names of the moves that the adapter can apply.
        parts: that can be recomputed, in order of execution.
        not_recomputed: why there are none.
        not_split: why the batch can't be split.
        approximate: why micro-batches only approximate the step.
        draws_random_numbers: whether layers do, which are others for parts.
        work: of the forward pass of one sample, in the unit of the parts; 0: that of all parts.
        call_seconds: what starting a pass costs at least (assumed).
        loop_factor: time of a sample in the loop over micro-batches, over that in a whole batch (assumed).
        copies_state: whether old and new state are there at once unless memory is donated.
        time_forward: (seconds of one sample, seconds of a call however small) of the forward pass on the device in
            hand; None where it can't be run.
    """

    framework: str
    precisions: tuple[str, ...]
    moves: frozenset[str]
    parts: tuple[StepPart, ...] = ()
    not_recomputed: str = ""
    not_split: str = ""
    approximate: str = ""
    draws_random_numbers: bool = False
    work: float = 0.0
    call_seconds: float = 2e-3
    loop_factor: float = 1.0
    copies_state: bool = False
    time_forward: Callable[[], tuple[float, float] | None] = field(default=lambda: None)


def forward_seconds(
    forward: Callable[[int], Callable[[], object]], batch_size: int, *, is_compiled: bool = False
) -> tuple[float, float]:
    """(seconds of one sample, seconds of a call however small), from two sizes of the batch.

    Args:
        forward: gives the forward pass of so many samples.
        batch_size: of the step.
        is_compiled: another size would have to be compiled: all is counted as time of samples.
    """
    many = min(batch_size, max(_TIMED_SAMPLES, batch_size // _TIMED_SAMPLES))
    long = _best_seconds(forward(many))
    if many == 1 or is_compiled:
        return long / many, 0.0
    short = _best_seconds(forward(1))
    sample = max(long - short, 0.1 * long) / (many - 1)
    return sample, max(0.0, short - sample)


def _best_seconds(run: Callable[[], object]) -> float:
    times = []
    # The first is only to be compiled.
    for _ in range(1 + _NUM_TIMED):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times[1:])
