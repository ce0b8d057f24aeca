"""The Pareto front of memory and time, for whatever has both."""

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")

# Times that differ by less than this share are the same.
_SAME = 1e-9


def undominated(
    found: Iterable[T], cost: Callable[[T], tuple[float, float]], keep: Callable[[T], bool] = lambda one: False
) -> list[T]:
    """Those that no other beats in both memory and time, largest memory first.

    Args:
        found: what there is.
        cost: (memory, time) of one.
        keep: whether one is wanted in any case.

    >>> undominated([(1, 9), (2, 5), (3, 6), (4, 2)], lambda one: one)
    [(4, 2), (2, 5), (1, 9)]
    """
    kept: list[T] = []
    least = float("inf")
    for one in sorted(found, key=lambda one: (*cost(one), not keep(one))):
        seconds = cost(one)[1]
        if keep(one) or not kept or seconds < least * (1 - _SAME):
            kept.append(one)
            least = min(least, seconds)
    return kept[::-1]
