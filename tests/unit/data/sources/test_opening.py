import gzip
import json
import os
import pickle

import numpy as np
import pytest

from memfit.core.errors import BadFile, BadInput
from memfit.data.array import open_array
from memfit.data.sources import opening
from memfit.data.sources.joined import Concatenated, ConcatenatedSamples
from memfit.data.sources.npy import NpySource
from memfit.data.sources.npz import NpzSource
from memfit.data.sources.opening import kind_of, open_source
from tests.sources import names, read

X = np.random.default_rng(0).normal(size=(12, 3)).astype("f4")
Y = np.arange(12) % 3


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(source, **options):
    with pytest.raises((BadInput, BadFile)) as caught:
        open_source(source, **options)
    return str(caught.value)


# What can be given.


def test_a_path_as_text_or_as_a_path(folder):
    np.save("x.npy", X)

    for source in ("x.npy", folder / "x.npy"):
        opened = open_source(source)
        assert isinstance(opened, NpySource)
        np.testing.assert_array_equal(read(opened)[0], X)


def test_a_list_is_read_in_its_order(folder):
    np.save("b.npy", X[:5])
    np.save("a.npy", X[5:])

    opened = open_source(["b.npy", folder / "a.npy"])

    assert isinstance(opened, Concatenated)
    np.testing.assert_array_equal(read(opened)[0], X)


def test_a_pattern_is_read_in_the_order_of_its_numbers(folder):
    for number in range(12):
        np.save(f"part-{number}.npy", X[number : number + 1])

    np.testing.assert_array_equal(read(open_source("part-*.npy"))[0], X)
    np.testing.assert_array_equal(read(open_source(["part-[0-4].npy", "part-5.npy"]))[0], X[:6])
    assert "no file matches 'other-*.npy'" in refusal("other-*.npy")


def test_a_name_with_signs_of_a_pattern_is_found_as_it_is(folder):
    np.save("x[1].npy", X)

    assert open_source("x[1].npy").num_samples == 12


def test_a_pair_is_features_and_labels(folder):
    np.save("x0.npy", X[:7])
    np.save("x1.npy", X[7:])
    np.save("y.npy", Y)

    for source, options in [
        ((["x0.npy", "x1.npy"], "y.npy"), {}),
        (("x?.npy", ["y.npy"]), {}),
        (["x0.npy", "x1.npy"], {"labels": "y.npy"}),
        ("x?.npy", {"labels": folder / "y.npy"}),
        ("x?.npy", {"labels": ["y.npy"]}),
    ]:
        opened = open_source(source, **options)
        assert names(opened) == [("x", False), ("y", True)]
        x, y = read(opened)
        np.testing.assert_array_equal(x, X)
        np.testing.assert_array_equal(y, Y)


def test_a_dict_names_the_fields(folder):
    np.save("1.npy", X)
    np.save("2.npy", Y)
    source = {"image": "1.npy", "depth": "1.npy", "class": "2.npy"}

    assert names(open_source(source)) == [("image", False), ("depth", False), ("class", False)]
    opened = open_source(source, labels="class")
    assert names(opened) == [("image", False), ("depth", False), ("class", True)]
    np.testing.assert_array_equal(read(opened)[2], Y)
    assert names(open_source(source, columns=["depth"], labels="class")) == [("depth", False), ("class", True)]
    assert names(open_source(source, columns="depth")) == [("depth", False)]
    assert names(open_source({"a": "1.npy"}, labels="2.npy")) == [("a", False), ("x", True)]
    assert refusal(source, labels="clas") == (
        "the dict has no name 'clas' (did you mean 'class'?). It has: 'image', 'depth', 'class'."
    )
    assert "is left for features, which are needed too: 'a' is the label" in refusal({"a": "1.npy"}, labels="a")
    assert "a dict of names and paths is needed" in refusal({})
    assert "a dict of names and paths is needed" in refusal({1: "1.npy"})


def test_a_source_stays_as_it_is(folder):
    np.save("x.npy", X)
    source = NpySource("x.npy")

    assert open_source(source) is source
    assert "has no columns to choose from" in refusal(source, columns=["a"])


def test_texts_as_labels_become_classes(folder):
    texts = np.array(["cat", "dog", "ant"])[Y]
    np.save("x.npy", X)
    np.save("y.npy", texts)
    np.savez("d.npz", x=X, y=texts)

    for source, options in [
        (("x.npy", "y.npy"), {}),
        ("x.npy", {"labels": "y.npy"}),
        ({"x": "x.npy", "y": "y.npy"}, {"labels": "y"}),
        ({"x": "x.npy"}, {"labels": "y.npy"}),
        ("d.npz", {}),
    ]:
        opened = open_source(source, **options)
        assert opened.classes == ("ant", "cat", "dog")
        assert [opened.classes[number] for number in read(opened)[1]] == texts.tolist()
        assert names(opened)[1] == ("y", True)


def test_npz_by_keys(folder):
    np.savez("d.npz", x=X, y=Y)

    assert isinstance(open_source("d.npz"), NpzSource)
    assert names(open_source("d.npz", columns="x")) == [("x", False)]
    assert names(open_source("d.npz", columns=["y"], labels="x")) == [("y", False), ("x", True)]


def test_addresses(folder):
    fsspec = pytest.importorskip("fsspec")
    for name, array in (("x-0", X[:5]), ("x-1", X[5:]), ("y", Y)):
        with fsspec.open(f"memory://memfit-opening/{name}.npy", "wb") as file:
            np.save(file, array)
    with fsspec.open("memory://memfit-opening/d.npz", "wb") as file:
        np.savez_compressed(file, x=X, y=Y)
    with fsspec.open("memory://memfit-folder/x.npy", "wb") as file:
        np.save(file, X)

    x, y = read(open_source(("memory://memfit-opening/x-*.npy", "memory://memfit-opening/y.npy")))
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, Y)
    np.testing.assert_array_equal(read(open_source("memory://memfit-opening/d.npz"))[0], X)
    np.testing.assert_array_equal(read(open_source("memory://memfit-folder"))[0], X)
    opened = open_source("memory://memfit-opening/x-0.npy", labels=["memory://memfit-opening/x-0.npy"])
    assert names(opened) == [("x", False), ("y", True)]
    assert pickle.loads(pickle.dumps(opened)).fingerprint() == opened.fingerprint()


# Folders.


def test_a_folder_of_one_kind_is_read_in_the_order_of_its_numbers(folder):
    os.mkdir("parts")
    for number in (10, 9, 1):
        np.save(f"parts/{number}.npy", np.full((2, 2), number))
    (folder / "parts" / "README.md").write_text("about")
    (folder / "parts" / ".hidden.csv").write_text("a\n1\n")

    opened = open_source("parts")

    assert read(opened)[0][:, 0].tolist() == [1, 1, 9, 9, 10, 10]


@pytest.mark.parametrize("pair", [("x", "y"), ("X_train", "y_train"), ("images", "labels")])
def test_a_folder_of_an_obvious_pair(folder, pair):
    os.mkdir("data")
    np.save(f"data/{pair[0]}.npy", X)
    np.save(f"data/{pair[1]}.npy", Y)

    opened = open_source("data")

    assert names(opened) == [("x", False), ("y", True)]
    np.testing.assert_array_equal(read(opened)[1], Y)


def test_a_folder_of_images_is_given_to_its_own_reader(folder, monkeypatch):
    asked = []
    monkeypatch.setattr(opening, "ImageSource", lambda *path, **options: asked.append((path, options)) or stand_in())
    os.makedirs("pictures/cat")
    os.makedirs("flat")
    (folder / "flat" / "a.jpg").write_bytes(b"x")

    def stand_in():
        np.save(folder / "x.npy", X)
        return NpySource(folder / "x.npy")

    open_source("pictures", on_error="skip")
    open_source("flat")

    assert asked == [
        (("pictures",), {"on_error": "skip", "follow_links": False, "image_size": None}),
        (("flat",), {"on_error": "fail", "follow_links": False, "image_size": None}),
    ]
    assert "'pictures' has no columns to choose from" in refusal("pictures", labels="class")


def test_folders_that_say_nothing_are_refused(folder):
    os.makedirs("empty")
    os.makedirs("mixed")
    os.makedirs("notes")
    np.save("mixed/a.npy", X)
    np.savez("mixed/b.npz", X)
    (folder / "notes" / "a.txt").write_text("text")

    assert "the folder 'empty' is empty" in refusal("empty")
    message = refusal("mixed")
    assert "holds files of several kinds: a.npy, b.npz. Give a pattern, such as" in message
    assert "holds nothing that can be streamed" in refusal("notes")


# Kinds.


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.npy", "npy"),
        ("A.NPY", "npy"),
        ("a.npz", "npz"),
        ("a.h5", "hdf5"),
        ("a.hdf5", "hdf5"),
        ("a.he5", "hdf5"),
        ("a.parquet", "parquet"),
        ("a.pq", "parquet"),
        ("a.arrow", "arrow"),
        ("a.feather", "arrow"),
        ("a.csv", "csv"),
        ("a.tsv", "csv"),
        ("a.csv.gz", "csv"),
    ],
)
def test_kinds_by_name(folder, name, kind):
    (folder / name).write_bytes(b"anything")

    assert kind_of(name) == kind


@pytest.mark.parametrize(
    ("head", "kind"),
    [(b"\x93NUMPY\x01\x00", "npy"), (b"PK\x03\x04", "npz"), (b"\x89HDF\r\n\x1a\n", "hdf5"), (b"PAR1", "parquet")],
)
def test_kinds_by_the_first_bytes(folder, head, kind):
    (folder / "data").write_bytes(head + b"more")

    assert kind_of("data") == kind


def test_tables_and_hdf5_are_told_by_their_endings(folder):
    h5py, pyarrow = pytest.importorskip("h5py"), pytest.importorskip("pyarrow")
    from pyarrow import feather, parquet

    text = "a,b,y\n" + "".join(f"{i},{i / 2},{i % 3}\n" for i in range(12))
    (folder / "a.csv").write_text(text)
    with gzip.open("a.tsv.gz", "wt") as file:
        file.write(text.replace(",", "\t"))
    table = pyarrow.table({"a": np.arange(12), "b": np.arange(12) / 2, "y": Y})
    parquet.write_table(table, "a.pq")
    feather.write_feather(table, "a.feather")
    with h5py.File("a.h5", "w") as file:
        file["features"], file["y"] = np.stack([np.arange(12), np.arange(12) / 2], 1), Y

    for name in ("a.csv", "a.tsv.gz", "a.pq", "a.feather", "a.h5"):
        opened = open_source(name, columns=["features"] if name == "a.h5" else ["a", "b"], labels="y")
        assert names(opened) == [("features", False), ("y", True)]
        assert [array.tolist() for array in read(opened)] == [[[i, i / 2] for i in range(12)], Y.tolist()]
    # A file of labels goes with a table too.
    np.save("y.npy", Y)
    np.testing.assert_array_equal(read(open_source("a.csv", columns=["a", "b"], labels="y.npy"))[-1], Y)


# What can't be streamed.


def test_missing_paths_name_the_nearest(folder):
    np.save("train.npy", X)

    assert refusal("trian.npy") == "there is no 'trian.npy'; did you mean 'train.npy'?"
    assert refusal("zzz") == "there is no 'zzz'."
    assert refusal("nowhere/x.npy") == "there is no 'nowhere/x.npy'; its folder isn't there either."
    assert refusal(["train.npy", "tr.npy"]).startswith("there is no 'tr.npy'")


def test_what_cannot_be_streamed_says_what_to_do(folder):
    (folder / "empty.npy").write_bytes(b"")
    (folder / "a.bin").write_bytes(b"some text")
    (folder / "a.jpg").write_bytes(b"\xff\xd8\xff")
    (folder / "named.pth").write_bytes(b"x")
    (folder / "unnamed").write_bytes(pickle.dumps([1]))

    assert "'empty.npy' is empty: 0 bytes" in refusal("empty.npy")
    assert "'a.bin' is of no kind that can be streamed: .npy, .npz" in refusal("a.bin")
    assert "is a single image. Give the folder" in refusal("a.jpg")
    for name in ("named.pth", "unnamed"):
        message = refusal(name)
        assert f"'{name}' is a pickle" in message
        assert "save its arrays: np.save('x.npy', x)" in message


def test_other_things_are_refused(folder):
    np.save("x.npy", X)

    assert "an array of shape (12, 3) was given" in refusal(X)
    assert "np.save writes it to a file" in refusal([X, X])
    assert "3 (int) was given" in refusal(3)
    assert "an empty list was given" in refusal([])
    assert "an empty path was given" in refusal("")
    assert "a tuple is a pair (features, labels), and one of 3 was given" in refusal(("x.npy",) * 3)
    assert "labels are given twice" in refusal(("x.npy", "x.npy"), labels="x.npy")
    assert "labels is the name of a column" in refusal("x.npy", labels=3)
    assert "has no columns, and 'a' was asked for" in refusal("x.npy", columns=["a"])
    assert "on_error is 'fail' or 'skip', and 'ignore' was given" in refusal("x.npy", on_error="ignore")
    assert "a path is text" in refusal(BytesPath())


class BytesPath(os.PathLike):
    def __fspath__(self):
        return b"x.npy"


def test_no_samples_and_no_values_are_refused(folder):
    np.save("none.npy", X[:0])
    np.save("hollow.npy", np.zeros((3, 0)))

    assert "none.npy holds no samples, so there is nothing to stream" in refusal("none.npy")
    assert "a sample of 'x' in hollow.npy has the shape (0,): no values in it" in refusal("hollow.npy")


def test_unequal_lengths_and_shapes_are_told(folder):
    np.save("x.npy", X)
    np.save("y.npy", Y[:5])
    np.save("wide.npy", np.zeros((2, 4), "f4"))

    assert "x.npy has 12 samples, y.npy has 5" in refusal(("x.npy", "y.npy"))
    assert "x.npy and wide.npy can't be read one after the other" in refusal(["x.npy", "wide.npy"])


def test_many_files_are_one_source(folder):
    for number in range(200):
        np.save(f"{number}.npy", np.full((3, 2), number, "u1"))

    opened = open_source("*.npy")

    assert opened.num_samples == 600
    assert read(opened)[0][:, 0].tolist() == [number for number in range(200) for _ in range(3)]
    assert not isinstance(opened, ConcatenatedSamples)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes among its files")
def test_pipes_devices_and_links_to_nothing_are_told(folder):
    os.mkfifo(folder / "pipe.npy")
    for path in (folder / "pipe.npy", "/dev/zero"):
        with pytest.raises(BadFile, match="is a pipe or a device, of which only the next bytes can be read"):
            open_source(path)
    (folder / "link.npy").symlink_to("nowhere.npy")
    with pytest.raises(BadFile, match=r"link\.npy' is a link to 'nowhere\.npy', where there is nothing"):
        open_source(folder / "link.npy")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no links")
def test_folders_with_links_in_circles_or_that_cannot_be_listed(folder, monkeypatch):
    (folder / "loop").mkdir()
    (folder / "loop" / "loop.npy").symlink_to(folder / "loop" / "loop.npy")
    with pytest.raises(BadFile, match=r"loop\.npy' is a link to"):
        open_source(folder / "loop")

    def refuse(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(opening.os, "scandir", refuse)
    with pytest.raises(BadFile, match="loop' can't be looked into: Permission denied"):
        open_source(folder / "loop")


def test_named_files_of_unequal_length_are_not_called_labels(folder):
    np.save(folder / "long.npy", np.zeros((9, 2)))
    np.save(folder / "short.npy", np.zeros(8))
    with pytest.raises(BadInput, match=r"has 9 samples, .* has 8: as many are needed in each"):
        open_source({"a": folder / "long.npy", "b": folder / "short.npy"})


# Arrays of files that are open already.


def test_open_arrays_name_their_file(folder):
    np.save("big.npy", X)
    mapped = np.load("big.npy", mmap_mode="r")

    said = "an array that is in a file was given; it is streamed from there: give its path, 'big.npy'."
    assert refusal(mapped) == said
    assert refusal([mapped, mapped]) == said
    assert refusal((np.asarray(mapped)[2:], "big.npy")) == said
    assert refusal(open_array("big.npy")) == said
    assert "labels is an array that is in a file" in refusal("big.npy", labels=mapped)
    assert "give its path, 'big.npy'." in refusal("big.npy", labels=mapped)


def test_open_datasets_name_their_file(folder):
    h5py = pytest.importorskip("h5py")
    with h5py.File("a.h5", "w") as file:
        file["train/x"] = X

        assert refusal(file["train/x"]).endswith("give its path, 'a.h5', and columns='train/x'.")


# Folders that say what is in them.


def said_folder(**arrays):
    os.mkdir("said")
    fields = []
    for name, array in arrays.items():
        np.save(f"said/file_{name}.npy", array)
        fields.append({"file": f"file_{name}.npy", "name": name, "is_label": name.startswith("label")})
    with open("said/memfit-fields.json", "w") as file:
        json.dump({"format": "memfit fields", "version": 1, "fields": fields}, file)
    with open("said/classes.json", "w") as file:
        json.dump(["cat", "dog", "emu"], file)


def test_a_folder_that_says_its_labels(folder):
    said_folder(label=Y, a=X, b=X + 1)

    source = open_source("said")

    assert names(source) == [("a", False), ("b", False), ("label", True)]
    assert source.classes == ("cat", "dog", "emu")
    assert np.array_equal(read(source)[1], X + 1)
    assert np.array_equal(read(source)[2], Y)
    assert pickle.loads(pickle.dumps(source)).classes == source.classes
    assert names(open_source("said", columns="b")) == [("b", False)]
    assert names(open_source("said", columns="b", labels="label")) == [("b", False), ("label", True)]
    other = open_source("said", labels="b")
    assert (names(other), other.classes) == ([("a", False), ("b", True)], ())
    assert "'said' has no field 'lable' (did you mean 'label'?). It has: 'a', 'b'" in refusal("said", labels="lable")
    assert "features, which are needed too" in refusal("said", columns="b", labels="b")


def test_a_folder_that_says_several_labels_or_none(folder):
    said_folder(label_1=Y, label_2=X[:, 0], a=X)

    source = open_source("said")

    assert names(source) == [("a", False), ("label_1", True), ("label_2", True)]
    assert source.classes == ("cat", "dog", "emu")
    assert np.array_equal(read(source)[2], X[:, 0])
    os.rename("said", "other")
    said_folder(a=X)
    assert names(open_source("said")) == [("a", False)]


FIELDS = [
    {"file": "y.npy", "name": "kind", "is_label": True},
    {"file": "x.npy", "name": "features", "is_label": False},
]


def described(fields):
    return json.dumps({"format": "memfit fields", "fields": fields})


@pytest.fixture
def pair(folder):
    """A folder of features and labels that are told by their names."""
    os.mkdir("pair")
    np.save("pair/x.npy", X)
    np.save("pair/y.npy", Y)
    return folder / "pair"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[" * 100_000,
        "[1]",
        "{}",
        json.dumps({"format": "another", "fields": FIELDS}),
        b"\xed\xb3\xbf".decode("latin-1"),
        described([1, 2]),
        described([{"file": 1, "name": "a", "is_label": False}]),
        described([*FIELDS, {"file": "../z.npy", "name": "z", "is_label": False}]),
        described([FIELDS[1], FIELDS[1]]),
        described(FIELDS[:1]),
        described([FIELDS[0], {**FIELDS[1], "is_label": True}]),
        described([FIELDS[0], {**FIELDS[1], "name": "kind"}]),
    ],
    ids=range(14),
)
def test_a_description_that_is_damaged_or_of_other_files_is_ignored(pair, content):
    (pair / "memfit-fields.json").write_text(described(FIELDS))
    assert names(open_source("pair")) == [("features", False), ("kind", True)]

    (pair / "memfit-fields.json").write_text(content, encoding="latin-1")
    assert names(open_source("pair")) == [("x", False), ("y", True)]


def test_names_of_classes_beside_an_obvious_pair(pair):
    (pair / "classes.json").write_text('["cat", "h\u00fctte", "emu"]', encoding="utf-8")
    assert open_source("pair").classes == ("cat", "h\u00fctte", "emu")

    np.save("pair/y.npy", Y.astype("f4"))
    assert open_source("pair").classes == ()


@pytest.mark.parametrize(
    "content",
    [b"", b"[1, 2]", b'{"cat": 0}', b'["a", "a"]', b"\xff\xfe", b"[" * 100_000, b'["%s"]' % (b"a" * (17 << 20))],
    ids=range(7),
)
def test_damaged_names_of_classes_are_ignored(pair, content):
    (pair / "classes.json").write_bytes(content)

    assert open_source("pair").classes == ()
