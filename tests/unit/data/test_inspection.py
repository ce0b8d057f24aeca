import json
import os

import numpy as np
import pytest

from memfit.core.errors import BadFile, BadInput
from memfit.core.units import MIB
from memfit.data import inspection
from memfit.data.inspection import inspect_data
from memfit.data.sources.opening import open_source

VALUES = np.random.default_rng(0).standard_normal((3000, 100))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_file_is_described(folder):
    np.save("x.npy", VALUES)

    found = inspect_data("x.npy")

    assert (found.name, found.num_samples) == ("x.npy", 3000)
    assert found.loaded_bytes == VALUES.nbytes
    assert found.disk_bytes == VALUES.nbytes + 128
    assert found.savings == {"float32": VALUES.nbytes // 2, "float16": VALUES.nbytes * 3 // 4}
    (field,) = found.fields
    assert (field.name, field.dtype, field.shape) == ("x", "float64", (100,))
    assert found.warnings == (
        "stored as float64, twice what training in float32 uses: every epoch reads twice the bytes. "
        "`memfit data convert --dtype float32` halves the file and measures what that does to the numbers.",
    )
    data = json.loads(json.dumps(found.to_json()))
    assert data["origins"]["host_bytes"] == "measured"
    assert data["streaming"]["memory_bytes"] == 512 * MIB


def test_the_first_look_is_at_a_sample_of_the_values(folder):
    values = np.tile(VALUES, (3, 1))
    values[0, 0], values[-1, 0], values[-1, 1] = np.nan, np.inf, 99.0
    np.save("x.npy", values)

    seen = inspect_data("x.npy").fields[0].seen

    # 4 MiB of 7.2 MB.
    assert seen.num_values == 16 * 327 * 100
    assert (seen.num_nan, seen.num_infinite, seen.maximum) == (1, 1, 99.0)


def test_labels_and_narrow_types_save_nothing(folder):
    np.save("x.npy", VALUES.astype("f4"))
    np.save("y.npy", np.arange(3000))

    found = inspect_data(("x.npy", "y.npy"))

    assert found.savings == {"float16": 3000 * 100 * 2}
    assert [(field.name, field.is_label) for field in found.fields] == [("x", False), ("y", True)]
    assert found.fields[1].seen.maximum == 2999
    assert found.warnings == ()


def test_how_it_streams_follows_from_the_budget(folder):
    np.save("x.npy", VALUES.astype("f4"))

    whole = inspect_data("x.npy", memory="64MiB").streaming
    parts = inspect_data("x.npy", memory="1MiB", batch_size=8).streaming

    assert whole.neighbours_together == whole.neighbours_at_best
    assert parts.neighbours_together > 2 * parts.neighbours_at_best > 0
    assert whole.blocks_per_window == whole.num_blocks
    assert parts.window_bytes < MIB


def test_few_blocks_are_warned_of(folder):
    np.save("x.npy", np.zeros((100, 10_000), "f4"))

    (warning,) = inspect_data("x.npy", memory="1MiB", batch_size=2).warnings

    assert "of samples are followed by one of the same block, against" in warning
    assert warning.endswith("in a full shuffle. More memory helps.")
    # All of it in one window is a full shuffle, however few blocks it has.
    assert inspect_data("x.npy", memory="64MiB").warnings == ()


def test_all_blocks_in_one_window_are_no_reason_to_warn(folder):
    """20,000 samples divided by 20,000 / 7 samples a block is a hair less than 7 blocks."""
    rows = "".join(f"{row},{row * 0.5},{row % 7},{row * 3.0}\n" for row in range(20_000))
    (folder / "x.csv").write_text("a,b,c,price\n" + rows)

    found = inspect_data("x.csv", labels="price")

    assert found.streaming.num_blocks == 7
    assert found.streaming.blocks_per_window == 7
    assert found.warnings == ()


def test_few_large_chunks_are_warned_of(folder):
    h5py = pytest.importorskip("h5py")
    with h5py.File("x.h5", "w") as file:
        file.create_dataset("x", data=VALUES.astype("f4"), chunks=(100, 100))

    (warning,) = inspect_data("x.h5", memory="4MiB", batch_size=8).warnings

    assert "smaller chunks: `memfit data convert --chunk 256KiB`" in warning


def test_a_budget_that_is_too_small_is_a_warning(folder):
    np.save("x.npy", VALUES)

    found = inspect_data("x.npy", memory="10KiB", batch_size=512)

    assert found.streaming is None
    assert "is too little for batches of 512 samples" in found.warnings[0]


def test_what_is_unpacked_first_is_warned_of(folder):
    np.savez_compressed("x.npz", x=VALUES)
    np.save("fortran.npy", np.asfortranarray(VALUES))

    for path, reason in (("x.npz", "compressed"), ("fortran.npy", "Fortran order")):
        found = inspect_data(path)
        assert found.streaming.is_unpacked_first
        assert reason in found.warnings[0]
        assert "unpacked to a scratch folder (2.29 MiB) when it is streamed for the first time" in found.warnings[0]
        assert found.fields[0].seen.num_values > 0


def test_images_are_described(folder):
    image = pytest.importorskip("PIL.Image")
    for name in ("cat", "dog"):
        os.makedirs(f"images/{name}")
        for number in range(3):
            image.fromarray(np.full((8, 8 + number, 3), number, np.uint8)).save(f"images/{name}/{number}.png")

    found = inspect_data("images")

    os.makedirs("images/empty")
    assert "class folders without images: 'empty'" in inspect_data("images").warnings
    assert found.classes == ("cat", "dog")
    assert found.fields[0].is_ragged
    assert found.loaded_bytes is None
    assert any("6 files of" in warning and "resize them to one shape" in warning for warning in found.warnings)


def test_text_labels_have_no_values(folder):
    np.save("names.npy", np.array(["a", "b"] * 50))
    np.save("x.npy", VALUES[:100])

    found = inspect_data({"x": "x.npy"})

    assert found.fields[0].seen is not None
    assert inspection.seen([]) is None
    assert inspection.seen([np.array([np.nan])]).minimum is None


@pytest.mark.parametrize("host", [None, 10**6])
def test_whose_limit_it_is(folder, monkeypatch, host):
    np.save("x.npy", VALUES)
    monkeypatch.setattr(inspection, "host_memory_bytes", lambda: host)
    monkeypatch.setattr(inspection, "cgroup_limit_bytes", lambda: host)

    found = inspect_data("x.npy")

    assert (found.host_bytes, found.is_limited) == (host, host is not None)


def test_bad_input_is_refused(folder):
    with pytest.raises(BadFile, match=r"there is no 'x.npy'"):
        inspect_data("x.npy")
    np.save("x.npy", VALUES)
    with pytest.raises(BadInput, match=r"batch_size must be at least 1, but 0 was given"):
        inspect_data("x.npy", batch_size=0)
    with pytest.raises(BadInput, match=r"is not a size"):
        inspect_data("x.npy", memory="much")
    np.save("objects.npy", np.array([{}, 3], dtype=object), allow_pickle=True)
    with pytest.raises(BadFile, match=r"pickle"):
        inspect_data("objects.npy")


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_columns_that_cannot_be_features_are_left_out_and_named(folder, kind):
    if kind == "csv":
        (folder / "t.csv").write_text("a,name,b,kind\n1,x,4,dog\n2,y,5,cat\n")
    else:
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        table = {"a": [1.0, 2.0], "name": ["x", "y"], "b": [4.0, 5.0], "kind": ["dog", "cat"]}
        parquet.write_table(pyarrow.table(table), "t.parquet")

    found = inspect_data(f"t.{kind}")

    assert [(field.name, field.shape) for field in found.fields] == [("features", (2,))]
    assert "left out here: 'name', 'kind' of " in found.warnings[0]
    assert "are text, which can't be features" in found.warnings[0]
    assert "or use as labels with --labels (labels=). Looked at: 'a', 'b'." in found.warnings[0]
    assert "'name' of" in inspect_data(f"t.{kind}", labels="kind").warnings[0]
    assert inspect_data(f"t.{kind}", labels="kind").classes == ("cat", "dog")


def test_columns_that_were_asked_for_are_not_left_out(folder):
    (folder / "t.csv").write_text("a,kind\n1,dog\n2,cat\n")
    (folder / "texts.csv").write_text("kind\ndog\ncat\n")
    np.save("x.npy", VALUES[:2])

    for source, options in (
        ("t.csv", {"columns": ["a", "kind"]}),
        ("texts.csv", {}),
        (("x.npy", "t.csv"), {}),
        ("x.npy", {"labels": "t.csv"}),
        ({"x": "t.csv"}, {}),
    ):
        with pytest.raises(BadInput, match=r"'kind' of .* is text"):
            inspect_data(source, **options)


ZEROS = np.zeros((300, 64, 64), "f4")


def test_npy(tmp_path):
    np.save(tmp_path / "x.npy", ZEROS)

    assert open_source(tmp_path / "x.npy").storage().lines == (
        ".npy: samples one after the other, without compression",
    )


def test_npy_in_fortran_order(tmp_path):
    np.save(tmp_path / "x.npy", np.asfortranarray(ZEROS))

    assert "each sample scattered over the file" in open_source(tmp_path / "x.npy").storage().lines[0]


def test_all_files_of_a_pair_are_described(tmp_path):
    np.save(tmp_path / "x.npy", ZEROS)
    np.savez(tmp_path / "y.npz", y=ZEROS[:, 0, 0])

    assert open_source({"a": tmp_path / "x.npy", "b": tmp_path / "y.npz"}, labels="b").storage().lines == (
        ".npy: samples one after the other, without compression",
        "y: a member of the archive, without compression, read in place",
    )


def test_members_of_an_archive_are_told_apart(tmp_path):
    np.savez(tmp_path / "x.npz", x=ZEROS)
    np.savez_compressed(tmp_path / "packed.npz", x=ZEROS)

    assert open_source(tmp_path / "x.npz").storage().lines == (
        "x: a member of the archive, without compression, read in place",
    )
    assert open_source(tmp_path / "packed.npz").storage().lines == (
        "x: a member of the archive, compressed to 0% of its size",
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
        file.create_dataset("x", data=ZEROS, **options)

    found = open_source(tmp_path / "x.h5").storage()

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

    found = open_source(tmp_path / "x.parquet").storage()

    assert " of up to " in found.lines[0]
    assert found.lines[0].endswith(f"{size} rows in the first; snappy")
    assert [("large for shuffling" in warning) for warning in found.warnings] == [True] * is_warned


def test_text_is_converted_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEMFIT_SPOOL", "there")
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")

    found = open_source([tmp_path / "x.csv", tmp_path / "x.csv"]).storage()

    assert found.is_text
    assert found.lines == (
        "text, one line a sample; converted once to Arrow in 'there', and read from there "
        "(2 files; the first is described)",
    )
