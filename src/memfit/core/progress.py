"""What memfit is doing, for whoever waits for it: one line on standard error that says so after two seconds.

Any part says what it does with `doing`; inside of that, others say it in more detail. The line is shown where somebody
can see it, a terminal or a notebook, and is gone when the outermost part is done. MEMFIT_PROGRESS=0 turns it off. It
never touches standard output, and nothing is redirected: a program's own output is its own affair.
"""

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from memfit.core import env
from memfit.core.printing import printable

QUICK_SECONDS = 2.0
"""What takes no longer leaves no trace."""
_REFRESH_SECONDS = 0.25
_FRAMES = "|/-\\"
_MAX_COLUMNS = 100


class _Shown(threading.local):
    """What this thread is doing, outermost first, and the line that shows it."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.line: _Line | None = None


_shown = _Shown()
# Of several threads, the first has the line.
_one_line = threading.Lock()


@contextmanager
def doing(text: str, *, quiet: bool = False) -> Iterator[None]:
    """Says what is done while it lasts.

    Args:
        text: in a few words, such as "tracing resnet50".
        quiet: nothing is shown, of what is done inside either.
    """
    outermost = not _shown.texts
    _shown.texts.append(text)
    if outermost and not quiet and is_seen(sys.stderr) and _one_line.acquire(blocking=False):
        _shown.line = _Line(sys.stderr, text)
    elif _shown.line is not None:
        _shown.line.text = text
    try:
        yield
    finally:
        _shown.texts.pop()
        if _shown.line is not None and outermost:
            _shown.line.close()
            _shown.line = None
            _one_line.release()
        elif _shown.line is not None:
            _shown.line.text = _shown.texts[-1]


def announce(text: str, *, by: str = "memfit") -> None:
    """Writes a message of ours that stays to standard error, at once and on lines of its own."""
    if _shown.line is not None:
        _shown.line.clear()
    print(printable(f"{by}: {text}", keep="\n\t"), file=sys.stderr, flush=True)


def is_seen(stream: TextIO | None) -> bool:
    """Whether somebody looks at what is written there as it comes, and wants to."""
    if stream is None or not env.wants_progress():
        return False
    # Streams of others need not have all of a file's methods.
    is_terminal = getattr(stream, "isatty", lambda: False)
    return is_terminal() or type(stream).__module__.startswith("ipykernel.")


class _Line:
    """The line, written by a thread of its own."""

    def __init__(self, stream: TextIO, text: str) -> None:
        self.text = text
        self._stream = stream
        self._began = time.monotonic()
        self._num_written = 0
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memfit-progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        wait = QUICK_SECONDS
        while not self._done.wait(wait):
            wait = _REFRESH_SECONDS
            seconds = time.monotonic() - self._began
            frame = _FRAMES[int(seconds / _REFRESH_SECONDS) % len(_FRAMES)]
            taken = f"{int(seconds) // 60}:{int(seconds) % 60:02}"
            try:
                columns = os.get_terminal_size(self._stream.fileno()).columns
            except (OSError, ValueError, AttributeError):
                columns = 0
            # A line that wraps could not be written over, and each turn would add another. The last column is left
            # free, where some terminals wrap already.
            columns = min(_MAX_COLUMNS, (columns or shutil.get_terminal_size().columns) - 1)
            room = columns - len(f"{frame} memfit:  ({taken})")
            text = printable(self.text)
            text = text if len(text) <= room else f"{text[: max(0, room - 3)]}..."
            self._write(f"{frame} memfit: {text} ({taken})")

    def _write(self, line: str) -> None:
        with self._lock:
            padded = line.ljust(self._num_written)
            self._num_written = len(line)
            try:
                self._stream.write(f"\r{padded}\r" if not line else f"\r{padded}")
                self._stream.flush()
            except (OSError, ValueError):
                # Nobody is there any more.
                self._done.set()

    def clear(self) -> None:
        """Makes room for another line."""
        if self._num_written:
            self._write("")

    def close(self) -> None:
        """Ends the line, and leaves nothing of it."""
        self._done.set()
        self._thread.join()
        self.clear()
