"""The results of a search in a file: one line of JSON per trial, added when the trial has ended.

A line is added with one write and is on disk before anything that it replaces is removed. A process that is killed can
leave half a line at the end, which counts as not there; damage anywhere else is an error.
"""

import json
import math
import os
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from memfit.core.errors import BadFile, BadInput

FORMAT = "memfit.search"
FORMAT_VERSION = 1


class Outcome(StrEnum):
    """How a trial ended."""

    FINISHED = "finished"
    OUT_OF_MEMORY = "out of memory"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Record:
    """One trial that has ended.

    Args:
        number: of the trial, from 0 up.
        parameters: what was tried.
        outcome: how it ended.
        score: None where there is none, or where it is not a finite number.
        seconds: how long it took.
        weights: name of the file with the parameters of its model, or "".
        error: what was raised, or "".
        held: what still held the trial's model when it had ended, or "".
        memory_bytes: what the process held afterwards; None where the system doesn't say.
    """

    number: int
    parameters: dict[str, Any]
    outcome: Outcome
    score: float | None = None
    seconds: float = 0.0
    weights: str = ""
    error: str = ""
    held: str = ""
    memory_bytes: int | None = None


class Trials:
    """The file of results in a folder.

    Args:
        folder: of the search; made where it isn't there.
        header: what makes this search another than others: its space, seed and direction.
        resume: whether to go on with what the file has; otherwise it begins anew.
    """

    def __init__(self, folder: Path, header: dict[str, Any], *, resume: bool) -> None:
        self.folder = folder
        self._path = folder / "results.jsonl"
        self.records: list[Record] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not resume and self._path.exists():
                with open(self._path, "rb") as file:
                    first = file.readline(1 << 20).decode("utf-8", errors="replace")
                if first and _parsed(self._path, 1, first).get("format") != FORMAT:
                    raise BadFile(f"{str(self._path)!r} is no file of a search, and stays. Give another folder.")
                self._path.unlink()
            self._read(header)
        except OSError as error:
            raise BadFile(
                f"the folder of the search, {str(folder)!r}, can't be used: {error.strerror or error}. "
                "Give a folder that can be written to."
            ) from error

    def add(self, record: Record) -> None:
        """Adds a record, which is on disk afterwards."""
        self._write(asdict(record))
        self.records.append(record)

    def _read(self, header: dict[str, Any]) -> None:
        text = self._path.read_bytes() if self._path.exists() else b""
        whole = text.rfind(b"\n") + 1
        if whole < len(text):
            os.truncate(self._path, whole)
        lines = text[:whole].decode("utf-8", errors="replace").splitlines()
        if not lines:
            self._write({"format": FORMAT, "version": FORMAT_VERSION, **header})
            return
        self._check(_parsed(self._path, 1, lines[0]), header)
        for number, line in enumerate(lines[1:], 2):
            data = _parsed(self._path, number, line)
            try:
                self.records.append(Record(**{**data, "outcome": Outcome(data["outcome"])}))
            except (KeyError, TypeError, ValueError) as error:
                raise BadFile(f"line {number} of {str(self._path)!r} is no result of a trial: {error}.") from None

    def _check(self, found: dict[str, Any], header: dict[str, Any]) -> None:
        if found.get("format") != FORMAT or found.get("version") != FORMAT_VERSION:
            raise BadFile(f"{str(self._path)!r} was not written by a search of this version. Give another folder.")
        for name, value in json.loads(json.dumps(header)).items():
            if found.get(name) != value:
                raise BadInput(
                    f"{str(self.folder)!r} holds another search: its {name} is {found.get(name)!r}, and not {value!r}. "
                    "Give another folder, or resume=False, which begins anew and drops what is there."
                )

    def _write(self, data: dict[str, Any]) -> None:
        line = json.dumps(data, allow_nan=False).encode() + b"\n"
        created = not self._path.exists()
        with open(self._path, "ab", buffering=0) as file:
            file.write(line)
            os.fsync(file.fileno())
        if created:
            sync_folder(self.folder)


def sync_folder(folder: Path) -> None:
    """Puts the names of a folder on disk, where the system can."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def best_of(records: list[Record], *, maximize: bool) -> Record | None:
    """The finished record with the best score, the earlier one of two that are equal."""
    scored = [record for record in records if record.score is not None and record.outcome is Outcome.FINISHED]
    if not scored:
        return None
    return min(scored, key=lambda record: -_score(record) if maximize else _score(record))


def _score(record: Record) -> float:
    return math.nan if record.score is None else record.score


def _parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise BadFile(
            f"line {number} of {str(path)!r} is damaged: {line[:60]!r}. Remove the line, or give another folder."
        )
    return data
