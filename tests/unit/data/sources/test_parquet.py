"""Parquet files are read row group by row group, in batches."""

import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memfit.core.errors import BadFile, BadInput, MissingDependency
from memfit.data.convert import convert_data
from memfit.data.files import LocalFile
from memfit.data.inspection import inspect_data
from memfit.data.source import Source
from memfit.data.sources import parquet
from memfit.data.sources.parquet import ParquetSource
from tests.sources import read

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

NUM_SAMPLES = 1003
RANDOM = np.random.default_rng(0)
A = RANDOM.standard_normal(NUM_SAMPLES)
B = RANDOM.integers(-100, 100, NUM_SAMPLES).astype(np.int16)
X = RANDOM.standard_normal((NUM_SAMPLES, 2, 3)).astype(np.float32)
CLASSES = np.array(["owl", "cat", "yak"])[RANDOM.integers(0, 3, NUM_SAMPLES)]


def table() -> Any:
    flat = pa.array(X.reshape(-1))
    nested = pa.FixedSizeListArray.from_arrays(pa.FixedSizeListArray.from_arrays(flat, 3), 2)
    lists = pa.ListArray.from_arrays(np.arange(0, 6 * NUM_SAMPLES + 1, 6, dtype=np.int32), flat)
    return pa.table({"a": A, "b": B, "x": nested, "lists": lists, "species": CLASSES})


def write(path: Path, what: Any = None, **options: Any) -> str:
    pq.write_table(table() if what is None else what, path, **{"row_group_size": 100, **options})
    return str(path)


def check(source: Source, start: int, stop: int) -> None:
    features, x, lists, species = read(source, start, stop)
    np.testing.assert_array_equal(features, np.stack([A, B], 1)[start:stop])
    np.testing.assert_array_equal(x, X[start:stop])
    np.testing.assert_array_equal(lists, X[start:stop].reshape(-1, 6))
    assert [source.classes[number] for number in species] == CLASSES[start:stop].tolist()


@pytest.mark.parametrize("options", [{}, {"compression": "none", "use_dictionary": False}, {"data_page_size": 200}])
def test_reads_what_is_stored(tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_BATCH_BYTES", 1000)
    source = ParquetSource(write(tmp_path / "a.parquet", **options), labels="species")
    assert [(field.name, field.dtype.name, field.shape) for field in source.fields] == [
        ("features", "float64", (2,)),
        ("x", "float32", (2, 3)),
        ("lists", "float32", (6,)),
        ("species", "int64", ()),
    ]
    assert source.classes == ("cat", "owl", "yak")
    assert source.num_samples == NUM_SAMPLES
    assert source.layout.edges is not None
    assert source.layout.edges.tolist() == [*range(0, 1001, 100), NUM_SAMPLES]
    for start, stop in [(0, NUM_SAMPLES), (0, 100), (150, 420), (130, 160), (160, 161), (1000, 1003), (7, 7)]:
        check(source, start, stop)
        source.drop(start, stop)


def test_a_row_group_read_in_parts_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = ParquetSource(write(tmp_path / "a.parquet"), labels="species")
    entered: list[int] = []
    real = pq.ParquetFile.iter_batches

    def iter_batches(file: Any, *, row_groups: list[int], **options: Any) -> Any:
        entered.extend(row_groups)
        return real(file, row_groups=row_groups, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", iter_batches)
    for start in range(200, 400, 20):
        check(source, start, start + 20)
    assert entered == [2, 3]
    # Backwards it has to begin anew.
    check(source, 310, 320)
    check(source, 300, 310)
    assert entered == [2, 3, 3, 3]


def test_columns_that_are_not_chosen_are_not_looked_at(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", table().append_column("when", pa.array([None] * NUM_SAMPLES, pa.date32())))
    source = ParquetSource(path, columns=["b"], labels="a")
    features, a = read(source, 90, 210)
    assert features.dtype == np.float32
    np.testing.assert_array_equal(features[:, 0], B[90:210])
    np.testing.assert_array_equal(a, A[90:210])
    with pytest.raises(BadInput, match=r"'when' \(date32\[day\]\) of .* can't be features"):
        ParquetSource(path, labels="species")


def test_gaps(tmp_path: Path) -> None:
    gaps = {"f": pa.array([1.5, None, 2.5, None]), "i": pa.array([1, 2, None, 4]), "s": pa.array(["u", "v", "u", None])}
    path = write(tmp_path / "a.parquet", pa.table(gaps), row_group_size=2)
    # A missing fraction is NaN.
    np.testing.assert_array_equal(read(ParquetSource(path, columns=["f"]), 0, 4)[0][:, 0], [1.5, np.nan, 2.5, np.nan])
    whole = ParquetSource(path, columns=["i"])
    read(whole, 0, 2)
    with pytest.raises(BadInput, match=r"column 'i' of .*a\.parquet' lacks a number in row 2"):
        read(whole, 0, 4)
    with pytest.raises(BadInput, match=r"column 's' of .* lacks a label in row 3"):
        read(ParquetSource(path, columns=["f"], labels="s"), 0, 4)


def test_ragged_lists(tmp_path: Path) -> None:
    lists = pa.array([[1.0, 2.0]] * 150 + [[1.0, 2.0, 3.0]] + [[1.0, 2.0]] * 49)
    source = ParquetSource(write(tmp_path / "a.parquet", pa.table({"l": lists})))
    read(source, 0, 150)
    with pytest.raises(BadInput, match=r"column 'l' of .* is ragged: row 150 has a list of 3, and row 0 one of 2"):
        read(source, 100, 200)


def test_too_many_classes(tmp_path: Path) -> None:
    names = pa.table({"a": np.arange(66_000), "s": [str(number) for number in range(66_000)]})
    with pytest.raises(BadInput, match=r"column 's' of .* has more than 65,536 different strings"):
        ParquetSource(write(tmp_path / "a.parquet", names, row_group_size=66_000), labels="s")


def test_damage_is_named_with_row_group_column_and_offset(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", write_page_checksum=True)
    chunk = pq.ParquetFile(path).metadata.row_group(3).column(1)
    offset = chunk.dictionary_page_offset or chunk.data_page_offset
    with open(path, "r+b") as file:
        file.seek(offset + chunk.total_compressed_size - 40)
        file.write(b"\xaa" * 30)
    source = ParquetSource(path, labels="species")
    check(source, 0, 300)
    with pytest.raises(BadFile) as raised:
        read(source, 250, 350)
    said = str(raised.value)
    assert f"row group 3 of {path!r} (rows 300 on) is damaged in column 'b'" in said
    assert f"{chunk.total_compressed_size} bytes begin at offset {offset} of the file" in said
    # What isn't damaged can still be read.
    check(source, 400, 500)


def test_truncated_and_other_files(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet")
    os.truncate(path, os.path.getsize(path) - 100)
    with pytest.raises(BadFile, match=r"a\.parquet' can't be opened as Parquet"):
        ParquetSource(path)
    (tmp_path / "b.parquet").write_bytes(b"")
    with pytest.raises(BadFile, match=r"b\.parquet' can't be opened as Parquet"):
        ParquetSource(tmp_path / "b.parquet")
    with pytest.raises(BadFile, match=r"none\.parquet"):
        ParquetSource(tmp_path / "none.parquet")


def test_file_that_changes_after_it_was_opened(tmp_path: Path) -> None:
    source = ParquetSource(write(tmp_path / "a.parquet"), columns=["a"])
    before = source.fingerprint()
    write(tmp_path / "a.parquet", table().slice(0, 500))
    assert source.fingerprint() != before
    with pytest.raises(BadFile, match="has changed since it was opened: it had 1003 rows and now has 500"):
        read(source, 0, 5)


def test_pickled_and_closed_sources_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.parquet")
    monkeypatch.chdir(tmp_path)
    source = ParquetSource("a.parquet", labels="species")
    check(source, 0, 50)
    other = pickle.loads(pickle.dumps(source))
    monkeypatch.chdir("/")
    check(other, 40, 60)
    source.close()
    check(source, 50, 150)
    assert source.name == "a.parquet"
    assert source.fingerprint() == other.fingerprint()
    assert repr(source) == "ParquetSource('a.parquet')"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system can't fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_reads_after_a_fork(tmp_path: Path) -> None:
    source = ParquetSource(write(tmp_path / "a.parquet"), labels="species")
    check(source, 0, 50)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            check(source, 50, 150)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    check(source, 50, 150)


def test_threads_read_at_once(tmp_path: Path) -> None:
    source = ParquetSource(write(tmp_path / "a.parquet"), labels="species")
    failed: list[Exception] = []

    def work(seed: int) -> None:
        try:
            for start in np.random.default_rng(seed).integers(0, 900, 10).tolist():
                check(source, start, start + 80)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_row_groups_without_rows_are_passed_over(tmp_path: Path) -> None:
    schema = pa.schema({"a": pa.float32()})
    with pq.ParquetWriter(tmp_path / "a.parquet", schema) as writer:
        for values in ([], [1, 2], [], [3]):
            writer.write_table(pa.table({"a": pa.array(values, pa.float32())}))
    source = ParquetSource(tmp_path / "a.parquet")
    assert source.layout.edges is not None
    assert source.layout.edges.tolist() == [0, 2, 3]
    assert read(source, 0, 3)[0][:, 0].tolist() == [1, 2, 3]
    empty = ParquetSource(write(tmp_path / "b.parquet", pa.table({"a": pa.array([], pa.float32())})))
    assert empty.num_samples == 0


def test_scratch_follows_pages_not_row_groups(tmp_path: Path) -> None:
    large = pa.table({"a": RANDOM.standard_normal(300_000)})
    options = {"row_group_size": 300_000, "use_dictionary": False, "max_rows_per_page": 10**6}
    small_pages = write(tmp_path / "a.parquet", large, data_page_size=10_000, **options)
    large_pages = write(tmp_path / "b.parquet", large, data_page_size=2**30, **options)
    needed = [ParquetSource(path).layout.scratch_bytes for path in (small_pages, large_pages)]
    assert needed[1] - needed[0] > 2 * (300_000 * 8 - 20_000)
    # A dictionary that was given up says nothing about the pages that follow.
    options["use_dictionary"] = True
    given_up = ParquetSource(write(tmp_path / "c.parquet", large, **options)).layout.scratch_bytes
    assert given_up > needed[0] + 2 * 2**20 - 20_000


def test_header_that_is_none_counts_as_a_usual_page(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\x15\x00\x15\x90\x4e\x00" + b"\x00" * 20)
    file = LocalFile(tmp_path / "a")
    assert parquet._page_bytes(0, file) == 5000
    assert parquet._page_bytes(5, file) == parquet._USUAL_PAGE_BYTES


def test_large_row_groups_are_released_and_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_RELEASED_BYTES", 10)
    monkeypatch.setattr("memfit.data.files._DROP_EVERY_BYTES", 1000)
    source = ParquetSource(write(tmp_path / "a.parquet", use_dictionary=["a"]), columns=["a"])
    released: list[int] = []
    monkeypatch.setattr(parquet, "_release_pools", lambda: released.append(1))
    dropped: list[tuple[int, int]] = []
    monkeypatch.setattr(LocalFile, "drop", lambda self, offset, size: dropped.append((offset, size)))
    read(source, 0, 99)
    assert released == []
    read(source, 99, 100)
    assert released == [1]
    source.drop(0, 10)
    assert dropped == []
    source.drop(10, 100)
    # 100 doubles are 800 bytes.
    assert dropped == []
    source.drop(100, 150)
    assert dropped == [(0, os.path.getsize(tmp_path / "a.parquet"))]


def test_the_memory_of_readers_is_the_systems_and_others_keep_theirs(tmp_path: Path) -> None:
    usual = pa.default_memory_pool().backend_name
    source = ParquetSource(write(tmp_path / "a.parquet", data_page_size=100_000), columns=["a", "x"])
    before = pa.system_memory_pool().bytes_allocated()
    read(source, 0, 50)

    assert pa.default_memory_pool().backend_name == usual
    # The rest of the row group is decoded and waits.
    assert pa.system_memory_pool().bytes_allocated() > before
    source.close()
    assert pa.system_memory_pool().bytes_allocated() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_fork_while_a_file_is_opened_leaves_the_child_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = ParquetSource(write(tmp_path / "a.parquet"), columns=["a"])
    usual = pa.default_memory_pool().backend_name
    opening, go_on = threading.Event(), threading.Event()
    plain = pq.ParquetFile

    def slowly(*given: Any, **options: Any) -> Any:
        opening.set()
        go_on.wait(10)
        return plain(*given, **options)

    monkeypatch.setattr(pq, "ParquetFile", slowly)
    thread = threading.Thread(target=lambda: read(source, 0, 10))
    thread.start()
    assert opening.wait(10)
    threading.Timer(0.2, go_on.set).start()
    child = os.fork()
    if child == 0:
        with parquet._system_pool():
            inside = pa.default_memory_pool().backend_name
        os._exit(0 if (inside, pa.default_memory_pool().backend_name) == ("system", usual) else 1)
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


IMPORTS = """
import sys
import memfit
for batch in memfit.stream(sys.argv[1], columns=["a", "x"], batch_size=50):
    pass
print([name for name in ("numpy.ma", "pyarrow.compute") if name in sys.modules])
"""


def test_reading_loads_no_more_than_it_uses(tmp_path: Path) -> None:
    """Each worker would have a copy of its own."""
    path = write(tmp_path / "a.parquet")
    done = subprocess.run([sys.executable, "-c", IMPORTS, path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_missing_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDependency, match=r"pyarrow is needed: `pip install pyarrow`"):
        ParquetSource(path)


def test_reads_remote_files(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").pipe_file("/tables/a.parquet", Path(write(tmp_path / "a.parquet")).read_bytes())
    source = ParquetSource("memory://tables/a.parquet", labels="species")
    check(source, 90, 310)
    source.drop(0, 10)
    source.close()
    check(pickle.loads(pickle.dumps(source)), 90, 310)


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are text on this system")
def test_names_that_are_no_utf8(tmp_path: Path) -> None:
    # GIVEN a name as file systems of other countries and times have left them
    path = tmp_path / os.fsdecode(b"caf\xe9.parquet")
    np.save(tmp_path / "x.npy", np.arange(6.0).reshape(3, 2))
    convert_data(tmp_path / "x.npy", path)
    source = ParquetSource(path)
    out = np.empty((3, 2))
    source.read(0, 3, [out])
    assert out.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert inspect_data(path).storage
