"""Loops that run: a frame for each, with its iterations (`tensorflow/core/common_runtime/propagator_state.h`).

An iteration may begin before those in front of it have ended, as soon as its inputs are there, but only so many run
at once: `parallel_iterations` of the loop. What arrives for a later one waits. A frame is done when its last iteration
is; only then does it let go of what all iterations share.
"""

from typing import final

from memfit.frameworks.tensorflow.trace.memory import Tensor


@final
class Iteration:
    """One iteration of a loop, or the whole graph: inputs that have arrived and how many are still missing."""

    __slots__ = ("frame", "inputs", "missing", "num_active", "num_frames", "number")

    def __init__(self, frame: "Frame", number: int) -> None:
        self.frame = frame
        self.number = number
        self.inputs: dict[int, list[Tensor | None]] = {}
        self.missing: dict[int, list[int]] = {}
        self.num_active = 0
        self.num_frames = 0


@final
class Frame:
    """A loop that runs, with so many inputs that have yet to come, and so many iterations that may run at once."""

    __slots__ = (
        "constants", "dead_exits", "iterations", "limit", "name", "num_done", "num_entries", "parent", "waiting"
    )  # fmt: skip

    def __init__(self, parent: Iteration | None, name: str = "", num_entries: int = 0, limit: int = 1) -> None:
        self.parent = parent
        self.name = name
        self.num_entries = num_entries
        self.limit = max(1, limit)
        self.iterations: list[Iteration] = [Iteration(self, 0)]
        self.num_done = 0
        # What all iterations get, what waits for an iteration that may not begin yet, and ways out not taken.
        self.constants: list[tuple[int, Tensor]] = []
        self.waiting: list[tuple[int, Tensor]] = []
        self.dead_exits: list[int] = []

    @property
    def is_full(self) -> bool:
        """Whether another iteration must wait."""
        return len(self.iterations) - self.num_done >= self.limit

    @property
    def is_done(self) -> bool:
        """Whether no iteration runs any more."""
        return self.num_done == len(self.iterations) and not self.num_entries

    def following(self) -> Iteration:
        """Begins another iteration."""
        later = Iteration(self, len(self.iterations))
        self.iterations.append(later)
        self.dead_exits.clear()
        return later

    def ended(self) -> Iteration | None:
        """The oldest iteration, if it has come to its end since; it doesn't count any longer."""
        if self.num_done == len(self.iterations):
            return None
        oldest = self.iterations[self.num_done]
        if oldest.num_active or oldest.num_frames or (oldest.number == 0 and self.num_entries):
            return None
        self.num_done += 1
        return oldest
