"""A program that XLA compiled: its values, how XLA lays them out, and what kernels take beside them."""

import os
from collections.abc import Sequence
from functools import cached_property

from memfit.core.timeline import Timeline
from memfit.frameworks.xla.buffers import Describe, timeline_of
from memfit.frameworks.xla.hlo import Module, parse
from memfit.frameworks.xla.layout import Layout, lay_out
from memfit.frameworks.xla.liveness import Lives, lives_of
from memfit.frameworks.xla.origin import PhaseOf
from memfit.frameworks.xla.scratch import Scratch, scratch_of


class Program:
    """A program as text after all of XLA's passes, scheduled.

    `compiled.as_text()` of JAX and `experimental_get_compiler_ir(stage="optimized_hlo")` of TensorFlow give it.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def module(self) -> Module:
        """Its instructions."""
        return parse(self.text)

    @cached_property
    def lives(self) -> Lives:
        """Of its values."""
        return lives_of(self.module)

    @cached_property
    def layout(self) -> Layout:
        """What XLA sets aside, by its own rules."""
        return lay_out(self.lives)

    def scratch(self, num_threads: int | None = None) -> tuple[Scratch, ...]:
        """What kernels take for themselves on the CPU; by default with a thread for each processor."""
        return scratch_of(self.module, self.lives, num_threads or num_processors())

    def timeline(
        self,
        describe: Describe,
        describe_result: Describe | None = None,
        scratch: Sequence[Scratch] = (),
        phase_of: PhaseOf | None = None,
    ) -> Timeline:
        """Every buffer, with what kernels take for themselves on the CPU; see `timeline_of`."""
        spans = [(one.time, one.end, one.matrix_bytes) for one in scratch]
        spans += [(one.time, one.time, one.own_bytes) for one in scratch]
        taken = [span for span in spans if span[2]]
        return timeline_of(self.module, self.lives, describe, describe_result, taken, phase_of)


def num_processors() -> int:
    """That this process may use, which is how many threads XLA has."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1
