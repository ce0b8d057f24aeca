"""Data that can only be read from its beginning, unpacked once to files that can be read anywhere.

A compressed .npz has no places to jump to. It is written out as .npy files into the spool folder, under
the fingerprint of the data as name: the next run finds it there, and data that was changed gets a place of its own.
Several processes that start together unpack it once; the others wait. What was interrupted is gone on with.
"""

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from memfit.core import heap
from memfit.core.env import spool_folder
from memfit.core.errors import BadFile, reason_of
from memfit.core.progress import announce
from memfit.core.units import format_size
from memfit.data.files import LocalFile
from memfit.data.journal import Journal, write_whole
from memfit.data.source import Field, Source
from memfit.data.sources.joined import Passing
from memfit.data.sources.npy import NpyArray, NpyArrays
from memfit.data.transfer import Transfer, free_bytes
from memfit.data.writing import file_names, plan_target

# Several are in memory at once, which a stream with a small budget has to allow for.
_PIECE_BYTES = 2 << 20
# Written pages that aren't on disk yet count against a container's limit beside the budget.
_SYNC_BYTES = 4 << 20
DESCRIPTION = "memfit.json"
_Result = TypeVar("_Result")


def spooled(source: Source) -> Source:
    """The samples in unpacked files, which any process can read anywhere; unpacks them if that was not done before."""
    shapes = [((source.num_samples, *field.shape), field.dtype) for field in source.fields]
    key, size_bytes = source.fingerprint(), source.total_bytes

    def open_unpacked(place: Path) -> SpooledSource | None:
        paths = [place / name for name in file_names(source.fields)]
        try:
            arrays = [NpyArray(LocalFile(path), repr(str(path))) for path in paths]
        except BadFile:
            return None
        if [(array.shape, array.dtype) for array in arrays] != shapes:
            # It was made of other data, or not to its end.
            return None
        pairs = [(array, (field,)) for array, field in zip(arrays, source.fields, strict=True)]
        unpacked = NpyArrays("", pairs, source.name)
        unpacked.classes = source.classes
        return SpooledSource(unpacked, source.fields, paths, name=source.name, fingerprint=key)

    return make_once(key, open_unpacked, lambda place: _unpack(source, place), source.name, size_bytes)


def make_once(
    key: str, open_result: Callable[[Path], _Result | None], make: Callable[[Path], None], name: str, size_bytes: int
) -> _Result:
    """What the spool folder (MEMFIT_SPOOL, or a part of the user's cache folder) holds under a key.

    Made now, if it isn't there, by one of the processes that need it; the others wait.
    """
    place = Path(spool_folder()).expanduser() / key
    result = open_result(place)
    try:
        if result is None:
            place.parent.mkdir(parents=True, exist_ok=True)
            with Journal(place).locked(wait=True):
                # Another process may have done it while this one waited.
                result = open_result(place)
                if result is None:
                    make(place)
                    # What stays in reserve would be copied by every worker that is forked.
                    heap.release()
                    result = open_result(place)
    except OSError as error:
        raise BadFile(
            f"{name} has to be unpacked before it can be streamed, and {str(place.parent)!r} can't be written "
            f"to: {reason_of(error)}. Set MEMFIT_SPOOL to a folder with {format_size(size_bytes)} of room."
        ) from error
    assert result is not None
    with contextlib.suppress(OSError):
        # For whoever cleans up by the time of the last use.
        os.utime(place)
    return result


class SpooledSource(Passing):
    """Samples of files in the spool folder, under the name of what they were made of."""

    def __init__(self, source: Source, fields: tuple[Field, ...], paths: Sequence[Path], **original: str) -> None:
        super().__init__(source, fields, **original)
        self.paths = tuple(paths)


def _unpack(source: Source, place: Path) -> None:
    size, free = source.total_bytes, free_bytes(place.parent)
    reason = source.layout.reason.rstrip(".") or "as it is, it takes more memory to read than there is"
    if free is not None and size > free:
        raise BadFile(
            f"{source.name} has to be unpacked before it can be streamed ({reason}). That takes "
            f"{format_size(size)}, and {str(place.parent)!r} has {format_size(free)} left. Make room, or set "
            "MEMFIT_SPOOL to a folder on another disk."
        )
    announce(
        f"unpacking {source.name} to {str(place)!r}, {format_size(size)}, once: {reason}. Later runs find it there."
    )
    # A name without an ending stands for a folder.
    folder = place.with_suffix("")
    target = plan_target(
        folder, source.fields, source.num_samples, chunk_bytes=_PIECE_BYTES, read_bytes=source.sample_bytes
    )
    try:
        journal = Journal(place)
        Transfer(source, target, journal, {"use": "spool"}, discard_other=True, sync_bytes=_SYNC_BYTES).run()
    finally:
        source.close()
    description = {"name": source.name, "classes": list(source.classes), "bytes": size}
    write_whole(place / DESCRIPTION, json.dumps(description).encode())
