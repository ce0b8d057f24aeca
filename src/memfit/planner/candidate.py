"""Candidates for a plan, what a search for them can do, and the front of those that no other beats."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from memfit.core.device import Origin
from memfit.core.settings import Settings

T = TypeVar("T")

# Times that differ by less than this share are the same.
_SAME = 1e-9
# Tried where the batch allows it: parts whose largest has another size than that of fewer parts.
_PARTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96, 128, 192, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings with what they are computed to need.

    Bytes are those before the allocator or after it, as the search counts, without the CUDA context; seconds have any
    unit where the search has no origin of them. `variant` is what the search computed them from.
    """

    settings: Settings
    computed_bytes: float
    seconds: float
    variant: Any = None


class CandidateSearch(Protocol):
    """The candidates for one step, and what was learned of some."""

    seconds_origin: Origin | None = Origin.ASSUMED
    """How times are known that no step was run for; None where they aren't in seconds."""
    computes_peaks: bool = False
    """Whether computed bytes are those that the allocator takes; else they are scaled by what a trace says."""

    @property
    def plain(self) -> Candidate:
        """The step as it is, as a candidate."""

    def best(self, usable_bytes: float) -> Candidate | None:
        """The fastest candidate that is computed to fit and worth a proof, or None."""

    def smallest(self, count: int) -> Sequence[Candidate]:
        """Candidates that are computed to need least."""

    def contenders(self, usable_bytes: float, most_seconds: float) -> Sequence[Candidate]:
        """The best of each kind that fit and take no longer, where steps can be timed."""
        return ()

    def front(self) -> Sequence[Candidate]:
        """Candidates for a picture of memory against time."""

    def evaluate(self, settings: Settings) -> Candidate:
        """What settings are computed to need."""

    def learn(self, candidate: Candidate, needed_bytes: float) -> None:
        """A proof says what the allocator takes for a candidate."""

    def exclude(self, candidate: Candidate) -> None:
        """A candidate can't be run."""

    def is_traced(self, settings: Settings) -> bool:
        """Whether a trace said what settings need."""
        return False


def possible_parts(batch_size: int | None) -> tuple[int, ...]:
    """Numbers of micro-batches worth trying: each with a smaller largest part than the one before.

    >>> possible_parts(6)
    (1, 2, 3, 6)
    """
    if not batch_size:
        return (1,)
    sizes = [-(-batch_size // parts) for parts in (*(number for number in _PARTS if number < batch_size), batch_size)]
    # The fewest parts that give each size.
    return tuple(dict.fromkeys(-(-batch_size // size) for size in sizes))


def undominated(
    points: Iterable[T], cost: Callable[[T], tuple[float, float]], keep: Callable[[T], bool] = lambda point: False
) -> list[T]:
    """Those that no other beats in both costs, (memory, time), and those to `keep` anyway; largest memory first.

    >>> undominated([(1, 9), (2, 5), (3, 6), (4, 2)], lambda point: point)
    [(4, 2), (2, 5), (1, 9)]
    """
    kept: list[T] = []
    least = float("inf")
    for point in sorted(points, key=lambda point: (*cost(point), not keep(point))):
        seconds = cost(point)[1]
        if keep(point) or not kept or seconds < least * (1 - _SAME):
            kept.append(point)
            least = min(least, seconds)
    return kept[::-1]


def front_of(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates that no other beats in both memory and time, largest memory first."""
    return undominated(candidates, lambda candidate: (candidate.computed_bytes, candidate.seconds))
