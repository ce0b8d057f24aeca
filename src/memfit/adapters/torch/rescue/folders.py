"""Where activations can wait on disk: a folder whose files aren't memory themselves.

/dev/shm always is memory, and /tmp on many systems: a file there takes what the rescue wants to free. The kernel's list
of mounts tells.
"""

import os
import re
import tempfile
from pathlib import Path

from memfit.core.errors import BadFile

_MEMORY_TYPES = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_MOUNTS = Path("/proc/self/mountinfo")


def choose_folder(folder: str | None = None, mounts: Path = _MOUNTS) -> Path:
    """A folder on a real disk that can be written to: the one given, else that for temporary files, else this one.

    Args:
        folder: where to put the files; None to choose.
        mounts: the kernel's list of mounts; where there is none, every folder counts as one on a disk.

    Raises:
        BadFile: there is none.
    """
    candidates = [folder] if folder is not None else [tempfile.gettempdir(), os.getcwd()]
    problems = []
    for candidate in dict.fromkeys(candidates):
        path = Path(candidate).absolute()
        problem = _problem(path, mounts)
        if problem is None:
            return path
        problems.append(f"{path} {problem}")
    raise BadFile(
        f"activations can't wait on disk: {'; '.join(problems)}. "
        "Give a folder on a disk that can be written to, or set TMPDIR to one."
    )


def file_system(path: Path, mounts: Path = _MOUNTS) -> str | None:
    """Type of the file system that holds `path`, such as "ext4"; None where the system doesn't tell."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        real = path.resolve()
    except OSError:
        return None
    best, found = -1, None
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, types = before.split(), after.split()
        if len(fields) < 5 or not types:
            continue
        # Blanks, tabs and backslashes in the path are written as octal numbers; of mounts on top of each other the
        # last one counts.
        point = Path(re.sub(r"\\([0-7]{3})", lambda digits: chr(int(digits[1], 8)), fields[4]))
        if (real == point or point in real.parents) and len(point.parts) >= best:
            best, found = len(point.parts), types[0]
    return found


def _problem(path: Path, mounts: Path) -> str | None:
    if not path.is_dir():
        return "is no folder"
    kind = file_system(path, mounts)
    if kind in _MEMORY_TYPES:
        return f"is memory ({kind})"
    try:
        with tempfile.TemporaryFile(dir=path):
            return None
    except OSError as error:
        return f"can't be written to ({error.strerror or error})"
