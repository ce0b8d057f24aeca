import csv
import gzip
import io
import itertools
import math
import os
import pickle
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memfit.core.errors import BadFile, BadInput
from memfit.data.sources import csv as csv_source
from memfit.data.sources import csv_index
from memfit.data.sources.csv import open_csv

pytest.importorskip("pyarrow")


@pytest.fixture(autouse=True)
def small_steps(monkeypatch, tmp_path):
    """Chunks, blocks and pieces of a few rows, so that small files have many, and a cache of the test's own."""
    monkeypatch.setattr(csv_index, "_CHUNK_BYTES", 200)
    monkeypatch.setattr(csv_index, "BLOCK_BYTES", 60)
    monkeypatch.setattr(csv_index, "_COLUMN_BYTES", 1)
    monkeypatch.setattr(csv_source, "_PIECE_BYTES", 150)
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))


def read(source, start=0, stop=None, dtypes=None):
    stop = source.num_samples if stop is None else stop
    dtypes = dtypes or [field.dtype for field in source.fields]
    out = [np.full((stop - start, *field.shape), 77, dtype) for field, dtype in zip(source.fields, dtypes, strict=True)]
    source.read(start, stop, out)
    source.drop(start, stop)
    return out


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


CLASSES = st.sampled_from(["a", "b,c", 'q"q', "two\nlines", "two\r\nlines", "é", '""', "3"])
NUMBERS = st.floats(-1e30, 1e30) | st.sampled_from([None, math.inf])


@given(
    rows=st.lists(st.tuples(NUMBERS, st.integers(-(2**63), 2**63 - 1), CLASSES), min_size=1, max_size=60),
    end=st.sampled_from(["\n", "\r\n"]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    delimiter=st.sampled_from(",;\t|"),
    has_end=st.booleans(),
    has_header=st.booleans(),
    has_mark=st.booleans(),
    cuts=st.lists(st.integers(0, 60), min_size=2, max_size=8),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_tables_come_back_as_they_were_written(
    tmp_path, rows, end, quoting, delimiter, has_end, has_header, has_mark, cuts
):
    # GIVEN a table written by Python's csv; the class "first" keeps any of them from being all numbers
    rows = [(1.5, 7, "first"), *rows]
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator=end, quoting=quoting, delimiter=delimiter)
    if has_header:
        writer.writerow(["x", "n", "label"])
    writer.writerows([["" if x is None else repr(x), n, label] for x, n, label in rows])
    written = text.getvalue() if has_end else text.getvalue().removesuffix(end)
    path = write(tmp_path / "x.csv", (b"\xef\xbb\xbf" if has_mark else b"") + written.encode())
    # WHEN it is opened
    source = open_csv(path, columns=None, labels="label" if has_header else "2")
    # THEN all values are there, and any run of rows is that part of the whole
    assert source.num_samples == len(rows)
    assert source.classes == tuple(sorted({label for *_, label in rows}))
    features, labels = read(source)
    expected = np.array([[math.nan if x is None else x, n] for x, n, _ in rows], np.float64)
    np.testing.assert_array_equal(features, expected)
    assert [source.classes[number] for number in labels] == [label for *_, label in rows]
    for start, stop in itertools.pairwise(cuts):
        start, stop = sorted((min(start, len(rows)), min(stop, len(rows))))
        part, numbers = read(source, start, stop, [np.float32, np.int32])
        np.testing.assert_array_equal(part, expected[start:stop].astype(np.float32))
        np.testing.assert_array_equal(numbers, labels[start:stop])


def table(num_rows=200):
    rows = [f"{row},{row / 4},{'xyz'[row % 3]}" for row in range(num_rows)]
    return "n,f,t\n" + "\n".join(rows) + "\n"


def test_fields_and_layout(tmp_path):
    path = write(tmp_path / "x.csv", table())
    source = open_csv(path, columns=None, labels="t")
    features, label = source.fields
    assert (features.name, features.shape, features.dtype) == ("features", (2,), np.float64)
    assert (label.name, label.shape, label.dtype, label.is_label) == ("t", (), np.int64, True)
    assert source.name == str(path)
    edges = source.layout.edges
    assert edges[0] == 0 and edges[-1] == 200 and len(edges) > 20 and (np.diff(edges) > 0).all()
    assert not source.layout.is_sequential and source.layout.scratch_bytes > 0
    assert source.notes == ()


def test_only_bytes_near_the_rows_are_read(tmp_path, monkeypatch):
    source = open_csv(write(tmp_path / "x.csv", table()), columns=None, labels="t")
    runs = []
    whole = source._text.read
    monkeypatch.setattr(source._text, "read", lambda start, stop: runs.append((start, stop)) or whole(start, stop))
    features, _ = read(source, 100, 103)
    assert features[:, 0].tolist() == [100, 101, 102]
    assert 0 < sum(stop - start for start, stop in runs) < 200


def test_columns_in_the_order_given_and_integer_labels(tmp_path):
    path = write(tmp_path / "x.csv", table())
    source = open_csv(path, columns=["f", "n"], labels=None)
    (features,) = read(source, 4, 6)
    assert features.tolist() == [[1, 4], [1.25, 5]]
    assert source.classes == ()
    source = open_csv(path, columns="f", labels=["n"])
    assert source.fields[1].dtype == np.int64
    assert read(source, 7, 9)[1].tolist() == [7, 8]


def test_columns_without_names_go_by_their_numbers(tmp_path):
    path = write(tmp_path / "x.csv", "1,2,a\n3,4,b\n5,6,a\n")
    source = open_csv(path, columns=["1", "column 0"], labels="2")
    assert source.classes == ("a", "b")
    features, labels = read(source)
    assert features.tolist() == [[2, 1], [4, 3], [6, 5]]
    assert labels.tolist() == [0, 1, 0]
    assert 'the first line has no names: columns are "0", "1" and so on' in source.notes
    with pytest.raises(BadInput, match="has no column 'column 7'"):
        open_csv(path, columns=["7"], labels=None)


def test_unknown_columns_and_text_as_features(tmp_path):
    path = write(tmp_path / "x.csv", table())
    with pytest.raises(BadInput, match=r"has no column 'F' .*did you mean 'f'"):
        open_csv(path, columns=["F"], labels=None)
    with pytest.raises(BadInput, match=r"'t' of .* is text, which can't be features"):
        open_csv(path, columns=None, labels=None)


def test_empty_cells_are_nan_and_noted(tmp_path):
    path = write(tmp_path / "x.csv", "i,f,b,e,n\n1,NA,true,,1\n,2.5,,,1\n3,null,False,,1\n")
    source = open_csv(path, columns=None, labels="i")
    features, labels = read(source)
    nan = math.nan
    np.testing.assert_array_equal(features, [[nan, 1, nan, 1], [2.5, nan, nan, 1], [nan, 0, nan, 1]])
    np.testing.assert_array_equal(labels, [1, nan, 3])
    assert (
        "column 'i' has 1 empty cells, which are NaN, and its whole numbers are floating-point ones for that"
        in source.notes
    )
    assert "column 'f' has 2 empty cells, which are NaN" in source.notes
    assert not any("'n'" in note for note in source.notes)


def test_many_columns_with_empty_cells_are_counted(tmp_path):
    path = write(tmp_path / "x.csv", ",".join(f"c{n}" for n in range(9)) + "\n" + "1," * 8 + "1\n" + "," * 8 + "\n")
    assert "4 more columns have empty cells, which are NaN" in open_csv(path, columns=None, labels=None).notes


def test_truth_values(tmp_path):
    path = write(tmp_path / "x.csv", "b,c\ntrue,True\nfalse,False\n")
    features, labels = read(open_csv(path, columns=None, labels="c"))
    assert features.tolist() == [[1], [0]]
    assert labels.tolist() == [1, 0] and labels.dtype == np.int64


def test_decimal_commas_tabs_and_row_numbers(tmp_path):
    source = open_csv(write(tmp_path / "x.csv", "a;b\n1,5;2\n2,25;3\n"), columns=None, labels=None)
    assert read(source)[0].tolist() == [[1.5, 2], [2.25, 3]]
    assert source.notes == ("numbers have a decimal comma",)
    source = open_csv(write(tmp_path / "x.tsv", "a\tb\n1\t2\n"), columns=None, labels=None)
    assert read(source)[0].tolist() == [[1, 2]]
    source = open_csv(write(tmp_path / "y.csv", ",a\n0,5.5\n1,6.5\n"), columns=None, labels=None)
    assert "the row numbers that pandas writes" in source.notes[0]


def test_text_in_a_column_of_features_is_named_by_line(tmp_path):
    rows = table(100).splitlines()
    rows[61] = "60,oops,x"
    path = write(tmp_path / "x.csv", "\n".join(rows))
    with pytest.raises(BadFile, match=r"x\.csv', line 62: column 'f' has 'oops', where other rows have numbers"):
        open_csv(path, columns=None, labels="t")
    # As labels it is a class, and said to be
    source = open_csv(path, columns=["n"], labels="f")
    assert "oops" in source.classes and "15.0" not in source.classes and "14.75" in source.classes
    assert any("(line 62: 'oops')" in note for note in source.notes)
    assert read(source, 60, 61)[1].tolist() == [source.classes.index("oops")]
    assert open_csv(path, columns=["n"], labels="t").num_samples == 100


def test_gzip_is_read_from_its_beginning(tmp_path):
    plain = open_csv(write(tmp_path / "x.csv", table()), columns=None, labels="t")
    packed = open_csv(write(tmp_path / "x.csv.gz", gzip.compress(table().encode())), columns=None, labels="t")
    assert packed.layout.is_sequential
    assert "packed by gzip, and can only be unpacked from its beginning" in packed.layout.reason
    for start, stop in [(0, 200), (50, 60), (10, 20)]:
        for first, second in zip(read(plain, start, stop), read(packed, start, stop), strict=True):
            np.testing.assert_array_equal(first, second)


def test_the_fingerprint_changes_with_the_file_and_the_choice(tmp_path):
    path = write(tmp_path / "x.csv", table())
    first = open_csv(path, columns=None, labels="t").fingerprint()
    assert first == open_csv(path, columns=None, labels="t").fingerprint()
    assert first != open_csv(path, columns=["n"], labels="t").fingerprint()
    os.utime(path, (1, 1))
    assert first != open_csv(path, columns=None, labels="t").fingerprint()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("\n150,37.5,x", "\n150,oops,x", "line 152: column 'f' has 'oops', which is no number"),
        ("\n150,37.5,x", "\n150,37,5,x", "line 152: 4 cells"),
        ("\n150,37.5,x", "\n150,37.5,q", "the label 'q'"),
        ("\n150,37.5,x", "\n150,    ,x", "line 152: column 'f' has '    ', which is no number"),
        ("\n150,37.5,x", "\n,37.5000,x", "and has empty cells in column 'n', which had none"),
        ("\n150,37.5,x", "\n0x1,0x11,x", "line 152: column 'n' has '0x1'"),
        ("\n150,37.5,x", "\n" * 11, r"and has \d+ rows from line \d+ on instead of \d+"),
    ],
)
def test_a_file_that_was_changed_after_opening(tmp_path, old, new, message):
    path = write(tmp_path / "x.csv", table())
    source = open_csv(path, columns=None, labels="t")
    assert len(old) == len(new)
    write(path, table().replace(old, new))
    with pytest.raises(BadFile, match=rf"x\.csv' was changed since it was opened, .*{message}"):
        read(source)


def test_it_is_read_after_a_pickle_a_fork_and_by_threads(tmp_path):
    source = open_csv(write(tmp_path / "x.csv", table()), columns=None, labels="t")
    whole = read(source)

    def is_right(copy):
        return all(
            np.array_equal(part, array[start : start + 30])
            for start in (0, 33, 170)
            for part, array in zip(read(copy, start, start + 30), whole, strict=True)
        )

    assert is_right(pickle.loads(pickle.dumps(source)))
    found = []
    threads = [threading.Thread(target=lambda: found.append(is_right(source))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 8
    if hasattr(os, "fork"):
        child = os.fork()
        if not child:
            code = 1
            try:
                code = int(not is_right(source))
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    source.close()
    assert is_right(source)


def test_a_file_behind_an_address(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    with system.open("/folder/x.csv", "wb") as file:
        file.write(table().encode())
    source = open_csv("memory://folder/x.csv", columns=None, labels="t")
    local = open_csv(write(tmp_path / "x.csv", table()), columns=None, labels="t")
    for first, second in zip(read(source, 20, 90), read(local, 20, 90), strict=True):
        np.testing.assert_array_equal(first, second)
    assert source.fingerprint() == source.fingerprint()
