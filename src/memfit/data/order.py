"""The order of the samples in an epoch: a function of the geometry, the seed and the epoch, and of nothing else.

Blocks are permuted; the permuted sequence is cut into lanes; each lane into windows, whose samples are permuted. Batch
`i` of the epoch is the next batch of lane `i % num_lanes`. A place in this order is a number from 0 to `num_samples`,
so that any process can find out what comes there without having given out what came before.

Batches are dealt out to ranks and, in each, to workers. Ranks take turns: one round gives each of them a batch. Where
the samples don't fill the last round, they are spread evenly over it, and where there are fewer than ranks, over the
last two, so that all ranks give the same number of batches (a rank that gave one more would wait for the others for
ever) and no sample is left out or given twice. Only where batches have one sample, or fewer samples than ranks are left
of the epoch, have some ranks nothing to give in the last round.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from memfit.data.geometry import Geometry
from memfit.data.source import Array

# What a generator of random numbers is for, so that no two share their numbers.
_BLOCKS, _WINDOW, SAMPLE, BATCH = 1, 2, 3, 4
# Of so few blocks, the permutation is the best of several.
_MANY_BLOCKS = 10_000
_NUM_DRAWN = 16


# First sample of a run that lies in one piece in the source, and the one after its last.
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of samples of one window, in the order in which they are given out."""

    lane: int
    window: int
    start: int
    stop: int


class Order:
    """The order of one epoch; without a seed, that in which the samples are stored.

    `edges` are those of the source's own blocks, where it has some.
    """

    def __init__(self, geometry: Geometry, edges: Array | None, seed: int | None, epoch: int) -> None:
        self.geometry = geometry
        self._seed = seed
        self._epoch = epoch
        if geometry.block_samples == 0 and edges is not None:
            edges = np.append(edges[:-1][:: geometry.num_merged], edges[-1]).astype(np.int64)
            # They are in order. `np.unique` would load all of `numpy.ma`, in each worker.
            edges = edges[np.diff(edges, prepend=-1) > 0]
        else:
            size = geometry.block_samples or max(1, geometry.num_samples)
            edges = np.append(np.arange(0, geometry.num_samples, size, dtype=np.int64), geometry.num_samples)
        starts, stops = edges[:-1], edges[1:]
        if seed is not None:
            permutation = _permuted_blocks(random_generator(seed, epoch, _BLOCKS), len(starts))
            starts, stops = starts[permutation], stops[permutation]
        self._stops = stops
        # Place in the permuted sequence at which each block ends.
        self._ends = np.cumsum(stops - starts)
        # A batch in turn, the last of which may not be full.
        num_full, rest = divmod(geometry.num_samples, geometry.batch_size)
        turns, more = divmod(num_full, geometry.num_lanes)
        sizes = np.full(geometry.num_lanes, turns * geometry.batch_size, np.int64)
        sizes[:more] += geometry.batch_size
        sizes[more] += rest
        self._lane_starts = np.concatenate(([0], np.cumsum(sizes)))
        self._bounds = [self._window_bounds(lane) for lane in range(geometry.num_lanes)]

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """Where the samples at places `start` to `stop` of the epoch come from."""
        hand, num_lanes = self.geometry.batch_size, self.geometry.num_lanes
        while start < stop:
            number, offset = divmod(start, hand)
            lane, turn = number % num_lanes, number // num_lanes
            count = min(hand - offset, stop - start)
            place, end = turn * hand + offset, turn * hand + offset + count
            bounds = self._bounds[lane]
            while place < end:
                index = int(np.searchsorted(bounds, place, side="right")) - 1
                first, after = int(bounds[index]), min(end, int(bounds[index + 1]))
                yield Piece(lane, index, place - first, after - first)
                place = after
            start += count

    def samples(self, lane: int, index: int) -> Array:
        """Numbers in the source of a window's samples, in the order in which they are given out."""
        first, last = self.extent(lane, index)
        rows = np.arange(last - first, dtype=row_dtype(last - first))
        if self.is_shuffled:
            self.permute(lane, index, rows)
        return numbers_of(self.spans(lane, index), rows)

    def extent(self, lane: int, index: int) -> tuple[int, int]:
        """Numbers in the lane of a window's first sample and of the one after its last."""
        first, last = self._bounds[lane][index : index + 2].tolist()
        return first, last

    def spans(self, lane: int, index: int) -> list[Span]:
        """Where the samples of a window lie."""
        # In the permuted sequence of blocks.
        start, stop = (int(self._lane_starts[lane]) + place for place in self.extent(lane, index))
        block = int(np.searchsorted(self._ends, start, side="right"))
        spans = []
        while start < stop:
            end = int(self._ends[block])
            count = min(end, stop) - start
            offset = int(self._stops[block]) - (end - start)
            spans.append((offset, offset + count))
            start += count
            block += 1
        return spans

    @property
    def is_shuffled(self) -> bool:
        """Whether samples come in another order than they are stored in."""
        return self._seed is not None

    def permute(self, lane: int, index: int, rows: Array) -> None:
        """Brings `rows`, which counts from 0, into the order in which a window's samples are given out."""
        assert self._seed is not None
        random_generator(self._seed, self._epoch, _WINDOW, lane, index).shuffle(rows)

    def lane_places(self, lane: int, start: int, stop: int) -> Array:
        """Places in the epoch of samples `start` to `stop` of a lane."""
        hand, num_lanes = self.geometry.batch_size, self.geometry.num_lanes
        turn, offset = np.divmod(np.arange(start, stop), hand)
        places: Array = (turn * num_lanes + lane) * hand + offset
        return places

    def _window_bounds(self, lane: int) -> Array:
        """Where the windows of a lane begin, and where the last one ends; at the end of a block where one is near."""
        base, end = int(self._lane_starts[lane]), int(self._lane_starts[lane + 1])
        size = self.geometry.window_samples
        # Lanes that all came to the end of a window at once would all have to be read at once.
        target = base + max(1, size * (lane + 1) // self.geometry.num_lanes)
        bounds = [base]
        while target < end:
            block = int(np.searchsorted(self._ends, target, side="right"))
            whole = int(self._ends[block - 1]) if block else 0
            bounds.append(whole if whole > bounds[-1] else target)
            target = bounds[-1] + size
        if end > base:
            bounds.append(end)
        return np.asarray(bounds, np.int64) - base


def _permuted_blocks(generator: np.random.Generator, num_blocks: int) -> Array:
    """A permutation of blocks in which places tell little about where a block lies.

    By chance, a permutation of n has a correlation of about 1 / sqrt(n) with the order as stored. That is nothing for
    samples, which are many, but not for a few hundred blocks: so it is the best of several.
    """
    if num_blocks > _MANY_BLOCKS or num_blocks < 3:
        return generator.permutation(num_blocks)
    drawn = [generator.permutation(num_blocks) for _ in range(_NUM_DRAWN)]
    places = np.arange(num_blocks) - (num_blocks - 1) / 2
    return min(drawn, key=lambda permutation: abs(float(places @ permutation)))


def numbers_of(spans: Sequence[Span], rows: Array) -> Array:
    """Numbers in the source of the samples that are the `rows`-th of those in the spans."""
    starts, stops = np.array(spans, np.int64).reshape(-1, 2).T
    sizes = stops - starts
    firsts = np.cumsum(sizes) - sizes
    index = np.searchsorted(firsts, rows, side="right") - 1
    numbers: Array = (starts - firsts)[index] + rows
    return numbers


def row_dtype(num_samples: int) -> np.dtype[Any]:
    """The type that holds the order of a window's samples."""
    return np.dtype(np.int32 if num_samples < 2**31 else np.int64)


def random_generator(*key: int) -> np.random.Generator:
    """A generator that depends on these numbers and on nothing else."""
    return np.random.Generator(np.random.PCG64(seed_sequence(*key)))


def seed_sequence(*key: int) -> np.random.SeedSequence:
    """Random bits that depend on these numbers, of any size and sign, and on nothing else."""
    return np.random.SeedSequence([2 * part if part >= 0 else -2 * part - 1 for part in key])


@dataclass(frozen=True, slots=True)
class EpochShare:
    """The batches that one worker of one rank gives of an epoch, from a place on."""

    start: int  # place in the order of the epoch of the first sample that is left
    num_samples: int  # in the whole epoch
    batch_size: int
    num_ranks: int = 1
    drop_last: bool = False  # whether samples that don't fill a round are left out
    rank: int = 0
    worker: int = 0
    num_workers: int = 1  # of this rank

    @property
    def _per_round(self) -> int:
        return self.batch_size * self.num_ranks

    @property
    def _rounds(self) -> tuple[int, list[int]]:
        """Rounds of full batches, and the samples of each round that isn't full."""
        num_full, rest = divmod(self.num_samples - self.start, self._per_round)
        if self.drop_last or rest == 0:
            return num_full, []
        if rest >= self.num_ranks or num_full == 0 or self.batch_size == 1:
            return num_full, [rest]
        rest += self._per_round
        return num_full - 1, [-(-rest // 2), rest // 2]

    @property
    def num_rounds(self) -> int:
        """Batches of the rank with most of them."""
        num_full, rest = self._rounds
        return num_full + len(rest)

    def batch(self, turn: int) -> Span:
        """Places of the first sample of the rank's batch and of the one after its last; equal where it gives none."""
        num_full, rest = self._rounds
        if turn < num_full:
            first = self.start + turn * self._per_round + self.rank * self.batch_size
            return first, first + self.batch_size
        # Parts whose sizes differ by one at most, larger ones first.
        size, more = divmod(rest[turn - num_full], self.num_ranks)
        first = self.start + num_full * self._per_round + sum(rest[: turn - num_full])
        first += self.rank * size + min(self.rank, more)
        return first, first + size + (self.rank < more)

    def batches(self) -> Iterator[Span]:
        """Places of the first sample of each batch that the worker gives and of the one after its last, in order."""
        for turn in range(self.worker, self.num_rounds, self.num_workers):
            start, stop = self.batch(turn)
            if stop > start:
                yield start, stop

    @property
    def num_batches(self) -> int:
        """Batches of the rank, of all its workers together."""
        rounds = self.num_rounds
        start, stop = self.batch(rounds - 1) if rounds else (0, 1)
        return rounds if stop > start else rounds - 1

    def place_after(self, num_rounds: int) -> int:
        """Place that the epoch has come to when every rank has given `num_rounds` batches."""
        if num_rounds >= self.num_rounds:
            return self.num_samples
        return replace(self, rank=0).batch(num_rounds)[0]

    def gives(self, places: Array) -> Array:
        """For each place whether the worker gives its sample."""
        num_full, rest = self._rounds
        turn, offset = np.divmod(places - self.start, self._per_round)
        mine: Array = (turn % self.num_workers == self.worker) & (offset // self.batch_size == self.rank)
        mine &= (turn < num_full) & (places >= self.start)
        for turn_left in range(num_full, num_full + len(rest)):
            if turn_left % self.num_workers == self.worker:
                start, stop = self.batch(turn_left)
                mine |= (places >= start) & (places < stop)
        return mine
