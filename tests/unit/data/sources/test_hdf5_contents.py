"""Datasets are found by their names, and those that can't be streamed are refused."""

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memfit
from memfit.core.errors import BadFile, BadInput, MissingDependency
from memfit.data.source import Field
from memfit.data.sources import hdf5_contents
from memfit.data.sources.hdf5 import Hdf5Source
from memfit.data.sources.hdf5_contents import Dataset, choose, describe, find

h5py = pytest.importorskip("h5py")


def made(path: Path, *names: str) -> Any:
    file = h5py.File(path / "a.h5", "w")
    for name in names:
        file[name] = np.zeros((3, 2))
    return file


@pytest.mark.parametrize(
    ("names", "columns", "labels", "expected"),
    [
        (["images", "labels", "other"], None, None, (["images"], ["labels"])),
        (["train/X", "train/y", "notes"], None, None, (["train/X"], ["train/y"])),
        (["image", "label", "other"], None, None, (["image"], ["label"])),
        (["Feature", "Target"], None, None, (["Feature"], ["Target"])),
        (["anything"], None, None, (["anything"], [])),
        (["a", "b", "c"], ["/b/", "a"], "/c", (["b", "a"], ["c"])),
        (["a", "b"], ["a", "b"], "b", (["a"], ["b"])),
        (["a", "b"], None, "b", (["a"], ["b"])),
        (["data", "b", "c"], None, "c", (["data"], ["c"])),
        (["a", "b"], ["a"], None, (["a"], [])),
    ],
)
def test_choice(tmp_path: Path, names: Any, columns: Any, labels: Any, expected: Any) -> None:
    with made(tmp_path, *names) as file:
        assert choose(file, columns, labels, "a.h5") == expected


@pytest.mark.parametrize(
    ("names", "columns", "labels", "said"),
    [
        (
            ["a", "b"],
            None,
            None,
            "Name them: --columns (columns=) for features, --labels (labels=) for labels. It has:\n  a  (3, 2)",
        ),
        (["train/x", "train/y", "test/x", "test/y"], None, None, "  test/x  (3, 2) float64"),
        (["a", "b", "c"], None, "c", "is ambiguous"),
        ([], None, None, "has no datasets"),
        (["a"], [], None, "is left for the features"),
        (["a"], [1], None, "1 is not a string"),
        ([f"d{number:02}" for number in range(60)], None, None, "  and 10 more"),
    ],
)
def test_no_choice(tmp_path: Path, names: Any, columns: Any, labels: Any, said: str) -> None:
    with made(tmp_path, *names) as file, pytest.raises(BadInput) as raised:
        choose(file, columns, labels, "a.h5")
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("columns", "labels", "expected"),
    [
        (None, None, (["other", "x"], ["kind"])),
        (None, "kind", (["other", "x"], ["kind"])),
        (None, "other", (["x"], ["other"])),
        (["x"], None, (["x"], [])),
    ],
)
def test_marks_say_what_is_a_label(tmp_path: Path, columns: Any, labels: Any, expected: Any) -> None:
    # GIVEN "x" and "y" are there as well, but "y" was added by someone else
    with made(tmp_path, "kind", "other", "x", "y") as file:
        for name in ("kind", "other", "x"):
            file[name].attrs["memfit_label"] = name == "kind"
        file["y"].attrs["memfit_label"] = "perhaps"

        assert choose(file, columns, labels, "a.h5") == expected


def test_names_of_classes_of_labels(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["y"] = np.array([1, 0])
        file["y"].attrs["classes"] = ["cat", "dog"]
        file["x"] = np.zeros(2)
        file["x"].attrs["classes"] = ["cat", "dog"]
        for name, value in (("bytes", np.array([b"cat"])), ("number", 3), ("twice", ["cat", "cat"])):
            file[name] = np.array([1, 0])
            file[name].attrs["classes"] = value

        assert describe(file["y"], "y", True, "a.h5").classes == ("cat", "dog")
        for name in ("x", "bytes", "number", "twice"):
            assert describe(file[name], name, True, "a.h5").classes == ()
        assert describe(file["y"], "y", False, "a.h5").classes == ()


def test_names_that_are_not_there(tmp_path: Path) -> None:
    with made(tmp_path, "train/images", "train/labels") as file:
        with pytest.raises(BadInput, match=r"no dataset 'train/image' \(did you mean 'train/images'"):
            find(file, "train/image", "a.h5")
        with pytest.raises(BadInput, match=r"'train' of 'a\.h5' is a group, not a dataset. It has:\n  train/images"):
            find(file, "train", "a.h5")
        with pytest.raises(BadInput, match="no dataset ''"):
            find(file, "", "a.h5")


@pytest.mark.parametrize(
    ("values", "dtype", "said"),
    [
        (["a", "b"], None, "'d' of 'a.h5' holds strings. Store them as class numbers"),
        (np.array([b"a", b"b"]), None, "holds strings"),
        ([np.arange(2), np.arange(3)], "vlen", "holds arrays of different lengths"),
        (np.zeros(2, [("u", "f4"), ("v", "i4")]), None, "is compound, with the fields 'u', 'v'"),
        (np.zeros(2, np.complex64), None, "holds complex64, which are not real numbers"),
        (5.0, None, "is a single value"),
        (None, "empty", "is empty"),
    ],
)
def test_datasets_that_cannot_be_streamed(tmp_path: Path, values: Any, dtype: Any, said: str) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        if dtype == "vlen":
            file.create_dataset("d", (2,), h5py.vlen_dtype(np.int32))
        elif dtype == "empty":
            file["d"] = h5py.Empty("f4")
        else:
            file["d"] = values
        with pytest.raises(BadInput) as raised:
            describe(file["d"], "d", False, "a.h5")
    assert said in str(raised.value)


def test_filter_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a dataset with a filter that h5py doesn't have
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_chunk((3, 2))
    settings.set_filter(32026, h5py.h5z.FLAG_OPTIONAL, ())
    tried: list[str] = []
    real = builtins.__import__

    def without_plugins(name: str, *rest: Any) -> Any:
        if name == "hdf5plugin":
            tried.append(name)
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_plugins)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        space = h5py.h5s.create_simple((3, 2))
        h5py.h5d.create(file.id, b"d", h5py.h5t.NATIVE_FLOAT, space, settings)
        # WHEN it is described
        # THEN the plugin is tried, and asked for
        with pytest.raises(MissingDependency, match=r"with blosc2 \(filter 32026\).*: pip install hdf5plugin"):
            describe(file["d"], "d", False, "a.h5")
    assert tried == ["hdf5plugin"]


def test_virtual_dataset_whose_files_are_missing(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "part.h5", "w") as file:
        file["d"] = np.ones((3, 2))
    layout = h5py.VirtualLayout((3, 2), "f8")
    layout[:] = h5py.VirtualSource("part.h5", "d", (3, 2))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_virtual_dataset("d", layout)
        assert describe(file["d"], "d", False, "a.h5").chunks is None
        (tmp_path / "part.h5").unlink()
        # HDF5 itself would give zeros.
        with pytest.raises(BadFile, match=r"made of other files, of which 'part\.h5' is missing"):
            describe(file["d"], "d", False, "a.h5")


def test_cache_holds_one_run_of_chunks_or_a_small_dataset() -> None:
    field = Field("x", np.dtype("f4"), (1000, 100))
    cut = Dataset("x", field, 10**6, (16, 300, 50), True)
    assert cut.chunk_grid == (4, 2)
    assert cut.cache_bytes == 8 * cut.chunk_bytes
    assert cut.num_slots > 8
    assert cut.scratch_bytes > cut.cache_bytes + 3 * cut.chunk_bytes
    small = Dataset("y", Field("y", np.dtype("i8"), ()), 10_000, (128,), False)
    assert small.cache_bytes == 79 * 128 * 8
    large = Dataset("y", Field("y", np.dtype("i8"), ()), 10**6, (128,), False)
    assert large.cache_bytes == 128 * 8
    contiguous = Dataset("y", Field("y", np.dtype("i8"), ()), 10**6, None, False)
    assert (contiguous.cache_bytes, contiguous.chunk_grid, contiguous.chunk_bytes) == (0, (), 0)
    assert contiguous.scratch_bytes == hdf5_contents.PIECE_BYTES


@pytest.mark.parametrize("chunks", [(1000,), None])
def test_datasets_that_promise_what_was_never_written(tmp_path: Path, chunks: Any) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        vast = file.create_dataset("x", (10**15,), "f4", chunks=chunks)
        with pytest.raises(BadFile, match=r"'x' of 'a\.h5' is of the shape \(10{15},\), .*, of which 0 B are stored"):
            describe(vast, "x", False, "a.h5")
        # Zeros that were never written are allowed where they can be streamed.
        assert describe(file.create_dataset("y", (10**9,), "f4", chunks=(10**6,)), "y", False, "a.h5").num_samples


@pytest.fixture
def place(tmp_path):
    """A folder for data, beside one with a file that is none of its business."""
    (tmp_path / "data").mkdir()
    (tmp_path / "away").mkdir()
    for path in (tmp_path / "away" / "secret.h5", tmp_path / "data" / "part.h5"):
        with h5py.File(path, "w") as file:
            file["x"] = np.arange(10.0)
            file["inner/x"] = h5py.SoftLink("/x")
    (tmp_path / "away" / "raw.bin").write_bytes(np.arange(10.0).tobytes())
    return tmp_path / "data"


def virtual(file, source, name="x"):
    layout = h5py.VirtualLayout((10,), "f8")
    layout[:] = h5py.VirtualSource(source, name, (10,))
    file.create_virtual_dataset("x", layout)


def through_group(file):
    file["all"] = h5py.ExternalLink("../away/secret.h5", "/")
    file["x"] = h5py.SoftLink("/all/x")


WAYS_OUT = {
    "link": lambda file: file.__setitem__("x", h5py.ExternalLink("../away/secret.h5", "/x")),
    "link beside": lambda file: file.__setitem__("x", h5py.ExternalLink("part.h5", "/x")),
    "soft link through a link": through_group,
    "virtual": lambda file: virtual(file, "../away/secret.h5"),
    "plain file": lambda file: file.create_dataset("x", (10,), "f8", external=[("../away/raw.bin", 0, 80)]),
}


@pytest.mark.parametrize("way", WAYS_OUT)
def test_other_files_are_not_read_unasked(place, monkeypatch, way):
    monkeypatch.chdir(place)
    with h5py.File("main.h5", "w") as file:
        WAYS_OUT[way](file)

    with pytest.raises(BadFile, match=r"dataset 'x' of 'main.h5' .*which isn't read unasked.*--follow-links"):
        memfit.stream("main.h5", columns="x", batch_size=5)
    with pytest.raises(BadFile, match="isn't read unasked"):
        memfit.open_array("main.h5", key="x")

    (batch, *_) = memfit.stream(
        "main.h5", columns="x", batch_size=10, shuffle=False, options=memfit.StreamOptions(follow_links=True)
    )
    np.testing.assert_array_equal(batch, np.arange(10))


def test_a_linked_dataset_is_not_left_out_without_a_word(place):
    # GIVEN features in another file and labels in this one, and nobody who names them
    with h5py.File(place / "main.h5", "w") as file:
        file["x"] = h5py.ExternalLink("part.h5", "/x")
        file["y"] = np.arange(10)
    with h5py.File(place / "links.h5", "w") as file:
        file["only"] = h5py.ExternalLink("part.h5", "/x")
        file["group"] = h5py.ExternalLink("gone.h5", "/")

    with pytest.raises(BadFile, match=r"dataset 'x' of .*is a link into another file, 'part.h5', which isn't read"):
        Hdf5Source(place / "main.h5")
    source = Hdf5Source(place / "main.h5", follow_links=True)
    assert [(field.name, field.is_label) for field in source.fields] == [("x", False), ("y", True)]
    with pytest.raises(memfit.BadInput, match=r"ambiguous(.|\n)*group  a link into 'gone.h5'(.|\n)*only  a link into"):
        Hdf5Source(place / "links.h5", follow_links=True)


def test_a_part_that_refers_to_others_is_refused_too(place):
    with h5py.File(place / "middle.h5", "w") as file:
        file["x"] = h5py.ExternalLink("../away/secret.h5", "/x")
    with h5py.File(place / "main.h5", "w") as file:
        virtual(file, "middle.h5")

    with pytest.raises(BadFile, match=r"is a link into another file, '\.\./away/secret\.h5'"):
        Hdf5Source(place / "main.h5", columns=["x"])


def test_parts_of_one_name_in_two_folders_are_both_looked_at(place):
    # GIVEN a harmless part, and another of the same name in a folder below that leads outside
    (place / "below").mkdir()
    with h5py.File(place / "below" / "part.h5", "w") as file:
        file["x"] = h5py.ExternalLink("../../away/secret.h5", "/x")
    with h5py.File(place / "below" / "middle.h5", "w") as file:
        virtual(file, "part.h5")
    layout = h5py.VirtualLayout((20,), "f8")
    layout[:10] = h5py.VirtualSource("part.h5", "x", (10,))
    layout[10:] = h5py.VirtualSource("below/middle.h5", "x", (10,))
    with h5py.File(place / "main.h5", "w") as file:
        file.create_virtual_dataset("x", layout)

    with pytest.raises(BadFile, match=r"is a link into another file, '\.\./\.\./away/secret\.h5'"):
        Hdf5Source(place / "main.h5", columns=["x"])


@pytest.mark.parametrize("way", ["part", "inside", "soft link"])
def test_what_belongs_to_the_file_is_read(place, way):
    with h5py.File(place / "main.h5", "w") as file:
        file["own"] = np.arange(10.0)
        if way == "soft link":
            file["x"] = h5py.SoftLink("own")
        else:
            virtual(file, *(("part.h5", "inner/x") if way == "part" else (".", "own")))

    (batch, *_) = memfit.stream(place / "main.h5", columns="x", batch_size=10, shuffle=False)
    np.testing.assert_array_equal(batch, np.arange(10))


def test_soft_links_in_a_circle_lead_nowhere(place):
    with h5py.File(place / "main.h5", "w") as file:
        file["x"], file["y"] = h5py.SoftLink("/y"), h5py.SoftLink("/x")

    with pytest.raises(memfit.BadInput):
        Hdf5Source(place / "main.h5", columns=["x"])
