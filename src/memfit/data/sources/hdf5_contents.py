"""What is in an HDF5 file, which of it is streamed, and how much memory reading it takes.

An HDF5 file is a tree of datasets, of which the user names those to use, or their names say it: one with `images` and
`labels` needs no explanation. Everything that can't be streamed is found out here, from the file's table of contents,
before a sample is read.
"""

import contextlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memfit.core.errors import BadFile, BadInput, MissingDependency
from memfit.core.units import MIB, format_size
from memfit.data.source import Field
from memfit.data.sources.joined import class_names
from memfit.data.sources.tables import Names, describe_unknown
from memfit.data.writing import IS_LABEL

_FEATURE_NAMES = ("x", "image", "images", "data", "feature", "features", "input", "inputs")
_LABEL_NAMES = ("y", "label", "labels", "target", "targets")

# Small datasets, such as labels, stay in the cache whole: their chunks are shared by many blocks of the features.
_SMALL_BYTES = 2 * MIB
# Values that are converted on their way are read in pieces of this size.
PIECE_BYTES = 1 * MIB
# The library's cache for its own tables of contents may grow to 32 MiB if it is let.
MOST_METADATA_BYTES = 8 * MIB
_MOST_LISTED = 50
_MOST_HOPS = 64
# No compression makes more of a byte than this; a dataset that says otherwise was hardly written to, or is damaged.
_MOST_UNPACKED = 100_000
_VAST_BYTES = 2**40
_FILTERS = {
    32001: "blosc",
    32004: "lz4",
    32008: "bitshuffle",
    32013: "zfp",
    32015: "zstd",
    32017: "sz",
    32026: "blosc2",
}


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset that is streamed, by its path in the file."""

    path: str
    field: Field
    num_samples: int
    chunks: tuple[int, ...] | None
    """Its chunks' shape; None where it is stored in one piece."""
    is_filtered: bool
    """Whether chunks have to be unpacked."""
    classes: tuple[str, ...] = ()
    """Names that its numbers stand for; () where they stand for themselves."""

    @property
    def chunk_bytes(self) -> int:
        """Of one chunk, unpacked."""
        return 0 if self.chunks is None else math.prod(self.chunks) * self.field.dtype.itemsize

    @property
    def chunk_grid(self) -> tuple[int, ...]:
        """Chunks along each axis of a sample."""
        return () if self.chunks is None else tuple(map(ceil_divide, self.field.shape, self.chunks[1:]))

    @property
    def cache_bytes(self) -> int:
        """For the chunks that one run of samples lies in, or for all of a small dataset."""
        if self.chunks is None:
            return 0
        row_bytes = math.prod(self.chunk_grid) * self.chunk_bytes
        whole_bytes = ceil_divide(self.num_samples, self.chunks[0]) * row_bytes
        return max(row_bytes, whole_bytes if whole_bytes <= _SMALL_BYTES else 0)

    @property
    def num_slots(self) -> int:
        """Of the cache's hash table, so that no two chunks that it is to hold want the same."""
        rows = 1 if self.chunks is None else max(1, self.cache_bytes // max(1, self.chunk_bytes))
        return max(521, 1 + 2 * rows, 1 + math.prod(1 << (size - 1).bit_length() for size in self.chunk_grid))

    @property
    def scratch_bytes(self) -> int:
        """Memory beside the caller's arrays."""
        if self.chunks is None:
            return PIECE_BYTES
        num_chunks = math.prod(self.chunk_grid) * ceil_divide(self.num_samples, self.chunks[0])
        # Beside the chunk in the cache: as it is stored, unpacked, and put back into its order by the shuffle filter.
        unpacking = (3 if self.is_filtered else 1) * self.chunk_bytes
        metadata = min(MOST_METADATA_BYTES, 128 * num_chunks)
        # The library keeps what its cache let go of for a while: measured, no more than as much again.
        return 2 * self.cache_bytes + unpacking + metadata + 8 * self.num_slots + PIECE_BYTES


def choose(file: Any, columns: Names, labels: str | None, name: str) -> tuple[list[str], list[str]]:
    """Paths of the datasets that are features, and of those that are labels."""
    targets = [] if labels is None else [labels.strip("/")]
    if columns is not None:
        for path in columns:
            if not isinstance(path, str):
                raise BadInput(f"datasets are named by their paths in the file, and {path!r} is not a string.")
        paths = dict.fromkeys(path.strip("/") for path in columns)
        features = [path for path in paths if path not in targets]
        if not features:
            raise BadInput(f"no dataset of {name!r} is left for the features: --columns names only labels, or nothing.")
        return features, targets
    own, linked = _datasets_in(file)
    present = own | linked
    if not present:
        raise BadInput(f"{name!r} has no datasets.")
    # Datasets that memfit wrote say whether they are labels.
    marks = {path: file[path].attrs.get(IS_LABEL) for path in own}
    marked = {path: bool(mark) for path, mark in marks.items() if isinstance(mark, bool | np.bool_)}
    if targets:
        rest = [path for path in present if path not in targets]
        written = [path for path in rest if marked.get(path) is False]
        if written:
            return written, targets
        features = rest if len(rest) == 1 else [path for path in rest if _is_called(path, _FEATURE_NAMES)]
        if len(features) == 1:
            return features, targets
    elif False in marked.values():
        return [path for path in marked if not marked[path]], [path for path in marked if marked[path]]
    else:
        # Features and labels that lie in the same group and are called what such are called.
        pairs = [
            (feature, label)
            for feature in present
            for label in present
            if _is_called(feature, _FEATURE_NAMES) and _is_called(label, _LABEL_NAMES)
            if feature.rpartition("/")[0] == label.rpartition("/")[0]
        ]
        if len(pairs) == 1:
            return [pairs[0][0]], [pairs[0][1]]
        if len(present) == 1:
            return list(present), []
    raise BadInput(
        f"which datasets of {name!r} to stream is ambiguous. Name them: --columns (columns=) for features, "
        f"--labels (labels=) for labels. It has:\n{_listing(present)}"
    )


def _datasets_in(file: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Paths of the datasets in a file, and of links into others, which aren't opened; with what to say of each."""
    import h5py

    datasets: dict[str, str] = {}
    linked: dict[str, str] = {}

    def visit(path: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            datasets[path] = f"{item.shape} {item.dtype}"

    def visit_link(path: str, link: Any) -> None:
        if isinstance(link, h5py.ExternalLink):
            linked[path] = f"a link into {link.filename!r}"

    file.visititems(visit)
    file.visititems_links(visit_link)
    return datasets, linked


def _listing(datasets: dict[str, str]) -> str:
    lines = [f"  {path}  {what}" for path, what in list(datasets.items())[:_MOST_LISTED]]
    if len(datasets) > _MOST_LISTED:
        lines.append(f"  and {len(datasets) - _MOST_LISTED} more")
    return "\n".join(lines)


def _is_called(path: str, names: Sequence[str]) -> bool:
    return path.rpartition("/")[2].lower() in names


def find(file: Any, path: str, name: str) -> Any:
    """The dataset at a path."""
    import h5py

    item = file.get(path) if path else None
    if isinstance(item, h5py.Dataset):
        return item
    own, linked = _datasets_in(item if isinstance(item, h5py.Group) else file)
    if isinstance(item, h5py.Group):
        inside = {f"{path}/{key}": what for key, what in (own | linked).items()}
        raise BadInput(f"{path!r} of {name!r} is a group, not a dataset. It has:\n{_listing(inside)}")
    raise BadInput(describe_unknown([path], [*own, *linked], "dataset", repr(name)))


def describe(dataset: Any, path: str, is_label: bool, name: str) -> Dataset:
    """What has to be known of a dataset to stream it."""
    subject = f"dataset {path!r} of {name!r}"
    if not dataset.shape:
        what = "is empty" if dataset.shape is None else "is a single value"
        raise BadInput(f"{subject} {what}, and samples lie along the first axis of an array.")
    _check_kind(dataset.dtype, subject)
    num_filters = _check_filters(dataset, subject)
    if dataset.is_virtual:
        # HDF5 gives zeros for parts whose files are missing, without a word.
        bases = (os.path.dirname(os.path.abspath(dataset.file.filename)), os.getcwd())
        for part in dataset.virtual_sources():
            is_plain = part.file_name != "." and "%" not in part.file_name
            if is_plain and not any(os.path.exists(os.path.join(base, part.file_name)) for base in bases):
                raise BadFile(f"{subject} is made of other files, of which {part.file_name!r} is missing. Put it back.")
    elif not dataset.external:
        # And for what was never written, of which a file of a kilobyte can promise a petabyte.
        size, stored = math.prod(map(int, dataset.shape)) * dataset.dtype.itemsize, dataset.id.get_storage_size()
        if size > max(_VAST_BYTES, stored * _MOST_UNPACKED):
            raise BadFile(
                f"{subject} is of the shape {dataset.shape}, {format_size(size)}, of which {format_size(stored)} are "
                "stored: the rest was never written, or the file is damaged. Write it to its end, or make it smaller "
                "with resize()."
            )
    dtype = np.dtype(dataset.dtype.str)
    field = Field(path, dtype.newbyteorder("="), tuple(map(int, dataset.shape[1:])), is_label=is_label)
    names = dataset.attrs.get("classes") if is_label else None
    classes = class_names(names.tolist(), field) if isinstance(names, np.ndarray) else ()
    # A virtual dataset has no chunks of its own.
    chunks = None if dataset.chunks is None or dataset.is_virtual else tuple(map(int, dataset.chunks))
    return Dataset(path, field, int(dataset.shape[0]), chunks, num_filters > 0, classes)


def _check_kind(dtype: np.dtype[Any], subject: str) -> None:
    if dtype.kind in "biuf":
        return
    import h5py

    if h5py.check_string_dtype(dtype) is not None:
        what = "holds strings. Store them as class numbers (integers), and leave this dataset out"
    elif h5py.check_vlen_dtype(dtype) is not None:
        what = "holds arrays of different lengths. Pad them to one length, or store them in files of their own"
    elif dtype.names is not None:
        what = (
            f"is compound, with the fields {', '.join(map(repr, dtype.names))}. Store each field as a dataset, or the "
            "table as Parquet (a pandas .h5: pandas.read_hdf, then to_parquet)"
        )
    else:
        what = f"holds {dtype}, which are not real numbers"
    raise BadInput(f"{subject} {what}.")


def _check_filters(dataset: Any, subject: str) -> int:
    """The number of filters that chunks go through, all of which are there."""
    from h5py.h5z import filter_avail

    settings = dataset.id.get_create_plist()
    filters = [settings.get_filter(number) for number in range(settings.get_nfilters())]
    if not all(filter_avail(code) for code, *_ in filters):
        with contextlib.suppress(ImportError):
            # Importing it makes its filters known.
            import hdf5plugin  # noqa: F401
    for code, _, _, text in filters:
        if not filter_avail(code):
            called = _FILTERS.get(code) or text.decode(errors="replace").split(";")[0] or "a filter"
            raise MissingDependency(
                f"{subject} is compressed with {called} (filter {code}), which h5py can't unpack by itself: "
                "pip install hdf5plugin"
            )
    return len(filters)


def stay_inside(file: Any, path: str, subject: str, root: str = "", seen: set[tuple[str, str]] | None = None) -> None:
    """Refuses the dataset at a path where it lies outside of the file or of its folder.

    An HDF5 file can refer to others: by a link to an object of another file, by the sources of a virtual dataset, and
    by a dataset whose bytes are in plain files. The library opens them without a word, whatever they are, so that a
    file from somewhere else could make a training read any file of this machine. Parts of a virtual dataset, and plain
    files, that lie in the folder of the file or below it belong to the data; all else needs the user's word. `root` is
    that folder, where `file` is only a part; `subject` is what to call the dataset.
    """
    import h5py

    seen = set() if seen is None else seen
    place, folder = os.path.realpath(file.filename), os.path.dirname(os.path.abspath(file.filename))
    item = _resolve(file, path, subject)
    # Whoever looks for a dataset that isn't there says so.
    if (place, path) in seen or not isinstance(item, h5py.Dataset):
        return
    seen.add((place, path))
    root = root or os.path.realpath(folder)
    for part, *_ in item.external or ():
        _refuse_outside(part, folder, root, subject, "keeps its values in another file")
    for source in item.virtual_sources() if item.is_virtual else ():
        if source.file_name == ".":
            stay_inside(file, source.dset_name, subject, root, seen)
            continue
        place = _refuse_outside(source.file_name, folder, root, subject, "is made of other files")
        # A name with a "%" in it stands for many, which lie in the same folder; what is missing is told elsewhere.
        if os.path.isfile(place):
            with h5py.File(place, "r") as other:
                stay_inside(other, source.dset_name, subject, root, seen)


def _resolve(file: Any, path: str, subject: str) -> Any:
    """What is at a path, found without leaving the file; None where nothing is."""
    import h5py

    group, parts = file, path.split("/")
    for _ in range(_MOST_HOPS):
        while parts and parts[0] in ("", "."):
            parts.pop(0)
        if not parts:
            return group
        if not isinstance(group, h5py.Group):
            return None
        link = group.get(parts[0], getlink=True)
        if isinstance(link, h5py.ExternalLink):
            raise _outside(subject, "is a link into another file", link.filename)
        if isinstance(link, h5py.SoftLink):
            group = file if link.path.startswith("/") else group
            parts = [*link.path.split("/"), *parts[1:]]
            continue
        group = group.get(parts.pop(0)) if link is not None else None
    return None


def _refuse_outside(part: str, folder: str, root: str, subject: str, what: str) -> str:
    """The place of a file that a dataset refers to, which is in the root folder or below it."""
    places = [os.path.realpath(os.path.join(base, part)) for base in (folder, os.getcwd())]
    place = next((place for place in places if os.path.exists(place)), places[0])
    if not os.path.join(place, "").startswith(os.path.join(root, "")):
        raise _outside(subject, what, part)
    return place


def _outside(subject: str, what: str, part: str) -> BadFile:
    return BadFile(
        f"{subject} {what}, {part!r}, which isn't read unasked. Give that file itself, or --follow-links "
        "(follow_links=True) where it is one that you trust."
    )


def ceil_divide(number: int, divisor: int) -> int:
    """Quotient, rounded up."""
    return -(-number // divisor)
