"""Indexes of CSV files, kept between runs: looking through a large file takes minutes.

They lie in the user's cache folder under a name that is made from the path, the size and the time of change of the
file, so that a changed file has none. What can't be read back is as good as none.
"""

import contextlib
import hashlib
import json
import os
import tempfile
import zipfile
from collections.abc import Sequence

import numpy as np

from memfit.core.env import cache_folder
from memfit.core.errors import BadFile
from memfit.core.units import MIB
from memfit.data.files import stat_of
from memfit.data.sources.csv_bytes import PackedBytes, PlainBytes
from memfit.data.sources.csv_dialect import Dialect
from memfit.data.sources.csv_index import ColumnFacts, Index, build_index

# Smaller files are looked through again in less time than a look into the cache is worth.
LEAST_CACHED_BYTES = 4 * MIB
_MOST_CACHED = 256
_FORMAT = 1


def load_index(text: PlainBytes | PackedBytes, labels: Sequence[str]) -> Index:
    """The index of a file: from the cache if it was made before and the file hasn't changed, else made now."""
    size_bytes, changed = stat_of(text.path)
    key = hashlib.sha256(repr((_FORMAT, text.path, size_bytes, changed, sorted(labels))).encode()).hexdigest()[:32]
    cached = os.path.join(cache_folder(), "csv", f"{key}.npz")
    if size_bytes < LEAST_CACHED_BYTES:
        return build_index(text, labels, size_bytes)
    found = read_cached(cached)
    if found is None:
        found = build_index(text, labels, size_bytes)
        if stat_of(text.path) != (size_bytes, changed):
            raise BadFile(f"{text.name!r} was changed while it was read. Wait until it is written, and start again.")
        with contextlib.suppress(OSError):
            write_cached(cached, found)
    return found


def write_cached(path: str, index: Index) -> None:
    """Keeps an index; the oldest ones go when there are many."""
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    facts = {
        "dialect": {name: getattr(index.dialect, name) for name in Dialect.__slots__},
        "columns": [[getattr(column, name) for name in ColumnFacts.__slots__] for column in index.columns],
        "classes": {str(place): names for place, names in index.classes.items()},
    }
    packed = np.frombuffer(json.dumps(facts).encode(), np.uint8)
    number, temporary = tempfile.mkstemp(dir=folder, suffix=".part")
    try:
        with os.fdopen(number, "wb") as file:
            np.savez(file, offsets=index.offsets, rows=index.rows, lines=index.lines, facts=packed)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    kept = sorted((entry for entry in os.scandir(folder)), key=lambda entry: entry.stat().st_mtime)
    for entry in kept[:-_MOST_CACHED]:
        os.unlink(entry.path)


def read_cached(path: str) -> Index | None:
    """An index that was kept; None where there is none that can be trusted."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
            offsets, rows, lines = stored["offsets"], stored["rows"], stored["lines"]
            facts = json.loads(stored["facts"].tobytes())
        dialect = Dialect(**{**facts["dialect"], "names": tuple(facts["dialect"]["names"])})
        columns = tuple(ColumnFacts(*column) for column in facts["columns"])
        classes = {int(place): tuple(names) for place, names in facts["classes"].items()}
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None
    is_sound = (
        offsets.ndim == rows.ndim == lines.ndim == 1
        and len(offsets) == len(rows) == len(lines) + 1 > 1
        and bool((np.diff(offsets) > 0).all() and (np.diff(rows) > 0).all())
        and len(columns) == len(dialect.names)
    )
    return Index(dialect, offsets, rows, lines, columns, classes) if is_sound else None
