"""What the script of a dry run wrote, as the layers of its view show it when it has ended, however that was."""

import contextlib
import itertools
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from memfit.core.progress import announce
from memfit.processes.overlay import LAYERS

# Python's own, which say nothing of the script.
_BYTECODE = "__pycache__"


def collect(folder: Path, kept: str = "") -> dict[str, str]:
    """Each file that the script wrote or changed, by the path it knew, and where it is now; "" where it is not kept.

    Args:
        folder: that was given to `overlay.enter`; where there was no view, there is nothing to collect.
        kept: where to keep them, the path of each below the working folder or the root; "" for nowhere.
    """
    try:
        layers = json.loads(Path(folder, LAYERS).read_text("utf-8"))
    except (OSError, ValueError):
        layers = []
    written = {path: place for above, layer in layers for path, place in _written(str(above), Path(layer))}
    if not written or not kept:
        return dict.fromkeys(sorted(written), "")
    places = {}
    target = Path(kept)
    if target.exists() and any(target.iterdir()):
        # In it, where nothing is yet.
        target = next(each for number in itertools.count(1) if not (each := Path(kept, str(number))).exists())
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


def _written(above: str, layer: Path) -> Iterator[tuple[str, Path]]:
    """(path, place) of the files of a layer that are new, or newer than what is below."""
    for current, folders, names in os.walk(layer):
        folders[:] = [name for name in folders if name != _BYTECODE]
        for name in names:
            place = Path(current, name)
            path = os.path.normpath(os.path.join(above, place.relative_to(layer)))
            status = place.lstat()
            before = None
            with contextlib.suppress(OSError):
                before = os.lstat(path).st_mtime_ns
            # What was removed is a device file, and what only changed its owner or mode is a copy.
            if stat.S_ISREG(status.st_mode) and status.st_mtime_ns != before:
                yield path, place
