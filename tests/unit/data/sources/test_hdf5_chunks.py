"""Chunks that are unpacked beside HDF5 hold what HDF5 says they hold."""

import threading
from pathlib import Path

import h5py
import numpy as np
import pytest

from memfit.data.sources.hdf5 import open_hdf5
from memfit.data.sources.hdf5_chunks import PackedChunks
from memfit.data.sources.hdf5_contents import describe


def packed_of(path: Path, name: str = "x") -> tuple[h5py.File, PackedChunks | None]:
    file = h5py.File(path, "r")
    return file, PackedChunks.of(describe(file[name], name, False, str(path)), file[name])


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64", "uint8", "int16"])
@pytest.mark.parametrize("shape", [(100,), (100, 3), (100, 4, 5)])
def test_unpacks_what_hdf5_packed(tmp_path, shuffle, dtype, shape):
    # GIVEN a dataset whose last chunk is a part of one
    values = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=(16, *shape[1:]), compression="gzip", shuffle=shuffle)
    file, packed = packed_of(tmp_path / "a.h5")
    assert packed is not None

    # WHEN runs of chunks are read, THEN they are what was stored
    for start, stop in ((0, 16), (32, 80), (96, 100), (0, 100)):
        out = np.empty((stop - start, *shape[1:]), dtype)
        assert packed.read(threading.RLock(), start, stop, out)
        np.testing.assert_array_equal(out, values[start:stop])
    file.close()


def test_leaves_to_hdf5_what_it_can_not_do(tmp_path):
    values = np.arange(64, dtype="float32").reshape(16, 4)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("plain", data=values, chunks=(4, 4))
        file.create_dataset("lzf", data=values, chunks=(4, 4), compression="lzf")
        file.create_dataset("checked", data=values, chunks=(4, 4), compression="gzip", fletcher32=True)
        file.create_dataset("divided", data=values, chunks=(4, 2), compression="gzip")
        file.create_dataset("swapped", data=values.astype(">f4"), chunks=(4, 4), compression="gzip")
        file.create_dataset("x", data=values, chunks=(4, 4), compression="gzip")
        file.create_dataset("empty", (16, 4), "float32", chunks=(4, 4), compression="gzip")
    for name in ("plain", "lzf", "checked", "divided"):
        file, packed = packed_of(tmp_path / "a.h5", name)
        assert packed is None, name
        file.close()
    file, packed = packed_of(tmp_path / "a.h5")
    assert packed is not None
    assert not packed.read(threading.RLock(), 2, 6, np.empty((4, 4), "float32"))
    assert not packed.read(threading.RLock(), 0, 6, np.empty((6, 4), "float32"))
    assert not packed.read(threading.RLock(), 0, 4, np.empty((4, 4), "float64"))
    _, never_written = packed_of(tmp_path / "a.h5", "empty")
    assert never_written is not None
    assert not never_written.read(threading.RLock(), 0, 4, np.empty((4, 4), "float32"))
    file.close()

    # Sources give the same, whoever unpacks.
    for name in ("plain", "lzf", "checked", "divided", "swapped", "x"):
        source = open_hdf5(tmp_path / "a.h5", columns=[name])
        out = np.empty((16, 4), source.fields[0].dtype)
        source.read(0, 16, [out])
        np.testing.assert_array_equal(out, values)
        source.close()
