"""What is used of JAX beyond its public interface; seen in 0.4.35 to 0.10.2. All of it can be done without."""

from typing import Any


def used_arguments(compiled: Any, num_leaves: int) -> tuple[int, ...]:
    """Numbers of the arguments' leaves that a compiled program uses; all where JAX doesn't say."""
    kept = getattr(getattr(compiled, "_executable", None), "_kept_var_idx", None)
    return tuple(range(num_leaves)) if kept is None else tuple(sorted(kept))


def trace_of(value: Any) -> Any:
    """The trace that an array belongs to while a function is traced; None for others, or where JAX doesn't say."""
    return getattr(value, "_trace", None)
