"""Candidates for a plan, and the front of those that no other beats in both memory and time."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from memfit.core.settings import Settings

T = TypeVar("T")

# Times that differ by less than this share are the same.
_SAME = 1e-9


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings with what they are computed to need.

    Args:
        settings: how the step is run.
        computed_bytes: memory, before the allocator or after it, as the search counts; without the CUDA context.
        seconds: time of a step, in any unit where the search has no times.
        variant: what the search computed the figures from.
    """

    settings: Settings
    computed_bytes: float
    seconds: float
    variant: Any = None


def undominated(
    found: Iterable[T], cost: Callable[[T], tuple[float, float]], keep: Callable[[T], bool] = lambda one: False
) -> list[T]:
    """Those that no other beats in both costs, (memory, time), and those to `keep` anyway; largest memory first.

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


def front_of(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates that no other beats in both memory and time, largest memory first."""
    return undominated(candidates, lambda one: (one.computed_bytes, one.seconds))
