"""How files store their samples: chunks, row groups, compression; and what of that stands in the way of streaming."""

import math
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memfit.core.env import spool_folder
from memfit.core.errors import MemfitError
from memfit.core.units import MIB, format_size
from memfit.data.source import Field

# A window of an ordinary budget holds only a few dozen blocks that are larger than this.
_LARGE_BLOCK_BYTES = 4 * MIB
# What libraries raise on a file that they can't make sense of; reading it says so better.
_UNREADABLE = (OSError, ValueError, RuntimeError, KeyError, MemfitError, ImportError, zipfile.BadZipFile)


@dataclass(frozen=True, slots=True)
class Storage:
    """How a file stores its samples."""

    lines: tuple[str, ...] = ()  # in words
    warnings: tuple[str, ...] = ()  # what is worth changing
    is_text: bool = False  # numbers are stored as text, so that their types are the reader's


def storage_of(paths: Sequence[Path], fields: Sequence[Field]) -> Storage:
    """How the first of these files stores the fields; nothing is said of what can't be looked at."""
    from memfit.data.sources.opening import kind_of

    files = [path for path in paths if path.is_file()]
    if not files:
        return Storage()
    more = f" ({len(files)} files; the first is described)" if len(files) > 1 else ""
    try:
        kind = kind_of(str(files[0]))
        storage = _DESCRIBED[kind](str(files[0]), fields)
    except _UNREADABLE:
        return Storage()
    return replace(storage, lines=tuple(line + more for line in storage.lines))


def _npy(path: str, fields: Sequence[Field]) -> Storage:
    from memfit.data.sources.npy import NpySource

    if NpySource(path).layout.is_sequential:
        return Storage((".npy: in Fortran order, each sample scattered over the file",))
    return Storage((".npy: samples one after the other, without compression",))


def _npz(path: str, fields: Sequence[Field]) -> Storage:
    lines = []
    with zipfile.ZipFile(path) as archive:
        for field in fields:
            info = archive.getinfo(f"{field.name}.npy")
            if info.compress_type == zipfile.ZIP_STORED:
                lines.append(f"{field.name}: a member of the archive, without compression, read in place")
            else:
                share = info.compress_size / max(1, info.file_size)
                lines.append(f"{field.name}: a compressed member of the archive, {share:.0%} of its size")
    return Storage(tuple(lines))


def _hdf5(path: str, fields: Sequence[Field]) -> Storage:
    import h5py

    lines, warnings = [], []
    with h5py.File(path, "r") as file:
        for field in fields:
            dataset = file[field.name]
            if dataset.chunks is None:
                lines.append(f"{field.name}: in one piece, without compression")
                continue
            size = math.prod(dataset.chunks) * dataset.dtype.itemsize
            method = _compression(dataset)
            lines.append(f"{field.name}: chunks of {list(dataset.chunks)}, {format_size(size)}, {method}")
            warnings += _chunk_warnings(field.name, dataset.chunks, dataset.shape, size)
    return Storage(tuple(lines), tuple(warnings))


def _compression(dataset: Any) -> str:
    if dataset.compression is None:
        # Filters that h5py has no name for.
        return "other filters" if dataset.id.get_create_plist().get_nfilters() else "no compression"
    stored, whole = dataset.id.get_storage_size(), max(1, dataset.size * dataset.dtype.itemsize)
    return f"compressed with {dataset.compression} to {stored / whole:.0%}"


def _chunk_warnings(name: str, chunks: tuple[int, ...], shape: tuple[int, ...], size: int) -> list[str]:
    across = math.prod(-(-length // chunk) for length, chunk in zip(shape[1:], chunks[1:], strict=True))
    warnings = []
    if across > 1:
        warnings.append(
            f"the chunks of {name!r} cut across samples: one sample lies in {across} chunks, and each read unpacks "
            f"all of them with {chunks[0]} samples each. `memfit data convert` writes chunks of whole samples."
        )
    if size * across > _LARGE_BLOCK_BYTES:
        warnings.append(
            f"the chunks of {name!r} are large for shuffling: {format_size(size * across)} are unpacked together, "
            f"{chunks[0]} samples that lie side by side. `memfit data convert` writes chunks of 1 MiB."
        )
    return warnings


def _parquet(path: str, fields: Sequence[Field]) -> Storage:
    from pyarrow import parquet

    with open(path, "rb") as opened, parquet.ParquetFile(opened) as file:
        metadata = file.metadata
        count = metadata.num_row_groups
        sizes = [metadata.row_group(index).total_byte_size for index in range(min(count, 1000))]
        codecs = {metadata.row_group(0).column(index).compression for index in range(metadata.num_columns)}
        rows = metadata.row_group(0).num_rows
    largest = max(sizes)
    method = ", ".join(sorted(codec.lower() for codec in codecs)).replace("uncompressed", "no compression")
    groups = "1 row group" if count == 1 else f"{count} row groups"
    lines = (f"{groups} of up to {format_size(largest)}, {rows} rows in the first; {method}",)
    if largest <= _LARGE_BLOCK_BYTES:
        return Storage(lines)
    warning = (
        f"row groups of {format_size(largest)} are large for shuffling: each is unpacked as a whole, {rows} rows that "
        "lie side by side. `memfit data convert` writes row groups of 1 MiB."
    )
    return Storage(lines, (warning,))


def _arrow(path: str, fields: Sequence[Field]) -> Storage:
    return Storage(("Arrow: record batches, each read as a whole",))


def _csv(path: str, fields: Sequence[Field]) -> Storage:
    is_packed = path.lower().endswith(".gz")
    text = "text, compressed with gzip" if is_packed else "text, one line a sample"
    return Storage((f"{text}; converted once to Arrow in {spool_folder()!r}, and read from there",), is_text=True)


_DESCRIBED = {"npy": _npy, "npz": _npz, "hdf5": _hdf5, "parquet": _parquet, "arrow": _arrow, "csv": _csv}
