"""How commands write: tables through rich, JSON plainly, progress to standard error."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

from memfit.core.errors import BadFile
from memfit.core.progress import QUICK_SECONDS, announce, doing, is_seen
from memfit.reports.parts import Report

if TYPE_CHECKING:
    from rich.console import RenderableType

# A file or a pipe has no width of its own, and the 80 columns that rich assumes would break every table.
_PIPE_COLUMNS = 160


@contextmanager
def progress(text: str, *, quiet: bool) -> Iterator[None]:
    """What is done and for how long, on standard error, where that is a terminal.

    What the user's code prints meanwhile goes there too: standard output is for the answer.
    """
    with redirect_stdout(sys.stderr), doing(text, quiet=quiet):
        yield


@contextmanager
def transfer_progress(text: str, *, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A function to call with (bytes done, bytes in total); None where nobody would see it.

    It draws a bar with speed and time left on standard error, where that is a terminal, after two seconds.
    """
    if quiet or not is_seen(sys.stderr):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as SpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), SpeedColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    task = bar.add_task(text)
    shown_from = time.monotonic() + QUICK_SECONDS

    def update(done_bytes: int, total_bytes: int) -> None:
        if time.monotonic() >= shown_from:
            bar.start()
        bar.update(task, completed=done_bytes, total=total_bytes)

    try:
        yield update
    finally:
        bar.stop()


def fill_standard_streams() -> None:
    """Has standard streams that are closed lead nowhere: the next files to be opened would take their places."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(handle, True)
    os.close(handle)
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - stays open


def is_of_output(error: OSError) -> bool:
    """True if standard output failed: its reader went away, or the disk that it is redirected to is full."""
    if isinstance(error, BrokenPipeError):
        return True
    try:
        # What failed may be gone from the buffer, so that there is something to write again.
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError as again:
        return again.errno == error.errno
    return False


def check_writable(path: str) -> None:
    """Refuses a path that no file can be written to, before any time is spent on what to write."""
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise BadFile(f"there is no folder {folder!r} to write {path!r} to. Make it first, or name another.")
    if os.path.isdir(path):
        raise BadFile(f"{path!r} is a folder. Give the path of a file, such as memory.html.")
    if os.path.exists(path) and not os.path.isfile(path):
        raise BadFile(f"{path!r} is not a file. Give the path of one, such as memory.html.")
    if not _may_be_replaced(path):
        raise BadFile(f"{path!r} is there already and is no report: it would be lost. Name another file, or remove it.")
    if not os.access(folder, os.W_OK):
        raise BadFile(f"the folder {folder!r} can't be written to, so {path!r} can't be either. Name another.")


def _may_be_replaced(path: str) -> bool:
    """Whether a file is missing, empty, or begins as pages and JSON do: anything else, such as a script, is a slip."""
    try:
        with open(path, "rb") as file:
            return file.read(64).lstrip()[:1] in (b"", b"<", b"{")
    except OSError:
        return True  # missing, or for `os.replace` to refuse


def check_folder(path: str) -> None:
    """Refuses a path that is no folder and can't become one."""
    if os.path.exists(path) and not os.path.isdir(path):
        raise BadFile(f"{path!r} is not a folder. Give the path of one; it is made where it is missing.")


def print_json(value: Any) -> None:
    """Writes `value` as one JSON document."""
    json.dump(value, sys.stdout)
    sys.stdout.write("\n")


def error_document(error: BaseException, exit_code: int) -> dict[str, Any]:
    """What --json gives in the place of an answer."""
    return {"error": {"type": type(error).__name__, "message": str(error), "exit_code": exit_code}}


def print_error(
    error: BaseException, exit_code: int, *, as_json: bool, by: str = "memfit", answer: dict[str, Any] | None = None
) -> int:
    """Says on standard error what is wrong, with --json on standard output as well, and gives back the exit code.

    Args:
        error: what is wrong.
        exit_code: of the command.
        as_json: whether standard output takes JSON.
        by: who says so.
        answer: what there is to say beside the error.
    """
    announce(str(error), by=by)
    if as_json:
        print_json({**(answer or {}), **error_document(error, exit_code)})
        sys.stdout.flush()
    return exit_code


def print_report(report: Report, *, stderr: bool = False) -> None:
    """Writes a report."""
    from memfit.reports.terminal import render_report

    show(render_report(report), stderr=stderr)


def print_result(result: Any, report: Callable[[Any], Report], *, as_json: bool) -> None:
    """Writes a result as JSON or as its report."""
    if as_json:
        print_json(result.to_json())
    else:
        print_report(report(result))


def show(renderable: "RenderableType", *, stderr: bool = False) -> None:
    """Writes what `memfit.reports.terminal` has drawn."""
    from memfit.reports.terminal import SafeConsole

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else _PIPE_COLUMNS
    SafeConsole(width=width, stderr=stderr).print(renderable)
