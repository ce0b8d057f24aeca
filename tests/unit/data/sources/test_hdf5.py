"""HDF5 files are read by chunks, within a cache of known size."""

import os
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memfit.core.errors import BadFile, BadInput, MissingDependency
from memfit.data.sources import hdf5
from memfit.data.sources.hdf5 import Handle, Hdf5Source
from memfit.data.sources.hdf5_contents import describe
from tests.sources import read

h5py = pytest.importorskip("h5py")

NUM_SAMPLES = 103
X = np.random.default_rng(0).standard_normal((NUM_SAMPLES, 6, 5)).astype(np.float32)
Y = np.arange(NUM_SAMPLES) % 7


def write(path: Path, **options: Any) -> str:
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=X, **options)
        file.create_dataset("labels", data=Y)
    return str(path)


LAYOUTS = {
    "contiguous": {},
    "chunked": {"chunks": (10, 6, 5)},
    "gzip": {"chunks": (10, 6, 5), "compression": "gzip", "shuffle": True},
    "lzf": {"chunks": (16, 6, 5), "compression": "lzf", "fletcher32": True},
    "cut": {"chunks": (10, 4, 2), "compression": "gzip"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reads_what_is_stored(tmp_path: Path, layout: str) -> None:
    source = Hdf5Source(write(tmp_path / "a.h5", **LAYOUTS[layout]))
    assert [(field.name, field.shape, field.is_label) for field in source.fields] == [
        ("images", (6, 5), False),
        ("labels", (), True),
    ]
    assert source.num_samples == NUM_SAMPLES
    for start, stop in [(0, NUM_SAMPLES), (0, 10), (7, 33), (100, 103), (5, 5)]:
        x, y = read(source, start, stop)
        np.testing.assert_array_equal(x, X[start:stop])
        np.testing.assert_array_equal(y, Y[start:stop])
        source.drop(start, stop)


def test_edges_are_those_of_the_chunks(tmp_path: Path) -> None:
    chunked = Hdf5Source(write(tmp_path / "a.h5", **LAYOUTS["cut"])).layout
    assert chunked.edges is not None
    assert chunked.edges.tolist() == [*range(0, NUM_SAMPLES, 10), NUM_SAMPLES]
    contiguous = Hdf5Source(write(tmp_path / "b.h5")).layout
    assert contiguous.edges is None
    assert 0 < contiguous.scratch_bytes < chunked.scratch_bytes


def test_converts_as_numpy_does(tmp_path: Path) -> None:
    # GIVEN values that an integer doesn't hold, of which HDF5 would make its largest, and more than one piece of them
    values = np.arange(300_000).reshape(30_000, 10)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = values.astype(">i4")
    source = Hdf5Source(tmp_path / "a.h5")
    assert source.fields[0].dtype == np.dtype("int32")
    # WHEN they are read as other types
    # THEN they wrap around as in NumPy
    np.testing.assert_array_equal(read(source, 3, 30_000, "uint8")[0], values[3:].astype(np.uint8))
    np.testing.assert_array_equal(read(source, 0, 30_000)[0], values)
    assert read(source, 0, 30, "float16")[0].dtype == np.float16


def test_booleans_and_enumerations(tmp_path: Path) -> None:
    kind = h5py.enum_dtype({"red": 0, "blue": 1}, basetype="i1")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.array([True, False, True])
        file.create_dataset("y", data=np.array([0, 1, 1]), dtype=kind)
    x, y = read(Hdf5Source(tmp_path / "a.h5"), 0, 3)
    assert x.tolist() == [True, False, True]
    assert y.tolist() == [0, 1, 1]
    assert y.dtype == np.int8


def test_each_chunk_is_unpacked_once_when_read_in_parts(tmp_path: Path) -> None:
    # GIVEN chunks that cut through samples, and their bytes damaged after the first read
    path = write(tmp_path / "a.h5", chunks=(50, 2, 2), compression="gzip")
    source = Hdf5Source(path)
    read(source, 0, 1)
    with h5py.File(path) as file:
        places = [(info.byte_offset, info.size) for info in chunk_infos(file["images"]) if info.chunk_offset[0] == 0]
    with open(path, "r+b") as file:
        for offset, size in places:
            file.seek(offset)
            file.write(bytes(size))
    # WHEN the rest of the block is read
    # THEN it comes from the cache
    np.testing.assert_array_equal(read(source, 1, 50)[0], X[1:50])


def chunk_infos(dataset: Any) -> list[Any]:
    return [dataset.id.get_chunk_info(number) for number in range(dataset.id.get_num_chunks())]


def test_pickled_and_closed_sources_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.h5", **LAYOUTS["gzip"])
    monkeypatch.chdir(tmp_path)
    source = Hdf5Source("a.h5")
    read(source, 0, 5)
    other = pickle.loads(pickle.dumps(source))
    monkeypatch.chdir("/")
    np.testing.assert_array_equal(read(other, 0, 5)[0], X[:5])
    source.close()
    source.close()
    np.testing.assert_array_equal(read(source, 0, 5)[0], X[:5])
    assert source.name == "a.h5"
    assert source.classes == ()
    assert source.fingerprint() == other.fingerprint()
    assert repr(source) == "Hdf5Source('a.h5')"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system can't fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_reads_after_a_fork(tmp_path: Path) -> None:
    # GIVEN an open file, and its lock held at the moment of the fork
    source = Hdf5Source(write(tmp_path / "a.h5", **LAYOUTS["gzip"]))
    read(source, 0, 5)
    with source._opened.get(source._open).lock:
        child = os.fork()
        if child == 0:
            # WHEN the child reads
            code = 1
            try:
                code = 0 if (read(source, 20, 40)[0] == X[20:40]).all() else 2
                source.close()
            finally:
                os._exit(code)
    # THEN it neither waits for ever nor disturbs the parent
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    np.testing.assert_array_equal(read(source, 50, 60)[0], X[50:60])


def test_closing_what_a_parent_opened_leaves_it_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Hdf5Source(write(tmp_path / "a.h5"))
    read(source, 0, 5)
    opened = source._opened.get(source._open)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    source.close()
    assert opened.file.id.valid
    opened.file.close()


def test_threads_read_at_once(tmp_path: Path) -> None:
    source = Hdf5Source(write(tmp_path / "a.h5", **LAYOUTS["cut"]))
    wrong: list[int] = []

    def work(seed: int) -> None:
        for start in np.random.default_rng(seed).integers(0, 90, 20).tolist():
            if (read(source, start, start + 13)[0] != X[start : start + 13]).any():
                wrong.append(start)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_damaged_chunk_is_named_with_its_offset(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", **LAYOUTS["lzf"])
    with h5py.File(path) as file:
        place = next(info for info in chunk_infos(file["images"]) if info.chunk_offset[0] == 32)
    with open(path, "r+b") as file:
        file.seek(place.byte_offset + 10)
        file.write(b"\xff" * 40)
    source = Hdf5Source(path)
    np.testing.assert_array_equal(read(source, 0, 32)[0], X[:32])
    with pytest.raises(BadFile) as raised:
        read(source, 20, 60)
    said = str(raised.value)
    assert f"dataset 'images' of {path!r} is damaged in the chunk that begins with sample 32" in said
    assert f"at offset {place.byte_offset} of the file" in said


@pytest.mark.parametrize("layout", ["contiguous", "gzip"])
def test_truncated_file(tmp_path: Path, layout: str) -> None:
    path = write(tmp_path / "a.h5", **LAYOUTS[layout])
    os.truncate(path, os.path.getsize(path) - 500)
    with pytest.raises(BadFile, match=r"a\.h5' is truncated: .*truncated file"):
        Hdf5Source(path)


def test_file_cut_off_while_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5")
    source = Hdf5Source(path)
    read(source, 0, 1)
    os.truncate(path, 4000)
    # HDF5 itself would give zeros.
    with pytest.raises(BadFile, match=r"has become shorter: it had \d+ bytes and now ends at offset 4000"):
        read(source, 50, 60)
    os.unlink(path)
    read(source, 0, 1)


def test_damage_without_chunks_is_named_with_its_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Hdf5Source(write(tmp_path / "a.h5"))

    def fail(*_: Any) -> None:
        raise OSError("input/output error")

    monkeypatch.setattr(hdf5.Handle, "read_stored", fail)
    with pytest.raises(BadFile, match=r"'images' of .* is damaged among samples 50 to 60, from offset \d+ of the file"):
        read(source, 50, 60)


def test_no_hdf5_file(tmp_path: Path) -> None:
    (tmp_path / "a.h5").write_bytes(b"something else" * 100)
    with pytest.raises(BadFile, match="is not an HDF5 file"):
        Hdf5Source(tmp_path / "a.h5")
    with pytest.raises(BadFile, match=r"none\.h5"):
        Hdf5Source(tmp_path / "none.h5")


def test_file_that_changes_after_it_was_opened(tmp_path: Path) -> None:
    source = Hdf5Source(write(tmp_path / "a.h5"))
    before = source.fingerprint()
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["images"] = X[:50]
        file["labels"] = Y[:50]
    assert source.fingerprint() != before
    with pytest.raises(
        BadFile, match=r"has changed since it was opened: dataset 'images' is now of shape \(50, 6, 5\)"
    ):
        read(source, 0, 5)


def test_names_of_classes(tmp_path: Path) -> None:
    path = str(tmp_path / "a.h5")
    with h5py.File(path, "w") as file:
        file["anything"] = np.zeros((2, 3))
        file["kind"] = np.array([1, 0])
        file["anything"].attrs["memfit_label"] = False
        file["kind"].attrs["memfit_label"] = True
        file["kind"].attrs["classes"] = ["cat", "dog"]

    source = Hdf5Source(path)

    assert [(field.name, field.is_label) for field in source.fields] == [("anything", False), ("kind", True)]
    assert source.classes == ("cat", "dog")
    assert pickle.loads(pickle.dumps(source)).classes == ("cat", "dog")
    assert Hdf5Source(path, columns=["anything"]).classes == ()


def test_lengths_must_agree(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["y"] = np.zeros((5, 2)), np.zeros(4)
    with pytest.raises(BadInput, match="differ in their number of samples: 'x' has 5, 'y' has 4"):
        Hdf5Source(tmp_path / "a.h5")


def test_pages_are_dropped_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.data.files._DROP_EVERY_BYTES", 2000)
    source = Hdf5Source(write(tmp_path / "a.h5", **LAYOUTS["gzip"]))
    dropped: list[tuple[int, int]] = []
    monkeypatch.setattr(type(source._file), "drop", lambda self, offset, size: dropped.append((offset, size)))
    source.drop(0, 10)
    assert dropped == []
    source.drop(10, 20)
    assert dropped == [(0, os.path.getsize(tmp_path / "a.h5"))]


def test_missing_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.h5")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MissingDependency, match=r"h5py is needed: `pip install h5py`"):
        Hdf5Source(path)


def test_reads_remote_files(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    content = Path(write(tmp_path / "a.h5", **LAYOUTS["gzip"])).read_bytes()
    fsspec.filesystem("memory").pipe_file("/datasets/a.h5", content)
    source = Hdf5Source("memory://datasets/a.h5")
    np.testing.assert_array_equal(read(source, 9, 31)[0], X[9:31])
    source.drop(0, 10)
    source.close()
    np.testing.assert_array_equal(read(pickle.loads(pickle.dumps(source)), 9, 31)[0], X[9:31])


def test_damaged_table_of_contents(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", **LAYOUTS["gzip"])
    content = bytearray(Path(path).read_bytes())
    place = content.index(b"TREE")
    content[place : place + 4] = b"EERT"
    Path(path).write_bytes(content)
    with pytest.raises(BadFile, match=r"a\.h5'"):
        read(Hdf5Source(path), 0, 10)


def test_very_many_chunks_are_merged_into_fewer_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN 50 chunks, and room for the edges of 20 blocks
    monkeypatch.setattr(hdf5, "_MOST_BLOCKS", 20)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.arange(99), chunks=(2,))
    edges = Hdf5Source(tmp_path / "a.h5").layout.edges
    # THEN each block is three chunks
    assert edges is not None
    assert edges.tolist() == [*range(0, 99, 6), 99]


def unpacked(path: Path, name: str, start: int, stop: int, out: Any) -> bool:
    with h5py.File(path, "r") as file:
        handle = Handle(file, describe(file[name], name, False, str(path)))
        return handle.unpack(threading.RLock(), start, stop, out)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64", "uint8", "int16"])
@pytest.mark.parametrize("shape", [(100,), (100, 3), (100, 4, 5)])
def test_unpacks_what_hdf5_packed(tmp_path, shuffle, dtype, shape):
    # GIVEN a dataset whose last chunk is a part of one
    values = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=(16, *shape[1:]), compression="gzip", shuffle=shuffle)

    # WHEN runs of chunks are read, THEN they are what was stored
    for start, stop in ((0, 16), (32, 80), (96, 100), (0, 100)):
        out = np.empty((stop - start, *shape[1:]), dtype)
        assert unpacked(tmp_path / "a.h5", "x", start, stop, out)
        np.testing.assert_array_equal(out, values[start:stop])


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
    for name in ("plain", "lzf", "checked", "divided", "swapped", "empty"):
        assert not unpacked(tmp_path / "a.h5", name, 0, 4, np.empty((4, 4), "float32")), name
    assert not unpacked(tmp_path / "a.h5", "x", 2, 6, np.empty((4, 4), "float32"))
    assert not unpacked(tmp_path / "a.h5", "x", 0, 6, np.empty((6, 4), "float32"))
    assert not unpacked(tmp_path / "a.h5", "x", 0, 4, np.empty((4, 4), "float64"))

    # Sources give the same, whoever unpacks.
    for name in ("plain", "lzf", "checked", "divided", "swapped", "x"):
        source = Hdf5Source(tmp_path / "a.h5", columns=[name])
        out = np.empty((16, 4), source.fields[0].dtype)
        source.read(0, 16, [out])
        np.testing.assert_array_equal(out, values)
        source.close()
