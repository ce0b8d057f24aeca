"""The order of the samples in an epoch: a function of the geometry, the seed and the epoch, and of nothing else.

Blocks are permuted; the permuted sequence is cut into lanes; each lane into windows, whose samples are permuted. Batch
`i` of the epoch is the next batch of lane `i % num_lanes`. A place in this order is a number from 0 to `num_samples`,
so that any process can find out what comes there without having given out what came before.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memfit.data.geometry import Geometry
from memfit.data.source import Array

# What a generator of random numbers is for, so that no two share their numbers.
_BLOCKS, _WINDOW, SAMPLE, BATCH = 1, 2, 3, 4
# Of so few blocks, the permutation is the best of several.
_MANY_BLOCKS = 10_000
_NUM_DRAWN = 16


@dataclass(frozen=True, slots=True)
class Span:
    """A run of samples that lie one after the other in the source."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Window:
    """Samples that are in memory together.

    Sample `i`, in the order in which they are given out, is the `permutation[i]`-th of those in the spans. `first` is
    the number of its first sample in the lane.
    """

    lane: int
    first: int
    spans: tuple[Span, ...]
    permutation: Array | None

    @property
    def num_samples(self) -> int:
        """Samples in it."""
        return sum(span.stop - span.start for span in self.spans)

    def samples(self) -> Array:
        """Their numbers in the source, in the order in which they are given out."""
        rows = np.arange(self.num_samples) if self.permutation is None else self.permutation
        return numbers_of(self.spans, rows)


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of samples of one window, in the order in which they are given out."""

    lane: int
    window: int
    start: int
    stop: int


class Order:
    """The order of one epoch.

    Args:
        geometry: of the stream.
        edges: of the source's own blocks, where it has some.
        seed: of the stream; None for the order in which the samples are stored.
        epoch: counted from 0.
    """

    def __init__(self, geometry: Geometry, edges: Array | None, seed: int | None, epoch: int) -> None:
        self.geometry = geometry
        self._seed = seed
        self._epoch = epoch
        self._starts, self._stops = _blocks(geometry, edges)
        if seed is not None:
            permutation = _scattered(random_generator(seed, epoch, _BLOCKS), len(self._starts))
            self._starts, self._stops = self._starts[permutation], self._stops[permutation]
        # Place in the permuted sequence at which each block ends.
        self._ends = np.cumsum(self._stops - self._starts)
        self._lane_starts = np.concatenate(([0], np.cumsum(self._lane_sizes())))
        self._bounds = [self._window_bounds(lane) for lane in range(geometry.num_lanes)]

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """Where the samples at places `start` to `stop` of the epoch come from."""
        hand, num_lanes = self.geometry.batch_size, self.geometry.num_lanes
        while start < stop:
            number, offset = divmod(start, hand)
            lane, turn = number % num_lanes, number // num_lanes
            count = min(hand - offset, stop - start)
            yield from self._lane_pieces(lane, turn * hand + offset, turn * hand + offset + count)
            start += count

    def window(self, lane: int, index: int) -> Window:
        """Window `index` of a lane."""
        first, last = self.extent(lane, index)
        permutation = np.arange(last - first, dtype=row_dtype(last - first)) if self.is_shuffled else None
        if permutation is not None:
            self.permute(lane, index, permutation)
        return Window(lane, first, self.spans(lane, index), permutation)

    def extent(self, lane: int, index: int) -> tuple[int, int]:
        """Numbers in the lane of a window's first sample and of the one after its last."""
        first, last = self._bounds[lane][index : index + 2].tolist()
        return first, last

    def spans(self, lane: int, index: int) -> tuple[Span, ...]:
        """Where the samples of a window lie."""
        first, last = self.extent(lane, index)
        base = int(self._lane_starts[lane])
        return tuple(self._spans(base + first, base + last))

    @property
    def is_shuffled(self) -> bool:
        """Whether samples come in another order than they are stored in."""
        return self._seed is not None

    def permute(self, lane: int, index: int, rows: Array) -> None:
        """Brings `rows`, which counts from 0, into the order in which a window's samples are given out."""
        assert self._seed is not None
        random_generator(self._seed, self._epoch, _WINDOW, lane, index).shuffle(rows)

    def places(self, window: Window) -> Array:
        """Places in the epoch of a window's samples, in the order in which they are given out."""
        return self.lane_places(window.lane, window.first, window.first + window.num_samples)

    def lane_places(self, lane: int, start: int, stop: int) -> Array:
        """Places in the epoch of samples `start` to `stop` of a lane."""
        hand, num_lanes = self.geometry.batch_size, self.geometry.num_lanes
        turn, offset = np.divmod(np.arange(start, stop), hand)
        places: Array = (turn * num_lanes + lane) * hand + offset
        return places

    def samples(self, start: int, stop: int) -> Array:
        """Numbers in the source of the samples at places `start` to `stop`."""
        parts = []
        for piece in self.pieces(start, stop):
            parts.append(self.window(piece.lane, piece.window).samples()[piece.start : piece.stop])
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _lane_sizes(self) -> Array:
        """Samples of each lane: a batch in turn, the last of which may not be full."""
        num_samples, hand, num_lanes = self.geometry.num_samples, self.geometry.batch_size, self.geometry.num_lanes
        num_full, rest = divmod(num_samples, hand)
        turns, more = divmod(num_full, num_lanes)
        sizes: Array = np.full(num_lanes, turns * hand, np.int64)
        sizes[:more] += hand
        sizes[more] += rest
        return sizes

    def _lane_pieces(self, lane: int, start: int, stop: int) -> Iterator[Piece]:
        bounds = self._bounds[lane]
        while start < stop:
            index = int(np.searchsorted(bounds, start, side="right")) - 1
            first, end = int(bounds[index]), min(stop, int(bounds[index + 1]))
            yield Piece(lane, index, start - first, end - first)
            start = end

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

    def _spans(self, start: int, stop: int) -> Iterator[Span]:
        """Where the samples at these places of the permuted sequence of blocks lie."""
        block = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            end = int(self._ends[block])
            count = min(end, stop) - start
            offset = int(self._stops[block]) - (end - start)
            yield Span(offset, offset + count)
            start += count
            block += 1


def numbers_of(spans: Sequence[Span], rows: Array) -> Array:
    """Numbers in the source of the samples that are the `rows`-th of those in the spans."""
    starts = np.array([span.start for span in spans], np.int64)
    sizes = np.array([span.stop - span.start for span in spans], np.int64)
    firsts = np.cumsum(sizes) - sizes
    index = np.searchsorted(firsts, rows, side="right") - 1
    numbers: Array = (starts - firsts)[index] + rows
    return numbers


def row_dtype(num_samples: int) -> np.dtype[Any]:
    """The type that holds the order of a window's samples."""
    return np.dtype(np.int32 if num_samples < 2**31 else np.int64)


def _scattered(generator: np.random.Generator, num_blocks: int) -> Array:
    """A permutation of blocks in which places tell little about where a block lies.

    By chance, a permutation of n has a correlation of about 1 / sqrt(n) with the order as stored. That is nothing for
    samples, which are many, but not for a few hundred blocks: so it is the best of several.
    """
    if num_blocks > _MANY_BLOCKS or num_blocks < 3:
        return generator.permutation(num_blocks)
    drawn = [generator.permutation(num_blocks) for _ in range(_NUM_DRAWN)]
    places = np.arange(num_blocks) - (num_blocks - 1) / 2
    return min(drawn, key=lambda permutation: abs(float(places @ permutation)))


def random_generator(*key: int) -> np.random.Generator:
    """A generator that depends on these numbers and on nothing else."""
    return np.random.Generator(np.random.PCG64(seed_sequence(*key)))


def seed_sequence(*key: int) -> np.random.SeedSequence:
    """Random bits that depend on these numbers, of any size and sign, and on nothing else."""
    return np.random.SeedSequence([2 * part if part >= 0 else -2 * part - 1 for part in key])


def _blocks(geometry: Geometry, edges: Array | None) -> tuple[Array, Array]:
    num_samples = geometry.num_samples
    if geometry.block_samples == 0 and edges is not None:
        kept = np.append(edges[:-1][:: geometry.num_merged], edges[-1]).astype(np.int64)
        # They are in order. `np.unique` would load all of `numpy.ma`, in each worker.
        kept = kept[np.diff(kept, prepend=-1) > 0]
        return kept[:-1], kept[1:]
    size = geometry.block_samples or max(1, num_samples)
    starts = np.arange(0, num_samples, size, dtype=np.int64)
    return starts, np.minimum(starts + size, num_samples)
