"""Compiles a function for shapes and reads what XLA lays out for it: nothing is run, and no array is made."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from memfit.core.errors import StepFailed
from memfit.core.estimate import Note
from memfit.core.timeline import Category, Timeline
from memfit.core.trace import Serving, Trace
from memfit.frameworks.jax import internals
from memfit.frameworks.jax.trace.arguments import size_of
from memfit.frameworks.xla.program import Describe, SourceOf, XlaProgram, held_before
from memfit.frameworks.xla.scratch import Scratch, most_bytes, spread_of

_KEEP_BARRIERS = {"xla_disable_hlo_passes": "cse_barrier_expander"}
"""XLA for CPU drops the barriers behind which `jax.checkpoint` recomputes, merges what is computed twice, and so keeps
all that should have been recomputed; on a GPU it does not."""

_COPIES = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled program."""

    program: XlaProgram
    argument_bytes: int  # those that the program doesn't use included
    output_bytes: int
    temporary_bytes: int
    alias_bytes: int  # of results that take the place of donated arguments
    constant_bytes: int  # part of the program, such as arrays that a step closes over
    kept: tuple[int, ...]  # numbers of the arguments' leaves that the program uses, in its own order
    unused: tuple[tuple[int, int], ...]  # (number, bytes) of the others, which the caller holds nonetheless
    scratch: tuple[Scratch, ...] | None  # what kernels take on the CPU; None where it is to run elsewhere

    @property
    def assigned_bytes(self) -> int:
        """All that is taken while the program runs: what XLA lays out, and what kernels take beside it on the CPU."""
        laid_out = self.argument_bytes + self.constant_bytes + self.output_bytes + self.temporary_bytes
        return laid_out - self.alias_bytes + most_bytes(self.scratch or ())

    @property
    def num_devices(self) -> int:
        """Devices that run the program together; all sizes are those of one."""
        return math.prod(int(count) for count in _COPIES.findall(self.program.text.partition("\n")[0]))

    def timeline(
        self, describe: Describe, describe_result: Describe | None = None, source_of: SourceOf | None = None
    ) -> Timeline:
        """Every buffer of the program.

        `describe` gives (category, dotted path of the module) from the number of an argument's leaf, as
        `jax.tree.leaves(arguments)` counts them, static ones left out; `describe_result` the same for leaves of the
        result that take no argument's place; `source_of` is as for `Origins`.
        """
        kept = self.kept
        scratch = self.scratch or ()
        made = self.program.timeline(
            lambda number: describe(kept[number]), describe_result, scratch, source_of=source_of
        )
        return held_before(made, [(size, *describe(number)) for number, size in self.unused if size])

    def trace(
        self,
        timeline: Timeline,
        notes: tuple[Note, ...],
        batch_bytes: int,
        sizes: Mapping[Category, int] | None = None,
        num_parameters: int = 0,
    ) -> Trace:
        """A trace of the program, with the bytes of parameters, gradients and so on, where they are known."""
        sizes = {category: size for category, size in (sizes or {}).items() if size}
        return Trace(
            timeline,
            notes,
            num_parameters,
            sizes.get(Category.PARAMETER, 0),
            batch_bytes,
            serving=Serving.BEST_FIT,
            assigned_bytes=self.assigned_bytes,
            state_bytes=sizes,
            spread=(1.0, 1.0) if self.scratch is None else spread_of(self.assigned_bytes, self.scratch),
        )


def compile_step(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    donate_argnums: Sequence[int] = (),
    *,
    as_on_gpu: bool = False,
) -> Compiled:
    """The function, compiled for arguments of these shapes.

    Args:
        function: plain, or jitted: then its own donated arguments count, and those given here don't.
        arguments: pytrees of arrays or of `jax.ShapeDtypeStruct`.
        donate_argnums: places of arguments whose memory the results may take.
        as_on_gpu: lets `jax.checkpoint` recompute as it does on a GPU, which XLA for CPU undoes.
    """
    jitted = function
    if not hasattr(function, "lower"):
        jitted = jax.jit(function, donate_argnums=tuple(donate_argnums))
    lowered = jitted.lower(*arguments)  # type: ignore[attr-defined]
    return read(lowered, as_on_gpu=as_on_gpu)


def read(lowered: Any, *, as_on_gpu: bool = False) -> Compiled:
    """Compiles what `jitted.lower(...)` gave and reads its memory; `as_on_gpu` as for `compile_step`."""
    try:
        compiled = lowered.compile(compiler_options=_KEEP_BARRIERS if as_on_gpu else None)
    except RuntimeError as error:
        # jaxlib 0.4 takes no lists as options: what `jax.checkpoint` recomputes then counts as kept.
        if not any(name in str(error) for name in _KEEP_BARRIERS):
            raise
        compiled = lowered.compile()
    analysis = compiled.memory_analysis()
    text = compiled.as_text()
    if analysis is None or not text:
        raise StepFailed(
            f"JAX's {jax.default_backend()!r} backend says nothing about the memory of a compiled program; "
            "set JAX_PLATFORMS=cpu to estimate on the host."
        )
    sizes = [size_of(leaf) for leaf in jax.tree.leaves(lowered.in_avals)]
    kept = internals.used_arguments(compiled, len(sizes))
    unused = tuple((number, size) for number, size in enumerate(sizes) if number not in set(kept))
    program = XlaProgram(text)
    on_host = not as_on_gpu and jax.default_backend() == "cpu"
    return Compiled(
        program,
        analysis.argument_size_in_bytes + sum(size for _, size in unused),
        analysis.output_size_in_bytes,
        analysis.temp_size_in_bytes,
        analysis.alias_size_in_bytes,
        sum(buffer.size_bytes for buffer in program.lives.buffers if buffer.is_constant),
        kept,
        unused,
        program.scratch() if on_host else None,
    )
