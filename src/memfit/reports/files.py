"""Files that appear whole or not at all: what a report was before stays until the next one is complete."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memfit.core.redirected_files import unredirected


@unredirected()
def write_whole(render: Callable[[], str], path: str | os.PathLike[str]) -> Path:
    """Write what `render` gives to `path`, whole or not at all, and give back the path.

    A link is followed; what is neither a file nor missing (a folder, a device such as /dev/null) is refused.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise OSError("it is not a file")
    text = render()
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        # mkstemp makes files only their owner can read; a report is made to be shown to others.
        os.chmod(temporary, _default_mode())
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    return target


def write_json(data: dict[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write `data` as JSON that a person can read and a version control system compare."""
    return write_whole(lambda: json.dumps(data, indent=1) + "\n", path)


def _default_mode() -> int:
    # The mask can only be read by setting it.
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
