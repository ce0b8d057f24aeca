"""Ctrl-C in processes of memfit's own while no code is there yet that could handle it.

A command, or the process of a script, spends its first seconds with imports. A KeyboardInterrupt there would show a
traceback of code that is nobody's business. Imported first of all; a program that merely uses memfit is left alone.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_EXIT_INTERRUPTED = 130


def _is_command() -> bool:
    """Whether this process is the command."""
    return (_module() or "").removesuffix(".__main__") == "memfit" or (
        _module() is None and os.path.basename(sys.argv[0] if sys.argv else "").removesuffix(".exe") == "memfit"
    )


def _module() -> str | None:
    """What `python -m` was given; None without it."""
    words = getattr(sys, "orig_argv", [])
    return words[words.index("-m") + 1] if "-m" in words[:-1] else None


def _end(number: int, frame: FrameType | None) -> None:
    if _is_command():
        os.write(2, b"memfit: interrupted\n")
    # Of a process that was started by another the other one tells.
    os._exit(_EXIT_INTERRUPTED)


def end_at_once() -> None:
    """From now on Ctrl-C ends the process without a traceback, where it is one of memfit's own."""
    is_ours = _is_command() or (_module() or "").startswith("memfit.")
    if is_ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
        if hasattr(signal, "pthread_sigmask"):
            # Whoever started us may have made it wait, by `waiting`.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def raise_again() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def waiting() -> Iterator[None]:
    """Ctrl-C waits while it lasts, and in a process of memfit's own started meanwhile until that one has begun."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


end_at_once()
