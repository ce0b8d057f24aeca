"""The user's code: runs it, and tells whose code a file is: the user's, memfit's own, or that of a library."""

import os
import runpy
import sys
import sysconfig
import traceback
from collections.abc import Collection, Iterable

PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
"""Where memfit is."""

INSTALLED_FOLDERS = tuple(
    sorted(
        {os.path.abspath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    )
)
"""Where Python and installed libraries are: the user's own code isn't."""


def is_users(path: str) -> bool:
    """True for a file that neither memfit nor an installed library brought, nor the interpreter made up."""
    return not path.startswith("<") and not os.path.abspath(path).startswith((*INSTALLED_FOLDERS, PACKAGE_FOLDER))


def run_program(name: str, arguments: tuple[str, ...], *, module: bool) -> None:
    """Runs a script, or a module as for `python -m`, as `__main__` in this process."""
    sys.argv = [name, *arguments]
    sys.path.insert(0, os.getcwd() if module else os.path.dirname(os.path.abspath(name)))
    if module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(name, run_name="__main__")


def user_line(error: BaseException) -> tuple[str, str]:
    """(" at net.py:31 in loss", the code of that line) of the user's innermost frame; both "" without one."""
    names = SourceNames()
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = os.path.abspath(frame.filename)
        # Code that was given as text, as in a shell, is the user's.
        if frame.filename.startswith("<frozen") or path.startswith((*INSTALLED_FOLDERS, PACKAGE_FOLDER)):
            continue
        return f" at {names.short(path)}:{frame.lineno} in {frame.name}", frame.line or ""
    return "", ""


def caller_lines() -> frozenset[tuple[str, int]]:
    """(file, line) of all that is being called at this moment."""
    return frozenset((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(sys._getframe(1)))


class SourceNames:
    """Short names for source files: without the folder from which they are imported, or the one in which we are."""

    def __init__(self) -> None:
        roots = (os.path.abspath(path) + os.sep for path in {*sys.path, os.getcwd()} if path)
        self._roots = sorted(roots, key=len, reverse=True)
        self._of_users: dict[str, bool] = {}

    def short(self, path: str) -> str:
        """`path` without the machine's folders."""
        root = next((root for root in self._roots if path.startswith(root)), "")
        return path[len(root) :] if root else os.path.basename(path)

    def innermost(self, stack: Iterable[tuple[str, int]], callers: Collection[tuple[str, int]] = ()) -> str:
        """The first line of the user's among (file, line), as "net.py:31"; "" if there is none, or if it calls us.

        Args:
            stack: from the inside out.
            callers: lines on the stack that are no part of what is asked about.
        """
        for path, line in stack:
            if path not in self._of_users:
                self._of_users[path] = is_users(path)
            if self._of_users[path]:
                return "" if (path, line) in callers else f"{self.short(path)}:{line}"
        return ""


def interrupted_import(error: BaseException) -> str:
    """Name of the installed module whose import an exception ended, or "".

    Modules of the script's own don't count: a script may do all its work while one of them is imported.
    """
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(INSTALLED_FOLDERS):
            return str(frame.f_globals.get("__name__", ""))
        traceback = traceback.tb_next
    return (error.name or "") if isinstance(error, ImportError) else ""
