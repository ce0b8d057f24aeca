"""Data for the benchmarks of streams, and processes that read it under a limit of memory.

Files are made by blocks, so that making them needs no more memory than reading them. A reader runs in a process of its
own inside a control group (version 1) with a limit of memory, and the pages of its files are dropped before: what one
reader left in the page cache would make the next one fast.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy_format

from benchmarks.reporting import ROOT
from memfit.core.units import MIB

GROUPS = Path("/sys/fs/cgroup/memory")
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
# What readers have in the comparisons of speed, in decimal megabytes as containers are usually sized.
LIMIT_BYTES = 600 * 10**6
# Samples made at a time.
_BLOCK_BYTES = 8 * MIB

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Table:
    """The numbers of a file: rows that all differ, and a label for each.

    Attributes:
        num_rows: samples.
        num_columns: numbers of a sample.
        dtype: of the numbers.
    """

    num_rows: int
    num_columns: int
    dtype: str = "float32"

    @property
    def row_bytes(self) -> int:
        """Bytes of a sample."""
        return self.num_columns * np.dtype(self.dtype).itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of all samples."""
        return self.num_rows * self.row_bytes

    def blocks(self) -> Iterator[tuple[Array, Array]]:
        """Rows and labels, in order: a row's first number is its own number, as far as the type can tell."""
        generator = np.random.default_rng(0)
        rows = max(1, _BLOCK_BYTES // self.row_bytes)
        kind = np.dtype(self.dtype)
        for start in range(0, self.num_rows, rows):
            count = min(rows, self.num_rows - start)
            if kind.kind == "f":
                # Steps of 1/64, as measured values have, so that compression finds something to do.
                steps = generator.standard_normal((count, self.num_columns), dtype=np.float32) * 64
                block = (np.rint(steps, out=steps) / 64).astype(kind, copy=False)
            else:
                block = generator.integers(0, 200, (count, self.num_columns), dtype=kind)
            block[:, 0] = np.arange(start, start + count).astype(kind)
            yield block, np.arange(start, start + count, dtype=np.int64)


def table_of(num_bytes: int, row_bytes: int, dtype: str = "float32") -> Table:
    """A table of about so many bytes."""
    columns = max(1, row_bytes // np.dtype(dtype).itemsize)
    return Table(max(1, num_bytes // row_bytes), columns, dtype)


def write_npy(path: Path, table: Table) -> Path:
    """A .npy file; on disk when this returns."""
    with path.open("wb") as file:
        _write_npy(file, table)
        _force(file)
    return path


def _write_npy(file: Any, table: Table) -> None:
    header = npy_format.header_data_from_array_1_0(np.empty((0, table.num_columns), table.dtype))
    header["shape"] = (table.num_rows, table.num_columns)
    npy_format.write_array_header_1_0(file, header)
    for block, _ in table.blocks():
        file.write(block.data)


def write_npz(path: Path, table: Table, *, compressed: bool) -> Path:
    """A .npz file with one array "x"."""
    import zipfile

    kind = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with (
        zipfile.ZipFile(path, "w", kind, compresslevel=1 if compressed else None) as archive,
        archive.open("x.npy", "w", force_zip64=True) as file,
    ):
        _write_npy(file, table)
    _flush(path)
    return path


def write_hdf5(path: Path, table: Table, *, chunk_rows: int, compression: str | None = "gzip") -> Path:
    """An HDF5 file with chunked datasets "x" and "y"."""
    import h5py

    with h5py.File(path, "w") as file:
        options: dict[str, Any] = {"compression": compression}
        if compression == "gzip":
            options["compression_opts"] = 1
        shape = (table.num_rows, table.num_columns)
        x = file.create_dataset("x", shape, table.dtype, chunks=(chunk_rows, table.num_columns), **options)
        y = file.create_dataset("y", (table.num_rows,), "int64", chunks=(min(table.num_rows, max(chunk_rows, 4096)),))
        start = 0
        # Whole chunks at a time: a chunk that is written in two parts is compressed twice.
        for block, labels in _regrouped(table, chunk_rows):
            x[start : start + len(block)] = block
            y[start : start + len(block)] = labels
            start += len(block)
    _flush(path)
    return path


def write_parquet(path: Path, table: Table, *, group_rows: int) -> Path:
    """A Parquet file with a column "x" of vectors and a column "y", in row groups."""
    import pyarrow.parquet as parquet

    schema = _arrow_schema(table)
    with parquet.ParquetWriter(path, schema, compression="snappy", use_dictionary=False) as writer:
        for block, labels in _regrouped(table, group_rows):
            writer.write_table(_arrow_table(block, labels, schema), row_group_size=group_rows)
    _flush(path)
    return path


def write_arrow(path: Path, table: Table, *, group_rows: int) -> Path:
    """An Arrow IPC file with a column "x" of vectors and a column "y", in record batches."""
    import pyarrow

    schema = _arrow_schema(table)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, schema) as writer:
        for block, labels in _regrouped(table, group_rows):
            writer.write_table(_arrow_table(block, labels, schema), max_chunksize=group_rows)
    _flush(path)
    return path


def write_csv(path: Path, table: Table) -> Path:
    """A CSV file with columns x0, x1, ... and a last column y."""
    import pyarrow
    import pyarrow.csv

    names = [*(f"x{column}" for column in range(table.num_columns)), "y"]
    with path.open("wb") as file:
        for number, (block, labels) in enumerate(table.blocks()):
            columns = [*(pyarrow.array(np.ascontiguousarray(block[:, i])) for i in range(table.num_columns)), labels]
            options = pyarrow.csv.WriteOptions(include_header=number == 0)
            pyarrow.csv.write_csv(pyarrow.table(columns, names=names), file, options)
        _force(file)
    return path


def write_images(folder: Path, num_images: int, *, side: int, num_classes: int = 10) -> Path:
    """A folder of JPEG images in one folder a class: noise over a gradient, so that a file is a tenth of its pixels."""
    from PIL import Image

    generator = np.random.default_rng(0)
    ramp = np.linspace(0, 200, side, dtype=np.float32)
    base = np.stack([ramp[:, None] + 0 * ramp, ramp + 0 * ramp[:, None], ramp[::-1] + 0 * ramp[:, None]], axis=-1)
    for number in range(num_images):
        place = folder / f"class{number % num_classes}"
        place.mkdir(parents=True, exist_ok=True)
        noise = generator.integers(0, 40, (side, side, 1), dtype=np.int16)
        Image.fromarray((base + noise).astype(np.uint8)).save(place / f"{number:06d}.jpg", quality=85)
    return folder


def _regrouped(table: Table, rows: int) -> Iterator[tuple[Array, Array]]:
    """The blocks of a table, cut so that each is a multiple of `rows`, except the last."""
    kept: list[tuple[Array, Array]] = []
    num_kept = 0
    for pair in table.blocks():
        kept.append(pair)
        num_kept += len(pair[0])
        if num_kept < rows:
            continue
        block, labels = (np.concatenate(parts) for parts in zip(*kept, strict=True))
        whole = num_kept // rows * rows
        yield block[:whole], labels[:whole]
        kept, num_kept = [(block[whole:], labels[whole:])], num_kept - whole
    if num_kept:
        block, labels = (np.concatenate(parts) for parts in zip(*kept, strict=True))
        yield block, labels


def _arrow_schema(table: Table) -> Any:
    import pyarrow

    kind = pyarrow.from_numpy_dtype(np.dtype(table.dtype))
    return pyarrow.schema([("x", pyarrow.list_(kind, table.num_columns)), ("y", pyarrow.int64())])


def _arrow_table(block: Array, labels: Array, schema: Any) -> Any:
    import pyarrow

    x = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(block.reshape(-1)), block.shape[1])
    return pyarrow.table([x, pyarrow.array(labels)], schema=schema)


def _force(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def scratch(folder: str | None) -> Iterator[Path]:
    """A new folder for data, in `folder` or where temporary files go; removed afterwards, with what was unpacked."""
    place = Path(tempfile.mkdtemp(prefix="memfit-benchmark-", dir=folder))
    before = os.environ.get("MEMFIT_SPOOL")
    os.environ["MEMFIT_SPOOL"] = str(place / "spool")
    try:
        yield place
    finally:
        os.environ.pop("MEMFIT_SPOOL")
        if before is not None:
            os.environ["MEMFIT_SPOOL"] = before
        shutil.rmtree(place, ignore_errors=True)


def forget(paths: Iterable[Path], *, drop_caches: bool = False) -> None:
    """Has the kernel drop the pages of these files, and of all that are in folders among them.

    Args:
        paths: files and folders.
        drop_caches: drop those of all files of the machine instead, which needs the right to do so.
    """
    if drop_caches:
        os.sync()
        DROP_CACHES.write_text("1", encoding="ascii")
        return
    for path in paths:
        for file in [path] if path.is_file() else [found for found in path.rglob("*") if found.is_file()]:
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def how_cold(drop_caches: bool) -> str:
    """How the page cache was emptied, as a sentence."""
    if drop_caches:
        return "Before each run the page cache of the machine is emptied (/proc/sys/vm/drop_caches)."
    can = "could have been" if os.access(DROP_CACHES, os.W_OK) else "can't be"
    return (
        "Before each run the pages of its files are dropped (posix_fadvise DONTNEED); /proc/sys/vm/drop_caches "
        f"{can} written to here and wasn't used."
    )


@dataclass(frozen=True, slots=True)
class Finished:
    """A process that ran in a group.

    Attributes:
        code: its exit code; -9 where the kernel killed it.
        answer: what its last line of output says, as JSON; None where it has none.
        errors: the end of what it wrote to standard error.
        seconds: that it took.
        most_bytes: greatest charge of the group, page cache included; None without a group.
    """

    code: int
    answer: Any
    errors: str
    seconds: float
    most_bytes: int | None

    @property
    def reason(self) -> str:
        """Why it has no answer, in a few words."""
        if self.code == -9:
            return "killed"
        last = self.errors.strip().splitlines()[-1:] or ["no output"]
        return f"failed: {last[0][:160]}"


@contextlib.contextmanager
def group(limit_bytes: int | None) -> Iterator[Path | None]:
    """A control group with a limit of memory; None for no limit, or where groups can't be made."""
    if limit_bytes is None:
        yield None
        return
    path = GROUPS / f"memfit-benchmark-{uuid.uuid4().hex[:8]}"
    path.mkdir()
    try:
        (path / "memory.limit_in_bytes").write_text(str(limit_bytes), encoding="ascii")
        yield path
    finally:
        _remove(path)


def _remove(path: Path) -> None:
    # Processes that were just killed are in the group for a moment longer.
    for _ in range(100):
        with contextlib.suppress(OSError):
            path.rmdir()
            return
        time.sleep(0.05)


def run_limited(
    command: Sequence[str],
    *,
    limit_bytes: int | None = LIMIT_BYTES,
    environment: dict[str, str] | None = None,
    timeout_seconds: float = 1800,
) -> Finished:
    """Runs a command to its end, in a group with this limit; all its processes are in the group."""
    with group(limit_bytes) as place:

        def enter() -> None:
            if place is not None:
                (place / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")

        started = time.monotonic()
        try:
            done = subprocess.run(
                list(command),
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
                timeout=timeout_seconds,
                preexec_fn=enter,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            )
            code, output, errors = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired as error:
            code, output, errors = 1, "", f"not through after {error.timeout:.0f} s"
        seconds = time.monotonic() - started
        most = None
        if place is not None:
            most = int((place / "memory.max_usage_in_bytes").read_text(encoding="ascii"))
        return Finished(code, _last_json(output), errors, seconds, most)


def python_command(module: str, *arguments: object) -> list[str]:
    """The command that runs a module of this package with the present interpreter."""
    return [sys.executable, "-m", module, *map(str, arguments)]


def _last_json(output: str) -> Any:
    for line in reversed(output.splitlines()):
        with contextlib.suppress(ValueError):
            return json.loads(line)
    return None
