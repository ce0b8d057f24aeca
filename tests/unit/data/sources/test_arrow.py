"""Arrow and Feather files are read batch by batch."""

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memfit.core.errors import BadFile, BadInput, MissingDependency
from memfit.data.source import Source
from memfit.data.sources.arrow import ArrowSource
from tests.sources import read

pa = pytest.importorskip("pyarrow")
feather = pytest.importorskip("pyarrow.feather")

NUM_SAMPLES = 250
A = np.arange(NUM_SAMPLES) * 0.5
X = np.random.default_rng(0).integers(0, 255, (NUM_SAMPLES, 4)).astype(np.uint8)
CLASSES = np.array(["owl", "cat", "yak"])[np.arange(NUM_SAMPLES) % 3]


def table(*, has_dictionary: bool = False) -> Any:
    species = pa.array(CLASSES)
    if has_dictionary:
        species = species.dictionary_encode()
    return pa.table({"a": A, "x": pa.FixedSizeListArray.from_arrays(pa.array(X.reshape(-1)), 4), "species": species})


def write_stream(path: Path, what: Any) -> None:
    with pa.ipc.new_stream(path, what.schema) as writer:
        writer.write_table(what, max_chunksize=100)


def write_feather(path: Path, what: Any) -> None:
    feather.write_feather(what, path, chunksize=100, compression="lz4")


def write_file(path: Path, what: Any) -> None:
    with pa.ipc.new_file(path, what.schema) as writer:
        writer.write_table(what, max_chunksize=100)


def check(source: Source, start: int, stop: int) -> None:
    a, x, species = read(source, start, stop)
    np.testing.assert_array_equal(a[:, 0], A[start:stop])
    np.testing.assert_array_equal(x, X[start:stop])
    assert [source.classes[number] for number in species] == CLASSES[start:stop].tolist()


@pytest.mark.parametrize("has_dictionary", [False, True])
@pytest.mark.parametrize("write", [write_stream, write_file, write_feather])
def test_reads_what_is_stored(tmp_path: Path, write: Any, has_dictionary: bool) -> None:
    write(tmp_path / "a.arrow", table(has_dictionary=has_dictionary))
    source = ArrowSource(tmp_path / "a.arrow", labels="species")
    assert source.classes == ("cat", "owl", "yak")
    assert source.num_samples == NUM_SAMPLES
    assert source.layout.edges is not None
    assert source.layout.edges.tolist() == [0, 100, 200, 250]
    assert source.layout.scratch_bytes >= 100 * 12
    for start, stop in [(0, 250), (0, 100), (30, 40), (90, 210), (240, 250), (5, 5)]:
        check(source, start, stop)
        source.drop(start, stop)


def test_a_batch_read_in_parts_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_feather(tmp_path / "a.feather", table())
    source = ArrowSource(tmp_path / "a.feather", labels="species")
    check(source, 0, 10)
    monkeypatch.setattr(type(source._file), "read_into", lambda *_: pytest.fail("the batch was read again"))
    check(source, 10, 100)


def test_pickled_and_closed_sources_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_stream(tmp_path / "a.arrow", table())
    monkeypatch.chdir(tmp_path)
    source = ArrowSource("a.arrow", labels="species")
    check(source, 0, 50)
    other = pickle.loads(pickle.dumps(source))
    monkeypatch.chdir("/")
    check(other, 90, 110)
    source.close()
    check(source, 50, 150)
    assert source.fingerprint() == other.fingerprint()
    assert source.name == "a.arrow"
    assert repr(source) == "ArrowSource('a.arrow')"


def test_damaged_batch_is_named_with_its_offset(tmp_path: Path) -> None:
    write_feather(tmp_path / "a.feather", table())
    source = ArrowSource(tmp_path / "a.feather", labels="species")
    offset, size = source._contents.places[1]
    with open(tmp_path / "a.feather", "r+b") as file:
        file.seek(offset + size // 2)
        file.write(b"\xff" * (size // 2))
    check(source, 0, 100)
    with pytest.raises(
        BadFile, match=rf"batch of .*a\.feather' that begins with row 100, at offset {offset} of the file"
    ):
        read(source, 90, 110)


@pytest.mark.parametrize("write", [write_stream, write_file])
def test_truncated_file(tmp_path: Path, write: Any) -> None:
    write(tmp_path / "a.arrow", table())
    places = ArrowSource(tmp_path / "a.arrow", labels="species")._contents.places
    os.truncate(tmp_path / "a.arrow", sum(places[-1]) - 10)
    with pytest.raises(BadFile, match=rf"truncated or damaged: the batch of 50 rows at offset {places[-1][0]}"):
        ArrowSource(tmp_path / "a.arrow")


def test_other_files(tmp_path: Path) -> None:
    for content in (
        b"",
        b"something else than what was expected",
        b"ARROW1\0\0\xff\xff\xff\xff\x10\0\0\0" + b"\xff" * 16,
    ):
        (tmp_path / "a.arrow").write_bytes(content)
        with pytest.raises(BadFile, match=r"a\.arrow' is (not an Arrow or Feather file|damaged)"):
            ArrowSource(tmp_path / "a.arrow")


def test_dictionaries_that_change_on_the_way(tmp_path: Path) -> None:
    schema = pa.schema({"a": pa.int64(), "s": pa.dictionary(pa.int32(), pa.string())})
    with pa.ipc.new_stream(tmp_path / "a.arrow", schema) as writer:
        for values in (["u", "v"], ["w", "u"]):
            writer.write_batch(pa.record_batch([pa.array([1, 2]), pa.array(values).dictionary_encode()], schema=schema))
    with pytest.raises(BadInput, match=r"changes the dictionary of a column on its way, at offset \d+"):
        ArrowSource(tmp_path / "a.arrow", labels="s")


def test_table_without_rows(tmp_path: Path) -> None:
    write_stream(tmp_path / "a.arrow", table().slice(0, 0))
    assert ArrowSource(tmp_path / "a.arrow", columns=["a"]).num_samples == 0


def test_missing_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.arrow").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDependency, match=r"pyarrow is needed: `pip install pyarrow`"):
        ArrowSource(tmp_path / "a.arrow")


def test_reads_remote_files(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    write_feather(tmp_path / "a.feather", table())
    fsspec.filesystem("memory").pipe_file("/arrow/a.feather", (tmp_path / "a.feather").read_bytes())
    check(ArrowSource("memory://arrow/a.feather", labels="species"), 90, 210)
