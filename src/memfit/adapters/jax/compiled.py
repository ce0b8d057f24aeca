"""Compiles a function for shapes and reads what XLA lays out for it: nothing is run, and no array is made."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from memfit.adapters.jax.arguments import size_of
from memfit.adapters.xla.assignment import Assignment, read_assignment, read_names
from memfit.adapters.xla.buffers import Describe
from memfit.adapters.xla.placement import Placement
from memfit.adapters.xla.program import HostRun, Program
from memfit.core.errors import StepFailed
from memfit.core.timeline import Block, Phase, Timeline

_KEEP_BARRIERS = {"xla_disable_hlo_passes": "cse_barrier_expander"}
"""XLA for CPU drops the barriers behind which `jax.checkpoint` recomputes, merges what is computed twice, and so keeps
all that should have been recomputed; on a GPU it does not."""

_COPIES = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled program.

    Args:
        program: after all of XLA's passes.
        argument_bytes: of the arguments, those that the program doesn't use included.
        output_bytes: of the results.
        temporary_bytes: of what lives inside of the program.
        alias_bytes: of results that take the place of donated arguments.
        constant_bytes: of arrays that are part of the program, such as those that a step closes over.
        kept: numbers of the arguments' leaves that the program uses, in its own order.
        unused: (number, bytes) of the leaves that it doesn't use, which its caller holds nonetheless.
        run: on the CPU that it was compiled for; None where it is to run elsewhere.
    """

    program: Program
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    alias_bytes: int
    constant_bytes: int
    kept: tuple[int, ...]
    unused: tuple[tuple[int, int], ...]
    run: HostRun | None

    @property
    def assigned_bytes(self) -> int:
        """All that is taken while the program runs.

        On the CPU memory is there when it is first written to, and kernels take some for themselves.
        """
        fixed = self.argument_bytes + self.constant_bytes
        if self.run is not None:
            return fixed + self.run.peak_bytes
        return fixed + self.output_bytes + self.temporary_bytes - self.alias_bytes

    @property
    def spread(self) -> tuple[float, float]:
        """The least and the greatest peak of runs, each as a multiple of the typical one."""
        return (1.0, 1.0) if self.run is None else self.run.spread(self.argument_bytes + self.constant_bytes)

    @property
    def num_devices(self) -> int:
        """Devices that run the program together; all sizes are those of one."""
        return math.prod(int(count) for count in _COPIES.findall(self.program.text.partition("\n")[0]))

    def timeline(self, describe: Describe, describe_result: Describe | None = None) -> Timeline:
        """Every buffer of the program.

        Args:
            describe: takes the number of an argument's leaf (as `jax.tree.leaves(arguments)` counts them, static ones
                left out), gives (category, dotted path of the module).
            describe_result: the same for leaves of the result that take no argument's place.
        """
        kept = self.kept
        made = self.program.timeline(lambda number: describe(kept[number]), describe_result, self.run)
        extra = [(size, *describe(number)) for number, size in self.unused if size]
        if not extra:
            return made
        ahead = len(extra)
        blocks = [
            Block(size, place, None, category, Phase.SETUP, module, str(category))
            for place, (size, category, module) in enumerate(extra)
        ]
        return Timeline((*blocks, *_later(made, ahead)), made.num_ticks + ahead, _later_marks(made, ahead))


def compile_step(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    donate_argnums: Sequence[int] = (),
    static_argnums: Sequence[int] = (),
    *,
    as_on_gpu: bool = False,
) -> Compiled:
    """The function, compiled for arguments of these shapes.

    Args:
        function: plain, or jitted: then its own static and donated arguments count, and those given here don't.
        arguments: pytrees of arrays or of `jax.ShapeDtypeStruct`.
        donate_argnums: places of arguments whose memory the results may take.
        static_argnums: places of arguments that are constants of the program.
        as_on_gpu: lets `jax.checkpoint` recompute as it does on a GPU, which XLA for CPU undoes.
    """
    jitted = function
    if not hasattr(function, "lower"):
        jitted = jax.jit(function, donate_argnums=tuple(donate_argnums), static_argnums=tuple(static_argnums))
    lowered = jitted.lower(*arguments)  # type: ignore[attr-defined]
    return read(lowered, as_on_gpu=as_on_gpu)


def read(lowered: Any, *, as_on_gpu: bool = False) -> Compiled:
    """Compiles a lowered function and reads its memory.

    Args:
        lowered: what `jitted.lower(...)` gave.
        as_on_gpu: see `compile_step`.
    """
    compiled = lowered.compile(compiler_options=_KEEP_BARRIERS if as_on_gpu else None)
    analysis = compiled.memory_analysis()
    text = compiled.as_text()
    if analysis is None or not text:
        raise StepFailed(
            f"JAX's {jax.default_backend()!r} backend says nothing about the memory of a compiled program; "
            "set JAX_PLATFORMS=cpu to estimate on the host."
        )
    sizes = [size_of(leaf) for leaf in jax.tree.leaves(lowered.in_avals)]
    kept = _kept(compiled, len(sizes))
    unused = tuple((number, size) for number, size in enumerate(sizes) if number not in set(kept))
    program = Program(text)
    serialized = getattr(analysis, "serialized_buffer_assignment_proto", None)
    assignment = read_assignment(serialized) if serialized else None
    on_host = not as_on_gpu and jax.default_backend() == "cpu"
    return Compiled(
        program,
        analysis.argument_size_in_bytes + sum(size for _, size in unused),
        analysis.output_size_in_bytes,
        analysis.temp_size_in_bytes,
        analysis.alias_size_in_bytes,
        assignment.constant_bytes if assignment is not None else 0,
        kept,
        unused,
        program.on_host(_placement(compiled, assignment)) if on_host else None,
    )


def _placement(compiled: Any, assignment: Assignment | None) -> Placement | None:
    """Where XLA says that values lie; None where this version of JAX doesn't give it."""
    if assignment is None:
        return None
    try:
        (module,) = compiled.runtime_executable().hlo_modules()
        names = read_names(module.as_serialized_hlo_module_proto())
    except (AttributeError, ValueError, RuntimeError):
        return None
    return assignment.placement(names)


def _kept(compiled: Any, num_leaves: int) -> tuple[int, ...]:
    """Numbers of the leaves that a program uses: JAX drops the others."""
    # JAX keeps these to itself; without them, all are taken to be used.
    kept = getattr(getattr(compiled, "_executable", None), "_kept_var_idx", None)
    return tuple(range(num_leaves)) if kept is None else tuple(sorted(kept))


def _later(timeline: Timeline, ticks: int) -> list[Block]:
    return [
        Block(
            b.size_bytes,
            b.start + ticks,
            None if b.end is None else b.end + ticks,
            b.category,
            b.phase,
            b.module,
            b.op,
            b.source,
        )
        for b in timeline.blocks
    ]


def _later_marks(timeline: Timeline, ticks: int) -> tuple[Any, ...]:
    first, *rest = timeline.marks
    return (first, *(type(mark)(mark.tick + ticks, mark.phase, mark.step) for mark in rest))
