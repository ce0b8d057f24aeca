"""The formats that samples are written to, block by block.

Files of .npy can be cut at any sample and gone on with, so an interrupted conversion resumes. HDF5 and Parquet keep
their directory in memory until the end: after a kill there is no telling which part of the file is whole, and it is
written from its beginning again.
"""

import contextlib
import io
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from memfit.core.errors import BadInput, MissingDependency, how_to_install
from memfit.core.units import MIB
from memfit.data.files import drop_pages
from memfit.data.source import Array, Field

# Sequential formats are written by pieces of this size. The others are read by whole chunks, and a shuffle is the
# better the smaller these are; below a mebibyte compression and the cost of a read suffer.
_PIECE_BYTES = 8 * MIB
_CHUNK_BYTES = MIB
_COMPRESSIONS = {"hdf5": ("gzip", "lzf"), "parquet": ("gzip", "snappy", "zstd"), "npy": (), "folder": ()}
_TYPES = {"hdf5": "fiub", "parquet": "fiub", "npy": "fiubcmMSU", "folder": "fiubcmMSU"}
CLASSES_FILE = "classes.json"
"""Names of the classes, beside .npy files, which have no place for them."""
FIELDS_FILE = "memfit-fields.json"
"""Names of the fields, beside .npy files, and which of them are labels."""
FIELDS_FORMAT = "memfit fields"
IS_LABEL = "memfit_label"
"""Attribute of HDF5 datasets: whether they are labels."""
_KINDS = {".npy": "npy", ".h5": "hdf5", ".hdf5": "hdf5", ".parquet": "parquet", "": "folder"}


@dataclass(frozen=True, slots=True)
class Target:
    """The data set to write: format, fields and chunks."""

    kind: str  # "npy", "folder", "hdf5" or "parquet"
    fields: tuple[Field, ...]  # as they are written
    num_samples: int
    block_samples: int  # written at a time, and in one chunk or row group
    compression: str | None = None
    classes: tuple[str, ...] = ()  # names that the numbers of the labels stand for

    def is_named(self, field: Field) -> bool:
        """Whether the numbers of a field stand for names."""
        return bool(self.classes) and field.is_label and field.dtype.kind in "iu" and not field.shape

    @property
    def size_bytes(self) -> int:
        """Bytes of the samples without compression."""
        return self.num_samples * sum(field.sample_bytes for field in self.fields)


class Writer:
    """A file, or a folder of files, that is being written at its temporary place."""

    is_resumable = False

    def __init__(self, target: Target) -> None:
        self._target = target
        self._files: list[Any] = []  # on disk
        self._layers: list[Any] = []  # what libraries have open above these, uppermost first

    def open(self, part: Path, num_durable: int) -> int:
        """Makes it ready for the samples after the first `num_durable`; says how many of those really are there."""
        raise NotImplementedError

    def write(self, start: int, arrays: Sequence[Array]) -> None:
        """Appends samples, one array a field, the first of which has the number `start`."""
        raise NotImplementedError

    def sync(self) -> None:
        """Forces what was written to disk and lets go of its pages; may be called while another thread writes."""
        for file in self._files:
            sync_and_drop(file.fileno())

    def finish(self) -> None:
        """Completes the file and forces it to disk."""
        while self._layers:
            self._layers.pop(0).close()
        for file in self._files:
            os.fsync(file.fileno())
        self.sync()

    def close(self) -> None:
        """Closes what is open, whether it is complete or not."""
        for each in (*self._layers, *self._files):
            with contextlib.suppress(OSError):
                each.close()
        self._layers, self._files = [], []


def kind_of(destination: Path) -> str:
    """The format that a path stands for.

    >>> kind_of(Path("small.h5"))
    'hdf5'
    """
    if os.path.isdir(destination):
        return "folder"
    kind = _KINDS.get(destination.suffix.lower())
    if kind is None:
        raise BadInput(
            f"{str(destination)!r} can't be written: {destination.suffix!r} is not a format that samples are converted "
            "to. Name a file that ends in .npy, .h5 or .parquet, or a folder for .npy files."
        )
    return kind


def plan_target(
    destination: Path,
    fields: tuple[Field, ...],
    num_samples: int,
    *,
    read_bytes: int = 0,
    chunk_bytes: int | None = None,
    compression: str | None = None,
    classes: tuple[str, ...] = (),
) -> Target:
    """What is to be written to `destination`."""
    kind = kind_of(destination)
    if kind == "npy" and len(fields) > 1:
        names = ", ".join(field.name for field in fields)
        raise BadInput(
            f"one .npy file holds one array, and the source has {len(fields)}: {names}. Name a folder as destination, "
            "which gets one .npy file for each, or a file that ends in .h5 or .parquet."
        )
    if compression is not None and compression not in _COMPRESSIONS[kind]:
        known = " and ".join(_COMPRESSIONS[kind]) or "none, so that any sample can be read without those before it"
        raise BadInput(f"compression {compression!r} is not for {kind} files; for those there is {known}.")
    for field in fields:
        is_too_wide = kind == "parquet" and field.dtype.kind == "f" and field.dtype.itemsize > 8
        if field.dtype.kind not in _TYPES[kind] or is_too_wide:
            raise BadInput(
                f"{field.name!r} is {field.dtype.name}, which {kind} files don't hold. Leave it out with --columns, or "
                "name a folder or a .npy file as destination."
            )
    sample_bytes = max(1, sum(field.sample_bytes for field in fields))
    is_chunked = kind in ("hdf5", "parquet")
    if not is_chunked:
        # No block shows in the file, so that what counts is the memory that it takes on its way.
        sample_bytes = max(sample_bytes, read_bytes)
    chunk = chunk_bytes or (_CHUNK_BYTES if is_chunked else _PIECE_BYTES)
    # HDF5 holds no chunk of 4 GiB or more, and memory has to hold several.
    if chunk > 1024 * MIB:
        raise BadInput(f"chunks of {chunk} bytes are too large: several are in memory at once. Give at most 1GiB.")
    block_samples = max(1, min(chunk // sample_bytes, max(1, num_samples)))
    return Target(kind, fields, num_samples, block_samples, compression, classes)


def writer_for(target: Target) -> Writer:
    """The writer of a format."""
    kinds: dict[str, Callable[[Target], Writer]] = {"hdf5": _Hdf5Writer, "parquet": _ParquetWriter}
    return kinds.get(target.kind, _NpyWriter)(target)


def file_names(fields: Sequence[Field]) -> list[str]:
    """A name for the file of each field, which any file system takes.

    One array of features and one of labels are x and y, by which they are recognised as such when they are opened.

    >>> file_names([Field("a/b", np.dtype("f4"), ()), Field("y", np.dtype("f4"), ())])
    ['a_b.npy', 'y.npy']
    """
    if [field.is_label for field in fields] == [False, True]:
        return ["x.npy", "y.npy"]
    names: list[str] = []
    for field in fields:
        plain = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in field.name).strip(".")
        name = plain[:100] or "field"
        while f"{name.lower()}.npy" in [taken.lower() for taken in names]:
            name += "_"
        names.append(f"{name}.npy")
    return names


def header_of(field: Field, num_samples: int) -> bytes:
    """The beginning of a .npy file, as numpy writes it."""
    buffer = io.BytesIO()
    description = {
        "descr": np.lib.format.dtype_to_descr(field.dtype),
        "fortran_order": False,
        "shape": (num_samples, *field.shape),
    }
    # The first version that can hold it, without numpy's warning about newer ones.
    for write in (np.lib.format.write_array_header_1_0, np.lib.format.write_array_header_2_0):
        with contextlib.suppress(ValueError):
            write(buffer, description)
            return buffer.getvalue()
    raise BadInput(f"{field.name!r} has a type that .npy files can't describe: {field.dtype}.")


class _NpyWriter(Writer):
    """One .npy file, or a folder with one for each field."""

    is_resumable = True

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._headers = [header_of(field, target.num_samples) for field in target.fields]

    def open(self, part: Path, num_durable: int) -> int:
        fields = self._target.fields
        paths = [part]
        if self._target.kind == "folder":
            part.mkdir(parents=True, exist_ok=True)
            paths = [part / name for name in file_names(fields)]
            self._describe(part)
        for path in paths:
            path.touch()
            self._files.append(open(path, "r+b", buffering=0))  # noqa: SIM115 - closed by `close`
        opened = list(zip(self._files, fields, self._headers, strict=True))
        for file, field, header in opened:
            if os.fstat(file.fileno()).st_size < len(header) + num_durable * field.sample_bytes:
                num_durable = 0
        for file, field, header in opened:
            file.truncate(len(header) + num_durable * field.sample_bytes)
            file.seek(0)
            _write_all(file, memoryview(header))
        return num_durable

    def _describe(self, part: Path) -> None:
        """Writes beside .npy files what they have no place for."""
        target = self._target
        fields = [
            {"file": name, "name": field.name, "is_label": field.is_label}
            for name, field in zip(file_names(target.fields), target.fields, strict=True)
        ]
        contents: dict[str, Any] = {FIELDS_FILE: {"format": FIELDS_FORMAT, "version": 1, "fields": fields}}
        if target.classes:
            contents[CLASSES_FILE] = target.classes
        for name, content in contents.items():
            with open(part / name, "w", encoding="utf-8") as file:
                file.write(json.dumps(content))
                file.flush()
                os.fsync(file.fileno())

    def write(self, start: int, arrays: Sequence[Array]) -> None:
        for file, field, header, array in zip(self._files, self._target.fields, self._headers, arrays, strict=True):
            if array.nbytes:
                file.seek(len(header) + start * field.sample_bytes)
                _write_all(file, array.reshape(-1).view(np.uint8).data)


class _Hdf5Writer(Writer):
    """A dataset for each field, in chunks along the first axis."""

    def open(self, part: Path, num_durable: int) -> int:
        try:
            import h5py
        except ImportError:
            raise MissingDependency(f"HDF5 files need h5py: {how_to_install('h5py')}.") from None
        target = self._target
        self._disk = _PatientFile(part)
        self._files.append(self._disk)
        # The format of 1.8 and later, of 2008: the one before it has no room for the names of 4,096 classes or more.
        file = h5py.File(self._disk, "w", libver=("v108", "v108"))
        self._layers.append(file)
        self._datasets = []
        for field in target.fields:
            shape = (target.num_samples, *field.shape)
            options: dict[str, Any] = {}
            if all(shape):
                options["chunks"] = (target.block_samples, *field.shape)
                options |= {"compression": target.compression, "shuffle": target.compression is not None}
            dataset = file.create_dataset(field.name, shape, field.dtype, **options)
            dataset.attrs[IS_LABEL] = field.is_label
            if target.is_named(field):
                dataset.attrs["classes"] = list(target.classes)
            self._datasets.append(dataset)
        return 0

    def write(self, start: int, arrays: Sequence[Array]) -> None:
        for dataset, array in zip(self._datasets, arrays, strict=True):
            if array.size:
                dataset[start : start + len(array)] = array
        self._disk.check()

    def finish(self) -> None:
        super().finish()
        self._disk.check()


class _PatientFile(io.FileIO):
    """A file for HDF5's library, which crashes the process some time after a write of it failed, as on a full disk.

    Failures are kept from it and told to the writer instead, who throws the file away.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "w+")
        self._error: OSError | None = None

    def check(self) -> None:
        """Raises what went wrong so far."""
        if self._error is not None:
            raise self._error

    def truncate(self, size: int | None = None) -> int:
        try:
            return super().truncate(size)
        except OSError as error:
            self._error = self._error or error
            return size or 0

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer) or 0
        # Beyond the end are bytes that a failed write would have put there.
        memoryview(buffer).cast("B")[count:] = bytes(len(buffer) - count)
        return len(buffer)

    def write(self, content: Any) -> int:
        view = left = memoryview(content).cast("B")
        try:
            while left.nbytes:
                left = left[super().write(left) :]
        except OSError as error:
            self._error = self._error or error
        return view.nbytes


class _ParquetWriter(Writer):
    """A column for each field, in row groups of one block; arrays are lists of a fixed size."""

    def open(self, part: Path, num_durable: int) -> int:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError:
            raise MissingDependency(f"Parquet files need pyarrow: {how_to_install('pyarrow')}.") from None
        columns = []
        for field in self._target.fields:
            kind = pyarrow.string() if self._target.is_named(field) else pyarrow.from_numpy_dtype(field.dtype)
            for size in reversed(field.shape):
                kind = pyarrow.list_(kind, size)
            columns.append(pyarrow.field(field.name, kind, nullable=False))
        # As bytes: names that aren't UTF-8 are otherwise refused.
        file = pyarrow.OSFile(os.fsencode(part), "wb")
        self._layers.append(file)
        self._files.append(open(part, "r+b", buffering=0))  # noqa: SIM115 - closed by `close`
        self._writer = parquet.ParquetWriter(
            file,
            pyarrow.schema(columns),
            compression=self._target.compression or "none",
            # Numbers that hardly repeat gain nothing from a dictionary, and cost one.
            use_dictionary=False,
        )
        self._layers.insert(0, self._writer)
        return 0

    def write(self, start: int, arrays: Sequence[Array]) -> None:
        import pyarrow

        columns = []
        for field, array in zip(self._target.fields, arrays, strict=True):
            column = pyarrow.array(array.reshape(-1))
            if self._target.is_named(field):
                # Names stay names: whoever reads the table numbers them again, in the same order.
                column = pyarrow.array(self._target.classes, pyarrow.string()).take(column)
            for size in reversed(field.shape):
                column = pyarrow.FixedSizeListArray.from_arrays(column, size)
            columns.append(column)
        table = pyarrow.Table.from_arrays(columns, schema=self._writer.schema)
        self._writer.write_table(table, row_group_size=self._target.block_samples)


def _write_all(file: IO[bytes], content: memoryview) -> None:
    while content.nbytes:
        written = file.write(content)
        content = content[written:]


def sync_and_drop(descriptor: int) -> None:
    """Forces what was written to disk, after which the kernel needn't keep its pages."""
    getattr(os, "fdatasync", os.fsync)(descriptor)
    drop_pages(descriptor)
