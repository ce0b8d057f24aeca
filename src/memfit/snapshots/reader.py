"""Reads the files of `torch.cuda.memory._dump_snapshot`: every allocation and free of a real device.

A snapshot is a pickle, and a pickle can run anything. Its content is plain (dictionaries, lists, numbers, text), so
nothing that names a class or a function is loaded, and no PyTorch is needed. Files may be compressed with xz or gzip,
whatever they are called.
"""

import gzip
import io
import lzma
import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from memfit.core.errors import BadFile
from memfit.core.plain_files import open_plain
from memfit.core.units import GIB, format_size

MAX_BYTES = 4 * GIB
"""Snapshots that unpack to more are refused: a history of 100,000 events with C++ frames takes about 100 MiB."""

ALLOCATED, FREE_REQUESTED, FREE_COMPLETED = "alloc", "free_requested", "free_completed"
SEGMENT_ALLOCATED, SEGMENT_FREED, OUT_OF_MEMORY = "segment_alloc", "segment_free", "oom"
# Pages of an expandable segment.
SEGMENT_MAPPED, SEGMENT_UNMAPPED = "segment_map", "segment_unmap"

_XZ, _GZIP = b"\xfd7zXZ\x00", b"\x1f\x8b"
_PIECE_BYTES = 2**24
_FEWER = "Record fewer events: `torch.cuda.memory._record_memory_history(max_entries=100000)`."
_HOW = (
    "Record with `torch.cuda.memory._record_memory_history(max_entries=...)` before the step and write the file "
    "with `torch.cuda.memory._dump_snapshot(...)` after it."
)


class Frame(NamedTuple):
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
    def frames(self) -> tuple[Frame, ...]:
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
    def frames(self) -> tuple[Frame, ...]:
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
class Snapshot:
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
        recorded = {number for number, events in enumerate(self.histories) if events}
        return tuple(sorted(recorded | {segment.device for segment in self.segments}))

    def history(self, device: int | None = None) -> tuple[Event, ...]:
        """The events of a device; without a number, of the only one that has any.

        Raises:
            BadFile: nothing was recorded, for that device or at all, or several devices were and none is named.
        """
        recorded = [number for number, events in enumerate(self.histories) if events]
        if not recorded:
            raise BadFile(f"{self.path} has no history: it says what lived, not what happened. {_HOW}")
        if device is None:
            if len(recorded) > 1:
                names = ", ".join(map(str, recorded))
                raise BadFile(f"{self.path} has the history of several devices ({names}). Name one of them.")
            device = recorded[0]
        if device not in recorded:
            names = ", ".join(map(str, recorded))
            raise BadFile(f"{self.path} has no history of device {device}; it has that of {names}.")
        return self.histories[device]


def read_snapshot(path: str | Path, *, max_bytes: int = MAX_BYTES) -> Snapshot:
    """Reads a snapshot, compressed or not.

    Raises:
        BadFile: it can't be opened, is cut off, is larger than `max_bytes`, or isn't a snapshot.
    """
    path = Path(path)
    data = _unpacked(path, max_bytes)
    try:
        content = _PlainUnpickler(io.BytesIO(data)).load()
    except _NamesCode as error:
        raise BadFile(
            f"{path} is not a memory snapshot: it would load {error}, and a snapshot is plain data. Nothing was run."
        ) from None
    except (EOFError, pickle.UnpicklingError) as error:
        if "truncated" in str(error) or isinstance(error, EOFError):
            raise BadFile(f"{path} is cut off after {format_size(len(data))}: write or copy it again.") from None
        raise BadFile(f"{path} is not a memory snapshot: it is no pickle ({error}). {_HOW}") from None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, MemoryError) as error:
        raise BadFile(
            f"{path} is not a memory snapshot: it is no pickle ({type(error).__name__}: {error}). {_HOW}"
        ) from None
    return _parse(path, content)


class _NamesCode(Exception):
    """A pickle that wants to load a class or a function."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise _NamesCode(f"{module}.{name}"[:200])

    def persistent_load(self, pid: Any) -> Any:
        raise _NamesCode("an object of another file")


def _unpacked(path: Path, max_bytes: int) -> bytes:
    try:
        # A link to a snapshot is as good as the file; a FIFO or a device is not.
        with open_plain(path.resolve()) as file:
            start = file.read(len(_XZ))
            file.seek(0)
            opened: Any = file
            if start == _XZ:
                opened = lzma.LZMAFile(file)  # noqa: SIM115  (closed with `file`)
            elif start.startswith(_GZIP):
                opened = gzip.GzipFile(fileobj=file)
            # Piece by piece: a single read would ask for `max_bytes` at once, however small the file.
            content = io.BytesIO()
            while content.tell() <= max_bytes and (piece := opened.read(_PIECE_BYTES)):
                content.write(piece)
            data = content.getvalue()
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise BadFile(f"{path} is cut off or damaged ({error}): write or copy it again.") from None
    except MemoryError:
        raise BadFile(f"{path} holds more than this process has memory for. {_FEWER}") from None
    except OSError as error:
        raise BadFile(f"can't read {path}: {error.strerror or error}.") from None
    if len(data) > max_bytes:
        raise BadFile(f"{path} holds more than {format_size(max_bytes)}. {_FEWER}")
    if not data:
        raise BadFile(f"{path} is empty, and a memory snapshot was expected. {_HOW}")
    return data


def _parse(path: Path, content: Any) -> Snapshot:
    if not isinstance(content, Mapping) or not isinstance(content.get("segments"), Sequence):
        raise BadFile(
            f"{path} is not a memory snapshot: a dictionary with 'segments' and 'device_traces' was expected. {_HOW}"
        )
    try:
        segments = tuple(_segment(raw) for raw in content["segments"])
        # Files from before histories were kept have none.
        histories = tuple(
            tuple(_event(raw, device) for raw in trace) for device, trace in enumerate(content.get("device_traces", ()))
        )
        settings = dict(content.get("allocator_settings") or {})
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BadFile(
            f"{path} is a memory snapshot in a form that isn't known ({type(error).__name__}: {error}); "
            "those of PyTorch 2.1 and later are."
        ) from None
    return Snapshot(path, segments, histories, settings)


def _event(raw: Mapping[str, Any], device: int) -> Event:
    address = raw.get("addr")
    return Event(
        _text(raw["action"]),
        None if address is None else int(address),
        int(raw["size"]),
        int(raw["stream"]),
        device,
        raw,
    )


def _segment(raw: Mapping[str, Any]) -> Segment:
    first, second = raw.get("segment_pool_id", (0, 0))
    address = int(raw["address"])
    blocks, position = [], address
    for block in raw["blocks"]:
        size_bytes = int(block["size"])
        # Files of PyTorch 2.0 give no addresses: blocks follow each other.
        position = int(block.get("address", position))
        requested = int(block.get("requested_size", size_bytes))
        blocks.append(SnapshotBlock(position, size_bytes, requested, _text(block["state"]), block))
        position += size_bytes
    return Segment(
        address,
        int(raw["total_size"]),
        int(raw["stream"]),
        int(raw["device"]),
        (int(first), int(second)),
        _text(raw["segment_type"]),
        bool(raw.get("is_expandable", False)),
        tuple(blocks),
    )


def _frames(raw: Any) -> tuple[Frame, ...]:
    try:
        return tuple(Frame(_text(one["name"]), _text(one["filename"]), int(one["line"])) for one in raw or ())
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadFile(
            f"a memory snapshot has a stack in a form that isn't known ({type(error).__name__}: {error})."
        ) from None


def _text(value: Any) -> str:
    """Text; what holds itself many times over would take for ever to be written out as one."""
    if not isinstance(value, str):
        raise TypeError(f"text was expected, but there is a {type(value).__name__}")
    return value
