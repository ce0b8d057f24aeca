import dataclasses
import os

import numpy as np
import pytest

from memfit.core.errors import BadFile
from memfit.data.sources import csv_cache
from memfit.data.sources.csv_bytes import open_bytes
from memfit.data.sources.csv_cache import load_index, read_cached, write_cached
from memfit.data.sources.csv_index import build_index

pytest.importorskip("pyarrow")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(csv_cache, "LEAST_CACHED_BYTES", 0)
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))


def index_of(folder):
    (folder / "x.csv").write_text("a\n1\n")
    return build_index(open_bytes(folder / "x.csv"), (), 4)


def test_the_index_is_kept_until_the_file_changes(tmp_path, monkeypatch):
    path = tmp_path / "x.csv"
    path.write_text("t,n\n" + "x,1\ny,2\n" * 40)
    first = load_index(open_bytes(path), ["t"])
    builds = []
    monkeypatch.setattr(csv_cache, "build_index", lambda *given: builds.append(given) or build_index(*given))
    again = load_index(open_bytes(path), ["t"])
    assert not builds
    assert (again.dialect, again.columns, again.classes) == (first.dialect, first.columns, first.classes)
    assert all((getattr(again, name) == getattr(first, name)).all() for name in ("offsets", "rows", "lines"))
    # WHEN other labels are asked for, or the file is another one, THEN it is looked through again
    load_index(open_bytes(path), [])
    path.write_text("t,n\n" + "x,1\nz,2\n" * 41)
    assert load_index(open_bytes(path), ["t"]).classes == {0: ("x", "z")}
    assert len(builds) == 2


def test_a_damaged_cache_is_ignored(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("t,n\n" + "x,1\ny,2\n" * 40)
    expected = load_index(open_bytes(path), ["t"])
    (cached,) = (tmp_path / "cache" / "csv").iterdir()
    whole = cached.read_bytes()
    for damaged in (b"", b"nonsense", whole[: len(whole) // 2], whole[:200] + b"\xff" * 50 + whole[250:]):
        cached.write_bytes(damaged)
        assert read_cached(str(cached)) is None
        assert load_index(open_bytes(path), ["t"]).classes == expected.classes
    cached.unlink()
    np.savez(cached, offsets=np.arange(3), rows=np.zeros(3), lines=np.zeros(2), facts=np.zeros(2, np.uint8))
    assert read_cached(str(cached)) is None
    write_cached(
        str(cached),
        dataclasses.replace(expected, rows=expected.rows * 0),
    )
    assert read_cached(str(cached)) is None


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "file"))
    path = tmp_path / "x.csv"
    path.write_text("a\n1\n")
    assert load_index(open_bytes(path), []).rows[-1] == 1


def test_the_cache_keeps_the_newest(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_cache, "_MOST_CACHED", 3)
    index = index_of(tmp_path)
    for number in range(6):
        write_cached(str(tmp_path / "kept" / f"{number}.npz"), index)
        os.utime(tmp_path / "kept" / f"{number}.npz", (number, number))
    assert sorted(os.listdir(tmp_path / "kept")) == ["3.npz", "4.npz", "5.npz"]


def test_nothing_half_written_stays(tmp_path, monkeypatch):
    index = index_of(tmp_path)

    def full(*_given, **_named):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space"):
        write_cached(str(tmp_path / "kept" / "x.npz"), index)
    assert os.listdir(tmp_path / "kept") == []


def test_a_file_that_changes_meanwhile(tmp_path, monkeypatch):
    path = tmp_path / "x.csv"
    path.write_text("a\n1\n")
    sizes = iter([(4, 1.0), (6, 2.0)])
    monkeypatch.setattr(csv_cache, "stat_of", lambda _: next(sizes))
    with pytest.raises(BadFile, match="was changed while it was read"):
        load_index(open_bytes(path), [])


def test_small_files_are_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_cache, "LEAST_CACHED_BYTES", 1000)
    (tmp_path / "x.csv").write_text("a\n1\n")
    load_index(open_bytes(tmp_path / "x.csv"), [])
    assert not (tmp_path / "cache").exists()
