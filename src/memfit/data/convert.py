"""A file of samples in another type or format, whatever its size: `memfit data convert`.

Nothing is loaded as a whole, nothing appears at the destination before it is complete, and what the new type did to the
numbers is measured and reported. An interrupted conversion to .npy goes on where it was.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memfit.core.errors import BadFile, BadInput, reason_of
from memfit.core.shown import Shown
from memfit.core.typed_data import Saved
from memfit.core.units import format_size, parse_size
from memfit.data.files import matches
from memfit.data.journal import Journal
from memfit.data.precision import Statistics, parse_dtype, target_dtypes
from memfit.data.transfer import Progress, Transfer, free_bytes
from memfit.data.writing import CLASSES_FILE, FIELDS_FILE, Target, plan_target


@dataclass(frozen=True, slots=True)
class ConvertedField:
    """One field before and after."""

    name: str
    shape: tuple[int, ...]  # of one sample
    dtype_before: str
    dtype_after: str
    statistics: Statistics


@dataclass(frozen=True, slots=True, repr=False)
class Conversion(Saved, Shown):
    """What a conversion did; everything in it is measured."""

    saved_as = "conversion", "a conversion"

    source: str
    destination: str
    num_samples: int
    fields: tuple[ConvertedField, ...]
    source_bytes: int  # on disk; of the samples, where the source isn't a local file
    destination_bytes: int  # on disk
    seconds: float  # without what earlier runs had done
    resumed_at: int = 0  # samples that an interrupted run before this one had done
    classes: tuple[str, ...] = ()  # names that the numbers of the labels stand for

    def summary(self) -> str:
        """The files, and how large they are."""
        sizes = f"{format_size(self.source_bytes)} -> {format_size(self.destination_bytes)}"
        return f"of {self.source} to {self.destination}: {self.num_samples} samples, {sizes}"

    @property
    def totals(self) -> dict[str, Any]:
        """Of all fields: greatest errors, and numbers of values that were or became something special."""
        statistics = [field.statistics for field in self.fields]
        return {
            # Of values that stay ordinary numbers; those that became zero or subnormal are counted instead.
            "max_relative_error": max((each.max_relative_error for each in statistics), default=0.0),
            "max_absolute_error": max((each.max_absolute_error for each in statistics), default=0.0),
            "num_underflow": sum(each.num_zeroed + each.num_subnormal for each in statistics),
            "num_overflow": sum(each.num_overflow for each in statistics),
            "num_nan": sum(each.num_nan for each in statistics),
            "num_infinite": sum(each.num_infinite for each in statistics),
        }

    def to_json(self) -> dict[str, Any]:
        """A plain structure that `json` can write, and `from_json` read back."""
        return {**Saved.to_json(self), "origin": "measured", **self.totals}


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """What is seldom changed of a conversion.

    Attributes:
        chunk: bytes that are read and written at a time, and of an HDF5 chunk or a Parquet row group. By default 8
            MiB for .npy and 1 MiB for the others, which shuffle the better the smaller their chunks are.
        allow_overflow: let values become infinite that are too large for the new type.
        follow_links: as for `memfit.stream`.
        progress: called with the bytes of the source that are done, and all of them.
        image_size: height and width, or one number for both, that images are resized to; "240x320" too.
    """

    chunk: str | int | None = None
    allow_overflow: bool = False
    follow_links: bool = False
    progress: Progress | None = None
    image_size: int | str | tuple[int, int] | None = None


_DEFAULTS = ConvertOptions()
# JPEG's limit; more is a mistake.
_MOST_PIXELS = 65_535


def convert_data(
    source: Any,
    destination: str | os.PathLike[str],
    *,
    dtype: Any = None,
    columns: Any = None,
    labels: Any = None,
    compression: str | None = None,
    overwrite: bool = False,
    options: ConvertOptions = _DEFAULTS,
) -> Conversion:
    """Writes a file of samples in another type or format, whatever its size.

    Nothing is loaded as a whole, nothing appears at the destination before it is complete, and what the new type did to
    the numbers is measured. An interrupted conversion to .npy goes on where it was.

    Args:
        source: a path, or anything else that `memfit.stream` takes.
        destination: a file that ends in .npy, .h5 or .parquet, or a folder for one .npy file a field.
        dtype: for floating fields, or for features that are integers; None for the types they have.
        columns: as for `memfit.stream`.
        labels: as for `memfit.stream`.
        compression: "gzip" or "lzf" for HDF5, "gzip", "snappy" or "zstd" for Parquet.
        overwrite: replace what is at the destination, and discard the unfinished file of another conversion.
        options: size of chunks, overflows, links and a function that is told of the progress.

    Raises:
        BadInput: values don't fit the new type, or the options don't suit the data.
        BadFile: the source is damaged, or the destination can't be written or is there already.
    """
    from memfit.data.sources.opening import open_source

    began = time.perf_counter()
    kind = parse_dtype(dtype)
    chunk_bytes = None if options.chunk is None else parse_size(options.chunk)
    size = _parsed_size(options.image_size)
    path = _local(destination)
    read = list(paths_of(source))
    journal = Journal(path)
    journal.recover()
    _check_places(path, read, overwrite=overwrite)
    opened = open_source(source, columns=columns, labels=labels, follow_links=options.follow_links, image_size=size)
    try:
        for field in opened.fields:
            if field.is_ragged:
                raise BadInput(
                    f"the samples of {field.name!r} differ in shape, and a file of samples has one shape. Bring them "
                    "to one first: images with --image-size 224 (image_size=224), which resizes them."
                )
        dtypes = target_dtypes(opened.fields, kind)
        target = plan_target(
            path,
            tuple(replace(field, dtype=after) for field, after in zip(opened.fields, dtypes, strict=True)),
            opened.num_samples,
            read_bytes=opened.sample_bytes,
            chunk_bytes=chunk_bytes,
            compression=compression,
            classes=opened.classes,
        )
        chosen = {"columns": repr(columns), "labels": repr(labels), "allow_overflow": options.allow_overflow}
        if size is not None:
            chosen["image_size"] = size
        with contextlib.ExitStack() as stack:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(journal.locked(wait=False))
            except OSError as error:
                raise BadFile(
                    f"{str(path)!r} can't be written: {reason_of(error)}. Name another destination."
                ) from error
            _check_room(path, target, journal)
            statistics, resumed_at = Transfer(
                opened,
                target,
                journal,
                chosen,
                allow_overflow=options.allow_overflow,
                discard_other=overwrite,
                progress=options.progress,
            ).run()
    finally:
        opened.close()
    fields = tuple(
        ConvertedField(before.name, before.shape, before.dtype.name, after.dtype.name, seen)
        for before, after, seen in zip(opened.fields, target.fields, statistics, strict=True)
    )
    return Conversion(
        opened.name,
        str(path),
        opened.num_samples,
        fields,
        size_on_disk(read) or opened.total_bytes,
        size_on_disk([path]),
        time.perf_counter() - began,
        resumed_at,
        opened.classes,
    )


def paths_of(source: Any) -> Iterator[Path]:
    """Local paths in what a user gave as source, pairs, lists and dicts included."""
    if isinstance(source, str | os.PathLike):
        text = os.fspath(source)
        if isinstance(text, str) and "://" not in text:
            path = Path(text).expanduser()
            # Not `Path.exists`, which raises where a name is too long or a folder may not be entered.
            if not os.path.exists(path) and any(character in text for character in "*?["):
                yield from map(Path, matches(str(path)))
            else:
                yield path
    elif isinstance(source, Mapping | Sequence):
        for value in source.values() if isinstance(source, Mapping) else source:
            yield from paths_of(value)


def files_in(paths: Sequence[Path]) -> list[Path]:
    """Files, and all files in folders."""
    inside = [each for path in paths for each in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    return [path for path in inside if path.is_file()]


def size_on_disk(paths: Sequence[Path]) -> int:
    """Bytes of files, and of all files in folders."""
    total = 0
    for path in files_in(paths):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def _parsed_size(size: int | str | tuple[int, int] | None) -> tuple[int, int] | None:
    if size is None:
        return None
    sides: Any = size
    if isinstance(size, str) and re.fullmatch(r"[0-9]{1,9}(x[0-9]{1,9})?", size.lower()):
        first, _, second = size.lower().partition("x")
        sides = int(first), int(second or first)
    numbers = sides if isinstance(sides, tuple | list) else (sides, sides)
    if len(numbers) != 2 or any(type(number) is not int or not 0 < number <= _MOST_PIXELS for number in numbers):
        raise BadInput(
            f"image_size={size!r} is no size of images. Give one number for squares, such as 224, or height and width: "
            f"(240, 320), on the command line 240x320, from 1 to {_MOST_PIXELS:,} each."
        )
    return numbers[0], numbers[1]


def _local(destination: str | os.PathLike[str]) -> Path:
    text = os.fspath(destination)
    if "://" in text:
        raise BadInput(f"{text!r} is not a local path. Convert to a local file first, and copy that.")
    if not text or "\0" in text:
        raise BadInput(f"{text!r} is not a path. Name a file that ends in .npy, .h5 or .parquet, or a folder.")
    path = Path(text).expanduser()
    if not path.name or path.name == "..":
        raise BadInput(f"{str(path.absolute())!r} can't be replaced. Name a new file or folder in it.")
    return path


def _check_places(path: Path, read: Sequence[Path], *, overwrite: bool) -> None:
    target = path.resolve()
    for each in read:
        place = each.resolve()
        if place == target or (os.path.exists(each) and os.path.exists(path) and os.path.samefile(each, path)):
            raise BadInput(f"{str(path)!r} is both source and destination. Name another destination.")
        if place in target.parents and os.path.isdir(each):
            raise BadInput(
                f"{str(path)!r} lies inside the source {str(each)!r}, which it would become a part of. Name a "
                "destination beside it."
            )
        if target in place.parents:
            raise BadInput(
                f"the source {str(each)!r} lies inside the destination {str(path)!r}, which is replaced as a whole. "
                "Name another folder."
            )
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise BadFile(f"{str(path)!r} is there already. Replace it with --overwrite (overwrite=True), or name another.")
    if path.is_dir():
        own = (CLASSES_FILE, FIELDS_FILE)
        foreign = [
            each.name
            for each in path.iterdir()
            if not each.is_file() or (each.suffix != ".npy" and each.name not in own)
        ]
        if foreign:
            raise BadFile(
                f"the folder {str(path)!r} holds {foreign[0]!r}, which is no .npy file, and replacing the folder would "
                "delete it. Name another folder."
            )
    elif path.exists() and not path.is_file():
        raise BadFile(f"{str(path)!r} is not a file. Name another destination.")


def _check_room(path: Path, target: Target, journal: Journal) -> None:
    free = free_bytes(path.parent)
    # How well it compresses shows only at the end.
    if free is None or target.compression is not None:
        return
    needed = target.size_bytes - size_on_disk([journal.part])
    if needed > free:
        raise BadFile(
            f"{str(path)!r} would take {format_size(target.size_bytes)}, and its disk has {format_size(free)} left. "
            "Make room, name a destination on another disk, or choose a narrower type such as --dtype float16."
        )
