"""Who is fastest, on a machine whose speed drifts: times are compared within turns, never across them."""

import math
import statistics
import time
from collections.abc import Callable, Iterable

from memfit.core.settings import Settings

# Of the fastest time, what others may be slower after one turn without dropping out; less after more turns.
_CHANCE = 0.3
# Turns after which a single fast or slow moment no longer decides.
FEWEST_TURNS = 3
# Turns after which those that differ by less than this are as good as each other.
_TURNS_TO_EQUAL = 6
_EQUAL = 0.01


class Race:
    """Times of several settings that run turn by turn.

    Args:
        runners: the settings; equal ones run once.
    """

    def __init__(self, runners: Iterable[Settings]) -> None:
        self._times: dict[Settings, list[float]] = {runner: [] for runner in runners}
        self.running = list(self._times)
        self._num_turns = 0

    def turn(self, run: Callable[[Settings], float], end: float = math.inf) -> None:
        """Runs all that are left; there and back again, so that nobody always follows the same one.

        Args:
            run: runs one of them and says how many seconds that took.
            end: on `time.perf_counter`; those that haven't run by then drop out, but for the first.
        """
        self._num_turns += 1
        late = []
        for place, runner in enumerate(self.running if self._num_turns % 2 else self.running[::-1]):
            if place and time.perf_counter() >= end:
                late.append(runner)
            else:
                self._times[runner].append(run(runner))
        self.running = [runner for runner in self.running if runner not in late]

    def forget(self) -> None:
        """Drops the times so far, and nobody."""
        for times in self._times.values():
            times.clear()

    def drop(self) -> None:
        """Drops those that are slower than the fastest by more than times of so many turns may differ by chance."""
        turns = len(self._times[self.running[0]])
        if turns < FEWEST_TURNS:
            return
        scores = {runner: self._score(runner) for runner in self.running}
        limit = min(scores.values()) * (1 + _CHANCE / turns)
        self.running = [runner for runner in self.running if scores[runner] <= limit]

    @property
    def turn_seconds(self) -> float:
        """What the last turn took of those that are left."""
        return sum(self._times[runner][-1] for runner in self.running)

    @property
    def is_decided(self) -> bool:
        """Whether one is left, after turns enough, or those that are left are as fast as each other."""
        turns = len(self._times[self.running[0]])
        if len(self.running) < 2:
            return turns >= FEWEST_TURNS
        scores = [self._score(runner) for runner in self.running]
        return turns >= _TURNS_TO_EQUAL and max(scores) <= (1 + _EQUAL) * min(scores)

    def seconds(self, runner: Settings) -> float | None:
        """Of a turn, in the middle of the machine's moods; None for one that never ran."""
        return None if not self._times[runner] else self._score(runner) * statistics.median(self._paces())

    def _paces(self) -> list[float]:
        """The mean of each turn of those that ran in all of them."""
        turns = zip(*(self._times[runner] for runner in self.running), strict=True)
        return [statistics.geometric_mean(times) for times in turns]

    def _score(self, runner: Settings) -> float:
        times, paces = self._times[runner], self._paces()
        return statistics.median(one / pace for one, pace in zip(times, paces, strict=False))
