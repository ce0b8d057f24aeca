"""Processes that the script starts: they share the simulated device with it.

A process that is forked off goes on in the simulation, unless the device was in use already, as CUDA has it. Any other
Python is told through its environment: a `sitecustomize` waits there until PyTorch is imported, and begins a
simulation of the same device. Loader workers have nothing to do with the device and leave it at once. Each process
leaves a result in a file, and what it holds in that of the device (`memfit.allocator.shared`).
"""

import atexit
import contextlib
import multiprocessing
import multiprocessing.process
import os
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from memfit.allocator.shared import SharedDevice
from memfit.core import env
from memfit.core.patching import Replacement, around
from memfit.core.redirected_files import unredirected
from memfit.core.user_code import INSTALLED_FOLDERS
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.shapes import imports
from memfit.frameworks.torch.shapes.origin import HIDDEN_FOLDERS

_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib"))
# Where code is that isn't the user's own: memfit's, Python's, a library's.
_NOT_OWN = (*HIDDEN_FOLDERS, *INSTALLED_FOLDERS, "<")
NOT_SIMULATED = "process-not-simulated"
ENDED_IDLE = "script-ended-idle"
_HOOK = '''\
"""Lets a process of a script that memfit dry-runs see the simulated device, once it imports PyTorch."""
import importlib, importlib.machinery, importlib.util, os, sys, traceback
here = os.path.dirname(os.path.abspath(__file__))
others = [folder for folder in sys.path if os.path.abspath(folder or ".") != here]
spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
if spec is not None and spec.loader is not None:
    # The one that would have been found without us.
    sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["sitecustomize"])
def follow(module):
    if os.environ.get({variable!r}):
        importlib.import_module({program!r}).follow(os.environ[{variable!r}])
# Not the one in C: ours are left out of what `traceback` writes.
plain_hook = traceback.print_exception if sys.excepthook is sys.__excepthook__ else sys.excepthook
# Of an interruption the one who was interrupted tells.
sys.excepthook = lambda kind, error, trace: None if kind is KeyboardInterrupt else plain_hook(kind, error, trace)
if sys.prefix == {prefix!r}:
    if os.environ.get({files!r}):
        # Before anything of the program's is opened.
        importlib.import_module("memfit.core.redirected_files").follow(os.environ[{files!r}])
    spec = importlib.util.spec_from_file_location("_memfit_imports", {imports!r})
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.watch_imports({{"torch": follow}})
'''
_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.2
# How long a process that has taken its steps waits for others: with something seen of them, and before they are there.
_QUIET_SECONDS, _START_SECONDS, _MOST_SECONDS = 3.0, 30.0, 120.0
# Of a processor, above which a process that has not come yet is at work; on a busy machine imports get no more.
_WORKING_SHARE = 0.02
# How long a script may do nothing at all after its processes have taken their steps: where it waits in one of Python's
# or a library's functions (for a queue, a pipe, a process), and where its own code does, such as in time.sleep.
_IDLE_SECONDS, _OWN_IDLE_SECONDS = 10.0, 60.0


@contextlib.contextmanager
def environment(values: Mapping[str, str | None], *, restores_all: bool = False) -> Iterator[None]:
    """Sets variables of the environment, or takes them out (None), while it lasts.

    With `restores_all` also those that others have set or taken out meanwhile are afterwards as they were before.
    """
    before = {name: os.environ.get(name) for name in {*values, *(os.environ if restores_all else ())}}

    def put(variables: Mapping[str, str | None]) -> None:
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    put(values)
    try:
        yield
    finally:
        put(dict.fromkeys(os.environ.keys() - before.keys()) | before if restores_all else before)


def following(request_path: str, program: str) -> contextlib.AbstractContextManager[None]:
    """Every Python that is started meanwhile follows the request too, by `follow` of the module `program`."""
    folder = Path(request_path).parent / "hook"
    names = {"variable": env.SIMULATION, "files": env.REDIRECTED_FILES}
    text = _HOOK.format(program=program, prefix=sys.prefix, imports=imports.__file__, **names)
    with unredirected():
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(text, encoding="utf-8")
    paths = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return environment({"PYTHONPATH": paths, env.SIMULATION: request_path})


@dataclass(eq=False)
class Processes:
    """Hears of processes that the script starts, and of the end of the one that this is."""

    report: Callable[[str, str], None]
    are_simulated: bool = False
    leave: Callable[[], None] = lambda: None  # called in a process that turns out to be a loader's worker
    started: Callable[[], None] = lambda: None  # called when a process is about to be started
    # Called in a process of the script's own when it has done its work, with what ended it.
    ended: Callable[[BaseException | None], None] = lambda error: None
    num_started: int = 0
    forking: str = ""  # name of the process that is being started and stays in the simulation where it is forked off
    _pids: list[tuple[int, int]] = field(default_factory=list)  # of those started, behind that of who started them

    def replacements(self) -> list[Replacement]:
        """Stands in front of the two ways in which Python starts processes, and of the beginning of one."""

        def start(plain: Callable[[Any], None], process: Any) -> None:
            if _is_worker(process):
                # It sees no device, and isn't slowed by a simulation.
                with environment({env.SIMULATION: None}):
                    plain(process)
                return
            self._note(f"process {process.name!r}")
            self.forking = process.name if self.are_simulated else ""
            try:
                plain(process)
            finally:
                self.forking = ""
            self._pids.append((os.getpid(), process.pid))

        def bootstrap(plain: Callable[..., Any], process: Any, *args: Any, **kwargs: Any) -> Any:
            if _is_worker(process):
                self.leave()
                return plain(process, *args, **kwargs)
            errors: list[BaseException] = []
            plain_run = process.run

            def run() -> None:
                try:
                    plain_run()
                except KeyboardInterrupt:
                    # The one who was interrupted tells; a process of its own would print a traceback.
                    sys.exit(130)
                except BaseException as error:
                    errors.append(error)
                    raise

            process.run = run
            try:
                return plain(process, *args, **kwargs)
            finally:
                self.ended(errors[0] if errors else None)

        def popen(plain: Callable[..., None], process: Any, *args: Any, **kwargs: Any) -> None:
            command = args[0] if args else kwargs.get("args")
            words = command if isinstance(command, str) else " ".join(map(str, command or ()))
            if "python" not in words or not _asked_by_user():
                plain(process, *args, **kwargs)
                return
            self._note(f"command {words[:80]!r}")
            plain(process, *args, **kwargs)
            self._pids.append((os.getpid(), process.pid))

        base = multiprocessing.process.BaseProcess
        return [
            around(base, "start", start),
            around(base, "_bootstrap", bootstrap),
            around(subprocess.Popen, "__init__", popen),
        ]

    def _note(self, what: str) -> None:
        self.num_started += 1
        if self.are_simulated:
            self.started()
        else:
            self.report(NOT_SIMULATED, f"{what} was started: what it does on the device is not simulated")

    def num_alive(self) -> int:
        """How many of those that this process started have not ended."""
        return sum(starter == os.getpid() and _is_alive(pid) for starter, pid in self._pids)

    def finish(self) -> None:
        """Ends the processes that are left of a script that was ended: they may wait for it for ever."""
        left = [process for process in multiprocessing.active_children() if not _is_worker(process)]
        for process in left:
            process.terminate()
        deadline = time.monotonic() + _GRACE_SECONDS
        for process in left:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(_GRACE_SECONDS)


class ExitFunctions:
    """Functions that the script registers for its end: they run while the device and its files are there."""

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


def interrupt_when_idle(has_nothing_to_do: Callable[[], bool], end: Callable[[], None]) -> None:
    """Interrupts a script that waits for processes which have nothing to do any more; calls `end` before that."""
    main = threading.main_thread().ident

    def watch() -> None:
        since, used = time.monotonic(), time.process_time()
        while True:
            time.sleep(_POLL_SECONDS)
            now, now_used = time.monotonic(), time.process_time()
            # This thread, and whoever polls, take a little themselves.
            if now_used - used > 0.2 * (now - since) or not has_nothing_to_do():
                since, used = now, now_used
                continue
            frame = sys._current_frames().get(main or 0)
            is_in_own_code = frame is not None and not frame.f_code.co_filename.startswith(_NOT_OWN)
            if now - since > (_OWN_IDLE_SECONDS if is_in_own_code else _IDLE_SECONDS):
                break
        end()
        if main is not None and hasattr(signal, "pthread_kill"):
            signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=watch, daemon=True, name="memfit-idle").start()


def wait_for_others(device: SharedDevice, num_alive: Callable[[], int] | None = None) -> None:
    """Keeps what this process holds until those that were started beside it have taken their steps, too.

    Without a dry run all of them would train for hours, side by side. Here a process is done before another has begun.
    One that ended without PyTorch never comes: `num_alive` says how many of this process's own still can. Without it,
    those are waited for that were started beside this one, and do something: importing PyTorch is work.
    """
    begun = since = idle_since = time.monotonic()
    last, used = -1, 0.0
    while time.monotonic() - begun < _MOST_SECONDS:
        to_come, at_work, sign = device.others()
        if num_alive is not None:
            to_come = min(to_come, num_alive())
        elif to_come:
            now, now_used = time.monotonic(), _siblings_seconds(device.pids())
            if now_used - used > _WORKING_SHARE * (now - idle_since):
                idle_since, used = now, now_used
            if now - idle_since > _QUIET_SECONDS:
                to_come = 0
        if not to_come and not at_work:
            return
        if sign != last:
            last, since = sign, time.monotonic()
        if time.monotonic() - since > (_START_SECONDS if to_come else _QUIET_SECONDS):
            return
        time.sleep(_POLL_SECONDS)


def _siblings_seconds(known: set[int]) -> float:
    """Processor time of the processes that this one's parent has started beside it, without those that are known."""
    import psutil

    seconds = 0.0
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(os.getppid()).children():
            if process.pid not in known:
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    seconds += times.user + times.system
    return seconds


def _is_alive(pid: int) -> bool:
    if not hasattr(os, "waitid"):
        return True
    try:
        # Without a word to whoever waits for it.
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        # It has been waited for, or is the child of a server of processes.
        with contextlib.suppress(OSError):
            os.kill(pid, 0)
            return True
        return False


def _is_worker(process: Any) -> bool:
    return getattr(process, "_target", None) is internals.worker_loop


def _asked_by_user() -> bool:
    """Whether the user's own code, and not a library that asks for a version, starts the command."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_LIBRARIES):
            return False
        if not path.startswith(_NOT_OWN):
            return True
        frame = frame.f_back
    return False
