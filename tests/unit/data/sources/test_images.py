import gc
import io
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import warnings

import numpy as np
import pytest

import memfit
from memfit.core.errors import BadFile, BadInput, MissingDependency
from memfit.core.units import MIB
from memfit.data.source import SampleSource
from memfit.data.sources import images
from memfit.data.sources.images import ImageSource, SkippedSamples

Image = pytest.importorskip("PIL.Image")

COLOURS = np.random.default_rng(0).integers(0, 256, (6, 5, 3), dtype=np.uint8)


def save(path, image=None, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(COLOURS) if image is None else image
    image.save(path, **options)
    return path


def damage(path, text=b"no image"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    return path


def test_images_and_their_classes(tmp_path):
    for name in ["b/1.png", "a/2.png", "a/3.bmp"]:
        save(tmp_path / name)
    source = ImageSource(tmp_path)
    assert isinstance(source, SampleSource)
    assert source.classes == ("a", "b")
    image, label = source.fields
    assert (image.name, image.dtype, image.shape, image.is_ragged) == ("image", np.uint8, (6, 5, 3), False)
    assert (label.name, label.dtype, label.shape, label.is_label) == ("label", np.int64, (), True)
    assert source.layout.is_by_sample and source.num_samples == 3
    for sample, number in enumerate([0, 0, 1]):
        pixels, found = source.read_sample(sample)
        np.testing.assert_array_equal(pixels, COLOURS)
        assert pixels.flags.writeable and pixels.flags.c_contiguous
        assert found == number and found.dtype == np.int64 and found.shape == ()
        assert source.stored_bytes(sample) == os.path.getsize(source.sample_name(sample))
    assert source.name == str(tmp_path)
    assert source.fingerprint() == ImageSource(tmp_path).fingerprint()


def test_a_flat_folder_gives_images_alone(tmp_path):
    save(tmp_path / "1.png")
    source = ImageSource(tmp_path)
    assert [field.name for field in source.fields] == ["image"]
    assert len(source.read_sample(0)) == 1
    assert source.storage().warnings == ("the images lie in no class folders, and have no labels",)


def test_sizes_that_differ_are_said_to(tmp_path):
    save(tmp_path / "a" / "1.png")
    save(tmp_path / "a" / "2.png", Image.new("RGB", (9, 4)))
    source = ImageSource(tmp_path)
    assert source.fields[0].is_ragged and source.fields[0].shape == (6, 5, 3)
    assert source.read_sample(1)[0].shape == (4, 9, 3)


GRAY = Image.fromarray(COLOURS[:, :, 0])


def with_alpha(image):
    image = image.copy()
    image.putalpha(100)
    return image


@pytest.mark.parametrize(
    ("image", "ending", "expected"),
    [
        (GRAY, "png", np.repeat(COLOURS[:, :, :1], 3, 2)),
        (with_alpha(GRAY), "png", np.repeat(COLOURS[:, :, :1], 3, 2)),
        (with_alpha(Image.fromarray(COLOURS)), "png", COLOURS),
        (with_alpha(Image.fromarray(COLOURS)), "tif", COLOURS),
        (Image.fromarray(COLOURS // 128 * 255).quantize(8), "gif", COLOURS // 128 * 255),
        (GRAY.point(lambda value: 255 * (value > 99), "1"), "png", np.repeat(COLOURS[:, :, :1] > 99, 3, 2) * 255),
        (Image.fromarray(COLOURS[:, :, 0].astype(np.uint16) * 256 + 7), "png", np.repeat(COLOURS[:, :, :1], 3, 2)),
        (Image.fromarray(COLOURS).convert("CMYK"), "tif", COLOURS),
    ],
    ids=["L", "LA", "RGBA", "RGBA tif", "P", "1", "16 bits", "CMYK"],
)
def test_all_modes_become_three_channels(tmp_path, image, ending, expected):
    save(tmp_path / f"x.{ending}", image)
    (found,) = ImageSource(tmp_path).read_sample(0)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, expected)


def test_a_palette_with_transparency(tmp_path):
    image = Image.fromarray(COLOURS // 128 * 255).quantize(8)
    image.info["transparency"] = bytes(range(0, 160, 20))
    save(tmp_path / "x.png", image, transparency=bytes(range(0, 160, 20)))
    (found,) = ImageSource(tmp_path).read_sample(0)
    np.testing.assert_array_equal(found, COLOURS // 128 * 255)


def test_lossy_formats_and_orientation(tmp_path):
    smooth = np.broadcast_to(np.linspace(0, 255, 64).astype(np.uint8)[:, None, None], (64, 48, 3))
    notes = Image.Exif()
    notes[0x0112] = 6
    save(tmp_path / "x.jpg", Image.fromarray(np.ascontiguousarray(smooth)), quality=95, exif=notes)
    save(tmp_path / "x.webp", Image.fromarray(np.ascontiguousarray(smooth)), quality=95)
    source = ImageSource(tmp_path)
    for sample in range(2):
        (found,) = source.read_sample(sample)
        assert found.shape == (64, 48, 3)
        assert np.abs(found.astype(int) - smooth).max() < 12


def truncated_png():
    data = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 50, 3), dtype=np.uint8)).save(data, "PNG")
    return data.getvalue()[:4000]


def float_tiff():
    data = io.BytesIO()
    Image.new("F", (4, 4)).save(data, "TIFF")
    return data.getvalue()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the file is empty"),
        (b"no image at all", "it isn't an image of a kind that Pillow knows"),
        (truncated_png(), "[Tt]runcated"),
        (float_tiff(), r"its pixels are of 32 bits \(mode F\), which 8 can't stand for"),
    ],
)
def test_unreadable_images_fail_or_are_skipped(tmp_path, data, reason):
    save(tmp_path / "a" / "1.png")
    bad = damage(tmp_path / "a" / "2.png", data)
    message = rf"the image .*2\.png' can't be read: .*{reason}.*on_error=\"skip\""
    with pytest.raises(BadFile, match=message):
        ImageSource(tmp_path).read_sample(1)
    source = ImageSource(tmp_path, on_error="skip")
    assert source.num_skipped == 0
    for _ in range(2):
        assert source.read_sample(1) is None
    assert source.read_sample(0) is not None
    assert (source.num_skipped, source.skipped) == (1, [str(bad)])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes among its files")
def test_pipes_and_devices_are_never_read(tmp_path):
    # GIVEN names of images behind which bytes come for ever, or never
    save(tmp_path / "a" / "1.png")
    os.mkfifo(tmp_path / "a" / "2.png")
    (tmp_path / "a" / "3.png").symlink_to("/dev/zero")
    with pytest.raises(BadFile, match=r"2\.png' can't be read: it is a pipe, a device or a folder, and no file"):
        ImageSource(tmp_path)
    source = ImageSource(tmp_path, on_error="skip")
    assert [source.read_sample(sample) is None for sample in range(3)] == [False, True, True]
    assert source.num_skipped == 2


def test_files_too_large_for_an_image_are_not_read(tmp_path, monkeypatch):
    save(tmp_path / "a" / "1.png")
    with open(damage(tmp_path / "a" / "2.png"), "r+b") as file:
        file.truncate(8 * 1000 + MIB + 1)
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(BadFile, match=r"2\.png' can't be read: its file has 1,056,577 bytes, more than 8 for each"):
        ImageSource(tmp_path)


def test_workers_count_what_they_leave_out(tmp_path):
    # GIVEN images of which two can't be read, and two processes that read them
    for number in range(8):
        save(tmp_path / "a" / f"{number}.png")
    damaged = [str(damage(tmp_path / "a" / f"{number}.png")) for number in (2, 5)]
    stream = memfit.stream(tmp_path, batch_size=2, options=memfit.StreamOptions(on_error="skip"))
    assert sum(len(images) for images, _ in stream.parallel(2)) == 6
    # THEN the program knows what they left out
    assert (stream.source.num_skipped, stream.source.skipped) == (2, damaged)


def test_only_the_first_names_are_kept(tmp_path):
    for number in range(30):
        damage(tmp_path / "a" / f"{number:02d}.png")
    save(tmp_path / "a" / "good.png")
    source = ImageSource(tmp_path, on_error="skip")
    assert [source.read_sample(sample) for sample in range(30)] == [None] * 30
    assert source.num_skipped == 30
    assert [os.path.basename(name) for name in source.skipped] == [f"{number:02d}.png" for number in range(20)]


def test_a_file_that_is_gone(tmp_path):
    path = save(tmp_path / "a" / "1.png")
    source = ImageSource(tmp_path)
    path.unlink()
    with pytest.raises(BadFile, match="No such file or directory"):
        source.read_sample(0)


def test_too_many_pixels(tmp_path, monkeypatch):
    save(tmp_path / "a" / "1.png")
    source = ImageSource(tmp_path)
    # Pillow itself warns above its limit, and raises above twice that
    for limit in (20, 10):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(BadFile, match="30 pixels"):
            source.read_sample(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(BadFile, match="30 pixels"):
                source.read_sample(0)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert source.read_sample(0) is not None


def test_warnings_do_not_make_an_image_unreadable(tmp_path, monkeypatch):
    save(tmp_path / "a" / "1.png")
    opened = Image.open

    def with_warning(file):
        warnings.warn("damaged notes", UserWarning, stacklevel=2)
        return opened(file)

    monkeypatch.setattr(Image, "open", with_warning)
    np.testing.assert_array_equal(ImageSource(tmp_path).read_sample(0)[0], COLOURS)


def test_a_folder_without_any_image_that_can_be_read(tmp_path):
    for number in range(30):
        damage(tmp_path / "a" / f"{number}.png")
    with pytest.raises(BadFile, match=r"the image .*0\.png' can't be read"):
        ImageSource(tmp_path)
    with pytest.raises(BadFile, match=r"none of 30 images in .* can be read; the first is .*0\.png'"):
        ImageSource(tmp_path, on_error="skip")
    # One that can is found wherever it is
    save(tmp_path / "a" / "21.png")
    assert ImageSource(tmp_path, on_error="skip").fields[0].shape == (6, 5, 3)


def test_without_pillow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    images._pillow.cache_clear()
    try:
        with pytest.raises(MissingDependency, match=r"pip install pillow"):
            ImageSource(tmp_path)
    finally:
        images._pillow.cache_clear()


def test_runs_of_images_fill_arrays(tmp_path):
    for number in range(4):
        save(tmp_path / f"{'ab'[number // 2]}" / f"{number}.png", Image.fromarray(COLOURS + np.uint8(number)))
    source = ImageSource(tmp_path)
    out = [np.empty((2, 6, 5, 3), np.float32), np.empty(2, np.int64)]
    source.read(1, 3, out)
    source.drop(1, 3)
    source.close()
    np.testing.assert_array_equal(out[0], [COLOURS + np.uint8(1), COLOURS + np.uint8(2)])
    assert out[1].tolist() == [0, 1]
    save(tmp_path / "a" / "1.png", Image.new("RGB", (9, 4)))
    with pytest.raises(BadInput, match=r"1\.png is \[4, 9, 3\], and the first one is \[6, 5, 3\]"):
        source.read(1, 3, out)
    damage(tmp_path / "a" / "1.png")
    with pytest.raises(BadFile, match="no room for a gap"):
        ImageSource(tmp_path, on_error="skip").read(1, 3, out)


def test_it_is_read_after_a_pickle_a_fork_and_by_threads(tmp_path):
    for number in range(8):
        save(tmp_path / "a" / f"{number}.png", Image.fromarray(COLOURS + np.uint8(number)))
    damage(tmp_path / "a" / "9.png")
    source = ImageSource(tmp_path, on_error="skip")
    assert source.read_sample(8) is None

    def is_right(copy):
        return copy.read_sample(8) is None and all(
            np.array_equal(copy.read_sample(number)[0], COLOURS + np.uint8(number)) for number in range(8)
        )

    copy = pickle.loads(pickle.dumps(source))
    assert (copy.num_skipped, copy.skipped) == (1, [str(tmp_path / "a" / "9.png")])
    assert is_right(copy)
    found = []
    threads = [threading.Thread(target=lambda: found.append(is_right(source))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 8
    assert source.num_skipped == 1
    if hasattr(os, "fork"):
        child = os.fork()
        if not child:
            code = 1
            try:
                code = int(not is_right(source))
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_images_behind_an_address(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    with system.open("/photographs/a/1.png", "wb") as file:
        file.write(save(tmp_path / "1.png").read_bytes())
    source = ImageSource("memory://photographs")
    np.testing.assert_array_equal(source.read_sample(0)[0], COLOURS)
    assert source.sample_name(0) == "memory://photographs/a/1.png"
    system.rm("/photographs", recursive=True)
    with pytest.raises(BadFile, match=r"the image 'memory://photographs/a/1\.png' can't be read"):
        source.read_sample(0)


_ADD = """
import pickle, sys
skipped = pickle.loads(bytes.fromhex(sys.argv[1]))
skipped.add(7)
skipped.add(2)
"""


def test_samples_are_counted_once():
    skipped = SkippedSamples()
    assert skipped.numbers().tolist() == []
    for sample in (3_000_000, 5, 5):
        skipped.add(sample)
    assert skipped.numbers().tolist() == [5, 3_000_000]


def test_processes_that_are_started_anew_count_too():
    # GIVEN a process that knows it by a pickle
    skipped = SkippedSamples()
    skipped.add(2)
    subprocess.run([sys.executable, "-c", _ADD, pickle.dumps(skipped).hex()], check=True)
    # THEN what it left out is known here, and its end removed nothing
    assert skipped.numbers().tolist() == [2, 7]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system doesn't fork")
def test_forked_processes_count_too():
    skipped = SkippedSamples()
    child = os.fork()
    if not child:
        skipped.add(4)
        del skipped
        os._exit(0)
    os.waitpid(child, 0)
    assert skipped.numbers().tolist() == [4]


def test_the_file_goes_with_the_object(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    skipped = SkippedSamples()
    skipped.add(1)
    assert len(os.listdir(tmp_path)) == 1
    del skipped
    gc.collect()
    assert os.listdir(tmp_path) == []


def test_without_a_folder_to_write_to_this_process_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    skipped = SkippedSamples()
    skipped.add(9)
    skipped.add(1)
    assert skipped.numbers().tolist() == [1, 9]
    assert pickle.loads(pickle.dumps(skipped)).numbers().tolist() == []


def test_images_of_mixed_sizes_are_brought_to_one(tmp_path):
    save(tmp_path / "1.png")
    save(tmp_path / "2.png", Image.new("RGB", (31, 17), (10, 20, 30)))
    save(tmp_path / "3.png", Image.new("I;16", (3, 4), 512))

    source = ImageSource(tmp_path, image_size=(6, 5))

    assert source.fields[0].shape == (6, 5, 3) and not source.fields[0].is_ragged
    np.testing.assert_array_equal(source.read_sample(0)[0], COLOURS)
    np.testing.assert_array_equal(source.read_sample(1)[0], np.broadcast_to(np.uint8([10, 20, 30]), (6, 5, 3)))
    np.testing.assert_array_equal(source.read_sample(2)[0], np.full((6, 5, 3), 2))
