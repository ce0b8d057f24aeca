"""Batches of one epoch, as numpy arrays, in the order that the epoch has.

A reader gives one share of the batches: all of them, or those of one rank and one worker.

The user's transforms find random numbers that depend on the sample alone: augmentation that draws from a generator
shared by all samples gives other numbers with another number of workers, or after a resume. Each call finds generators
that were seeded from (seed, epoch, sample): the one handed over as `rng`, where the function asks for it, and the
program's own (`random`, `numpy.random` and those that an adapter adds, such as PyTorch's), which are set back
afterwards.
"""

import inspect
import itertools
import random
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from memfit.core.errors import BadFile, BadInput
from memfit.data.order import BATCH, SAMPLE, EpochShare, Order, random_generator, seed_sequence
from memfit.data.source import Array, SampleSource, Source
from memfit.data.windows import Windows

# Threads that read and decode samples ahead; decoders let go of the interpreter while they work.
_NUM_DECODERS = 2
# Random numbers of Python and NumPy, by their functions.
_OWN: tuple[Any, ...] = (
    SimpleNamespace(save=random.getstate, restore=random.setstate, seed=random.seed),
    SimpleNamespace(save=np.random.get_state, restore=np.random.set_state, seed=np.random.seed),
)


class _Transform(NamedTuple):
    """A function of the user's, and what it takes."""

    function: Callable[..., Any]
    takes_label: bool
    takes_generator: bool


class Transforms:
    """What is done to samples and to batches on their way.

    Each takes features, or features and label, and gives back the same. `randomness` is of libraries beside Python's
    and NumPy's, with `save()`, `restore(state)` and `seed(number)`, a number below 2**32.
    """

    def __init__(
        self, sample: Callable[..., Any] | None, batch: Callable[..., Any] | None, randomness: Sequence[Any] = ()
    ) -> None:
        self._sample = None if sample is None else _call_of(sample, "transform")
        self._batch = None if batch is None else _call_of(batch, "batch_transform")
        # Without Python's and NumPy's, which can't be pickled.
        self._more_randomness = tuple(randomness)

    @property
    def changes_samples(self) -> bool:
        """Whether samples have to be handed over one by one."""
        return self._sample is not None

    @property
    def takes_labels(self) -> bool:
        """Whether one of them can only be called with labels."""
        return any(call is not None and call.takes_label for call in (self._sample, self._batch))

    @contextmanager
    def own_randomness(self) -> Iterator[None]:
        """Whatever is drawn inside, the program's random numbers are as before afterwards."""
        is_needed = self._sample is not None or self._batch is not None
        states = [(each, each.save()) for each in (*_OWN, *self._more_randomness) if is_needed]
        try:
            yield
        finally:
            for each, state in states:
                each.restore(state)

    def on_sample(self, features: Any, label: Any, key: tuple[int, int, int]) -> tuple[Any, Any]:
        """The transformed sample; `key` is (seed, epoch, number of the sample)."""
        return self._apply(self._sample, features, label, (SAMPLE, *key))

    def on_batch(self, features: Any, label: Any, key: tuple[int, int, int]) -> tuple[Any, Any]:
        """The transformed batch; `key` is (seed, epoch, place of its first sample)."""
        return self._apply(self._batch, features, label, (BATCH, *key))

    def _apply(self, call: _Transform | None, features: Any, label: Any, key: tuple[int, ...]) -> tuple[Any, Any]:
        if call is None:
            return features, label
        keywords = {"rng": random_generator(*key)} if call.takes_generator else {}
        # Also where it takes a generator: what it calls may draw from others.
        number = int(seed_sequence(*key).generate_state(1)[0])
        for each in (*_OWN, *self._more_randomness):
            each.seed(number)
        if not call.takes_label:
            return call.function(features, **keywords), label
        result = call.function(features, label, **keywords)
        if not isinstance(result, tuple) or len(result) != 2:
            raise BadInput(
                f"the transform takes features and a label and has to give back both, but gave {_kind(result)}. "
                "Return (features, label), or let it take the features alone."
            )
        return result


@dataclass(frozen=True, slots=True)
class Assembly:
    """How batches are put together: which fields are features and labels, and of which type they are given."""

    source: Source
    dtypes: Sequence[np.dtype[Any]]  # of what is given out, one a field
    transforms: Transforms
    seed: int
    floating: np.dtype[Any] | None  # of transformed features of a floating type; None for the transform's own

    @property
    def _has_labels(self) -> bool:
        return any(field.is_label for field in self.source.fields)

    def transform(self, arrays: Sequence[Array], epoch: int, number: int) -> tuple[Any, Any]:
        """Features and labels of one sample, transformed; its number is the one in the source."""
        return self.transforms.on_sample(*self._split(arrays), (self.seed, epoch, number))

    def from_arrays(self, arrays: list[Array], numbers: Array | None, epoch: int, place: int) -> Any:
        """The batch as the user gets it."""
        if numbers is None:
            return self._finish(*self._split(arrays), epoch, place)
        with self.transforms.own_randomness():
            samples = [
                (number, self.transform([array[row] for array in arrays], epoch, number))
                for row, number in enumerate(numbers.tolist())
            ]
        return self.from_samples(samples, epoch, place)

    def from_samples(self, samples: list[tuple[int, tuple[Any, Any]]], epoch: int, place: int) -> Any:
        """The batch of samples that were transformed one by one, each with its number."""

        def name(row: int) -> str:
            return self.source.sample_name(samples[row][0])

        features = _stack_tree([pair[0] for _, pair in samples], name, self.floating)
        labels = _stack_tree([pair[1] for _, pair in samples], name, None) if self._has_labels else None
        return self._finish(features, labels, epoch, place)

    def _finish(self, features: Any, labels: Any, epoch: int, place: int) -> Any:
        with self.transforms.own_randomness():
            features, labels = self.transforms.on_batch(features, labels, (self.seed, epoch, place))
        return (features, labels) if self._has_labels else features

    def _split(self, arrays: Sequence[Array]) -> tuple[Any, Any]:
        """Features and labels, each an array, a dict of several, or None."""
        halves = []
        for is_label in (False, True):
            pairs = zip(self.source.fields, arrays, strict=True)
            named = {field.name: array for field, array in pairs if field.is_label == is_label}
            halves.append(named if len(named) > 1 else next(iter(named.values()), None))
        return halves[0], halves[1]


def read_epoch(
    assembly: Assembly, order: Order, share: EpochShare, *, epoch: int, limit_bytes: int, num_readers: int = 1
) -> Generator[Any]:
    """The batches of a share, one after the other.

    `limit_bytes` is of samples in memory, beside the batch that is put together, and `num_readers` of reads of the
    source that may be under way at once.
    """
    if assembly.source.layout.is_by_sample:
        return _by_sample(assembly, order, share, epoch, limit_bytes)
    return _by_window(assembly, order, share, epoch, limit_bytes, num_readers)


def _by_window(
    assembly: Assembly, order: Order, share: EpochShare, epoch: int, limit_bytes: int, num_readers: int
) -> Generator[Any]:
    source, dtypes = assembly.source, assembly.dtypes
    # The narrower of the stored and the given type.
    held = [
        min(field.dtype, given, key=lambda dtype: dtype.itemsize)
        for given, field in zip(dtypes, source.fields, strict=True)
    ]
    windows = Windows(source, order, share, held, limit_bytes, num_readers)
    try:
        for start, stop in share.batches():
            arrays = source.empty(stop - start, dtypes)
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


def _by_sample(assembly: Assembly, order: Order, share: EpochShare, epoch: int, limit_bytes: int) -> Generator[Any]:
    source = assembly.source
    assert isinstance(source, SampleSource)
    numbers = order.samples(0, 0)
    ahead = (int(number) for start, stop in share.batches() for number in numbers[start:stop])
    with ThreadPoolExecutor(_NUM_DECODERS, thread_name_prefix="memfit-stream") as pool:
        reading = _read_ahead(source, ahead, pool, limit_bytes)
        try:
            for start, stop in share.batches():
                # Transformed one by one, so that no more than a few are in memory as they were stored.
                with assembly.transforms.own_randomness():
                    samples = [
                        (number, assembly.transform(arrays, epoch, number))
                        for number, arrays in itertools.islice(reading, stop - start)
                        if arrays is not None
                    ]
                if not samples:
                    first = source.sample_name(int(numbers[start]))
                    raise BadFile(f"no sample of a batch of {stop - start} can be read; the first is {first}.")
                yield assembly.from_samples(samples, epoch, start)
                del samples
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
    return array if dtype is None or array.dtype.kind != "f" else array.astype(dtype, copy=False)


def stack(values: Sequence[Any], name: Callable[[int], str]) -> Array:
    """One array of samples that must agree in shape; `name` says what to call one of them in a message."""
    arrays = []
    for position, value in enumerate(values):
        reason = ""
        try:
            array = np.asarray(value)
        except (ValueError, TypeError, RuntimeError) as error:
            # Arrays of different shapes, or tensors that NumPy has no type for.
            array, reason = np.empty(0, object), f" ({error})"
        if array.dtype == object:
            raise BadInput(
                f"{name(position)} became {_kind(value)}, which is no array{reason}. A transform gives back arrays or "
                "numbers, or a dict of them."
            )
        arrays.append(array)
    first = arrays[0]
    # The type that holds all of them: in that of the first, fractions and the ends of texts could be lost.
    batch = np.empty((len(arrays), *first.shape), np.result_type(*{array.dtype for array in arrays}))
    for position, array in enumerate(arrays):
        if array.shape != first.shape:
            raise BadInput(
                f"samples of a batch differ in shape: {name(0)} is {list(first.shape)}, {name(position)} is "
                f"{list(array.shape)}. Give a transform that brings them to one shape, such as a resize or a crop."
            )
        batch[position] = array
    return batch


def _call_of(function: Callable[..., Any], name: str) -> _Transform:
    if not callable(function):
        raise BadInput(f"{name} must be a function, but {_kind(function)} was given.")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return _Transform(function, takes_label=False, takes_generator=False)
    positional = [
        each.name
        for each in parameters
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        and each.default is each.empty
        and each.name != "rng"
    ]
    if len(positional) > 2:
        raise BadInput(
            f"{name} takes {len(positional)} arguments ({', '.join(positional)}); it is called with the features, or "
            "with features and label, and with rng=... where it asks for that."
        )
    return _Transform(function, len(positional) == 2, any(each.name == "rng" for each in parameters))


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"[:80]
