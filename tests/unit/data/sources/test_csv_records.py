import csv
import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.data.sources import csv_records
from memfit.data.sources.csv_records import Malformed, find_stop, is_unclosed, iterate_cells, split_records

# Few characters, so that quotes, delimiters and line breaks meet in every way.
PIECES = st.sampled_from(["a", "1", '"', '""', ",", "\n", "\r\n", '",', ',"', " ", "é"])


@given(st.lists(PIECES, max_size=40).map("".join))
@settings(max_examples=300, deadline=None)
def test_cells_are_those_of_pythons_csv(text):
    text += "\n"
    data = text.encode()
    ends, is_blank = split_records(data, ",")
    complete = data[: int(ends[-1]) if len(ends) else 0]
    # Python takes what is left of an unclosed quote for a cell; here it isn't complete.
    expected = [row for row in csv.reader(io.StringIO(complete.decode(), newline="")) if row]
    found = list(iterate_cells(data, ","))
    assert [cells for _, cells in found] == expected
    assert len(expected) == int(np.count_nonzero(~is_blank))
    starts = [0, *ends[:-1].tolist()]
    assert [start for start, _ in found] == [start for start, blank in zip(starts, is_blank, strict=False) if not blank]
    if len(complete) < len(data):
        assert is_unclosed(data, find_stop(data, len(complete), ","))


@given(st.lists(PIECES, max_size=40).map("".join))
@settings(max_examples=200, deadline=None)
def test_counting_quotes_gives_the_same_records_as_the_pattern(text):
    data = (text + "\n").encode()
    counted = csv_records._split_by_parity(data, ",")
    if counted is not None:
        assert counted.tolist() == csv_records._split_by_pattern(data, ",").tolist()


def test_quotes_inside_a_cell_are_taken_as_they_are():
    data = b'5" pipe,1\n6" pipe,2\n'
    assert csv_records._split_by_parity(data, ",") is None
    assert [cells for _, cells in iterate_cells(data, ",")] == [['5" pipe', "1"], ['6" pipe', "2"]]
    assert split_records(data, ",")[0].tolist() == [10, 20]


@pytest.mark.parametrize(
    ("data", "position"), [(b"1,2\r3,4\n", 3), (b'"a",2\n1,\r2\n', 8), (b'"a\rb",2\n"c"\rx,1\n', 11), (b"1\r2\r3", 1)]
)
def test_carriage_returns_alone_are_refused_outside_quotes(data, position):
    with pytest.raises(Malformed, match="carriage return without a line feed") as caught:
        split_records(data, ",")
    assert caught.value.position == position


def test_carriage_returns_in_quotes_are_part_of_the_value():
    data = b'"a\rb",2\n'
    assert split_records(data, ",")[0].tolist() == [8]
    assert list(iterate_cells(data, ",")) == [(0, ["a\rb", "2"])]


def test_a_record_that_is_not_complete_is_left():
    ends, is_blank = split_records(b"1,2\n\r\n3,", ",")
    assert ends.tolist() == [4, 6]
    assert is_blank.tolist() == [False, True]
    assert split_records(b"", ",")[0].tolist() == []
    assert split_records(b"12", ",")[0].tolist() == []


def test_other_delimiters():
    for mark in ";\t|":
        assert list(iterate_cells(f'a{mark}"b{mark}c"\n'.encode(), mark)) == [(0, ["a", f"b{mark}c"])]
