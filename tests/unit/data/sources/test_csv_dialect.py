import pytest

from memfit.core.errors import BadFile
from memfit.data.sources.csv_dialect import find_dialect


@pytest.mark.parametrize(
    ("text", "delimiter", "names"),
    [
        ("a,b\n1,2\n3,4\n", ",", ("a", "b")),
        ("a;b\n1;2\n", ";", ("a", "b")),
        ("a\tb c, d\n1\t2\n", "\t", ("a", "b c, d")),
        ("a|b\n1|x,y\n", "|", ("a", "b")),
        ("a\n1\n2\n", ",", ("a",)),
        ('"a, with comma", b \n1,2\n', ",", ("a, with comma", "b")),
        (",b\n0,2\n1,3\n", ",", ("column 0", "b")),
        ("name;text\nx;a, b, c\ny;d\n", ";", ("name", "text")),
    ],
)
def test_delimiters_and_names(text, delimiter, names):
    found = find_dialect(text.encode(), "x.csv")
    assert (found.delimiter, found.names, found.has_header, found.line) == (delimiter, names, True, 2)
    assert text.encode()[found.start - 1 : found.start] == b"\n"


@pytest.mark.parametrize(
    "text",
    [
        "1,2\n3,4\n",
        "1,x\n2,y\n",
        "0.5,1\n",
        "1,2\n",
        "NA,2\n1,3\n",
        "x,1\ny,2\n",
        "x,y\nx,z\n",
        "0,1,2\n5,6,7\n",
        "5\n6\n",
    ],
)
def test_files_without_names(text):
    found = find_dialect(text.encode(), "x.csv")
    assert not found.has_header
    assert (found.start, found.line) == (0, 1)
    assert found.names == tuple(f"column {place}" for place in range(len(found.names)))


@pytest.mark.parametrize(
    "text", ["a,b\n", "label,0,1,2,3\n5,.1,.2,.3,.4\n", "0,1,2,3\n.1,.2,.3,.4\n", "a,b\nx,y\nz,w\n", "a,b\nNA,1\n"]
)
def test_files_with_names(text):
    assert find_dialect(text.encode(), "x.csv").has_header


def test_one_bad_cell_in_the_first_row_makes_no_names_of_it():
    assert not find_dialect(b"1,2,oops\n3,4,5\n6,7,8\n", "x.csv").has_header


def test_a_byte_order_mark_and_comments_are_passed_over():
    text = b"\xef\xbb\xbf# made by hand\n# twice\na,b\n1,2\n"
    found = find_dialect(text, "x.csv")
    assert found.names == ("a", "b")
    assert (found.line, text[found.start :]) == (4, b"1,2\n")


def test_names_in_a_comment_as_numpy_writes_them():
    found = find_dialect(b"# a,b\n1,2\n", "x.csv")
    assert (found.names, found.has_header, found.start, found.line) == (("a", "b"), True, 6, 2)
    assert not find_dialect(b"# 1,2\n1,2\n", "x.csv").has_header
    assert find_dialect(b"#a,b\n", "x.csv").names == ("#a", "b")


def test_decimal_commas():
    found = find_dialect(b"a;b\n1,5;2\n0,5;3\n", "x.csv")
    assert (found.delimiter, found.decimal) == (";", ",")
    assert find_dialect(b"1,5;2,5\n0,5;3,5\n", "x.csv").delimiter == ";"
    assert find_dialect(b"a;b\n1.5;x,5\n", "x.csv").decimal == "."


def test_a_tsv_has_tabs_whatever_else_it_has():
    assert find_dialect(b"a,b\tc\n1,2\t3\n", "x.TSV.gz").delimiter == "\t"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "'x.csv' has no rows"),
        (b"\n\r\n", "'x.csv' has no rows"),
        ("a,b\n".encode("utf-16"), "looks like UTF-16"),
        ("a,b\n".encode("utf-16-le"), "looks like UTF-16"),
        (b'# x\na,"b\n1,2\n', "'x.csv', line 2: a quote is opened and never closed"),
        (b"PK\x03\x04rest\n", "is a zip archive, perhaps an Excel workbook"),
    ],
)
def test_what_is_no_csv_file(data, message):
    with pytest.raises(BadFile, match=message):
        find_dialect(data, "x.csv")


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        (["1", "-2", " 3 ", "NA"], "int"),
        (["1", "2.5", "-1.5e3", ".5", "inf", "NaN"], "float"),
        (["true", "False", ""], "bool"),
        (["", "null"], ""),
        (["x", "1_000", "--1", "2020-01-01", "1,5"], "text"),
        (["1", "2", "oops"], "int"),
    ],
)
def test_kinds_of_columns(cells, kind):
    text = "a;b\n" + "".join(f"{cell};1.5\n" for cell in cells)
    assert find_dialect(text.encode(), "x.csv").kinds == (kind, "float")


def test_lines_that_end_with_a_carriage_return_alone():
    found = find_dialect(b"a,b\r1,2\r3,4\r", "a.csv")
    assert (found.names, found.start, found.line) == (("a", "b"), 4, 2)
