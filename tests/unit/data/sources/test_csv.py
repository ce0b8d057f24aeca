import csv
import gzip
import io
import itertools
import math
import os
import pickle
import sys
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memfit.core import heap
from memfit.core.errors import BadFile, BadInput, MissingDependency
from memfit.data.sources import csv as csv_source
from memfit.data.sources.csv import CsvSource
from tests.sources import read

pytest.importorskip("pyarrow")


@pytest.fixture(autouse=True)
def small_steps(monkeypatch, tmp_path):
    """Blocks and batches of a few rows, so that small files have many, and a spool folder of the test's own."""
    monkeypatch.setattr(csv_source, "_BLOCK_BYTES", 200)
    monkeypatch.setattr(csv_source, "_COLUMN_BYTES", 1)
    monkeypatch.setattr(csv_source, "_BATCH_BYTES", 200)
    monkeypatch.setattr(csv_source, "_HEAD_BYTES", 100)
    # What most of the time of such small conversions goes to.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(heap, "release", lambda: None)
    monkeypatch.setenv("MEMFIT_SPOOL", str(tmp_path / "spool"))


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
    source = CsvSource(path, labels="label" if has_header else "2")
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
    source = CsvSource(path, labels="t")
    features, label = source.fields
    assert (features.name, features.shape, features.dtype) == ("features", (2,), np.float64)
    assert (label.name, label.shape, label.dtype, label.is_label) == ("t", (), np.int64, True)
    assert source.name == str(path)
    edges = source.layout.edges
    assert edges[0] == 0 and edges[-1] == 200 and len(edges) > 20 and (np.diff(edges) > 0).all()
    assert not source.layout.is_sequential and source.layout.scratch_bytes > 0


def test_columns_in_the_order_given_and_integer_labels(tmp_path):
    path = write(tmp_path / "x.csv", table())
    source = CsvSource(path, columns=["f", "n"], labels=None)
    (features,) = read(source, 4, 6)
    assert features.tolist() == [[1, 4], [1.25, 5]]
    assert source.classes == ()
    source = CsvSource(path, columns=["f"], labels="n")
    assert source.fields[1].dtype == np.int64
    assert read(source, 7, 9)[1].tolist() == [7, 8]


def test_columns_without_names_go_by_their_numbers(tmp_path):
    path = write(tmp_path / "x.csv", "1,2,a\n3,4,b\n5,6,a\n")
    source = CsvSource(path, columns=["1", "column 0"], labels="2")
    assert source.classes == ("a", "b")
    features, labels = read(source)
    assert features.tolist() == [[2, 1], [4, 3], [6, 5]]
    assert labels.tolist() == [0, 1, 0]
    with pytest.raises(BadInput, match="has no column 'column 7'"):
        CsvSource(path, columns=["7"], labels=None)


def test_unknown_columns_and_text_as_features(tmp_path):
    path = write(tmp_path / "x.csv", table())
    with pytest.raises(BadInput, match=r"has no column 'F' .*did you mean 'f'"):
        CsvSource(path, columns=["F"], labels=None)
    with pytest.raises(BadInput, match=r"'t' of .* is text, which can't be features"):
        CsvSource(path)


def test_empty_cells_are_nan_and_noted(tmp_path):
    path = write(tmp_path / "x.csv", "i,f,b,e,n\n1,NA,true,,1\n,2.5,,,1\n3,null,False,,1\n")
    source = CsvSource(path, labels="i")
    features, labels = read(source)
    nan = math.nan
    np.testing.assert_array_equal(features, [[nan, 1, nan, 1], [2.5, nan, nan, 1], [nan, 0, nan, 1]])
    np.testing.assert_array_equal(labels, [1, nan, 3])


def test_truth_values(tmp_path):
    path = write(tmp_path / "x.csv", "b,c\ntrue,True\nfalse,False\n")
    features, labels = read(CsvSource(path, labels="c"))
    assert features.tolist() == [[1], [0]]
    assert labels.tolist() == [1, 0] and labels.dtype == np.int64


def test_decimal_commas_tabs_and_row_numbers(tmp_path):
    source = CsvSource(write(tmp_path / "x.csv", "a;b\n1,5;2\n2,25;3\n"))
    assert read(source)[0].tolist() == [[1.5, 2], [2.25, 3]]
    source = CsvSource(write(tmp_path / "x.tsv", "a\tb\n1\t2\n"))
    assert read(source)[0].tolist() == [[1, 2]]


def test_text_in_a_column_of_features_is_named_by_line(tmp_path):
    rows = table(100).splitlines()
    rows[61] = "60,oops,x"
    path = write(tmp_path / "x.csv", "\n".join(rows))
    with pytest.raises(BadFile, match=r"x\.csv', line 62: column 'f' has 'oops', where other rows have numbers"):
        CsvSource(path, labels="t")
    # As labels it is a class
    source = CsvSource(path, columns=["n"], labels="f")
    assert "oops" in source.classes and "15.0" not in source.classes and "14.75" in source.classes
    assert read(source, 60, 61)[1].tolist() == [source.classes.index("oops")]
    assert CsvSource(path, columns=["n"], labels="t").num_samples == 100


def test_gzip_is_told_by_the_contents(tmp_path):
    plain = CsvSource(write(tmp_path / "x.csv", table()), labels="t")
    packed = CsvSource(write(tmp_path / "y.csv", gzip.compress(table().encode())), labels="t")
    for start, stop in [(0, 200), (50, 60), (10, 20)]:
        for first, second in zip(read(plain, start, stop), read(packed, start, stop), strict=True):
            np.testing.assert_array_equal(first, second)


def test_truncated_and_damaged_archives_are_named(tmp_path):
    packed = gzip.compress(table(5000).encode())
    for data in (packed[: len(packed) // 2], packed[:30], packed[:-8] + bytes(8)):
        with pytest.raises(BadFile, match=r"x\.csv\.gz' can't be unpacked: .*truncated or damaged"):
            CsvSource(write(tmp_path / "x.csv.gz", data), labels="t")
    assert os.listdir(tmp_path / "spool") == []


def test_the_fingerprint_changes_with_the_file_and_the_choice(tmp_path):
    path = write(tmp_path / "x.csv", table())
    first = CsvSource(path, labels="t").fingerprint()
    assert first == CsvSource(path, labels="t").fingerprint()
    assert first != CsvSource(path, columns=["n"], labels="t").fingerprint()
    os.utime(path, (1, 1))
    assert first != CsvSource(path, labels="t").fingerprint()


def test_it_is_converted_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(csv_source, "_ANNOUNCED_BYTES", 1000)
    path = write(tmp_path / "x.csv", table())
    first = read(CsvSource(path, labels="t"))
    (folder,) = (tmp_path / "spool").iterdir()
    assert f"memfit: converting {path} to '{folder}', once." in capsys.readouterr().err
    # WHEN it is opened again THEN it isn't converted again, and the rows are the same
    source = CsvSource(path, labels="t")
    for one, other in zip(first, read(source), strict=True):
        np.testing.assert_array_equal(one, other)
    assert source.classes == ("x", "y", "z")
    assert not capsys.readouterr().err


@pytest.mark.parametrize("name", ["rows.arrow", "memfit.json"])
def test_what_was_converted_and_damaged_is_converted_again(tmp_path, name):
    path = write(tmp_path / "x.csv", table())
    CsvSource(path, labels="t")
    (folder,) = (tmp_path / "spool").iterdir()
    write(folder / name, (folder / name).read_bytes()[:20])
    assert len(read(CsvSource(path, labels="t"))[0]) == 200


def test_files_of_one_name_and_size_are_told_apart(tmp_path):
    for folder, text in (("a", "n\n1\n"), ("b", "n\n2\n")):
        (tmp_path / folder).mkdir()
        os.utime(write(tmp_path / folder / "x.csv", text), (1, 1))
    found = [read(CsvSource(tmp_path / folder / "x.csv"))[0].item() for folder in "ab"]
    assert found == [1, 2]


def test_a_file_that_changes_while_it_is_read(tmp_path, monkeypatch):
    sizes = iter([(4, 1.0), (6, 2.0)])
    monkeypatch.setattr(csv_source, "stat_of", lambda _: next(sizes))
    with pytest.raises(BadFile, match="was changed while it was read"):
        CsvSource(write(tmp_path / "x.csv", "a\n1\n"))
    assert os.listdir(tmp_path / "spool") == []


def test_a_spool_folder_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMFIT_SPOOL", str(write(tmp_path / "file", "")))
    with pytest.raises(BadFile, match=r"has to be unpacked before .* can't be written to: .*Set MEMFIT_SPOOL"):
        CsvSource(write(tmp_path / "x.csv", "a\n1\n"))


@pytest.mark.skipif(sys.platform != "linux", reason="file names are Unicode there")
def test_a_spool_folder_whose_name_is_no_text(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMFIT_SPOOL", os.fsdecode(os.fsencode(tmp_path) + b"/spool-\xff"))

    source = CsvSource(write(tmp_path / "x.csv", "a,b\n1,2\n3,4\n"))

    assert source.num_samples == 2


def test_blank_lines_and_a_last_line_without_an_end(tmp_path):
    path = write(tmp_path / "x.csv", "\na\n1\n" + "\n" * 500 + "2\n3\n" + "\r\n" * 300 + "4")
    assert read(CsvSource(path))[0].tolist() == [[1], [2], [3], [4]]


def test_kinds_found_late(tmp_path):
    # GIVEN labels that are whole numbers, and features that are empty, for many rows
    early = "1,1,,,7\n" * 200
    path = write(tmp_path / "x.csv", "i,f,e,b,n\n" + early + "2,1.5,7,true,\n" + early)
    for name, dtype in (("i", np.int64), ("f", np.float64), ("n", np.float64)):
        features, labels = read(CsvSource(path, columns=["e", "b"], labels=name))
        np.testing.assert_array_equal(features[199:202], [[math.nan] * 2, [7, 1], [math.nan] * 2])
        assert labels.dtype == dtype


def test_labels_that_turn_out_to_be_text_late_have_all_their_classes(tmp_path):
    rows = [f"{row % 3:02d},5" for row in range(300)]
    rows[280] = "other,5"
    source = CsvSource(write(tmp_path / "x.csv", "a,b\n" + "\n".join(rows)), labels="a")
    assert source.classes == ("00", "01", "02", "other")


def test_dates_and_words_for_nothing_are_classes_as_they_are_written(tmp_path):
    path = write(tmp_path / "x.csv", "d,n\n" + "2020-01-02,1\n2020-01-01,2\n" * 10)
    assert CsvSource(path, labels="d").classes == ("2020-01-01", "2020-01-02")
    path = write(tmp_path / "y.csv", "d,n\n" + "NA,1\n" * 30 + "x,1\n")
    assert CsvSource(path, labels="d").classes == ("NA", "x")


def test_too_many_classes(tmp_path, monkeypatch):
    path = write(tmp_path / "x.csv", "t,n\n" + "".join(f"name {row},1\n" for row in range(30)))
    monkeypatch.setattr(csv_source, "_LONGEST_CLASSES", 100)
    with pytest.raises(BadInput, match="too long and too many different strings"):
        CsvSource(path, labels="t")
    monkeypatch.setattr(csv_source, "MOST_CLASSES", 10)
    monkeypatch.setattr("memfit.data.sources.tables.MOST_CLASSES", 10)
    with pytest.raises(BadInput, match=r"column 't' of .*x\.csv has more than 10 different strings"):
        CsvSource(path, labels="t")


GOOD = "".join(f"{row},{row}\n" for row in range(140))


@pytest.mark.parametrize(
    ("bad", "line", "message"),
    [
        ("1\n", 142, r"1 cells \(separated by ','\), where 2 were expected as in the first row: '1'"),
        ("1,2,3\n", 142, r"3 cells .* where 2 were expected as in the first row: '1,2,3'"),
        ('1,"2\n3"\n1\n', 144, "1 cells"),
        ('\n\r\n1,"2\n', 144, "a quote is opened and never closed, .*: '1,2"),
        ("1,\x002\n", 142, r"column 'b' has '\\x002', where other rows have numbers"),
        (b"1,\xe9\n", 142, "column 'b' has '\ufffd', which isn't UTF-8.*iconv"),
        (b"1,x\xe2\x82", 142, "column 'b' has .* which isn't UTF-8"),
        ("1,0x1g\n", 142, "column 'b' has '0x1g', where other rows have numbers"),
    ],
)
@pytest.mark.parametrize("is_early", [False, True])
def test_bad_rows_are_named_by_line(tmp_path, bad, line, message, is_early):
    bad = bad if isinstance(bad, bytes) else bad.encode()
    good = GOOD.encode()
    if is_early:
        good, line = b"0,0\n" * 3, line - 137
    # Nothing after a character that is cut short by the end of the file.
    after = b"" if bad.endswith(b"\x82") else GOOD.encode()
    with pytest.raises(BadFile, match=rf"x\.csv', line {line}: {message}"):
        CsvSource(write(tmp_path / "x.csv", b"a,b\n" + good + bad + after))
    assert os.listdir(tmp_path / "spool") == []


def test_a_quote_that_is_never_closed_in_a_column_that_is_not_used(tmp_path):
    path = write(tmp_path / "x.csv", "a,t\n" + "1,x\n" * 140 + '1,"x\n1,x\n')
    with pytest.raises(BadFile, match="line 142: a quote is opened and never closed"):
        CsvSource(path, columns=["a"], labels=None)


def test_an_endless_record_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_source, "_LONGEST_RECORD", 300)
    for row in ('1,"' + "2\n" * 100_000, "1," + "2" * 300_000):
        with pytest.raises(BadFile, match=r"line 142: a quote is opened and never closed, or a row has more than"):
            CsvSource(write(tmp_path / "x.csv", "a,b\n" + GOOD + row))


def test_long_records_make_larger_blocks(tmp_path):
    path = write(tmp_path / "x.csv", "a,t\n" + "1,x\n" * 140 + f"2,{'y' * 5000}\n" + "1,x\n" * 140)
    assert read(CsvSource(path, columns=["a"], labels=None))[0].sum() == 282


def test_labels_must_not_be_empty(tmp_path):
    with pytest.raises(BadFile, match=r"line 144: column 't' is empty, and labels are needed in every row"):
        path = write(tmp_path / "x.csv", "t,n\n" + "x,1\n" * 140 + "y,1\n\n,2\nz,1\n")
        CsvSource(path, labels="t")


def test_only_names(tmp_path):
    with pytest.raises(BadFile, match=r"x\.csv' has names of columns but no rows"):
        CsvSource(write(tmp_path / "x.csv", "a,b\n"))


def test_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.csv", None)
    with pytest.raises(MissingDependency, match=r"pip install pyarrow"):
        CsvSource(write(tmp_path / "x.csv", "a\n1\n"))


def test_it_is_read_after_a_pickle_a_fork_and_by_threads(tmp_path):
    source = CsvSource(write(tmp_path / "x.csv", table()), labels="t")
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
    source = CsvSource("memory://folder/x.csv", labels="t")
    local = CsvSource(write(tmp_path / "x.csv", table()), labels="t")
    for first, second in zip(read(source, 20, 90), read(local, 20, 90), strict=True):
        np.testing.assert_array_equal(first, second)
    assert source.fingerprint() == source.fingerprint()


def test_line_ends_inside_of_quotes_survive_the_end_of_a_block(tmp_path):
    # GIVEN rows of all lengths, so that some block ends between the two bytes of such a line end
    labels = [f"{'a' * (number % 37)}\r\n{number % 5}" for number in range(400)]
    path = write(tmp_path / "x.csv", "".join(f'{n},"{label}"\n' for n, label in enumerate(labels)).encode())

    # WHEN it is opened
    source = CsvSource(path, labels="1")

    # THEN no label has lost a byte
    assert source.classes == tuple(sorted(set(labels)))
