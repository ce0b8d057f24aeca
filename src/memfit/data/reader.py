"""Batches of one epoch, as numpy arrays, in the order that the epoch has.

A reader gives one share of the batches: all of them, or those of one rank and one worker.
"""

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from memfit.core.errors import BadFile
from memfit.data.order import Order, Share
from memfit.data.source import Array, SampleSource, Source
from memfit.data.transforms import Transforms, stack
from memfit.data.windows import Room, Windows

# Threads that read and decode samples ahead; decoders let go of the interpreter while they work.
_NUM_DECODERS = 2


class Assembly:
    """How batches are put together: which fields are features and labels, and of which type they are given.

    Args:
        source: to read from.
        dtypes: of what is given out, one a field.
        transforms: the user's.
        seed: of the stream.
        floating: type that transformed features of a floating type are given in; None for the transform's own.
    """

    def __init__(
        self,
        source: Source,
        dtypes: Sequence[np.dtype[Any]],
        transforms: Transforms,
        seed: int,
        floating: np.dtype[Any] | None,
    ) -> None:
        self.source = source
        self.dtypes = tuple(dtypes)
        self.transforms = transforms
        self._seed = seed
        self._floating = floating
        self._features = [index for index, field in enumerate(source.fields) if not field.is_label]
        self._labels = [index for index, field in enumerate(source.fields) if field.is_label]

    def empty(self, num_samples: int) -> list[Array]:
        """Arrays for a batch, one a field."""
        return [
            np.empty((num_samples, *field.shape), dtype)
            for field, dtype in zip(self.source.fields, self.dtypes, strict=True)
        ]

    def transform(self, arrays: Sequence[Array], epoch: int, number: int) -> tuple[Any, Any]:
        """Features and labels of one sample, transformed; its number is the one in the source."""
        return self.transforms.on_sample(*self._split(arrays), (self._seed, epoch, number))

    def from_arrays(self, arrays: list[Array], numbers: Array | None, epoch: int, place: int) -> Any:
        """The batch as the user gets it."""
        if numbers is None:
            return self._finish(*self._split(arrays), epoch, place)
        with self.transforms.own_randomness():
            given = [
                (number, self.transform([array[row] for array in arrays], epoch, number))
                for row, number in enumerate(numbers.tolist())
            ]
        return self.from_samples(given, epoch, place)

    def from_samples(self, given: list[tuple[int, tuple[Any, Any]]], epoch: int, place: int) -> Any:
        """The batch of samples that were transformed one by one, each with its number."""
        numbers = [number for number, _ in given]

        def name(row: int) -> str:
            if isinstance(self.source, SampleSource):
                return self.source.sample_name(numbers[row])
            return f"sample {numbers[row]} of {self.source.name}"

        features = _stack_tree([pair[0] for _, pair in given], name, self._floating)
        labels = _stack_tree([pair[1] for _, pair in given], name, None) if self._labels else None
        return self._finish(features, labels, epoch, place)

    def _finish(self, features: Any, labels: Any, epoch: int, place: int) -> Any:
        with self.transforms.own_randomness():
            features, labels = self.transforms.on_batch(features, labels, (self._seed, epoch, place))
        return features if not self._labels else (features, labels)

    def _split(self, arrays: Sequence[Array]) -> tuple[Any, Any]:
        return self._group(arrays, self._features), self._group(arrays, self._labels)

    def _group(self, arrays: Sequence[Array], indices: list[int]) -> Any:
        if not indices:
            return None
        if len(indices) == 1:
            return arrays[indices[0]]
        return {self.source.fields[index].name: arrays[index] for index in indices}


def read_epoch(assembly: Assembly, order: Order, share: Share, room: Room, *, epoch: int) -> Iterator[Any]:
    """The batches of a share, one after the other."""
    if order.geometry.num_samples == 0:
        return iter(())
    if assembly.source.layout.is_by_sample:
        return _by_sample(assembly, order, share, room, epoch)
    return _by_window(assembly, order, share, room, epoch)


def _by_window(assembly: Assembly, order: Order, share: Share, room: Room, epoch: int) -> Iterator[Any]:
    source = assembly.source
    held = [
        given if given.itemsize < field.dtype.itemsize else field.dtype
        for given, field in zip(assembly.dtypes, source.fields, strict=True)
    ]
    windows = Windows(source, order, share, held, room)
    try:
        for start, stop in share.batches():
            arrays = assembly.empty(stop - start)
            numbers = np.empty(stop - start, np.int64) if assembly.transforms.changes_samples else None
            row = 0
            for piece in order.pieces(start, stop):
                end = row + piece.stop - piece.start
                if numbers is not None:
                    numbers[row:end] = windows.numbers(piece)
                windows.take(piece, [array[row:end] for array in arrays])
                row = end
            yield assembly.from_arrays(arrays, numbers, epoch, start)
            del arrays
    finally:
        windows.close()


def _by_sample(assembly: Assembly, order: Order, share: Share, room: Room, epoch: int) -> Iterator[Any]:
    source = assembly.source
    assert isinstance(source, SampleSource)
    numbers = order.samples(0, 0)
    ahead = (int(number) for start, stop in share.batches() for number in numbers[start:stop])
    with ThreadPoolExecutor(_NUM_DECODERS, thread_name_prefix="memfit-stream") as pool:
        reading = _read_ahead(source, ahead, pool, room.held_bytes)
        try:
            for start, stop in share.batches():
                # Transformed one by one, so that no more than a few are in memory as they were stored.
                with assembly.transforms.own_randomness():
                    given = [
                        (number, assembly.transform(arrays, epoch, number))
                        for number, arrays in itertools.islice(reading, stop - start)
                        if arrays is not None
                    ]
                if not given:
                    first = source.sample_name(int(numbers[start]))
                    raise BadFile(f"no sample of a batch of {stop - start} can be read; the first is {first}.")
                yield assembly.from_samples(given, epoch, start)
                del given
        finally:
            reading.close()
            pool.shutdown(wait=True, cancel_futures=True)


def _read_ahead(
    source: SampleSource, numbers: Iterator[int], pool: ThreadPoolExecutor, limit_bytes: int
) -> Generator[tuple[int, tuple[Array, ...] | None]]:
    """Samples in order, a few of which are read and decoded before they are asked for."""
    ahead: deque[tuple[int, Future[tuple[Array, ...] | None], int]] = deque()
    ahead_bytes = 0
    for number in numbers:
        # Photographs take ten to twenty times the room of their files.
        size = max(source.fields[0].sample_bytes, 12 * source.stored_bytes(number))
        while ahead and (len(ahead) >= 2 * _NUM_DECODERS or ahead_bytes + size > limit_bytes):
            first, future, first_size = ahead.popleft()
            ahead_bytes -= first_size
            yield first, future.result()
        ahead.append((number, pool.submit(source.read_sample, number), size))
        ahead_bytes += size
    while ahead:
        first, future, _ = ahead.popleft()
        yield first, future.result()


def _stack_tree(values: list[Any], name: Callable[[int], str], dtype: np.dtype[Any] | None) -> Any:
    if isinstance(values[0], dict):
        return {key: _stack_tree([value[key] for value in values], name, dtype) for key in values[0]}
    array = stack(values, name)
    if dtype is not None and array.dtype.kind == "f" and array.dtype != dtype:
        return array.astype(dtype)
    return array
