"""Blocks of a program that XLA compiled: which buffer lives from where to where, and what it is for."""

from collections.abc import Callable

from memfit.core.timeline import Category, Timeline

Describe = Callable[[int], tuple[Category, str]]
"""What an argument of the program is for, and the module that it belongs to, from its number."""


def timeline_of(text: str, describe: Describe) -> tuple[Timeline, int]:
    """(every buffer of a program, bytes that XLA lays out for it in total: arguments, results and temporaries).

    Args:
        text: the program after all of XLA's passes, scheduled ("is_scheduled=true" in its first line), as
            `compiled.as_text()` of JAX and `experimental_get_compiler_ir(stage="optimized_hlo")` of TensorFlow give it.
        describe: takes the number of an argument, gives (category, dotted path of the layer).
    """
    raise NotImplementedError
