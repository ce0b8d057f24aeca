"""What was found out about memory, for the next run of the same model, shapes and device.

A small JSON file in the user's cache folder. It only ever saves time: whatever is wrong with it, it counts as empty.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_MAX_ENTRIES = 256
_VERSION = 1


def key_of(parts: Iterable[object]) -> str:
    """One short name for everything that a finding depends on."""
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]


class Ceilings:
    """The findings of earlier runs.

    Args:
        folder: where the file is; None: nothing is kept.
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self._path = None if folder is None else Path(folder, "ceilings.json")
        self._own: dict[str, dict[str, Any]] = {}

    def get(self, key: str, *, only_own: bool = False) -> dict[str, Any] | None:
        """What was found for this key, or None.

        Args:
            key: from `key_of`.
            only_own: whether only findings of this object count, and not those of earlier runs.
        """
        finding = self._own.get(key)
        if finding is None and not only_own:
            finding = self._read().get(key)
        return dict(finding) if isinstance(finding, dict) else None

    def put(self, key: str, finding: dict[str, Any]) -> None:
        """Keeps a finding; the oldest go when there are many. Where it can't be written, later runs don't have it."""
        self._own[key] = finding
        if self._path is None:
            return
        entries = self._read()
        entries.pop(key, None)
        entries[key] = finding
        kept = dict(list(entries.items())[-_MAX_ENTRIES:])
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self._path.parent, prefix=".ceilings-")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    json.dump({"version": _VERSION, "entries": kept}, file)
                os.replace(temporary, self._path)
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError:
            return

    def _read(self) -> dict[str, Any]:
        if self._path is None:
            return {}
        try:
            data = json.loads(self._path.read_text(encoding="utf-8"))
            entries = data["entries"]
            return dict(entries) if data["version"] == _VERSION else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}
