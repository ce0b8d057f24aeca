"""Data that can only be read from its beginning, unpacked once to files that can be read anywhere.

A compressed .npz or a .csv.gz has no places to jump to. It is written out as .npy files into the spool folder, under
the fingerprint of the data as name: the next run finds it there, and data that was changed gets a place of its own.
Several processes that start together unpack it once; the others wait. What was interrupted is gone on with.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from memfit.core.env import spool_folder
from memfit.core.errors import BadFile
from memfit.core.printing import printable
from memfit.core.units import format_size
from memfit.data.journal import Journal, write_whole
from memfit.data.source import Array, Field, Layout, Source
from memfit.data.sources.npy import NpySource
from memfit.data.transfer import Transfer, free_bytes
from memfit.data.writing import file_names, plan_target

# Several are in memory at once, which a stream with a small budget has to allow for.
_PIECE_BYTES = 2 << 20
_DESCRIPTION = "memfit.json"


def spooled(
    source: Source, folder: str | os.PathLike[str] | None = None, *, announce: Callable[[str], None] | None = None
) -> Source:
    """The same samples in files that can be read from anywhere; unpacked now, if they weren't before.

    Args:
        source: to unpack.
        folder: where to; MEMFIT_SPOOL, or a part of the user's cache folder, if not given.
        announce: called with one sentence before it begins; written to standard error if not given.

    Raises:
        BadFile: the source is damaged, or there is no room or no permission in the folder.
    """
    place = Path(spool_folder() if folder is None else folder).expanduser() / source.fingerprint()
    found = _open(source, place)
    if found is not None:
        return found
    journal = Journal(place)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with journal.locked(wait=True):
            # Another process may have done it while this one waited.
            found = _open(source, place)
            if found is None:
                _unpack(source, place, journal, announce or _say)
                found = _open(source, place)
    except OSError as error:
        raise BadFile(
            f"{source.name} has to be unpacked before it can be streamed, and {str(place.parent)!r} can't be written "
            f"to: {error.strerror or error}. Set MEMFIT_SPOOL to a folder with {format_size(_size(source))} of room."
        ) from error
    assert found is not None
    return found


class SpooledSource:
    """Unpacked files under the name and with the fields and classes of what they were made of.

    Args:
        source: that was unpacked.
        paths: of its fields.
    """

    def __init__(self, source: Source, paths: Sequence[Path]) -> None:
        self._name = source.name
        self._fields = source.fields
        self._classes = source.classes
        self._fingerprint = source.fingerprint()
        self._parts = [NpySource(path) for path in paths]
        self.paths = tuple(paths)

    @property
    def name(self) -> str:
        """Of what was unpacked."""
        return self._name

    @property
    def fields(self) -> tuple[Field, ...]:
        """Of what was unpacked."""
        return self._fields

    @property
    def num_samples(self) -> int:
        """Samples in it."""
        return self._parts[0].num_samples

    @property
    def layout(self) -> Layout:
        """Any run of samples at the cost of its bytes."""
        return Layout(scratch_bytes=max(part.layout.scratch_bytes for part in self._parts))

    @property
    def classes(self) -> tuple[str, ...]:
        """Of what was unpacked."""
        return self._classes

    def fingerprint(self) -> str:
        """Of what was unpacked: the same before and after."""
        return self._fingerprint

    def read(self, start: int, stop: int, out: Sequence[Array]) -> None:
        """Fills one array a field with samples `start` to `stop`."""
        for part, array in zip(self._parts, out, strict=True):
            part.read(start, stop, [array])

    def drop(self, start: int, stop: int) -> None:
        """Gives the pages of these samples back."""
        for part in self._parts:
            part.drop(start, stop)

    def close(self) -> None:
        """Closes the files in this process."""
        for part in self._parts:
            part.close()


def _open(source: Source, place: Path) -> Source | None:
    """What was unpacked before; None where it isn't there or isn't whole."""
    paths = [place / name for name in file_names(source.fields)]
    try:
        parts = [NpySource(path) for path in paths]
        is_same = all(
            part.num_samples == source.num_samples
            and part.fields[0].shape == field.shape
            and part.fields[0].dtype == field.dtype
            for part, field in zip(parts, source.fields, strict=True)
        )
    except BadFile:
        return None
    if not is_same:
        return None
    with contextlib.suppress(OSError):
        # For whoever cleans up by the time of the last use.
        os.utime(place)
    return SpooledSource(source, paths)


def _unpack(source: Source, place: Path, journal: Journal, announce: Callable[[str], None]) -> None:
    size = _size(source)
    free = free_bytes(place.parent)
    if free is not None and size > free:
        raise BadFile(
            f"{source.name} has to be unpacked before it can be streamed ({_reason(source)}). That takes "
            f"{format_size(size)}, and {str(place.parent)!r} has {format_size(free)} left. Make room, or set "
            "MEMFIT_SPOOL to a folder on another disk."
        )
    announce(
        f"memfit: unpacking {source.name} to {str(place)!r}, {format_size(size)}, once: {_reason(source)}. "
        "Later runs find it there."
    )
    sample_bytes = sum(field.sample_bytes for field in source.fields)
    # A name without an ending stands for a folder.
    folder = place.with_suffix("")
    target = plan_target(folder, source.fields, source.num_samples, chunk_bytes=_PIECE_BYTES, read_bytes=sample_bytes)
    try:
        Transfer(source, target, journal, {"use": "spool"}, discard_other=True).run()
    finally:
        source.close()
    description = {"name": source.name, "classes": list(source.classes), "bytes": size}
    write_whole(place / _DESCRIPTION, json.dumps(description).encode())


def _size(source: Source) -> int:
    return source.num_samples * sum(field.sample_bytes for field in source.fields)


def _reason(source: Source) -> str:
    return source.layout.reason.rstrip(".") or "as it is, it takes more memory to read than there is"


def _say(sentence: str) -> None:
    print(printable(sentence), file=sys.stderr)
