import json
import os

import numpy as np
import pytest

from memfit.core.errors import BadFile, BadInput
from memfit.data import convert as converting
from memfit.data.convert import ConvertOptions, convert_data, paths_of, size_on_disk
from memfit.data.sources.opening import open_source
from tests.sources import NamedSamples

VALUES = np.random.default_rng(0).standard_normal((500, 4))
LABELS = np.arange(500) % 7


@pytest.fixture
def folder(tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", VALUES)
    np.save(tmp_path / "y.npy", LABELS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_conversion_reports_what_it_did(folder):
    done = convert_data("x.npy", "small.npy", dtype="float32", options=ConvertOptions(chunk="1KiB"))

    assert np.array_equal(np.load("small.npy"), VALUES.astype("f4"))
    assert done.num_samples == 500
    assert (done.source_bytes, done.destination_bytes) == (128 + 16_000, 128 + 8_000)
    assert 0 < done.totals["max_relative_error"] <= 2.0**-24
    assert done.totals["max_absolute_error"] == np.abs(VALUES - VALUES.astype("f4")).max()
    assert [done.totals[f"num_{what}"] for what in ("overflow", "underflow", "nan", "infinite")] == [0, 0, 0, 0]
    data = json.loads(json.dumps(done.to_json()))
    assert data["format"] == "memfit.conversion"
    assert type(done).from_json(data) == done
    assert data["fields"][0]["dtype_after"] == "float32"
    assert data["max_relative_error"] == done.totals["max_relative_error"]


def test_without_a_type_the_bytes_are_the_same(folder):
    done = convert_data("x.npy", "same.npy")

    assert (folder / "same.npy").read_bytes() == (folder / "x.npy").read_bytes()
    assert done.totals["max_absolute_error"] == 0


@pytest.mark.parametrize("destination", ["both", "both.h5", "both.parquet"])
def test_several_fields_keep_their_values_in_every_format(folder, destination):
    convert_data(("x.npy", "y.npy"), destination, dtype="float32", options=ConvertOptions(chunk="4KiB"))

    source = open_source(destination, **({"labels": "y"} if destination.endswith("parquet") else {}))
    out = [np.empty((500, *field.shape), field.dtype) for field in source.fields]
    source.read(0, 500, out)
    source.close()
    assert np.array_equal(out[0].reshape(500, 4), VALUES.astype("f4"))
    assert np.array_equal(out[1], LABELS)


def test_names_of_classes_are_reported_and_kept(folder):
    (folder / "x.csv").write_text("a,kind\n1,dog\n2,cat\n3,dog\n")

    done = convert_data("x.csv", "x.parquet", labels="kind")

    assert done.classes == ("cat", "dog")
    assert open_source("x.parquet", labels="kind").classes == ("cat", "dog")
    convert_data("x.csv", "named", labels="kind")
    convert_data("x.csv", "named", labels="kind", overwrite=True)
    assert json.loads((folder / "named" / "classes.json").read_text()) == ["cat", "dog"]


@pytest.mark.parametrize("destination", ["named", "named.h5"])
def test_what_was_converted_opens_as_the_source_did(folder, destination):
    (folder / "x.csv").write_text("a,b,kind\n1,4,dog\n2,5,cat\n3,6,dog\n")
    convert_data("x.csv", destination, labels="kind")

    source = open_source(destination)

    assert [(field.name, field.is_label) for field in source.fields] == [("features", False), ("kind", True)]
    assert source.classes == ("cat", "dog")
    out = [np.empty((3, *field.shape), field.dtype) for field in source.fields]
    source.read(0, 3, out)
    source.close()
    assert out[0].tolist() == [[1, 4], [2, 5], [3, 6]]
    assert out[1].tolist() == [1, 0, 1]
    # and once more, from there
    convert_data(destination, "again")
    assert open_source("again").classes == ("cat", "dog")


@pytest.mark.parametrize("destination", ["named", "named.h5"])
def test_features_alone_stay_features(folder, destination):
    np.savez("two.npz", one=VALUES, y=VALUES[:, 0], label=LABELS)
    convert_data("two.npz", destination)

    fields = open_source(destination).fields

    assert sorted((field.name, field.is_label) for field in fields) == [("label", False), ("one", False), ("y", False)]


def test_the_destination_is_not_replaced_unasked(folder):
    convert_data("x.npy", "small.npy")
    with pytest.raises(BadFile, match=r"'small.npy' is there already. Replace it with --overwrite"):
        convert_data("x.npy", "small.npy", dtype="float32")

    convert_data("x.npy", "small.npy", dtype="float32", overwrite=True)

    assert np.load("small.npy").dtype == "float32"


def test_a_folder_is_replaced_only_where_it_holds_nothing_else(folder):
    convert_data(("x.npy", "y.npy"), "both")
    convert_data(("x.npy", "y.npy"), "both", dtype="float32", overwrite=True)
    assert np.load("both/x.npy").dtype == "float32"
    (folder / "both" / "notes.txt").touch()

    with pytest.raises(BadFile, match=r"holds 'notes.txt', which is no .npy file"):
        convert_data(("x.npy", "y.npy"), "both", overwrite=True)


def test_source_and_destination_are_kept_apart(folder):
    (folder / "shards").mkdir()
    np.save("shards/a.npy", VALUES)
    os.link("x.npy", "linked.npy")

    for destination in ("x.npy", "./x.npy", "linked.npy"):
        with pytest.raises(BadInput, match=r"both source and destination"):
            convert_data("x.npy", destination, overwrite=True)
    with pytest.raises(BadInput, match=r"lies inside the source"):
        convert_data("shards", "shards/b.npy")
    with pytest.raises(BadInput, match=r"lies inside the destination"):
        convert_data("shards/a.npy", "shards", overwrite=True)


@pytest.mark.parametrize(
    ("destination", "message"),
    [
        ("s3://bucket/x.npy", "is not a local path"),
        ("", "is not a path"),
        ("a\0b.npy", "is not a path"),
        ("..", "can't be replaced"),
        ("x.csv", r"Name a file that ends in \.npy"),
        ("x.npy/y.npy", "can't be written"),
    ],
)
def test_destinations_that_can_not_be(folder, destination, message):
    with pytest.raises(BadInput, match=message):
        convert_data("y.npy", destination)


def test_a_pipe_is_no_destination(folder):
    os.mkfifo("pipe.npy")
    with pytest.raises(BadFile, match=r"is not a file"):
        convert_data("x.npy", "pipe.npy", overwrite=True)


def test_a_disk_that_is_too_small_is_noticed_before(folder, monkeypatch):
    monkeypatch.setattr(converting, "free_bytes", lambda path: 1000)

    with pytest.raises(BadFile, match=r"would take 15\.6 KiB, and its disk has 1000 B left"):
        convert_data("x.npy", "small.npy")

    assert not list(folder.glob(".small*"))
    assert not (folder / "small.npy").exists()


def test_a_folder_that_can_not_be_written_is_named(folder):
    (folder / "file").touch()

    with pytest.raises(BadFile, match=r"'file/small\.npy' can't be written: File exists"):
        convert_data("x.npy", "file/small.npy")


def test_samples_of_different_shapes_are_refused(folder):
    with pytest.raises(BadInput, match=r"differ in shape"):
        convert_data(NamedSamples(3), "small.npy")


def test_bad_options_are_refused_before_anything_is_written(folder):
    chunks = [{"options": ConvertOptions(chunk=size)} for size in ("many", "0")]
    for options in (*chunks, {"dtype": "int8"}, {"dtype": "foo"}, {"compression": "gzip"}):
        with pytest.raises(BadInput):
            convert_data("x.npy", "small.npy", **options)
    assert sorted(path.name for path in folder.iterdir()) == ["x.npy", "y.npy"]


def test_a_truncated_source_leaves_nothing(folder):
    (folder / "cut.npy").write_bytes((folder / "x.npy").read_bytes()[:-8])

    with pytest.raises(BadFile, match=r"cut"):
        convert_data("cut.npy", "small.npy")

    assert sorted(path.name for path in folder.iterdir()) == ["cut.npy", "x.npy", "y.npy"]


def test_paths_are_found_in_whatever_is_given(folder):
    given = {"a": ["x.npy", ("y.npy",)], "b": "s3://bucket/z.npy", "c": 3, "d": "*.npy"}

    assert [path.name for path in paths_of(given)] == ["x.npy", "y.npy", "x.npy", "y.npy"]
    assert size_on_disk([folder]) == size_on_disk([folder / "x.npy", folder / "y.npy"])
    assert size_on_disk([folder / "nothing"]) == 0


def test_names_that_cannot_be_looked_at(folder):
    """A name that is too long, as source and as destination."""
    with pytest.raises(BadFile, match=r"there is no|too long"):
        convert_data("a" * 300 + ".npy", "small.npy")
    with pytest.raises(BadFile, match=r"can't be written: File name too long"):
        convert_data("x.npy", "a" * 300 + ".npy")


def test_a_folder_with_a_folder_in_it_is_not_replaced(folder):
    (folder / "mine" / "inner.npy").mkdir(parents=True)
    (folder / "mine" / "inner.npy" / "notes.txt").write_text("mine")
    with pytest.raises(BadFile, match=r"holds 'inner\.npy', which is no \.npy file"):
        convert_data("x.npy", "mine", overwrite=True)
    assert (folder / "mine" / "inner.npy" / "notes.txt").read_text() == "mine"


def test_what_appears_at_the_destination_meanwhile_stays(folder):
    def appear(done, total):
        (folder / "small.npy").write_text("mine")

    with pytest.raises(BadFile, match=r"somebody else has made it in the meantime, and it stays"):
        convert_data("x.npy", "small.npy", options=ConvertOptions(progress=appear))
    assert (folder / "small.npy").read_text() == "mine"


def test_a_link_that_leads_nowhere_is_there_already(folder):
    (folder / "link.npy").symlink_to("nowhere.npy")
    with pytest.raises(BadFile, match=r"is there already"):
        convert_data("x.npy", "link.npy")
    assert (folder / "link.npy").is_symlink()


def test_images_of_mixed_sizes_are_resized(folder):
    pillow = pytest.importorskip("PIL.Image")
    for name, size, colour in (("a/1.png", (31, 17), 10), ("b/2.png", (8, 9), 200)):
        (folder / "photos" / name).parent.mkdir(parents=True)
        pillow.new("RGB", size, (colour, colour, colour)).save(folder / "photos" / name)

    with pytest.raises(BadInput, match=r"--image-size 224 \(image_size=224\)"):
        convert_data("photos", "images")
    done = convert_data("photos", "images", options=ConvertOptions(image_size=(4, 6)))

    assert done.fields[0].shape == (4, 6, 3)
    assert [np.unique(image).tolist() for image in np.load("images/x.npy")] == [[10], [200]]
    assert np.load("images/y.npy").tolist() == [0, 1]
    as_text = convert_data("photos", "more images", options=ConvertOptions(image_size="4x6"))
    assert as_text.fields == done.fields


@pytest.mark.parametrize("size", [0, -3, "2e4", (3,), (3, 4, 5), 1.5, True, 10**9])
def test_what_is_no_size_of_images(folder, size):
    with pytest.raises(BadInput, match="is no size of images"):
        convert_data("x.npy", "small.npy", options=ConvertOptions(image_size=size))


def test_only_images_are_resized(folder):
    with pytest.raises(BadInput, match="holds no folder of images"):
        convert_data("x.npy", "small.npy", options=ConvertOptions(image_size=8))


def test_a_folder_that_was_set_aside_is_put_back(folder):
    (folder / ".made.memfit-old").mkdir()
    np.save(folder / ".made.memfit-old" / "y.npy", LABELS)

    with pytest.raises(BadFile, match="is there already"):
        convert_data("x.npy", "made")

    assert np.array_equal(np.load("made/y.npy"), LABELS)
