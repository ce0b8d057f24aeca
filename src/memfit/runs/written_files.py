"""What the script of a dry run wrote, as the layers of its view show it when it has ended, however that was."""

import contextlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from memfit.core.progress import announce
from memfit.runs.overlay import LAYERS

# Python's own, which say nothing of the script.
_BYTECODE = "__pycache__"


def collect(folder: Path, kept: str = "") -> dict[str, str]:
    """Each file that the script wrote or changed, by the path it knew, and where it is now; "" where it is not kept.

    Args:
        folder: that was given to `overlay.enter`; where there was no view, there is nothing to collect.
        kept: where to keep them, the path of each below the working folder or the root; "" for nowhere.
    """
    layers = [(above, Path(layer)) for above, layer in _layers(folder)]
    written = {path: place for above, layer in layers for path, place in _written(above, layer)}
    if not written or not kept:
        return dict.fromkeys(sorted(written), "")
    places = {}
    target = _unused(Path(kept))
    for path, place in sorted(written.items()):
        below = os.path.relpath(path)
        there = target / (path.lstrip(os.sep) if below.startswith(os.pardir) else below)
        try:
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(place, there)
            places[path] = str(there)
        except OSError as error:
            places[path] = ""
            announce(f"{path} can't be kept as {there}: {error.strerror or error}")
    return places


def _layers(folder: Path) -> list[tuple[str, str]]:
    try:
        return [(str(above), str(layer)) for above, layer in json.loads(Path(folder, LAYERS).read_text("utf-8"))]
    except (OSError, ValueError):
        return []


def _written(above: str, layer: Path) -> Iterator[tuple[str, Path]]:
    """(path, place) of the files of a layer that are new, or newer than what is below."""
    for current, folders, names in os.walk(layer):
        folders[:] = [name for name in folders if name != _BYTECODE]
        for name in names:
            place = Path(current, name)
            path = os.path.normpath(os.path.join(above, place.relative_to(layer)))
            status = place.lstat()
            # What was removed is a device file, and what only changed its owner or mode is a copy.
            if stat.S_ISREG(status.st_mode) and status.st_mtime_ns != _modified(path):
                yield path, place


def _modified(path: str) -> int | None:
    with contextlib.suppress(OSError):
        return os.lstat(path).st_mtime_ns
    return None


def _unused(folder: Path) -> Path:
    """The folder, or one in it where it holds something."""
    if not folder.exists() or not any(folder.iterdir()):
        return folder
    number = 1
    while (folder / str(number)).exists():
        number += 1
    return folder / str(number)
