"""Compiles a function for shapes and reads what XLA lays out for it: nothing is run, and no array is made."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from memfit.adapters.xla.buffers import Describe
from memfit.core.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled program.

    Args:
        text: the program after all of XLA's passes.
        argument_bytes: of the arguments, those that the program doesn't use included.
        output_bytes: of the results.
        temporary_bytes: of what lives inside of the program.
        alias_bytes: of results that take the place of donated arguments.
    """

    text: str
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    alias_bytes: int

    @property
    def assigned_bytes(self) -> int:
        """All that is taken while the program runs."""
        return self.argument_bytes + self.output_bytes + self.temporary_bytes - self.alias_bytes

    def timeline(self, describe: Describe) -> Timeline:
        """Every buffer of the program.

        Args:
            describe: takes the number of an argument's leaf (as `jax.tree.leaves(arguments)` counts them, static ones
                left out), gives (category, dotted path of the module).
        """
        raise NotImplementedError


def compile_step(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    donate_argnums: Sequence[int] = (),
    static_argnums: Sequence[int] = (),
) -> Compiled:
    """The function, compiled for arguments of these shapes.

    Args:
        function: plain, or jitted: then its own static and donated arguments count, and those given here don't.
        arguments: pytrees of arrays or of `jax.ShapeDtypeStruct`.
        donate_argnums: places of arguments whose memory the results may take.
        static_argnums: places of arguments that are constants of the program.
    """
    raise NotImplementedError
