import json
import sys
from pathlib import Path

import numpy as np
import pytest

from memfit.core.errors import BadInput, MissingDependency
from memfit.data.source import Field
from memfit.data.writing import file_names, header_of, kind_of, plan_target, writer_for

X = Field("x", np.dtype("f4"), (3, 2))
Y = Field("y", np.dtype("i8"), (), is_label=True)


def arrays(num_samples):
    generator = np.random.default_rng(0)
    return [generator.standard_normal((num_samples, 3, 2)).astype("f4"), np.arange(num_samples)]


def written(path, fields, data, **options):
    target = plan_target(path, fields, len(data[0]), **options)
    writer = writer_for(target)
    assert writer.open(path, 0) == 0
    for start in range(0, target.num_samples, target.block_samples):
        writer.write(start, [array[start : start + target.block_samples] for array in data])
        writer.sync()
    writer.finish()
    writer.close()
    return target


def test_a_file_is_the_one_that_numpy_writes(tmp_path):
    x, _ = arrays(100)

    written(tmp_path / "x.npy", (X,), [x], chunk_bytes=1000)
    np.save(tmp_path / "numpy.npy", x)

    assert (tmp_path / "x.npy").read_bytes() == (tmp_path / "numpy.npy").read_bytes()


def test_a_folder_holds_a_file_for_each_field(tmp_path):
    data = arrays(50)

    written(tmp_path / "folder", (X, Y), data, chunk_bytes=500)

    assert np.array_equal(np.load(tmp_path / "folder" / "x.npy"), data[0])
    assert np.array_equal(np.load(tmp_path / "folder" / "y.npy"), data[1])


def test_writing_goes_on_after_what_is_durable(tmp_path):
    x, _ = arrays(100)
    target = plan_target(tmp_path / "x.npy", (X,), 100)
    first = writer_for(target)
    first.open(tmp_path / "x.npy", 0)
    first.write(0, [x[:60]])
    first.close()

    # GIVEN that only 40 of 60 samples are known to be on disk
    second = writer_for(target)
    assert second.open(tmp_path / "x.npy", 40) == 40
    assert (tmp_path / "x.npy").stat().st_size == 128 + 40 * 24
    second.write(40, [x[40:]])
    second.finish()
    second.close()

    assert np.array_equal(np.load(tmp_path / "x.npy"), x)


def test_a_file_that_is_shorter_than_it_should_be_is_begun_again(tmp_path):
    target = plan_target(tmp_path / "x.npy", (X,), 100)
    (tmp_path / "x.npy").write_bytes(b"short")

    writer = writer_for(target)

    assert writer.open(tmp_path / "x.npy", 40) == 0
    assert (tmp_path / "x.npy").read_bytes() == header_of(X, 100)
    writer.close()


@pytest.mark.parametrize("compression", [None, "gzip", "lzf"])
def test_hdf5_has_chunks_of_whole_samples(tmp_path, compression):
    h5py = pytest.importorskip("h5py")
    data = arrays(100)

    target = written(tmp_path / "x.h5", (X, Y), data, chunk_bytes=320, compression=compression)

    assert target.block_samples == 10
    with h5py.File(tmp_path / "x.h5") as file:
        assert np.array_equal(file["x"][...], data[0])
        assert np.array_equal(file["y"][...], data[1])
        assert file["x"].chunks == (10, 3, 2)
        assert file["x"].compression == compression


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_parquet_has_row_groups_of_one_block(tmp_path, compression):
    parquet = pytest.importorskip("pyarrow.parquet")
    data = arrays(25)

    written(tmp_path / "x.parquet", (X, Y), data, chunk_bytes=320, compression=compression)

    with parquet.ParquetFile(tmp_path / "x.parquet") as file:
        assert [file.metadata.row_group(index).num_rows for index in range(3)] == [10, 10, 5]
        table = file.read()
    assert np.array_equal(np.array(table["x"].to_pylist(), "f4"), data[0])
    assert table["y"].to_pylist() == data[1].tolist()


def test_names_of_classes_are_kept(tmp_path):
    h5py = pytest.importorskip("h5py")
    parquet = pytest.importorskip("pyarrow.parquet")
    data = [arrays(4)[0], np.array([0, 2, 1, 0])]
    names = ("cat", "dog", "emu")

    for name in ("folder", "x.h5", "x.parquet"):
        written(tmp_path / name, (X, Y), data, classes=names)

    assert (tmp_path / "folder" / "classes.json").read_text() == '["cat", "dog", "emu"]'
    with h5py.File(tmp_path / "x.h5") as file:
        assert list(file["y"].attrs["classes"]) == list(names)
    assert parquet.read_table(tmp_path / "x.parquet")["y"].to_pylist() == ["cat", "emu", "dog", "cat"]


def test_many_classes_are_kept(tmp_path):
    h5py = pytest.importorskip("h5py")
    names = tuple(f"class {number}" for number in range(5000))

    written(tmp_path / "x.h5", (X, Y), [arrays(4)[0], np.array([0, 2, 1, 0])], classes=names)

    with h5py.File(tmp_path / "x.h5") as file:
        assert tuple(file["y"].attrs["classes"]) == names


def test_what_is_a_label_is_kept(tmp_path):
    h5py = pytest.importorskip("h5py")
    for name in ("folder", "x.h5"):
        written(tmp_path / name, (X, Y), arrays(4))

    with h5py.File(tmp_path / "x.h5") as file:
        assert (bool(file["x"].attrs["memfit_label"]), bool(file["y"].attrs["memfit_label"])) == (False, True)
    said = json.loads((tmp_path / "folder" / "memfit-fields.json").read_text())
    assert said["fields"] == [
        {"file": "x.npy", "name": "x", "is_label": False},
        {"file": "y.npy", "name": "y", "is_label": True},
    ]
    assert not (tmp_path / "folder" / "classes.json").exists()


@pytest.mark.parametrize(("name", "module"), [("x.h5", "h5py"), ("x.parquet", "pyarrow")])
def test_a_missing_library_is_named(tmp_path, monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    writer = writer_for(plan_target(tmp_path / name, (Y,), 3))

    with pytest.raises(MissingDependency, match=rf"{module}: `pip install {module}`"):
        writer.open(tmp_path / name, 0)


def test_a_writer_can_be_closed_before_it_is_complete(tmp_path):
    for name in ("x.npy", "x.h5", "x.parquet"):
        writer = writer_for(plan_target(tmp_path / name, (Y,), 3))
        writer.open(tmp_path / name, 0)
        writer.close()
        writer.close()


@pytest.mark.parametrize(
    ("path", "kind"),
    [("a.npy", "npy"), ("a.H5", "hdf5"), ("a.hdf5", "hdf5"), ("a.parquet", "parquet"), ("a", "folder")],
)
def test_the_ending_tells_the_format(path, kind):
    assert kind_of(Path(path)) == kind


def test_a_folder_that_is_there_is_a_folder(tmp_path):
    (tmp_path / "a.b").mkdir()

    assert kind_of(tmp_path / "a.b") == "folder"


@pytest.mark.parametrize("name", ["x.csv", "x.npz", "x.pkl", "x.zip"])
def test_other_formats_are_refused(name):
    with pytest.raises(BadInput, match=r"Name a file that ends in \.npy, \.h5 or \.parquet"):
        kind_of(Path(name))


def test_several_fields_do_not_go_into_one_npy_file():
    with pytest.raises(BadInput, match=r"one .npy file holds one array, and the source has 2: x, y"):
        plan_target(Path("x.npy"), (X, Y), 3)


def test_compression_is_that_of_the_format():
    with pytest.raises(BadInput, match=r"compression 'zstd' is not for hdf5 files; for those there is gzip and lzf"):
        plan_target(Path("x.h5"), (X,), 3, compression="zstd")
    with pytest.raises(BadInput, match=r"is not for npy files; for those there is none"):
        plan_target(Path("x.npy"), (X,), 3, compression="gzip")


def test_types_that_a_format_lacks_are_refused():
    text = Field("name", np.dtype("U5"), ())

    with pytest.raises(BadInput, match=r"'name' is str160, which parquet files don't hold"):
        plan_target(Path("x.parquet"), (text,), 3)
    assert plan_target(Path("x.npy"), (text,), 3).kind == "npy"
    if np.dtype("g").itemsize > 8:
        with pytest.raises(BadInput, match=r"'long' is float\d+, which parquet files don't hold"):
            plan_target(Path("x.parquet"), (Field("long", np.dtype("g"), ()),), 3)


def test_chunks_are_bounded():
    with pytest.raises(BadInput, match=r"Give at most 1GiB"):
        plan_target(Path("x.npy"), (X,), 3, chunk_bytes=2**31)


def test_blocks_follow_what_is_read_where_none_shows_in_the_file():
    assert plan_target(Path("x.npy"), (X,), 10**9, read_bytes=48, chunk_bytes=4800).block_samples == 100
    assert plan_target(Path("x.h5"), (X,), 10**9, read_bytes=48, chunk_bytes=4800).block_samples == 200
    assert plan_target(Path("x.h5"), (X,), 10**9, chunk_bytes=1).block_samples == 1


def test_names_of_files_are_safe_and_differ():
    dtype = np.dtype("f4")
    fields = [Field(name, dtype, ()) for name in ("../a", "a b", "A_B", "", "x" * 300)]

    names = file_names(fields)

    assert names == ["_a.npy", "a_b.npy", "A_B_.npy", "field.npy", "x" * 100 + ".npy"]


def test_headers_of_long_types_are_of_the_second_version():
    many = Field("x", np.dtype([(f"column{number}", "f4") for number in range(5000)]), ())

    assert header_of(many, 3)[6:8] == b"\x02\x00"
