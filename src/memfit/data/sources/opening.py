"""Finds out what was given to be streamed, and opens it.

A path is told by its ending and, where that says nothing, by its first bytes. Several paths are read one after the
other, a pair is features and labels. Whatever can't be streamed gets one message here, before anything is read.

A folder that `memfit data convert` wrote says what the fields of its .npy files are called, which of them are labels,
and the names of the classes. That is only believed where it is whole and fits the files: a folder without it, or with
other files of the same names, is opened by the names of its files.
"""

import difflib
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from memfit.core.errors import BadFile, BadInput, MemfitError
from memfit.data.files import is_folder, is_remote, join, list_folder, matches, open_file, read_bytes
from memfit.data.source import Source
from memfit.data.sources.arrow import ArrowSource
from memfit.data.sources.csv import CsvSource
from memfit.data.sources.hdf5 import Hdf5Source
from memfit.data.sources.image_index import ENDINGS
from memfit.data.sources.images import ImageSource
from memfit.data.sources.joined import Paired, as_labels, class_names, concatenate, named
from memfit.data.sources.npy import MAGIC, NpySource
from memfit.data.sources.npz import NpzSource, obvious_pair
from memfit.data.sources.parquet import ParquetSource
from memfit.data.sources.tables import choose_names
from memfit.data.writing import CLASSES_FILE, FIELDS_FILE, FIELDS_FORMAT

_KINDS = {
    ".npy": "npy",
    ".npz": "npz",
    **dict.fromkeys((".h5", ".hdf5", ".hdf", ".he5"), "hdf5"),
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".arrow", ".feather", ".ipc"), "arrow"),
    **dict.fromkeys((".csv", ".tsv", ".csv.gz", ".tsv.gz"), "csv"),
    **dict.fromkeys((".pkl", ".pickle", ".pt", ".pth", ".joblib", ".ckpt"), "pickle"),
}
_MAGICS = (
    (MAGIC, "npy"),
    (b"PK\x03\x04", "npz"),
    (b"\x89HDF\r\n\x1a\n", "hdf5"),
    (b"PAR1", "parquet"),
    (b"ARROW1", "arrow"),
    *((bytes((0x80, protocol)), "pickle") for protocol in range(2, 6)),
)
_IMAGE_SUFFIXES = (*ENDINGS, ".ppm", ".pgm")
_KNOWN = ".npy, .npz, .h5, .hdf5, .parquet, .arrow, .feather, .csv, .tsv, .csv.gz, or a folder of images"
# Of the files beside converted data: names of very many classes, and long ones.
_MOST_DESCRIPTION_BYTES = 16 << 20


class _Reading(NamedTuple):
    """How files are read, whatever their kind."""

    on_error: str
    follow_links: bool
    image_size: tuple[int, int] | None = None


def open_source(
    source: Any,
    *,
    columns: Sequence[str] | str | None = None,
    labels: Any = None,
    on_error: str = "fail",
    follow_links: bool = False,
    image_size: tuple[int, int] | None = None,
) -> Source:
    """What is to be streamed, as a Source; images are resized to `image_size`, (height, width)."""
    if on_error not in ("fail", "skip"):
        raise BadInput(f"on_error is 'fail' or 'skip', and {on_error!r} was given")
    names = [columns] if isinstance(columns, str) else None if columns is None else list(columns)
    opened = _open(source, names, labels, _Reading(on_error, follow_links, image_size))
    if image_size is not None and image_size not in (field.shape[:2] for field in opened.fields):
        raise BadInput(f"{opened.name} holds no folder of images, which alone can be resized. Leave image_size away.")
    if not opened.num_samples:
        raise BadFile(f"{opened.name} holds no samples, so there is nothing to stream.")
    for field in opened.fields:
        if not field.sample_bytes and not field.is_ragged:
            raise BadFile(f"a sample of {field.name!r} in {opened.name} has the shape {field.shape}: no values in it.")
    return opened


def _open(source: Any, columns: list[str] | None, labels: Any, reading: _Reading) -> Source:
    if isinstance(source, Source):
        _refuse_choice(source.name, columns, labels)
        return source
    if isinstance(source, tuple):
        if len(source) != 2:
            raise BadInput(f"a tuple is a pair (features, labels), and one of {len(source)} was given; use a list")
        if labels is not None:
            raise BadInput(f"labels are given twice: {source[1]!r} in the pair, and labels={labels!r}")
        return _open_pair(*source, columns, reading)
    is_key = isinstance(source, Mapping) and isinstance(labels, str) and labels in source
    if _are_paths(labels) and not is_key:
        return _open_pair(source, labels, columns, reading)
    if isinstance(source, Mapping):
        return _open_mapping(source, columns, labels, reading)
    if labels is not None and not isinstance(labels, str):
        place = _place_of(labels)
        if place:
            raise BadInput(f"labels is an array that is in a file; it is streamed from there: give {place}.")
        raise BadInput(f"labels is the name of a column, key or dataset, or a path; {labels!r} was given")
    return concatenate([_open_path(path, columns, labels, reading) for path in _paths(source, reading)])


def _open_pair(features: Any, labels: Any, columns: list[str] | None, reading: _Reading) -> Source:
    return Paired(_open(features, columns, None, reading), as_labels(_open(labels, None, None, reading)))


def _open_mapping(source: Mapping[str, Any], columns: list[str] | None, labels: Any, reading: _Reading) -> Source:
    """Files under names; the one that `labels` names is the label."""
    if not source or not all(isinstance(name, str) for name in source):
        raise BadInput(f"a dict of names and paths is needed, such as {{'x': 'x.npy', 'y': 'y.npy'}}; got {source!r}")
    features, targets = choose_names(list(source), columns, labels, kind="name", source="the dict")
    opened = {name: named(_open(source[name], None, None, reading), name) for name in (*features, *targets)}
    joined = _side_by_side(opened[name] for name in features)
    return Paired(joined, as_labels(opened[labels])) if targets else joined


def _side_by_side(sources: Iterable[Source]) -> Source:
    return functools.reduce(lambda joined, source: Paired(joined, source, are_labels=False), sources)


def _paths(source: Any, reading: _Reading) -> list[str]:
    """The paths that a path, a pattern or a list of them stands for."""
    if isinstance(source, str | os.PathLike):
        path = os.fspath(source)
        if not isinstance(path, str):
            raise BadInput(f"a path is text, and {path!r} was given")
        return _expand(path, reading)
    if isinstance(source, Iterable) and not hasattr(source, "dtype") and not isinstance(source, bytes | bytearray):
        items = list(source)
        if not items:
            raise BadInput("an empty list was given; at least one path is needed")
        if all(isinstance(item, str | os.PathLike) for item in items):
            return [path for item in items for path in _paths(item, reading)]
        place = next((place for place in map(_place_of, items) if place), "")
    else:
        place = _place_of(source)
    if place:
        raise BadInput(f"an array that is in a file was given; it is streamed from there: give {place}.")
    what = f"an array of shape {source.shape}" if hasattr(source, "shape") else f"{source!r} ({type(source).__name__})"
    raise BadInput(
        f"a path, a list of paths, a pair (features, labels) or a dict of names and paths is needed, and {what} was "
        "given. Data that is in memory already needs no streaming; np.save writes it to a file."
    )


def _place_of(array: Any) -> str:
    """How to name the file that an open array is read from; "" where there is none."""
    from memfit.data.array import ArrayFile

    def shown(path: str) -> str:
        """A path as one would write it in this folder."""
        return path.removeprefix(os.path.join(os.getcwd(), ""))

    if isinstance(array, ArrayFile):
        return f"its path, {array.name!r}"
    h5py = sys.modules.get("h5py")
    if h5py is not None and isinstance(array, h5py.Dataset):
        return f"its path, {shown(array.file.filename)!r}, and columns={str(array.name).strip('/')!r}"
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap) and array.filename is not None:
            return f"its path, {shown(os.fspath(array.filename))!r}"
        # Such as what np.asarray made of one.
        array = array.base
    return ""


def _expand(path: str, reading: _Reading) -> list[str]:
    if not path:
        raise BadInput("an empty path was given")
    if not any(character in path for character in "*?["):
        return [path]
    if is_remote(path):
        from memfit.data.remote_files import glob_remote

        paths = glob_remote(path)
    else:
        if os.path.lexists(os.path.expanduser(path)):
            return [path]
        paths = matches(os.path.expanduser(path), follow_links=reading.follow_links)
    if not paths:
        raise BadFile(f"no file matches {path!r}; give a pattern that matches at least one, or a path.")
    return sorted(paths, key=_by_number)


def _by_number(path: str) -> list[tuple[int, str]]:
    """Sorts x-2 before x-10, as whoever numbered the files meant it."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path)]


def _open_path(path: str, columns: list[str] | None, labels: str | None, reading: _Reading) -> Source:
    # A server needn't be asked about what has the name of a file.
    if (_kind_by_name(path) is None or not is_remote(path)) and is_folder(path):
        return _open_folder(path, columns, labels, reading)
    if not is_remote(path) and not os.path.exists(os.path.expanduser(path)):
        raise BadFile(missing(path))
    kind = kind_of(path)
    # Only HDF5 files refer to others.
    options = {"follow_links": True} if kind == "hdf5" and reading.follow_links else {}
    return OPENERS[kind](path, columns=columns, labels=labels, **options)


def missing(path: str) -> str:
    """What to say of a path at which there is nothing: the nearest name in its folder too."""
    place = os.path.expanduser(path)
    if os.path.islink(place):
        return f"{path!r} is a link to {os.readlink(place)!r}, where there is nothing that can be read."
    folder, name = os.path.split(place)
    try:
        present = os.listdir(folder or ".")
    except OSError:
        return f"there is no {path!r}; its folder isn't there either."
    return f"there is no {path!r}{_nearest(name, present)}"


def kind_of(path: str) -> str:
    """The kind of a file: "npy", "npz", "hdf5", "parquet", "arrow" or "csv", by its ending or its first bytes."""
    kind = _kind_by_name(path)
    file = open_file(path)
    name = repr(file.name)
    if not is_remote(path) and not os.path.isfile(os.path.expanduser(path)):
        raise BadFile(
            f"{name} is a pipe or a device, of which only the next bytes can be read. Write its data to a file first."
        )
    if not file.size:
        raise BadFile(f"{name} is empty: 0 bytes. Was it written to its end?")
    if kind is None:
        head = read_bytes(file, 0, 16)
        file.close()
        kind = next((kind for magic, kind in _MAGICS if head.startswith(magic)), None)
    if kind == "pickle":
        raise BadFile(
            f"{name} is a pickle, which can't be read in parts, and loading one can run any code. Load it once where "
            "you trust it and save its arrays: np.save('x.npy', x), or x.numpy() of a tensor."
        )
    if kind is None and path.lower().endswith(_IMAGE_SUFFIXES):
        raise BadFile(f"{name} is a single image. Give the folder that holds a subfolder of images for each class.")
    if kind is None:
        raise BadFile(f"{name} is of no kind that can be streamed: {_KNOWN}. Convert it to one of them.")
    return kind


def _kind_by_name(path: str) -> str | None:
    # Addresses may carry a signature behind their path.
    lowered = (path.partition("?")[0] if is_remote(path) else path).lower()
    return next((kind for suffix, kind in _KINDS.items() if lowered.endswith(suffix)), None)


def _open_folder(path: str, columns: list[str] | None, labels: str | None, reading: _Reading) -> Source:
    """A folder of files of one kind, one after the other; else of images."""
    entries = [entry for entry in list_folder(path) if not entry.name.startswith("_")]
    if not entries:
        raise BadFile(f"the folder {path!r} is empty.")
    if not any(entry.is_folder for entry in entries):
        present = sorted((join(path, entry.name) for entry in entries), key=_by_number)
        data = [file for file in present if _kind_by_name(file) not in (None, "pickle")]
        if len({_kind_by_name(file) for file in data}) > 1:
            raise BadFile(
                f"the folder {path!r} holds files of several kinds: {', '.join(map(os.path.basename, data[:4]))}"
                f"{', ...' if len(data) > 4 else ''}. Give a pattern, such as {os.path.join(path, '*.npy')!r}."
            )
        members = _read_members(present, data)
        names = list(map(os.path.basename, data))
        pair = obvious_pair(names, ".npy") if labels is None and columns is None else None
        if not members and pair is not None:
            features, targets = (data[names.index(name)] for name in pair)
            members = [_Member(features, "x", is_label=False), _Member(targets, "y", is_label=True)]
        if members:
            return _open_members(path, members, columns, labels, _read_json(present, CLASSES_FILE))
        if data:
            return concatenate([_open_path(file, columns, labels, reading) for file in data])
        if not any(file.lower().endswith(_IMAGE_SUFFIXES) for file in present):
            raise BadFile(f"the folder {path!r} holds nothing that can be streamed: {_KNOWN}.")
    _refuse_choice(path, columns, labels)
    return ImageSource(path, **reading._asdict())


class _Member(NamedTuple):
    """A field of a folder that says what its fields are."""

    path: str
    name: str
    is_label: bool


def _read_members(present: Sequence[str], data: Sequence[str]) -> list[_Member]:
    """The fields of a folder, features first; none where it doesn't say, or says it of other files."""
    content = _read_json(present, FIELDS_FILE)
    fields = content.get("fields") if isinstance(content, dict) and content.get("format") == FIELDS_FORMAT else None
    if not isinstance(fields, list):
        return []
    paths = {os.path.basename(path): path for path in data}
    members = []
    for field in fields:
        match field:
            # Each file once, and none that isn't in the folder.
            case {"file": str(file), "name": str(name), "is_label": bool(is_label)} if file in paths:
                members.append(_Member(paths.pop(file), name, is_label))
            case _:
                return []
    is_sound = not paths and len({member.name for member in members}) == len(members)
    if not is_sound or all(member.is_label for member in members):
        return []
    return sorted(members, key=lambda member: member.is_label)


def _read_json(present: Sequence[str], name: str) -> Any:
    """What a small file of a folder says; None where it isn't there or isn't JSON."""
    path = next((path for path in present if os.path.basename(path) == name), None)
    if path is None:
        return None
    try:
        file = open_file(path)
        if file.size > _MOST_DESCRIPTION_BYTES:
            return None
        content = read_bytes(file, 0, file.size)
        file.close()
        return json.loads(content.decode("utf-8"))
    except (MemfitError, OSError, ValueError, RecursionError):
        return None


def _open_members(
    path: str, members: list[_Member], columns: list[str] | None, labels: str | None, classes: Any
) -> Source:
    """The fields of a folder that says what they are."""
    paths = {member.name: member.path for member in members}
    own = [member.name for member in members if member.is_label]
    features, targets = choose_names(list(paths), columns, labels, kind="field", source=repr(path), own_labels=own)
    joined = _side_by_side(NpySource(paths[name], name=name) for name in features)
    if not targets:
        return joined
    first, *others = (NpySource(paths[name], name=name) for name in targets)
    # The names are those of the labels that were written as such.
    if targets[0] in own and len(first.fields) == 1:
        first.classes = class_names(classes, first.fields[0])
    return Paired(joined, _side_by_side([as_labels(first), *others]))


def _open_npz(path: str, *, columns: list[str] | None, labels: str | None) -> Source:
    source = NpzSource(path, columns=columns, labels=labels)
    *features, last = source.fields
    if not (last.is_label and last.dtype.kind in "SU"):
        return source
    # Apart, so that only the labels are gone through for their texts.
    texts = as_labels(NpzSource(path, columns=[last.name]))
    return Paired(NpzSource(path, columns=[field.name for field in features]), texts)


OPENERS: dict[str, Callable[..., Source]] = {
    "npy": NpySource,
    "npz": _open_npz,
    "hdf5": Hdf5Source,
    "parquet": ParquetSource,
    "arrow": ArrowSource,
    "csv": CsvSource,
}


def _are_paths(labels: Any) -> bool:
    """Whether `labels` is a file, or several, and no name of a column."""
    if isinstance(labels, os.PathLike | Source):
        return True
    if isinstance(labels, str):
        return labels.lower().endswith(tuple(_KINDS)) or is_remote(labels)
    return isinstance(labels, list) and bool(labels) and all(_are_paths(label) for label in labels)


def _refuse_choice(name: str, columns: list[str] | None, labels: Any) -> None:
    for argument, value in (("columns", columns), ("labels", labels)):
        if value is not None:
            raise BadInput(f"{argument}={value!r} was given, and {name!r} has no columns to choose from; leave it out")


def _nearest(name: str, present: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(name, list(present), n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else "."
