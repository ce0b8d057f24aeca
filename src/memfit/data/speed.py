"""How fast a file of samples streams here, against reading the same bytes one after the other: `memfit data bench`.

Both are measured in the same run, and before each the kernel is told to forget the file's pages, so that the disk is
measured and not what happens to be cached. Nothing is known of caches below the kernel, such as a cloud disk's own.
"""

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.core.errors import BadFile, BadInput, reason_of
from memfit.core.shown import Shown
from memfit.core.typed_data import Saved
from memfit.core.units import MIB, parse_size
from memfit.data.convert import files_in, paths_of, size_on_disk
from memfit.data.files import drop_pages
from memfit.data.sources.spool import SpooledSource, spooled
from memfit.data.stream import DEFAULTS, ArrayStream, StreamOptions
from memfit.processes.process_tree import descendants, held_by

_READ_BYTES = 4 * MIB
_LOOK_SECONDS = 0.01


@dataclass(frozen=True, slots=True, repr=False)
class StreamSpeed(Saved, Shown):
    """What was measured; everything in it is of one run on this machine."""

    saved_as = "speed", "a speed of a stream"

    name: str
    num_samples: int
    disk_bytes: int | None  # of its files; None where they aren't local
    batch_size: int
    num_workers: int
    memory_bytes: int  # the budget
    rows_per_second: float  # of the shuffled stream, once its windows are filled
    bytes_per_second: float | None  # of the files that the stream got through
    raw_bytes_per_second: float | None  # of a plain read of the same files from beginning to end
    first_batch_seconds: float
    peak_bytes: int | None  # of memory, above what the process had before; None where the system doesn't say
    num_rows: int
    seconds: float  # that the stream was measured for
    is_cold: bool  # whether the kernel could be told to forget the files before

    def summary(self) -> str:
        """The file and how fast it streams."""
        return f"of {self.name}: {self.rows_per_second:,.0f} samples/s in batches of {self.batch_size}"

    @property
    def ratio(self) -> float | None:
        """Speed of the stream, as a share of the plain read's."""
        if not self.raw_bytes_per_second or self.bytes_per_second is None:
            return None
        return self.bytes_per_second / self.raw_bytes_per_second

    def to_json(self) -> dict[str, Any]:
        """A plain structure that `json` can write, and `from_json` read back."""
        return {**Saved.to_json(self), "origin": "measured", "ratio": self.ratio}


def bench_data(
    source: Any,
    *,
    columns: Any = None,
    labels: Any = None,
    batch_size: int = 32,
    memory: str | int = "512MiB",
    num_workers: int = 0,
    seconds: float = 5.0,
    options: StreamOptions = DEFAULTS,
) -> StreamSpeed:
    """Measure how fast a file of samples streams, compared with a sequential read.

    Files are dropped from the page cache before each measurement, so that the disk is measured.

    Args:
        source: as for `memfit.stream`.
        columns: as for `memfit.stream`.
        labels: as for `memfit.stream`.
        batch_size: samples of a batch.
        memory: the budget.
        num_workers: processes that make batches.
        seconds: that each of the two is measured for, at least a batch.
        options: of which `on_error` and `follow_links` count.

    Raises:
        BadInput: it can't be streamed, or not like this.
        BadFile: it is damaged, or isn't there.
    """
    from memfit.data.sources.opening import open_source

    if not seconds > 0:
        raise BadInput(f"seconds must be positive, but {seconds} was given.")
    if num_workers < 0:
        raise BadInput(f"the number of workers must be at least 0, but {num_workers} was given.")
    opened = open_source(
        source, columns=columns, labels=labels, on_error=options.on_error, follow_links=options.follow_links
    )
    files = files_in(list(paths_of(source)))
    if opened.layout.is_sequential:
        opened = spooled(opened)
    if isinstance(opened, SpooledSource):
        files = list(opened.paths)
    try:
        stream = ArrayStream(opened, batch_size=batch_size, memory_bytes=parse_size(memory))
        raw = _read_plainly(files, seconds)
        is_cold = _forget(files)
        with _watched() as peak_bytes:
            num_rows, first, passed = _run(stream, num_workers, seconds)
    finally:
        opened.close()
    size = size_on_disk(files) or None
    rate = num_rows / passed
    return StreamSpeed(
        opened.name,
        opened.num_samples,
        size,
        batch_size,
        num_workers,
        stream.memory_bytes,
        rate,
        None if size is None else rate * size / opened.num_samples,
        raw,
        first,
        peak_bytes(),
        num_rows,
        passed,
        is_cold,
    )


def _run(stream: ArrayStream, num_workers: int, seconds: float) -> tuple[int, float, float]:
    """Rows, seconds until the first batch, and the seconds that the rows took.

    Data that fits into the budget is measured by whole epochs. Otherwise the first batches come while windows are still
    being filled, and much of what is read isn't given out when the time is over: counting begins when as many samples
    were given out as memory holds, from where on as many are read as are given out.
    """
    geometry = stream.geometry
    held = 0 if stream.source.layout.is_by_sample else geometry.num_windows_held * geometry.window_samples
    is_whole = held >= stream.num_samples
    started = began = time.perf_counter()
    num_rows, num_before, first, passed = 0, 0, 0.0, 0.0
    while passed < seconds:
        for batch in stream.parallel(num_workers) if num_workers else stream:
            now = time.perf_counter()
            first = first or now - started
            features = batch[0] if isinstance(batch, tuple) else batch
            count = len(next(iter(features.values())) if isinstance(features, dict) else features)
            if not is_whole and num_before < held:
                num_before += count
                began = now
                continue
            num_rows += count
            passed = now - began
            if passed >= seconds and not is_whole:
                break
    return num_rows, first, passed


def _read_plainly(files: Sequence[Path], seconds: float) -> float | None:
    """Bytes a second of reading files from beginning to end."""
    if not files:
        return None
    _forget(files)
    buffer = memoryview(bytearray(_READ_BYTES))
    began, total = time.perf_counter(), 0
    try:
        for path in files:
            with open(path, "rb", buffering=0) as file:
                offset = 0
                while count := file.readinto(buffer):
                    drop_pages(file.fileno(), offset, count)
                    offset += count
                    total += count
                    if time.perf_counter() - began >= seconds:
                        return total / (time.perf_counter() - began)
    except OSError as error:
        raise BadFile(f"{str(path)!r} can't be read: {reason_of(error)}.") from error
    return total / (time.perf_counter() - began)


def _forget(files: Sequence[Path]) -> bool:
    """Has the kernel forget what it has cached of files; False where it can't be told."""
    if not files or not hasattr(os, "posix_fadvise"):
        return False
    for path in files:
        with contextlib.suppress(OSError), open(path, "rb") as file:
            # Pages that aren't on disk yet can't be forgotten.
            os.fsync(file.fileno())
            drop_pages(file.fileno())
    return True


@contextlib.contextmanager
def _watched() -> Iterator[Callable[[], int | None]]:
    """Gives what says the most memory that this process and its children had inside, beside what it had before."""
    gc.collect()
    before, peak, stop = _held_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.wait(_LOOK_SECONDS):
            peak = max(peak, (_held_bytes() or 0) - (before or 0))

    thread = threading.Thread(target=watch, name="memfit-peak", daemon=True)
    thread.start()
    try:
        yield lambda: None if before is None else peak
    finally:
        stop.set()
        thread.join()


def _held_bytes() -> int | None:
    """Memory of this process, and that of its children which they don't share with it."""
    own = held_by(os.getpid())
    if own is None:
        return None
    children = filter(None, map(held_by, descendants(os.getpid())))
    return own.held_bytes + sum(child.anonymous_bytes for child in children)
