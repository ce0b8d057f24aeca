"""How a CSV file is written, which nothing in it says: delimiter, decimal mark, whether the first row has the names.

All is found from the first rows. A delimiter is right where it cuts all of them into equally many cells. A first row
has names where it has text above a column of numbers, or numbers that only count the columns, as pandas writes them
for columns without names.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from memfit.core.errors import BadFile
from memfit.data.sources.csv_records import Malformed, find_stop, iterate_cells, lone_return

# Those that pandas takes for missing too, and a blank.
MISSING = (
    *("", " ", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A"),
    *("NA", "NULL", "NaN", "None", "n/a", "nan", "null"),
)
_DELIMITERS = (",", ";", "\t", "|")
_NUM_ROWS = 100
_MARK = b"\xef\xbb\xbf"
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*|\s*[+-]?(inf|infinity|nan)\s*", re.IGNORECASE)
_COMMA_NUMBER = re.compile(r"\s*[+-]?\d+,\d+([eE][+-]?\d+)?\s*")
_TRUTH = frozenset(("true", "false", "True", "False", "TRUE", "FALSE"))


@dataclass(frozen=True, slots=True)
class Dialect:
    r"""How a file is written.

    Attributes:
        delimiter: between cells.
        decimal: mark in numbers: "." or ",".
        names: of the columns; "column 0" and so on where the file has none.
        has_header: whether the file has names.
        start: offset of the first row after the names.
        line: its number in the file, counted from 1.
    """

    delimiter: str
    decimal: str
    names: tuple[str, ...]
    has_header: bool
    start: int
    line: int


def is_number(cell: str, decimal: str = ".") -> bool:
    """Whether a cell is a number or a truth value."""
    if decimal == "," and _COMMA_NUMBER.fullmatch(cell):
        return True
    return cell in _TRUTH or _NUMBER.fullmatch(cell) is not None


def find_dialect(head: bytes, name: str) -> Dialect:
    """How a file is written.

    Args:
        head: its first records, all of them complete.
        name: what the user calls it.

    Raises:
        BadFile: it has no rows, or isn't text.
        Malformed: its first record isn't complete.
    """
    start = len(_MARK) if head.startswith(_MARK) else 0
    _check_text(head, name)
    start, comments = _skip_comments(head, start)
    body = head[start:]
    delimiter = _find_delimiter(body, name)
    rows = _first_rows(body, delimiter)
    if not rows and body.strip():
        stop = find_stop(body, 0, delimiter)
        if body[stop : stop + 1] == b"\r":
            raise lone_return(start + stop)
        raise Malformed(start + stop, "a quote is opened and never closed")
    if not rows:
        raise BadFile(f"{name!r} has no rows. A CSV file of at least one row was expected.")
    decimal = _find_decimal([cells for _, cells in rows], delimiter)
    named = _last_comment_names(comments, delimiter, len(rows[0][1]))
    if named is None and _is_header([cells for _, cells in rows], decimal):
        named = rows[0][1]
        start += body.find(b"\n", find_stop(body, rows[0][0], delimiter)) + 1
    names = named or [""] * len(rows[0][1])
    return Dialect(
        delimiter,
        decimal,
        tuple(word.strip() or f"column {place}" for place, word in enumerate(names)),
        named is not None,
        start,
        1 + head.count(b"\n", 0, start),
    )


def _check_text(head: bytes, name: str) -> None:
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) or head[1:2] == b"\0" or head[:1] == b"\0":
        raise BadFile(
            f"{name!r} isn't text in UTF-8, and looks like UTF-16. Convert it, for instance with "
            "`iconv -f UTF-16 -t UTF-8`."
        )
    if head.startswith(b"PK\x03\x04"):
        raise BadFile(f"{name!r} is a zip archive, perhaps an Excel workbook, and no CSV file. Save it as CSV.")


def _skip_comments(head: bytes, start: int) -> tuple[int, list[bytes]]:
    """Where the first line is that doesn't begin with "#", and those that do."""
    comments = []
    while head.startswith(b"#", start):
        end = head.find(b"\n", start) + 1 or len(head)
        comments.append(head[start + 1 : end])
        start = end
    if start >= len(head) and len(comments) == 1:
        # All that there is, so that it is a row of names rather than a comment on nothing.
        return start - len(comments[0]) - 1, []
    return start, comments


def _last_comment_names(comments: Sequence[bytes], delimiter: str, num_columns: int) -> list[str] | None:
    """Names in the last comment, as `numpy.savetxt` writes them; None where it has none."""
    if not comments:
        return None
    cells = next(iterate_cells(comments[-1].strip() + b"\n", delimiter), (0, []))[1]
    return cells if len(cells) == num_columns and not all(is_number(cell) for cell in cells) else None


def _first_rows(body: bytes, delimiter: str) -> list[tuple[int, list[str]]]:
    rows = []
    for row in iterate_cells(body, delimiter):
        rows.append(row)
        if len(rows) > _NUM_ROWS:
            break
    return rows


def _find_delimiter(body: bytes, name: str) -> str:
    first_line = body[: body.find(b"\n") + 1]
    if name.lower().removesuffix(".gz").endswith(".tsv") and b"\t" in first_line:
        return "\t"
    best, best_score = ",", (0.0, 0.0, 0)
    for delimiter in _DELIMITERS:
        rows = [cells for _, cells in _first_rows(body, delimiter)]
        if not rows:
            continue
        width, count = Counter(len(cells) for cells in rows).most_common(1)[0]
        if width < 2:
            continue
        cells = [cell for row in rows for cell in row]
        decimal = "." if delimiter == "," else ","
        share = sum(is_number(cell, decimal) for cell in cells) / len(cells)
        score = (count / len(rows), share, width)
        if score > best_score:
            best, best_score = delimiter, score
    return best


def _find_decimal(rows: Sequence[Sequence[str]], delimiter: str) -> str:
    if delimiter == ",":
        return "."
    cells = [cell for row in rows for cell in row]
    has_commas = any(_COMMA_NUMBER.fullmatch(cell) for cell in cells)
    return "," if has_commas and not any("." in cell and is_number(cell) for cell in cells) else "."


def _is_header(rows: Sequence[Sequence[str]], decimal: str) -> bool:
    first, others = rows[0], rows[1:]
    if not others:
        return not any(is_number(cell, decimal) for cell in first)
    numbers = [cell for cell in first if is_number(cell, decimal)]
    # Few such numbers may as well be the first sample.
    if len(numbers) > 3 and numbers == [str(place) for place in range(len(numbers))]:
        return True
    votes = Counter(
        is_number(cell, decimal)
        for place, cell in enumerate(first)
        if cell not in MISSING and _is_number_column([row[place] for row in others if place < len(row)], decimal)
    )
    if votes:
        return votes[False] > 0 and not (votes[True] and len(numbers) > votes[False])
    # No column of numbers at all: names differ from each other and from what stands below them.
    return len(set(first)) == len(first) and not any(
        cell == row[place] for place, cell in enumerate(first) for row in others if place < len(row)
    )


def _is_number_column(cells: Sequence[str], decimal: str) -> bool:
    known = [cell for cell in cells if cell not in MISSING]
    return bool(known) and 2 * sum(is_number(cell, decimal) for cell in known) > len(known)
