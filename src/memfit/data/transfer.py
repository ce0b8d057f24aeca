"""Samples on their way from a source to a file: read, converted, written and forced to disk at the same time.

While one block is converted, the next is read by one thread, the last is written by another, and what was written
before is forced to disk by a third, which then lets go of its pages and notes in the journal how far it came. Four
blocks are in memory, whatever the size of the data.
"""

import contextlib
import errno
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from memfit.core.errors import BadFile, BadInput, reason_of
from memfit.core.units import MIB, format_size
from memfit.data.journal import Journal
from memfit.data.precision import Converter, Statistics
from memfit.data.source import Array, Source
from memfit.data.writing import Target, Writer, writer_for

VERSION = 1
Progress = Callable[[int, int], None]

# Written bytes after which they are forced to disk: enough to keep a disk busy, little enough for a small container.
_SYNC_BYTES = 32 * MIB
# The journal costs two waits for the disk each time.
_JOURNAL_SECONDS = 0.5
# How long overflows are counted after the first was found and nothing is written any more.
_COUNT_SECONDS = 5.0
# Blocks in memory: two that are read ahead, one that is converted and one that is written.
_NUM_SLOTS = 4
# Of these, one is under way while the other waits; more would let unwritten pages pile up.
_MOST_SYNCS = 2


@dataclass(slots=True)
class _Slot:
    """Memory for one block: as read, and as written."""

    before: list[Array]
    after: list[Array]
    written: "Future[None] | None" = None


class Overflow(BadInput):
    """Values that the new type can't hold."""


class Transfer:
    """One source on its way to one destination, whose journal must be locked.

    Args:
        options: anything else that changes what is written, for a later run to compare.
        discard_other: throw away the unfinished file of another transfer to the same place.
        progress: called with the bytes of the source that are done, and all of them.
        sync_bytes: that are written before they are forced to disk, from when on memory needn't hold them. Up to three
            times as much is on its way, which a control group counts and the kernel can't take back meanwhile.
    """

    def __init__(
        self,
        source: Source,
        target: Target,
        journal: Journal,
        options: dict[str, Any],
        *,
        allow_overflow: bool = False,
        discard_other: bool = False,
        progress: Progress | None = None,
        sync_bytes: int | None = None,
    ) -> None:
        self._source = source
        self._target = target
        self._journal = journal
        self._allow_overflow = allow_overflow
        self._discard_other = discard_other
        self._progress = progress
        self._identity = {
            "version": VERSION,
            "source": source.fingerprint(),
            "num_samples": source.num_samples,
            "kind": target.kind,
            "fields": [[field.name, field.dtype.str, list(field.shape)] for field in target.fields],
            **options,
        }
        self._writer: Writer = writer_for(target)
        self._converters: list[Converter] = []
        self._syncing: deque[Future[None]] = deque()
        self._failure: OSError | None = None
        self._sync_bytes = sync_bytes or _SYNC_BYTES
        self._unsynced_bytes = 0
        self._last_journal = 0.0

    def run(self) -> tuple[tuple[Statistics, ...], int]:
        """Transfers what is left; at the end the file is complete and in its place.

        Gives the statistics of each field, and the number of samples that an earlier, interrupted transfer had done.
        """
        start, statistics = self._resume()
        try:
            try:
                self._journal.part.parent.mkdir(parents=True, exist_ok=True)
                start = self._writer.open(self._journal.part, start)
                if start == 0:
                    statistics = [Statistics() for _ in self._target.fields]
                pairs = zip(self._source.fields, self._target.fields, statistics, strict=True)
                self._converters = [Converter(field, new.dtype, before) for field, new, before in pairs]
                self._all(start)
                self._writer.finish()
                if not self._discard_other and os.path.lexists(self._journal.destination):
                    raise FileExistsError(errno.EEXIST, "somebody else has made it in the meantime, and it stays")
                self._journal.finish()
            finally:
                self._writer.close()
        except OSError as error:
            raise self._unwritable(error) from error
        except BadInput:
            self._journal.discard()
            raise
        return tuple(converter.statistics for converter in self._converters), start

    def _resume(self) -> tuple[int, list[Statistics]]:
        """Samples that an earlier transfer had on disk, and their statistics."""
        journal = self._journal.read() if self._writer.is_resumable else None
        if journal is not None and self._journal.part.exists():
            if all(journal.get(key) == value for key, value in self._identity.items()):
                with contextlib.suppress(KeyError, TypeError, ValueError):
                    return int(journal["num_durable"]), [Statistics(**each) for each in journal["statistics"]]
            elif not self._discard_other:
                raise BadInput(
                    f"{str(self._journal.part)!r} is the unfinished file of another conversion, of another source or "
                    "with other options. Run that one again to finish it, or discard it with --overwrite "
                    "(overwrite=True)."
                )
        self._journal.discard()
        return 0, []

    def _all(self, start: int) -> None:
        size, total = self._target.block_samples, self._target.num_samples
        bounds = [(first, min(first + size, total)) for first in range(start, total, size)]
        slots = [self._slot() for _ in bounds[:_NUM_SLOTS]]
        pools = [ThreadPoolExecutor(1, f"memfit-{name}") for name in ("read", "write", "sync")]
        reader, writer, syncer = pools
        try:
            ahead = max(1, len(slots) - 2)
            reading = deque(
                reader.submit(self._read, slots[number], *bounds[number]) for number in range(len(bounds))[:ahead]
            )
            for number, (first, last) in enumerate(bounds):
                slot = slots[number % len(slots)]
                reading.popleft().result()
                if number + ahead < len(bounds):
                    after = slots[(number + ahead) % len(slots)]
                    reading.append(reader.submit(self._read, after, *bounds[number + ahead]))
                self._convert(slot, first, last)
                if not self._allow_overflow and any(each.statistics.num_overflow for each in self._converters):
                    self._refuse_overflow(last)
                snapshot = [replace(converter.statistics) for converter in self._converters]
                slot.written = writer.submit(self._write, slot, first, last, snapshot, syncer)
                if self._progress is not None:
                    self._progress(last * self._source.sample_bytes, self._source.total_bytes)
            for slot in slots:
                if slot.written is not None:
                    slot.written.result()
            while self._syncing:
                self._syncing.popleft().result()
        finally:
            for pool in pools:
                pool.shutdown(wait=True, cancel_futures=True)

    def _slot(self) -> _Slot:
        size = self._target.block_samples
        before = self._source.empty(size)
        after = [
            array if field.dtype == array.dtype else np.empty(array.shape, field.dtype)
            for array, field in zip(before, self._target.fields, strict=True)
        ]
        return _Slot(before, after)

    def _read(self, slot: _Slot, first: int, last: int) -> None:
        if slot.written is not None:
            slot.written.result()
        arrays = [array[: last - first] for array in slot.before]
        try:
            self._source.read(first, last, arrays)
            self._source.drop(first, last)
        except OSError as error:
            raise BadFile(f"{self._source.name} can't be read at sample {first}: {reason_of(error)}.") from error

    def _convert(self, slot: _Slot, first: int, last: int) -> None:
        for converter, before, after in zip(self._converters, slot.before, slot.after, strict=True):
            converter.run(first, before[: last - first], after[: last - first])

    def _write(
        self, slot: _Slot, first: int, last: int, snapshot: Sequence[Statistics], syncer: ThreadPoolExecutor
    ) -> None:
        if self._failure is not None:
            # After a failed write, others fail in ways that say less.
            raise self._failure
        arrays = [array[: last - first] for array in slot.after]
        try:
            self._writer.write(first, arrays)
        except OSError as error:
            self._failure = error
            raise
        self._unsynced_bytes += sum(array.nbytes for array in arrays)
        if self._unsynced_bytes >= self._sync_bytes:
            while len(self._syncing) >= _MOST_SYNCS:
                self._syncing.popleft().result()
            self._unsynced_bytes = 0
            self._syncing.append(syncer.submit(self._sync, last, snapshot))

    def _sync(self, num_durable: int, statistics: Sequence[Statistics]) -> None:
        self._writer.sync()
        now = time.monotonic()
        if self._writer.is_resumable and now - self._last_journal >= _JOURNAL_SECONDS:
            self._last_journal = now
            counted = [asdict(each) for each in statistics]
            self._journal.write({**self._identity, "num_durable": num_durable, "statistics": counted})

    def _refuse_overflow(self, start: int) -> None:
        """Counts on for a while, so that the message tells one outlier from a type that doesn't suit the data."""
        end = time.monotonic() + _COUNT_SECONDS
        slot = self._slot()
        total = self._source.num_samples
        while start < total and time.monotonic() < end:
            last = min(start + self._target.block_samples, total)
            self._read(slot, start, last)
            self._convert(slot, start, last)
            start = last
        where = next(each for each in self._converters if each.statistics.num_overflow)
        seen = where.statistics
        assert seen.first_overflow is not None
        sample, value = seen.first_overflow
        count = f"{seen.num_overflow} of {seen.num_values} values"
        if start < total:
            count = f"at least {seen.num_overflow} values, in the first {start} of {total} samples,"
        limit = np.finfo(where.dtype).max
        raise Overflow(
            f"{where.field.name!r} can't become {where.dtype.name} without loss: sample {sample} holds {value}, the "
            f"largest number of {where.dtype.name} is {limit}, and {count} would become infinite. Nothing was "
            "written. Keep the wider type, scale the data, or let it happen with --allow-overflow "
            "(allow_overflow=True)."
        )

    def _unwritable(self, error: OSError) -> BadFile:
        destination = str(self._journal.destination)
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
        reason = "the disk is full" if is_full else reason_of(error)
        if self._writer.is_resumable and self._journal.read() is not None and self._journal.part.exists():
            kept = (
                f"What is done is kept in {str(self._journal.part)!r}: make room and run the same again to go on, or "
                "delete it"
            )
        else:
            self._journal.discard()
            kept = f"The unfinished file was removed. Make room for {format_size(self._target.size_bytes)}"
        return BadFile(f"{destination!r} can't be written: {reason}. {kept}, or name another destination.")


def free_bytes(path: Path) -> int | None:
    """Room on the disk that `path` is or will be on; None where the system doesn't say."""
    for folder in (path, *path.absolute().parents):
        if folder.exists():
            with contextlib.suppress(OSError):
                return shutil.disk_usage(folder).free
    return None
