"""A program that XLA compiled: its values, where they lie, and what a run of it takes."""

import os
from dataclasses import dataclass
from functools import cached_property

from memfit.adapters.xla.buffers import Describe, timeline_of
from memfit.adapters.xla.hlo import Module, parse
from memfit.adapters.xla.host_run import several_runs
from memfit.adapters.xla.host_thunks import thunks_of
from memfit.adapters.xla.layout import Layout, lay_out
from memfit.adapters.xla.liveness import Lives, lives_of
from memfit.adapters.xla.origin import PhaseOf
from memfit.adapters.xla.placement import Placement
from memfit.core.timeline import Timeline

# Of the bytes of values, what a placement may not know.
_MOST_MISSING = 0.02


@dataclass(frozen=True, slots=True)
class HostRun:
    """What a run on the CPU takes beside arguments and constants.

    Args:
        peak_bytes: of memory that was written to, and of what kernels take for themselves.
        least_bytes: of the same, in a run that went well.
        greatest_bytes: in one that went badly.
        scratch: (first time, last time, bytes) of each kernel that takes memory for itself.
        asked_bytes: most that kernels ask for for themselves at once, in any run, whether they write to it or not.
    """

    peak_bytes: int
    least_bytes: int
    greatest_bytes: int
    scratch: tuple[tuple[int, int, int], ...]
    asked_bytes: int

    def spread(self, fixed_bytes: int) -> tuple[float, float]:
        """The least and the greatest peak as multiples of the typical one.

        Args:
            fixed_bytes: that are there in any case.
        """
        total = fixed_bytes + self.peak_bytes
        if not total:
            return 1.0, 1.0
        return (fixed_bytes + self.least_bytes) / total, (fixed_bytes + self.greatest_bytes) / total


class Program:
    """A compiled program.

    Args:
        text: after all of XLA's passes, scheduled ("is_scheduled=true" in its first line), as `compiled.as_text()` of
            JAX and `experimental_get_compiler_ir(stage="optimized_hlo")` of TensorFlow give it.
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

    def on_host(self, placement: Placement | None = None, num_threads: int | None = None) -> HostRun:
        """A run on the CPU.

        Args:
            placement: where values lie, if XLA has said so.
            num_threads: as many as there are processors for this process, by default.
        """
        if placement is None or not self._is_known(placement):
            placement = self.layout.placement
        threads = num_threads or num_processors()
        runs = several_runs(thunks_of(self.module, self.lives, placement, threads), placement, threads)
        typical = runs[len(runs) // 2]
        most_asked = max(run.asked_bytes for run in runs)
        return HostRun(typical.peak_bytes, runs[0].peak_bytes, runs[-1].peak_bytes, typical.scratch, most_asked)

    def _is_known(self, placement: Placement) -> bool:
        """Whether a placement is one of this program's values: nearly all bytes must be found in it."""
        found = missing = 0
        for buffer in self.lives.buffers:
            if buffer.argument is None and not buffer.is_constant:
                known = any((value.instruction.name, value.path) in placement.slices for value in buffer.values)
                found, missing = found + known * buffer.size_bytes, missing + (not known) * buffer.size_bytes
        return missing <= _MOST_MISSING * (found + missing)

    def timeline(
        self,
        describe: Describe,
        describe_result: Describe | None = None,
        run: HostRun | None = None,
        phase_of: PhaseOf | None = None,
    ) -> Timeline:
        """Every buffer, with what kernels take for themselves in a run on the CPU; see `timeline_of`."""
        scratch = () if run is None else run.scratch
        return timeline_of(self.module, self.lives, describe, describe_result, scratch, phase_of)


def num_processors() -> int:
    """That this process may use, which is how many threads XLA has."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1
