"""Who gives which batch: the samples that are left of an epoch, dealt out to ranks and, in each, to workers.

Ranks take turns: one round gives each of them a batch. Where the samples don't fill the last round, they are spread
evenly over it, and where there are fewer than ranks, over the last two, so that all ranks give the same number of
batches (a rank that gave one more would wait for the others for ever) and no sample is left out or given twice. Only
where batches have one sample, or fewer samples than ranks are left of the epoch, have some ranks nothing to give in the
last round.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from memfit.data.source import Array


@dataclass(frozen=True, slots=True)
class Schedule:
    """The batches of an epoch from a place on.

    Attributes:
        start: place in the order of the epoch of the first sample that is left.
        num_samples: in the whole epoch.
        batch_size: samples of a batch that is full.
        num_ranks: that share the epoch.
        drop_last: whether samples that don't fill a round are left out.
    """

    start: int
    num_samples: int
    batch_size: int
    num_ranks: int = 1
    drop_last: bool = False

    @property
    def num_rounds(self) -> int:
        """Batches of the rank with most of them."""
        return self._num_full + len(self._rest)

    @property
    def _per_round(self) -> int:
        return self.batch_size * self.num_ranks

    @property
    def _num_full(self) -> int:
        """Rounds of full batches."""
        num_full, rest = divmod(self.num_samples - self.start, self._per_round)
        if self.drop_last or rest == 0 or rest >= self.num_ranks or num_full == 0 or self.batch_size == 1:
            return num_full
        return num_full - 1

    @property
    def _rest(self) -> list[int]:
        """Samples of each round that isn't full."""
        rest = self.num_samples - self.start - self._num_full * self._per_round
        if self.drop_last or rest == 0:
            return []
        return [rest] if rest <= self._per_round else [-(-rest // 2), rest // 2]

    def batch(self, turn: int, rank: int) -> tuple[int, int]:
        """Places of the first sample of a batch and of the one after its last; equal where the rank gives none."""
        num_full = self._num_full
        if turn < num_full:
            first = self.start + turn * self._per_round + rank * self.batch_size
            return first, first + self.batch_size
        rest = self._rest
        first = self.start + num_full * self._per_round + sum(rest[: turn - num_full])
        bounds = _spread(rest[turn - num_full], self.num_ranks)
        return first + int(bounds[rank]), first + int(bounds[rank + 1])

    def batches(self, rank: int, worker: int = 0, num_workers: int = 1) -> Iterator[tuple[int, int]]:
        """The batches of one worker of a rank, in order."""
        for turn in range(worker, self.num_rounds, num_workers):
            start, stop = self.batch(turn, rank)
            if stop > start:
                yield start, stop

    def num_batches(self, rank: int) -> int:
        """Batches of a rank."""
        rounds = self.num_rounds
        if rounds == 0:
            return 0
        start, stop = self.batch(rounds - 1, rank)
        return rounds if stop > start else rounds - 1

    def place_after(self, num_rounds: int) -> int:
        """Place that the epoch has come to when every rank has given `num_rounds` batches."""
        if num_rounds >= self.num_rounds:
            return self.num_samples
        return self.batch(num_rounds, 0)[0]

    def is_given_by(self, places: Array, rank: int, worker: int, num_workers: int) -> Array:
        """For each place whether this worker of this rank gives its sample."""
        num_full = self._num_full
        turn, offset = np.divmod(places - self.start, self._per_round)
        mine: Array = (turn < num_full) & (turn % num_workers == worker) & (offset // self.batch_size == rank)
        mine &= places >= self.start
        for turn_left in range(num_full, self.num_rounds):
            if turn_left % num_workers == worker:
                start, stop = self.batch(turn_left, rank)
                mine |= (places >= start) & (places < stop)
        return mine


def _spread(count: int, parts: int) -> Array:
    """Bounds of parts whose sizes differ by one at most, larger ones first."""
    size, more = divmod(count, parts)
    bounds: Array = np.concatenate(([0], np.cumsum([size + (part < more) for part in range(parts)])))
    return bounds
