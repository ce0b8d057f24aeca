import json

import numpy as np
import pytest

from memfit.core.errors import BadFile, BadInput
from memfit.data import speed
from memfit.data.convert import files_in
from memfit.data.speed import bench_data


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.random.default_rng(0).standard_normal((2000, 100)).astype("f4"))
    return tmp_path


def check(found, num_samples=2000):
    assert found.num_samples == num_samples
    assert found.num_rows >= found.batch_size
    assert found.rows_per_second == pytest.approx(found.num_rows / found.seconds)
    assert found.first_batch_seconds > 0
    assert found.ratio == pytest.approx(found.bytes_per_second / found.raw_bytes_per_second)
    data = json.loads(json.dumps(found.to_json()))
    assert (data["origin"], data["ratio"]) == ("measured", found.ratio)


def test_data_that_fits_is_measured_by_whole_epochs(folder):
    found = bench_data("x.npy", seconds=0.01)

    check(found)
    assert found.num_rows % 2000 == 0
    assert found.disk_bytes == 2000 * 400 + 128
    assert found.bytes_per_second == pytest.approx(found.rows_per_second * found.disk_bytes / 2000)


def test_other_data_is_measured_once_memory_is_filled(folder):
    found = bench_data("x.npy", seconds=0.01, memory="512KiB", batch_size=8)

    check(found)
    assert found.memory_bytes == 512 * 1024


def test_batches_may_be_made_by_workers(folder):
    check(bench_data("x.npy", seconds=0.01, num_workers=2))


def test_labels_and_several_features_count_once(folder):
    np.save("y.npy", np.arange(2000))

    check(bench_data(("x.npy", "y.npy"), seconds=0.01))
    check(bench_data({"a": "x.npy", "b": "y.npy"}, seconds=0.01))


def test_what_has_to_be_unpacked_is_measured_afterwards(folder, monkeypatch, capsys):
    monkeypatch.setenv("MEMFIT_SPOOL", str(folder / "spool"))
    np.savez_compressed("x.npz", x=np.zeros((2000, 100), "f4"))

    found = bench_data("x.npz", seconds=0.01)

    check(found)
    assert found.disk_bytes == 2000 * 400 + 128
    assert "unpacking" in capsys.readouterr().err


def test_bad_input_is_refused(folder):
    for options, message in (
        ({"seconds": 0.0}, "seconds must be positive"),
        ({"seconds": float("nan")}, "seconds must be positive"),
        ({"num_workers": -1}, "at least 0, but -1"),
        ({"memory": "1KiB"}, "too little"),
        ({"batch_size": 0}, "batch_size"),
    ):
        with pytest.raises(BadInput, match=message):
            bench_data("x.npy", **options)
    with pytest.raises(BadFile):
        bench_data("nothing.npy")


def test_systems_that_say_nothing_leave_it_unknown(folder, monkeypatch):
    monkeypatch.setattr(speed, "_held_bytes", lambda: None)
    monkeypatch.delattr(speed.os, "posix_fadvise")

    found = bench_data("x.npy", seconds=0.01)

    assert found.peak_bytes is None
    assert not found.is_cold


def test_files_are_those_in_folders(folder):
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "c").touch()

    assert [path.name for path in files_in([folder / "x.npy", folder / "a", folder / "nothing"])] == ["x.npy", "c"]


def test_of_remote_files_the_disk_is_unknown(folder):
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").pipe("/speed.npy", (folder / "x.npy").read_bytes())

    found = bench_data("memory://speed.npy", seconds=0.01)

    assert found.num_rows >= 32
    assert (found.disk_bytes, found.raw_bytes_per_second, found.ratio, found.is_cold) == (None, None, None, False)
