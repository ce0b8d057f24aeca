"""What a folder of .npy files says of itself, where `memfit data convert` wrote it.

A .npy file holds numbers, and nothing about them. So beside the files lie what their fields are called, which of them
are labels, and the names of the classes. Both are only read where they are whole and fit the files: a folder without
them, or with others of the same names, is opened by the names of its files.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memfit.core.errors import MemfitError
from memfit.data.files import open_file, read_bytes
from memfit.data.source import Field
from memfit.data.writing import CLASSES_FILE, FIELDS_FILE, FIELDS_FORMAT

_MOST_CLASSES = 100_000
# Names of that many classes, and long ones; what is larger was not written for this.
_MOST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Member:
    """A field of a folder.

    Attributes:
        path: of its file.
        name: of the field.
        is_label: whether it belongs to the labels.
    """

    path: str
    name: str
    is_label: bool


def read_members(entries: Sequence[str], data: Sequence[str]) -> list[Member]:
    """The fields of a folder, features first; none where it doesn't say, or says it of other files."""
    said = _read_json(entries, FIELDS_FILE)
    if not isinstance(said, dict) or said.get("format") != FIELDS_FORMAT or not isinstance(said.get("fields"), list):
        return []
    paths = {os.path.basename(path): path for path in data}
    members = []
    for field in said["fields"]:
        if not isinstance(field, dict):
            return []
        file, name, is_label = (field.get(key) for key in ("file", "name", "is_label"))
        if not isinstance(file, str) or not isinstance(name, str) or not isinstance(is_label, bool):
            return []
        # Each file once, and none that isn't in the folder.
        path = paths.pop(file, None)
        if path is None:
            return []
        members.append(Member(path, name, is_label))
    is_sound = not paths and len({member.name for member in members}) == len(members)
    if not is_sound or all(member.is_label for member in members):
        return []
    return sorted(members, key=lambda member: member.is_label)


def read_classes(entries: Sequence[str]) -> tuple[str, ...]:
    """Names of the classes that a folder has; () where it has none."""
    return as_classes(_read_json(entries, CLASSES_FILE))


def as_classes(names: Any) -> tuple[str, ...]:
    """A list of different names as names of classes; () for anything else."""
    if not isinstance(names, list) or len(names) > _MOST_CLASSES or not all(isinstance(name, str) for name in names):
        return ()
    return tuple(names) if len(set(names)) == len(names) else ()


def can_have_classes(field: Field) -> bool:
    """Whether the values of a field can be numbers of classes."""
    return field.dtype.kind in "iu" and not field.shape


def _read_json(entries: Sequence[str], name: str) -> Any:
    """What a small file of a folder says; None where it isn't there or isn't JSON."""
    path = next((path for path in entries if os.path.basename(path) == name), None)
    if path is None:
        return None
    try:
        file = open_file(path)
        if file.size > _MOST_BYTES:
            return None
        content = read_bytes(file, 0, file.size)
        file.close()
        return json.loads(content.decode("utf-8"))
    except (MemfitError, OSError, ValueError, RecursionError):
        return None
