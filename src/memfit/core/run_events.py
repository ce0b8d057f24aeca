"""What `memfit run` and the script it started tell each other.

The supervisor writes a request and names its path in the environment; a guard or an integration in the script reads
it, and appends what happens to a file beside it, one line of JSON each. A line is appended by a single write, so that
ranks and workers can share the file, and a process that is killed leaves whole lines. Outside of a supervised run
nothing is read and nothing written.
"""

import contextlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.core import env
from memfit.core.typed_data import Saved

EVENTS, TRACEBACK = "events.jsonl", "traceback.txt"
"""Names of the files of events and of the traceback that ended the script, which are beside the request."""

# What a broken script could fill a disk with, and far more than any run has to tell.
_MAX_FILE_BYTES = 64 * 1024**2


@dataclass(frozen=True, slots=True)
class RunRequest(Saved):
    """What one attempt of a supervised run is to be."""

    saved_as = "run request", "a request of a run"

    attempt: int = 1  # from 1 on
    checkpoint: str | None = None  # folder for checkpoints, from whose last one it goes on; None where none was named
    micro_batch_size: int | None = None  # most samples at once; None where nothing is known against any size
    budget_bytes: int | None = None  # memory that the script may take on each device; None where all there is
    share: float = 1.0  # of what its plan may use, what it is to use, after attempts whose plans were too large
    rescue: bool = False  # whether operations that run out of memory are to be rescued from outside
    eager: bool = False  # whether the rescue is to move everything it can, before memory runs out
    script: str = ""  # path of the file, or dotted name of the module
    module: bool = False  # whether it is a module, as for `python -m`
    arguments: tuple[str, ...] = ()  # of the script
    data_limit_bytes: int | None = None  # most data that the process may map (RLIMIT_DATA); None without a limit
    verbose: bool = False  # whether tracebacks of failures for lack of memory are shown


def current() -> RunRequest | None:
    """The request of the supervised run that this process is part of; None outside of one."""
    path = env.run_request()
    if not path:
        return None
    try:
        return RunRequest.from_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # The supervisor is gone, or the variable is a leftover: the script runs on its own.
        return None


def note(event: str, **values: Any) -> bool:
    """Tells the supervisor that something happened; does nothing outside of a supervised run. Whether it was told."""
    path = env.run_request()
    if not path:
        return False
    line = json.dumps({"event": event, "time": time.time(), "pid": os.getpid(), **values}, default=str) + "\n"
    # Never a reason for the script to fail: the supervisor knows less, and that is all.
    with contextlib.suppress(OSError):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        descriptor = os.open(os.path.join(os.path.dirname(path), EVENTS), flags, 0o600)
        try:
            if os.fstat(descriptor).st_size < _MAX_FILE_BYTES:
                os.write(descriptor, line.encode("utf-8", errors="replace"))
                return True
        finally:
            os.close(descriptor)
    return False


def keep_traceback(text: str) -> bool:
    """Keeps the traceback that ended the script for the supervisor; whether that was possible."""
    with contextlib.suppress(OSError):
        Path(env.run_request()).with_name(TRACEBACK).write_text(text, encoding="utf-8", errors="replace")
        return True
    return False


def read_events(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All events so far, in order; a line that isn't whole is left out."""
    try:
        text = Path(folder, EVENTS).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    events = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            data = json.loads(line)
            if isinstance(data, dict) and isinstance(data.get("event"), str):
                events.append(data)
    return events


def last_checkpoint() -> str | None:
    """Path of the newest checkpoint that an earlier attempt wrote and that is still there."""
    request = current()
    if request is None:
        return None
    # The supervisor gives each attempt a folder of its own, numbered, beside the others.
    folder = Path(env.run_request()).absolute().parent
    for number in range(request.attempt - 1, 0, -1):
        for event in reversed(read_events(folder.with_name(f"{folder.name.rpartition('-')[0]}-{number}"))):
            path = event.get("path") if event["event"] == "checkpoint" else None
            if isinstance(path, str) and os.path.exists(path):
                return path
    return None
