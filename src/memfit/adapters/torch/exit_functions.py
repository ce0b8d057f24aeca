"""Functions that the script registers for its end: they run while the device is still there.

Python would run them when the interpreter ends, after the simulation. What they save would then overwrite the user's
own files, and what they ask of the device would fail.
"""

import atexit
import sys
import threading
from collections.abc import Callable
from typing import Any

from memfit.adapters.torch.replacement import Replacement

_GRACE_SECONDS = 5.0


class ExitFunctions:
    """Keeps what is registered with `atexit`."""

    def __init__(self) -> None:
        self._registered: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        self._threads = set(threading.enumerate())

    def replacements(self) -> list[Replacement]:
        """Stands in for `atexit.register` and `atexit.unregister`."""
        plain_unregister = atexit.unregister

        def register(func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
            self._registered.append((func, args, kwargs))
            return func

        def unregister(func: Callable[..., Any], /) -> None:
            self._registered = [entry for entry in self._registered if entry[0] != func]
            plain_unregister(func)

        return [Replacement(atexit, "register", register), Replacement(atexit, "unregister", unregister)]

    def run(self) -> None:
        """Ends the script as the interpreter would: its threads first, then the last registered function and so on."""
        for thread in set(threading.enumerate()) - self._threads:
            if not thread.daemon and thread is not threading.current_thread():
                thread.join(_GRACE_SECONDS)
        while self._registered:
            func, args, kwargs = self._registered.pop()
            try:
                func(*args, **kwargs)
            except Exception:
                sys.excepthook(*sys.exc_info())
            except SystemExit:
                continue
