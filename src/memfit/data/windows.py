"""Windows in memory: read ahead by one thread, held until their last sample is given out, within a limit of bytes.

A worker that gives only some of a window's samples, because others share its lane, keeps only those. Buffers are used
again: fresh memory costs as much as the copy into it.
"""

import itertools
import math
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from memfit.data.direct_reads import HUGE_BYTES, pages
from memfit.data.geometry import ALIGNMENT
from memfit.data.order import EpochShare, Order, Piece, Span, numbers_of, row_dtype
from memfit.data.source import Array, Source

# Threads that wait for the disk: it works on many reads at once, which makes scattered ones as fast as one long one.
_NUM_WAITING = 4
# Threads that decode; decoders of some formats take turns.
_NUM_DECODING = 2
# Samples whose places are looked at together: of very small samples, places take more room than the samples.
_NUM_LOOKED_AT = 2**16
# Where only some samples of a span are wanted, as much as is read at once, and a gap that isn't worth reading.
_PIECE_BYTES = 1 << 20
_GAP_BYTES = 64 << 10

_STACK_BYTES = 1 << 20
_starting = threading.Lock()
# A fork waits until no thread is being started: its child would find the lock taken for ever.
os.register_at_fork(before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_starting.release)

_Key = tuple[int, int]


@dataclass(slots=True)
class _Held:
    """A window in memory."""

    arrays: list[Array]  # one a field
    # For each sample in the order in which they are given out its row in the arrays, anything for those that aren't
    # held; None where these are the same.
    rows: Array | None
    spans: Sequence[Span]  # where the samples of the window lie
    kept: Array | None  # which of the samples in the spans are held; None where all are
    num_left: int  # samples that are still to be given out
    buffer: Array  # the memory behind the arrays and the rows


class Windows:
    """The windows that a reader needs, one after the other, with arrays of `dtypes`.

    `limit_bytes` of windows in memory is exceeded only by a window that is waited for while none is free.
    """

    def __init__(
        self,
        source: Source,
        order: Order,
        share: EpochShare,
        dtypes: Sequence[np.dtype[Any]],
        limit_bytes: int,
        num_readers: int = 1,
    ) -> None:
        self.source = source
        self.order = order
        self.share = share
        self._dtypes = dtypes
        self._limit_bytes = limit_bytes
        self._num_readers = num_readers
        self._sample_bytes = [
            math.prod(field.shape) * dtype.itemsize for field, dtype in zip(source.fields, dtypes, strict=True)
        ]
        self._held: dict[_Key, _Held] = {}
        self._spare: list[Array] = []
        self._held_bytes = 0
        self._wanted: _Key | None = None
        self._error: BaseException | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._process = os.getpid()

    def numbers(self, piece: Piece) -> Array:
        """Numbers in the source of samples that are yet to be taken."""
        held = self._wait_for((piece.lane, piece.window))
        rows = np.arange(piece.start, piece.stop) if held.rows is None else held.rows[piece.start : piece.stop]
        return numbers_of(held.spans, rows if held.kept is None else held.kept[rows])

    def take(self, piece: Piece, out: Sequence[Array]) -> None:
        """Copies samples of a window into `out`, one array a field."""
        start, stop = piece.start, piece.stop
        held = self._wait_for((piece.lane, piece.window))
        if held.rows is None:
            for array, into in zip(held.arrays, out, strict=True):
                into[...] = array[start:stop]
        else:
            rows = held.rows[start:stop]
            for array, into in zip(held.arrays, out, strict=True):
                if into.dtype == array.dtype:
                    # Rows are all within bounds; "clip" spares the check that would copy the result once more.
                    np.take(array, rows, axis=0, out=into, mode="clip")
                else:
                    into[...] = array[rows]
        held.num_left -= stop - start
        if held.num_left == 0:
            self._release((piece.lane, piece.window))

    def close(self) -> None:
        """Ends the reading ahead and lets go of all memory."""
        if self._process != os.getpid():
            return  # a copy in a forked process, which has none of the threads and may find the lock taken for ever
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if self._pool is not None:
            self._pool.shutdown()
        self._held.clear()
        self._spare.clear()

    def _wait_for(self, key: _Key) -> _Held:
        if self._thread is None:
            self._thread = threading.Thread(target=self._read_ahead, name="memfit-stream", daemon=True)
            self._thread.start()
        with self._changed:
            self._wanted = key
            self._changed.notify_all()
            while key not in self._held:
                if self._error is not None:
                    raise self._error
                self._changed.wait()
            self._wanted = None
            return self._held[key]

    def _release(self, key: _Key) -> None:
        with self._changed:
            held = self._held.pop(key)
            held.arrays.clear()
            held.rows = None
            self._spare.append(held.buffer)
            self._changed.notify_all()

    def _read_ahead(self) -> None:
        try:
            for key in self._needed():
                held = self._load(key)
                if held is None:
                    return
                with self._changed:
                    self._held[key] = held
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _needed(self) -> Iterator[_Key]:
        """Windows in the order in which they are first needed."""
        latest: dict[int, int] = {}
        for start, stop in self.share.batches():
            for piece in self.order.pieces(start, stop):
                if latest.get(piece.lane, -1) < piece.window:
                    latest[piece.lane] = piece.window
                    yield piece.lane, piece.window

    def _load(self, key: _Key) -> _Held | None:
        """Reads a window; None when the reader was closed meanwhile."""
        first, last = self.order.extent(*key)
        num_samples = last - first
        # For each sample, in the order in which they are given out, whether this reader gives it.
        given = np.empty(num_samples, np.bool_)
        pieces = [(start, min(start + _NUM_LOOKED_AT, num_samples)) for start in range(0, num_samples, _NUM_LOOKED_AT)]
        for start, stop in pieces:
            given[start:stop] = self.share.gives(self.order.lane_places(key[0], first + start, first + stop))
        num_given = int(np.count_nonzero(given))
        needs_rows = self.order.is_shuffled or num_given < num_samples
        row_type = row_dtype(num_samples)
        row_bytes = _aligned(num_samples * row_type.itemsize) if needs_rows else 0
        buffer = self._buffer(row_bytes + self._arrays_bytes(num_given), key)
        if buffer is None:
            return None
        rows = kept = None
        if needs_rows:
            rows = buffer[:row_bytes].view(row_type)[:num_samples]
            for start, stop in pieces:
                rows[start:stop] = np.arange(start, stop)
            if self.order.is_shuffled:
                self.order.permute(*key, rows)
            if num_given < num_samples:
                kept = _keep(rows, given)
        arrays, start = [], row_bytes
        for field, dtype, sample_bytes in zip(self.source.fields, self._dtypes, self._sample_bytes, strict=True):
            stop = start + num_given * sample_bytes
            arrays.append(buffer[start:stop].view(dtype).reshape((num_given, *field.shape)))
            start += _aligned(stop - start)
        spans = self.order.spans(*key)
        if kept is None:
            self._read_whole(spans, arrays)
        else:
            self._read_kept(spans, kept, arrays)
        return _Held(arrays, rows, spans, kept, num_given, buffer)

    def _read_whole(self, spans: Sequence[Span], arrays: list[Array]) -> None:
        sizes = [stop - start for start, stop in spans]
        places = list(zip(spans, itertools.accumulate(sizes, initial=0), strict=False))
        # As far as there is memory for what each of them takes.
        most = _NUM_WAITING if self.source.layout.edges is None else _NUM_DECODING
        num_readers = min(most, self._num_readers)
        if num_readers <= 1:
            self._read_spans(places, arrays)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(num_readers, thread_name_prefix="memfit-stream")
        # Each thread takes the next span when it is done with one: none waits for another that has slow ones.
        ahead = iter(places)
        with _small_stacks():
            reads = [self._pool.submit(self._read_spans, ahead, arrays) for _ in range(num_readers)]
        for read in reads:
            read.result()

    def _read_spans(self, places: Iterable[tuple[Span, int]], arrays: list[Array]) -> None:
        for (start, stop), row in places:
            if self._is_closed:
                return
            self.source.read(start, stop, [array[row : row + stop - start] for array in arrays])
            self.source.drop(start, stop)

    def _read_kept(self, spans: Sequence[Span], kept: Array, arrays: list[Array]) -> None:
        """Reads those rows of the spans that are in `kept`, which is sorted."""
        numbers = numbers_of(spans, kept)
        # Samples of two spans that lie side by side are read apart: nothing is read across their bounds.
        firsts = np.searchsorted(kept, np.cumsum([stop - start for start, stop in spans]))
        for low, high in self._pieces(numbers, firsts[:-1]):
            if self._is_closed:
                return
            start, stop = int(numbers[low]), int(numbers[high - 1]) + 1
            into = [array[low:high] for array in arrays]
            if stop - start == high - low:
                self.source.read(start, stop, into)
            else:
                scratch = [np.empty((stop - start, *array.shape[1:]), array.dtype) for array in arrays]
                self.source.read(start, stop, scratch)
                for array, whole in zip(into, scratch, strict=True):
                    np.take(whole, numbers[low:high] - start, axis=0, out=array, mode="clip")
            self.source.drop(start, stop)

    def _pieces(self, numbers: Array, cuts: Array) -> Iterator[tuple[int, int]]:
        """Parts of `numbers` that are read at once, so that what is read beside them takes little room and time."""
        sample_bytes = max(1, self._arrays_bytes(1))
        edges = self.source.layout.edges
        if edges is None:
            apart = np.diff(numbers // max(1, _PIECE_BYTES // sample_bytes)) > 0
            apart |= np.diff(numbers) > max(1, _GAP_BYTES // sample_bytes)
        else:
            # Blocks are read as a whole; small ones together.
            step = max(1, int(_PIECE_BYTES * len(edges) / max(1, int(edges[-1]) * sample_bytes)))
            apart = np.diff(np.searchsorted(edges[::step], numbers, side="right")) > 0
        inner = sorted({*(np.flatnonzero(apart) + 1).tolist(), *cuts.tolist()} - {0, len(numbers)})
        return itertools.pairwise([0, *inner, len(numbers)])

    def _buffer(self, size: int, key: _Key) -> Array | None:
        """Memory for a window, when there is some; None when the reader was closed."""
        with self._changed:
            while not self._is_closed:
                index = next((index for index in range(len(self._spare)) if self._spare[index].nbytes >= size), None)
                if index is not None:
                    return self._spare.pop(index)
                while self._spare and self._held_bytes + size > self._limit_bytes:
                    self._held_bytes -= self._spare.pop(0).nbytes
                if self._held_bytes + size <= self._limit_bytes or self._wanted == key:
                    self._held_bytes += size
                    return np.empty(size, np.uint8) if size < HUGE_BYTES else np.frombuffer(pages(size), np.uint8)
                self._changed.wait()
        return None

    def _arrays_bytes(self, num_samples: int) -> int:
        return sum(_aligned(num_samples * sample_bytes) for sample_bytes in self._sample_bytes)


@contextmanager
def _small_stacks() -> Iterator[None]:
    """Threads that start inside have little room, as they need: limits of the system count all of it as used."""
    with _starting:
        before = threading.stack_size(_STACK_BYTES)
        try:
            yield
        finally:
            threading.stack_size(before)


def _keep(rows: Array, given: Array) -> Array:
    """Which samples in memory are given, sorted; `rows` becomes their rows where only these are held."""
    is_kept = np.zeros(len(rows), np.bool_)
    is_kept[rows[given]] = True
    held = np.cumsum(is_kept, dtype=rows.dtype)
    held -= 1
    np.take(held, rows, out=rows, mode="clip")
    kept: Array = np.flatnonzero(is_kept).astype(rows.dtype)
    return kept


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
