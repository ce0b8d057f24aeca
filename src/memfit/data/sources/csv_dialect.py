"""How a CSV file is written, which nothing in it says: delimiter, decimal mark, names and kinds of its columns.

All is found from the first rows. A delimiter is right where it cuts all of them into equally many cells. A first row
has names where it has text above a column of numbers, or numbers that only count the columns, as pandas writes them
for columns without names.
"""

import csv
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from memfit.core.errors import BadFile

# Those that pandas takes for missing too, and a blank.
MISSING = (
    *("", " ", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A"),
    *("NA", "NULL", "NaN", "None", "n/a", "nan", "null"),
)
_DELIMITERS = (",", ";", "\t", "|")
_NUM_ROWS = 100
_MARK = b"\xef\xbb\xbf"
_INTEGER = re.compile(r"\s*[+-]?\d+\s*")
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*|\s*[+-]?(inf|infinity|nan)\s*", re.IGNORECASE)
_COMMA_NUMBER = re.compile(r"\s*[+-]?\d+,\d+([eE][+-]?\d+)?\s*")
_TRUTH = frozenset(("true", "false", "True", "False", "TRUE", "FALSE"))


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a file is written."""

    delimiter: str
    decimal: str
    """Mark in numbers: "." or ","."""
    names: tuple[str, ...]
    """Of the columns; "column 0" and so on where the file has none."""
    kinds: tuple[str, ...]
    """What most cells of each column are in the first rows: "int", "float", "bool", "text"; "" where all are empty."""
    has_header: bool
    start: int
    """Offset of the first row after the names."""
    line: int
    """Its number in the file, counted from 1."""


def find_dialect(head: bytes, name: str) -> Dialect:
    """How a file is written."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in head[:2]:
        raise BadFile(
            f"{name!r} isn't text in UTF-8, and looks like UTF-16. Convert it, for instance with "
            "`iconv -f UTF-16 -t UTF-8`."
        )
    if head.startswith(b"PK\x03\x04"):
        raise BadFile(f"{name!r} is a zip archive, perhaps an Excel workbook, and no CSV file. Save it as CSV.")
    lines = head.splitlines(keepends=True)
    lines[:1] = [line.removeprefix(_MARK) for line in lines[:1]]
    comments = list(itertools.takewhile(lambda line: line.startswith(b"#"), lines))
    if len(comments) == len(lines) == 1:
        # All that there is, so that it is a row of names rather than a comment on nothing.
        comments = []
    body = lines[len(comments) :]
    delimiter = _find_delimiter(body, name)
    rows, header_lines = _first_rows(body, delimiter)
    if not rows and b"".join(body).strip():
        raise BadFile(f"{name!r}, line {len(comments) + 1}: a quote is opened and never closed.")
    if not rows:
        raise BadFile(f"{name!r} has no rows. A CSV file of at least one row was expected.")
    decimal = _find_decimal(rows, delimiter)
    named = _last_comment_names(comments, delimiter, len(rows[0]))
    num_before = len(comments)
    if named is None and _is_header(rows, decimal):
        named, rows = rows[0], rows[1:]
        num_before += header_lines
    cells = named or [""] * len(rows[0])
    return Dialect(
        delimiter,
        decimal,
        tuple(cell.strip() or f"column {place}" for place, cell in enumerate(cells)),
        tuple(_kind([row[place] for row in rows if place < len(row)], decimal) for place in range(len(cells))),
        named is not None,
        sum(map(len, lines[:num_before])) + (len(_MARK) if head.startswith(_MARK) else 0),
        1 + num_before,
    )


def _first_rows(lines: Sequence[bytes], delimiter: str) -> tuple[list[list[str]], int]:
    """Cells of the first rows that are whole and aren't blank, and the lines up to the end of the first of them."""
    # The last line comes out by itself, unless a quote is opened before it and not closed.
    text = itertools.chain((line.decode("utf-8", "replace") for line in lines), ['""'])
    reader = csv.reader(text, delimiter=delimiter)
    rows: list[list[str]] = []
    first_end = 0
    try:
        for row in itertools.islice(filter(None, reader), _NUM_ROWS + 2):
            first_end = first_end or reader.line_num
            rows.append(row)
        del rows[-1:]
    except csv.Error:
        # A cell of more than 128 KiB: perhaps a quote that isn't closed, and then the file's reader says where.
        pass
    return rows, first_end


def _last_comment_names(comments: Sequence[bytes], delimiter: str, num_columns: int) -> list[str] | None:
    """Names in the last comment, as `numpy.savetxt` writes them; None where it has none."""
    rows, _ = _first_rows([line[1:].strip() for line in comments[-1:]], delimiter)
    is_names = bool(rows) and len(rows[0]) == num_columns and not all(map(_is_number, rows[0]))
    return rows[0] if is_names else None


def _find_delimiter(body: Sequence[bytes], name: str) -> str:
    if name.lower().removesuffix(".gz").endswith(".tsv") and b"\t" in b"".join(body[:1]):
        return "\t"
    best, best_score = ",", (0.0, 0.0, 0)
    for delimiter in _DELIMITERS:
        rows, _ = _first_rows(body, delimiter)
        width, count = Counter(map(len, rows)).most_common(1)[0] if rows else (0, 0)
        if width < 2:
            continue
        cells = [cell for row in rows for cell in row]
        decimal = "." if delimiter == "," else ","
        share = sum(_is_number(cell, decimal) for cell in cells) / len(cells)
        score = (count / len(rows), share, width)
        if score > best_score:
            best, best_score = delimiter, score
    return best


def _find_decimal(rows: Sequence[Sequence[str]], delimiter: str) -> str:
    if delimiter == ",":
        return "."
    cells = [cell for row in rows for cell in row]
    has_commas = any(_COMMA_NUMBER.fullmatch(cell) for cell in cells)
    return "," if has_commas and not any("." in cell and _is_number(cell) for cell in cells) else "."


def _is_header(rows: Sequence[Sequence[str]], decimal: str) -> bool:
    first, others = rows[0], rows[1:]
    if not others:
        return not any(_is_number(cell, decimal) for cell in first)
    numbers = [cell for cell in first if _is_number(cell, decimal)]
    # Few such numbers may as well be the first sample.
    if len(numbers) > 3 and numbers == [str(place) for place in range(len(numbers))]:
        return True
    votes = Counter(
        _is_number(cell, decimal)
        for place, cell in enumerate(first)
        if cell not in MISSING
        and _kind([row[place] for row in others if place < len(row)], decimal) not in ("", "text")
    )
    if votes:
        return votes[False] > 0 and not (votes[True] and len(numbers) > votes[False])
    # No column of numbers at all: names differ from each other and from what stands below them.
    return len(set(first)) == len(first) and not any(
        cell == row[place] for place, cell in enumerate(first) for row in others if place < len(row)
    )


def _kind(cells: Sequence[str], decimal: str) -> str:
    """What most cells of a column are."""
    known = [cell for cell in cells if cell not in MISSING]
    numbers = [cell for cell in known if _is_number(cell, decimal)]
    if not known:
        return ""
    if 2 * len(numbers) <= len(known):
        return "text"
    if all(map(_INTEGER.fullmatch, numbers)):
        return "int"
    return "bool" if 2 * sum(cell in _TRUTH for cell in numbers) > len(numbers) else "float"


def _is_number(cell: str, decimal: str = ".") -> bool:
    """Whether a cell is a number or a truth value."""
    if decimal == "," and _COMMA_NUMBER.fullmatch(cell):
        return True
    return cell in _TRUTH or _NUMBER.fullmatch(cell) is not None
