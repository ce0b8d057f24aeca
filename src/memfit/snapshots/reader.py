"""Reads the files of `torch.cuda.memory._dump_snapshot`: every allocation and free of a real device.

A snapshot is a pickle of plain data (dictionaries, lists, numbers, text), so that no PyTorch is needed. Files may be
compressed with xz, gzip or bzip2, or be alone in a zip, whatever they are called; `torch.save` writes a zip, too.

What differs between versions of PyTorch (torch/csrc/cuda/memory_snapshot.cpp): up to 2.0 blocks have no addresses; from
2.2 on there are the allocator's settings; from 2.12 on each event names its private pool. Notes of the program are
events in some versions ("user_defined") and a list beside the events in later ones, which may also leave out kinds of
events (`skip_actions`).
"""

import bz2
import gzip
import io
import lzma
import pickle
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from memfit.core.errors import BadFile
from memfit.core.plain_files import open_plain
from memfit.core.units import GIB, format_size
from memfit.snapshots.plain_pickle import CutOff, NamesCode, load_plain

MAX_BYTES = 1 * GIB
"""Snapshots that unpack to more are refused: a history of 100,000 events with C++ frames takes about 100 MiB."""

ALLOCATED, FREE_REQUESTED, FREE_COMPLETED = "alloc", "free_requested", "free_completed"
SEGMENT_ALLOCATED, SEGMENT_FREED, OUT_OF_MEMORY = "segment_alloc", "segment_free", "oom"
# Pages of an expandable segment.
SEGMENT_MAPPED, SEGMENT_UNMAPPED = "segment_map", "segment_unmap"

# What is an event of a device rather than a note of the program or the recorder.
_OF_MEMORY = {ALLOCATED, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOCATED, SEGMENT_FREED, OUT_OF_MEMORY} | {
    SEGMENT_MAPPED,
    SEGMENT_UNMAPPED,
}

_OPENERS: Mapping[bytes, Callable[[BufferedReader], Any]] = {
    b"\xfd7zXZ\x00": lzma.LZMAFile,
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"BZh": bz2.BZ2File,
    b"PK\x03\x04": lambda file: _opened_zip(file),
}
_PIECE_BYTES = 2**24
_FEWER = "Record fewer events: `torch.cuda.memory._record_memory_history(max_entries=100000)`."
_HOW = (
    "Record with `torch.cuda.memory._record_memory_history(max_entries=...)` before the step and write the file "
    "with `torch.cuda.memory._dump_snapshot(...)` after it."
)


class StackFrame(NamedTuple):
    """One line of a stack: the innermost comes first."""

    name: str
    filename: str
    line: int

    @property
    def is_python(self) -> bool:
        """True for a line of Python code."""
        return self.filename.endswith(".py") or self.filename.startswith("<")


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of a device's history.

    `address` is None for events that have none, such as running out of memory. `size_bytes` of an allocation is what
    was asked for, before rounding.
    """

    action: str
    address: int | None
    size_bytes: int
    stream: int
    device: int
    raw: Mapping[str, Any] = field(repr=False, compare=False)

    @property
    def frames(self) -> tuple[StackFrame, ...]:
        """The stack at the event, innermost first; empty where none was recorded."""
        return _frames(self.raw.get("frames"))


@dataclass(frozen=True, slots=True)
class SnapshotBlock:
    """A part of a segment at the time of the snapshot."""

    address: int
    size_bytes: int
    requested_bytes: int
    state: str
    raw: Mapping[str, Any] = field(repr=False, compare=False)

    @property
    def is_allocated(self) -> bool:
        """Whether a tensor holds it; a block that waits for a stream is neither free nor allocated."""
        return self.state == "active_allocated"

    @property
    def frames(self) -> tuple[StackFrame, ...]:
        """The stack at its allocation, innermost first; empty where none was recorded."""
        return _frames(self.raw.get("frames"))


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory of the driver at the time of the snapshot."""

    address: int
    total_bytes: int
    stream: int
    device: int
    pool: tuple[int, int]
    kind: str
    is_expandable: bool
    blocks: tuple[SnapshotBlock, ...]


@dataclass(frozen=True)
class MemorySnapshot:
    """A file of a snapshot: what lived at its end, and what had happened, for each device."""

    path: Path
    segments: tuple[Segment, ...]
    histories: tuple[tuple[Event, ...], ...]
    """Events by device number, oldest first; an empty one where nothing was recorded."""
    settings: Mapping[str, Any]
    """The allocator's settings; empty in files of PyTorch 2.2 and earlier."""

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """Numbers of the devices that have a history or memory."""
        return tuple(sorted({*self.recorded, *(segment.device for segment in self.segments)}))

    @cached_property
    def recorded(self) -> dict[int, int]:
        """Allocations by number of the device, for those with a history.

        A recording covers every device that the process sees: one that it didn't use may have notes of snapshots.
        """
        return {
            number: sum(event.action == ALLOCATED for event in events)
            for number, events in enumerate(self.histories)
            if any(event.action in _OF_MEMORY for event in events)
        }

    def history(self, device: int | None = None) -> tuple[Event, ...]:
        """The events of a device; without a number, of the only one that has any.

        Raises:
            BadFile: nothing was recorded, for that device or at all, or several devices were and none is named.
        """
        recorded = self.recorded
        if not recorded:
            raise BadFile(f"{self.path} has no history: it says what lived, not what happened. {_HOW}")
        if device is None:
            if len(recorded) > 1:
                names = "; ".join(f"{number}: {count:,} allocations" for number, count in recorded.items())
                raise BadFile(
                    f"{self.path} has the history of several devices ({names}). Name one of them: `--history "
                    f"{max(recorded, key=lambda number: recorded[number])}`, or history=... in Python."
                )
            (device,) = recorded
        if device not in recorded:
            names = ", ".join(map(str, recorded))
            raise BadFile(f"{self.path} has no history of device {device}; it has that of {names}.")
        return self.histories[device]


def read_snapshot(path: str | Path, *, max_bytes: int = MAX_BYTES) -> MemorySnapshot:
    """Reads a snapshot, compressed or not.

    Raises:
        BadFile: it can't be opened, is cut off, is larger than `max_bytes`, or isn't a snapshot.
    """
    path = Path(path)
    data = _unpacked(path, max_bytes)
    try:
        content = load_plain(data)
    except NamesCode as error:
        raise BadFile(
            f"{path} is not a memory snapshot: it would load {error}, and a snapshot is plain data. Nothing was run."
        ) from None
    except CutOff:
        raise BadFile(f"{path} is cut off after {format_size(len(data))}: write or copy it again.") from None
    except pickle.UnpicklingError as error:
        raise BadFile(f"{path} is not a memory snapshot: it is no pickle of one ({error}). {_HOW}") from None
    return _parse(path, content, len(data))


def _unpacked(path: Path, max_bytes: int) -> bytes:
    try:
        # A link to a snapshot is as good as the file; a FIFO or a device is not.
        with open_plain(path.resolve()) as file:
            start = file.read(max(map(len, _OPENERS)))
            file.seek(0)
            opener = next((opener for magic, opener in _OPENERS.items() if start.startswith(magic)), None)
            opened = file if opener is None else opener(file)
            # Piece by piece: a single read would ask for `max_bytes` at once, however small the file.
            content = io.BytesIO()
            while content.tell() <= max_bytes and (piece := opened.read(_PIECE_BYTES)):
                content.write(piece)
            data = content.getvalue()
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile, zipfile.BadZipFile) as error:
        raise BadFile(f"{path} is cut off or damaged ({error}): write or copy it again.") from None
    except (NotImplementedError, RuntimeError) as error:
        # A zip with a password, or of a method that Python doesn't know.
        raise BadFile(f"can't read {path}: {error}. Unpack it first.") from None
    except MemoryError:
        raise BadFile(f"{path} holds more than this process has memory for. {_FEWER}") from None
    except OSError as error:
        raise BadFile(f"can't read {path}: {error.strerror or error}.") from None
    if len(data) > max_bytes:
        raise BadFile(f"{path} holds more than {format_size(max_bytes)}. {_FEWER}")
    if not data:
        raise BadFile(f"{path} is empty, and a memory snapshot was expected. {_HOW}")
    return data


def _opened_zip(file: BufferedReader) -> Any:
    """The only file of a zip, or what `torch.save` has put into it."""
    archive = zipfile.ZipFile(file)
    names = [name for name in archive.namelist() if not name.endswith("/") and not name.startswith("__MACOSX/")]
    saved = [name for name in names if name.endswith("/data.pkl")] or names
    if len(saved) != 1:
        raise NotImplementedError(f"it is a zip of {len(names)} files, and one snapshot was expected")
    return archive.open(saved[0])


def _parse(path: Path, content: Any, num_bytes: int) -> MemorySnapshot:
    if (
        isinstance(content, Sequence)
        and content
        and all(isinstance(one, Mapping) and "blocks" in one for one in content)
    ):
        raise BadFile(f"{path} has no history: it is what `torch.cuda.memory_snapshot()` returns. {_HOW}")
    if not isinstance(content, Mapping) or not isinstance(content.get("segments"), Sequence):
        raise BadFile(
            f"{path} is not a memory snapshot: a dictionary with 'segments' and 'device_traces' was expected. {_HOW}"
        )
    try:
        # What holds the same list many times over would take for ever to be read.
        traces = content.get("device_traces", ())
        lists = (content["segments"], *traces, *(raw["blocks"] for raw in content["segments"]))
        if sum(map(len, lists)) > num_bytes:
            raise ValueError(f"{num_bytes:,} bytes hold more events and blocks than that")
        segments = tuple(_segment(raw) for raw in content["segments"])
        # Files from before histories were kept have none.
        histories = tuple(tuple(_event(raw, device) for raw in trace) for device, trace in enumerate(traces))
        settings = dict(content.get("allocator_settings") or {})
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BadFile(
            f"{path} is a memory snapshot in a form that isn't known ({type(error).__name__}: {error}); "
            "those of PyTorch 2.1 and later are."
        ) from None
    return MemorySnapshot(path, segments, histories, settings)


def _event(raw: Mapping[str, Any], device: int) -> Event:
    address = raw.get("addr")
    return Event(
        _text(raw["action"]),
        None if address is None else _number(address),
        _number(raw["size"]),
        _number(raw["stream"]),
        device,
        raw,
    )


def _segment(raw: Mapping[str, Any]) -> Segment:
    first, second = raw.get("segment_pool_id", (0, 0))
    address = _number(raw["address"])
    blocks, position = [], address
    for block in raw["blocks"]:
        size_bytes = _number(block["size"])
        # Files of PyTorch 2.0 give no addresses: blocks follow each other.
        position = _number(block.get("address", position))
        requested = _number(block.get("requested_size", size_bytes))
        blocks.append(SnapshotBlock(position, size_bytes, requested, _text(block["state"]), block))
        position += size_bytes
    return Segment(
        address,
        _number(raw["total_size"]),
        _number(raw["stream"]),
        _number(raw["device"]),
        (_number(first), _number(second)),
        _text(raw["segment_type"]),
        bool(raw.get("is_expandable", False)),
        tuple(blocks),
    )


def _frames(raw: Any) -> tuple[StackFrame, ...]:
    try:
        return tuple(StackFrame(_text(one["name"]), _text(one["filename"]), _number(one["line"])) for one in raw or ())
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadFile(
            f"a memory snapshot has a stack in a form that isn't known ({type(error).__name__}: {error})."
        ) from None


def _number(value: Any) -> int:
    """A whole number of 64 bits, as all of PyTorch's are."""
    number = int(value)
    if not -(1 << 63) <= number < 1 << 64:
        raise ValueError(f"a number of 64 bits was expected, but there is one of {number.bit_length()}")
    return number


def _text(value: Any) -> str:
    """Text; what holds itself many times over would take for ever to be written out as one."""
    if not isinstance(value, str):
        raise TypeError(f"text was expected, but there is a {type(value).__name__}")
    return value
