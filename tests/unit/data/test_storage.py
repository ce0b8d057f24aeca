from pathlib import Path

import numpy as np
import pytest

from memfit.data.source import Field
from memfit.data.storage import storage_of

X = Field("x", np.dtype("f4"), (64, 64))
VALUES = np.zeros((300, 64, 64), "f4")


def test_npy(tmp_path):
    np.save(tmp_path / "x.npy", VALUES)

    assert storage_of([tmp_path / "x.npy"], [X]).lines == (".npy: samples one after the other, without compression",)


def test_npy_in_fortran_order(tmp_path):
    np.save(tmp_path / "x.npy", np.asfortranarray(VALUES))

    assert "each sample scattered over the file" in storage_of([tmp_path / "x.npy"], [X]).lines[0]


def test_members_of_an_archive_are_told_apart(tmp_path):
    np.savez(tmp_path / "x.npz", x=VALUES)
    np.savez_compressed(tmp_path / "packed.npz", x=VALUES)

    assert storage_of([tmp_path / "x.npz"], [X]).lines == (
        "x: a member of the archive, without compression, read in place",
    )
    assert storage_of([tmp_path / "packed.npz"], [X]).lines == (
        "x: a compressed member of the archive, 0% of its size",
    )


@pytest.mark.parametrize(
    ("options", "line", "warnings"),
    [
        ({}, "x: in one piece, without compression", []),
        ({"chunks": (16, 64, 64)}, "x: chunks of [16, 64, 64], 256.0 KiB, no compression", []),
        (
            {"chunks": (16, 64, 64), "compression": "gzip"},
            "x: chunks of [16, 64, 64], 256.0 KiB, compressed with gzip to 0%",
            [],
        ),
        ({"chunks": (16, 64, 64), "fletcher32": True}, "x: chunks of [16, 64, 64], 256.0 KiB, other filters", []),
        ({"chunks": (300, 64, 64)}, "x: chunks of [300, 64, 64], 4.69 MiB, no compression", ["large for shuffling"]),
        ({"chunks": (30, 16, 64)}, "x: chunks of [30, 16, 64], 120.0 KiB, no compression", ["lies in 4 chunks"]),
    ],
)
def test_chunks_of_hdf5(tmp_path, options, line, warnings):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=VALUES, **options)

    found = storage_of([tmp_path / "x.h5"], [X])

    assert found.lines == (line,)
    assert len(found.warnings) == len(warnings)
    for warning, expected in zip(found.warnings, warnings, strict=True):
        assert expected in warning


@pytest.mark.parametrize(("size", "is_warned"), [(1000, False), (10**6, True)])
def test_row_groups_of_parquet(tmp_path, size, is_warned):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    values = np.random.default_rng(0).standard_normal(10**6)
    parquet.write_table(pyarrow.table({"a": values}), tmp_path / "x.parquet", row_group_size=size, compression="snappy")

    found = storage_of([tmp_path / "x.parquet"], [Field("features", np.dtype("f8"), (1,))])

    assert " of up to " in found.lines[0]
    assert found.lines[0].endswith(f"{size} rows in the first; snappy")
    assert [("large for shuffling" in warning) for warning in found.warnings] == [True] * is_warned


def test_text_is_converted_once(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMFIT_SPOOL", "there")
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")

    found = storage_of([tmp_path / "x.csv", tmp_path / "x.csv"], [])

    assert found.is_text
    assert found.lines == (
        "text, one line a sample; converted once to Arrow in 'there', and read from there "
        "(2 files; the first is described)",
    )


def test_nothing_is_said_of_what_can_not_be_looked_at(tmp_path):
    (tmp_path / "x.h5").write_bytes(b"no HDF5")
    (tmp_path / "x.npz").write_bytes(b"no archive")

    for path in (tmp_path / "x.h5", tmp_path / "x.npz", tmp_path / "nothing", tmp_path, Path("s3:/x")):
        assert storage_of([path], [X]).lines == ()
