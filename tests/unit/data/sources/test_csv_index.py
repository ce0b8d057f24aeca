import sys

import numpy as np
import pytest

from memfit.core.errors import BadFile, BadInput, MissingDependency
from memfit.data.sources import csv_index
from memfit.data.sources.csv_bytes import open_bytes
from memfit.data.sources.csv_index import arrow, build_index

pytest.importorskip("pyarrow")


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    """Chunks and blocks of a few rows, so that small files have many."""
    monkeypatch.setattr(csv_index, "_CHUNK_BYTES", 64)
    monkeypatch.setattr(csv_index, "BLOCK_BYTES", 40)
    monkeypatch.setattr(csv_index, "_COLUMN_BYTES", 1)


def index_of(path, data, labels=()):
    data = data.encode() if isinstance(data, str) else data
    path.write_bytes(data)
    return build_index(open_bytes(path), labels, len(data))


def test_blocks_rows_and_lines(tmp_path):
    rows = [f'{number},"a\nb"\r\n' + "\n" * (number % 3 == 0) for number in range(50)]
    data = "n,t\n" + "".join(rows)
    index = index_of(tmp_path / "x.csv", data)
    assert index.rows[0] == 0 and index.rows[-1] == 50
    assert index.offsets[-1] == len(data)
    assert len(index.lines) > 10
    for offset, row, line in zip(index.offsets, index.rows, index.lines, strict=False):
        before = data[: int(offset)]
        assert line == 1 + before.count("\n")
        assert before.endswith("\n")
        assert data[int(offset) :].lstrip("\n").startswith(f"{row},")


def test_a_last_line_without_an_end(tmp_path):
    index = index_of(tmp_path / "x.csv", "a\n1\n2")
    assert (index.rows[-1], index.offsets[-1]) == (2, 5)


def test_many_columns_make_larger_blocks(tmp_path, monkeypatch):
    data = "a,b,c,d\n" + "1,2,3,4\n" * 200
    assert np.diff(index_of(tmp_path / "x.csv", data).offsets).max() < 60
    monkeypatch.setattr(csv_index, "_COLUMN_BYTES", 100)
    assert np.diff(index_of(tmp_path / "x.csv", data).offsets)[:-1].min() >= 400


def test_blank_lines_make_no_blocks(tmp_path):
    index = index_of(tmp_path / "x.csv", "a\n1\n" + "\n" * 500 + "2\n3\n" + "\r\n" * 300)
    assert index.rows[-1] == 3
    assert (np.diff(index.rows) > 0).all()


def test_kinds_of_columns_found_late(tmp_path):
    early = "1,1,,x,true,2020-01-01,1\n"
    data = "a,b,c,d,e,f,g\n" + early * 20 + "2,1.5,7,y,False,2020-01-02,\n" + early * 20
    index = index_of(tmp_path / "x.csv", data)
    assert [column.kind for column in index.columns] == ["int", "float", "int", "text", "bool", "text", "int"]
    assert [column.num_missing for column in index.columns] == [0, 0, 40, 0, 0, 0, 1]
    assert all(not column.odd_line for column in index.columns)


@pytest.mark.parametrize("number", [1, 3, 60])
def test_text_among_numbers_is_found_with_its_line(tmp_path, number):
    rows = [f"{row},5" for row in range(100)]
    rows[number] = "oops,5"
    index = index_of(tmp_path / "x.csv", "a,b\n" + "\n".join(rows))
    facts = index.columns[0]
    assert (facts.kind, facts.odd_line, facts.odd_cell) == ("text", number + 2, "'oops'")
    assert index.columns[1].kind == "int"


def test_labels_that_turn_out_to_be_text_late_have_all_their_classes(tmp_path):
    rows = [f"{row % 3:02d},5" for row in range(100)]
    rows[80] = "other,5"
    index = index_of(tmp_path / "x.csv", "a,b\n" + "\n".join(rows), ["a"])
    assert index.classes == {0: ("00", "01", "02", "other")}
    assert index.columns[0].odd_line == 82


def test_dates_and_words_for_nothing_are_classes_as_they_are_written(tmp_path):
    data = "d,n\n" + "2020-01-02,1\n2020-01-01,2\n" * 10
    assert index_of(tmp_path / "x.csv", data, ["d"]).classes == {0: ("2020-01-01", "2020-01-02")}
    data = "d,n\n" + "NA,1\n" * 30 + "x,1\n"
    assert index_of(tmp_path / "y.csv", data, ["d"]).classes == {0: ("NA", "x")}


def test_too_many_classes(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_index, "MOST_CLASSES", 10)
    monkeypatch.setattr("memfit.data.sources.table_fields.MOST_CLASSES", 10)
    data = "t,n\n" + "".join(f"name {row},1\n" for row in range(30))
    with pytest.raises(BadInput, match=r"column 't' of .*x\.csv has more than 10 different strings"):
        index_of(tmp_path / "x.csv", data, ["t"])
    assert index_of(tmp_path / "y.csv", data).classes == {}
    monkeypatch.setattr(csv_index, "MOST_CLASSES", 100)
    monkeypatch.setattr("memfit.data.sources.table_fields.MOST_CLASSES", 100)
    monkeypatch.setattr(csv_index, "_LONGEST_CLASSES", 100)
    with pytest.raises(BadInput, match="too long and too many different strings"):
        index_of(tmp_path / "x.csv", data, ["t"])


GOOD = "".join(f"{row},{row}\n" for row in range(40))


@pytest.mark.parametrize(
    ("bad", "line", "message"),
    [
        ("1\n", 42, r"1 cells \(separated by ','\), where 2 were expected as in the first row: '1'"),
        ("1,2,3\n", 42, r"3 cells .* where 2 were expected as in the first row: '1,2,3'"),
        ('1,"2\n3"\n1\n', 44, "1 cells"),
        ('\n\r\n1,"2\n', 44, "a quote is opened and never closed: '\"2"),
        ("1,\x002\n", 42, "a byte of value zero"),
        (b"1,\xe9\n", 42, "the byte 0xe9 isn't UTF-8.*iconv"),
        (b"1,x\xe2\x82", 42, "the byte 0xe2 isn't UTF-8"),
        ("1,2\r1,3\n", 42, "a carriage return without a line feed"),
    ],
)
@pytest.mark.parametrize("is_early", [False, True])
def test_bad_rows_are_named_by_line(tmp_path, bad, line, message, is_early):
    bad = bad if isinstance(bad, bytes) else bad.encode()
    good = GOOD.encode()
    if is_early:
        good, line = b"", line - 40
    # Nothing after a character that is cut short by the end of the file.
    after = b"" if bad.endswith(b"\x82") else GOOD.encode()
    with pytest.raises(BadFile, match=rf"x\.csv', line {line}: {message}"):
        index_of(tmp_path / "x.csv", b"a,b\n" + good + bad + after)


def test_an_endless_record_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_index, "_LONGEST_RECORD", 300)
    for data, message in [
        ("a,b\n" + GOOD + '1,"' + "2\n" * 1000, r"line 42: a quote is opened and never closed"),
        ("a,b\n" + GOOD + "1" * 1000, r"line 42: a row of more than 300 B"),
        ("1" * 1000, "line 1: a row of more than 300 B"),
        ('"1\n' * 1 + "2\n" * 500, "line 1: a quote is opened and never closed"),
    ]:
        with pytest.raises(BadFile, match=message):
            index_of(tmp_path / "x.csv", data)


def test_labels_must_not_be_empty(tmp_path):
    with pytest.raises(BadFile, match=r"line 44: column 't' is empty, and labels are needed in every row"):
        index_of(tmp_path / "x.csv", "t,n\n" + "x,1\n" * 40 + "y,1\n\n,2\nz,1\n", ["t"])


def test_only_names(tmp_path):
    with pytest.raises(BadFile, match=r"x\.csv' has names of columns but no rows"):
        index_of(tmp_path / "x.csv", "a,b\n")


def test_characters_cut_by_chunks_are_whole(tmp_path):
    data = "t,n\n" + "€uro,1\n" * 100
    assert index_of(tmp_path / "x.csv", data, ["t"]).classes == {0: ("€uro",)}


def test_without_pyarrow(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    arrow.cache_clear()
    try:
        with pytest.raises(MissingDependency, match=r"pip install pyarrow"):
            arrow()
    finally:
        arrow.cache_clear()
