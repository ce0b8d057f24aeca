"""The process of a supervised script: `python -m memfit.api.supervised_child REQUEST.json [DESCRIPTOR]`.

Divides into the keeper and the script, limits the script's data, and runs it as Python would: as `__main__`, with its
own arguments and its own folder first on the path. No framework is loaded before the script loads it; what memfit has
to do in one is done when it has been imported. An exception that ends the script is told to the supervisor and shown
as Python would show it; where it is about memory, the supervisor says so in a line, and the traceback goes to a file.
"""

import builtins
import importlib.machinery
import io
import os
import runpy
import sys
import threading
import traceback as tracebacks
from itertools import pairwise
from pathlib import Path
from types import ModuleType, TracebackType

from memfit.catalogue.host import cgroup_limit_bytes
from memfit.core import interrupts as _interrupts
from memfit.core.guarding import BrokenUpdate, CannotFit, MemoryFailure, Where
from memfit.core.oom import recognise
from memfit.core.own_memory import limits as own_limits
from memfit.core.printing import printable
from memfit.core.progress import announce
from memfit.core.run_events import RunRequest, keep_traceback, note
from memfit.core.user_code import interrupted_import, is_users
from memfit.frameworks.torch.shapes import imports
from memfit.processes import child, limits
from memfit.processes import process_tree as processes
from memfit.processes.limits import has_devices

_MAX_TEXT = 500
_MAX_CODE = 100
# How long threads and handlers of the script may take to end when memory has run out.
_END_SECONDS = 30.0


def main(request_path: str, descriptor: str | None = None) -> None:
    """Runs what the file asks for; the script's end is this process's."""
    request = RunRequest.from_json(Path(request_path).read_text(encoding="utf-8"))
    child.divide(None if descriptor is None else int(descriptor))
    if request.data_limit_bytes is not None:
        limits.set_data_limit(request.data_limit_bytes)
    set_early: list[str] = []
    # Libraries ask whether others are there without importing them: only Keras tells that its backend is used.
    early = {name: lambda: set_early.extend(_flags(request)) for name in ("tensorflow", "jax")}
    late = {"torch": lambda module: _install_torch(request), "keras": lambda module: _install_keras(module, set_early)}
    imports.watch_imports(late, before=early)
    _interrupts.raise_again()
    run_script(request)


def _install_torch(request: RunRequest) -> None:
    """Budget, rescue, and the trainers that memfit knows, each when its own library has been imported."""
    from memfit.api import integrations
    from memfit.frameworks.torch.oom import limit_devices

    note("torch")
    if request.budget_bytes is not None:
        limit_devices(request.budget_bytes)
    if request.rescue:
        # What nobody asked for isn't loaded.
        from memfit.frameworks.torch import rescue

        rescue.Rescue(eager=request.eager)
        note("rescue", eager=request.eager)
    imports.watch_imports(integrations.TRAINERS)


def _install_keras(module: ModuleType, set_early: list[str]) -> None:
    from memfit.api import integrations

    backend = {"tensorflow": "TensorFlow", "jax": "JAX"}.get(module.backend.backend(), "none")
    texts = [text for text in set_early if text.startswith(backend) and ("GPU" not in text or has_devices())]
    if texts:
        announce("; ".join(texts))
    integrations.install_keras(module)


def _flags(request: RunRequest) -> list[str]:
    """Sets what backends of Keras read when they are imported; what was set, in words."""
    from memfit.frameworks.keras.guard import flags

    # TensorFlow is fastest with what can't stand a lack of memory: it keeps that where nothing says it will meet one.
    is_limited = request.budget_bytes is not None or request.attempt > 1 or cgroup_limit_bytes() is not None
    return flags.set_early(is_limited=is_limited)


def run_script(request: RunRequest) -> None:
    """Runs the script in this process; an exception that ends it is told and shown, and ends the process."""
    sys.argv = [request.script, *request.arguments]
    try:
        _run_as_main(request)
    except SystemExit:
        raise
    except BaseException as error:
        # Our own frames are no part of the script.
        traceback = _of_script(error.__traceback__)
        is_explained = tell(error.with_traceback(traceback))
        if sys.excepthook is not sys.__excepthook__:
            sys.excepthook(type(error), error, traceback)
        elif not is_explained or request.verbose:
            # As Python would, but what an exception says can't steer the terminal.
            text = printable("".join(tracebacks.format_exception(error)), keep="\n\t")
            print(text, end="", file=sys.stderr, flush=True)
        if is_explained:
            # Threads of the script may wait for what will not come, now that memory ran out.
            timer = threading.Timer(_END_SECONDS, _end)
            timer.daemon = True
            timer.start()
        if isinstance(error, KeyboardInterrupt):
            # Python ends a program that was interrupted by the signal itself, after its usual end.
            sys.excepthook = lambda *details: None
            raise
        sys.exit(1)


def _end() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _run_as_main(request: RunRequest) -> None:
    module = ModuleType("__main__")
    module.__dict__.update({"__builtins__": builtins, "__annotations__": {}})
    sys.modules["__main__"] = module
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if request.module else os.path.dirname(os.path.realpath(request.script))
    if request.module:
        # What `python -m` itself calls. Unlike `runpy.run_module` it leaves the module in place for threads and
        # functions that run after it.
        runpy._run_module_as_main(request.script, alter_argv=True)  # type: ignore[attr-defined]
        return
    # Python gives the arguments the path as it was written, and the program its whole.
    path = os.path.abspath(request.script)
    with io.open_code(path) as file:
        source = file.read()
    # What a program finds in its own namespace when Python has started it.
    module.__file__ = path
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    module.__dict__["__cached__"] = None
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)


def tell(error: BaseException) -> bool:
    """Tells the supervisor of the exception that ends the script; whether the supervisor will explain it."""
    if isinstance(error, KeyboardInterrupt):
        return False
    if isinstance(error, CannotFit | BrokenUpdate):
        # A guard has said why; of a broken update the last checkpoint is whole.
        failure = getattr(error, "failure", None) or MemoryFailure(Where.HOST, "guard", text=str(error))
    else:
        failure = recognise(error)
    # Device memory has no part in what the process has mapped.
    held = None if failure is not None and failure.where is not Where.HOST else processes.held_by(os.getpid())
    data_limit = own_limits()[0]
    if failure is not None:
        # Whoever shows the exception, and whoever clears up, needs memory too.
        limits.set_data_limit(None)
    lines = str(error).strip().splitlines() or [""]
    at = ""
    # The last line of the script's own that the exception passed, which no installed library holds.
    for frame in tracebacks.extract_tb(error.__traceback__):
        if is_users(frame.filename):
            code = f": {frame.line.strip()[:_MAX_CODE]}" if frame.line else ""
            at = f"{os.path.basename(frame.filename)}, line {frame.lineno}{code}"
    is_written = note(
        "error",
        type=type(error).__name__,
        text=lines[0][:_MAX_TEXT],
        memory=failure is not None,
        source="" if failure is None else failure.source,
        requested_bytes=None if failure is None else failure.requested_bytes,
        importing="" if failure is None else interrupted_import(error),
        at=at,
        # Mappings and arrays of NumPy, which programs ask for ahead and may never fill.
        may_stay_unused=isinstance(error, OSError) or hasattr(error, "_total_size"),
        data_bytes=None if held is None else held.data_bytes,
        used_bytes=None if held is None else held.used_bytes,
        data_limit_bytes=data_limit,
    )
    return failure is not None and is_written and keep_traceback("".join(tracebacks.format_exception(error)))


def _of_script(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback without our own frames: those that start the script, and those that see what it imports."""
    ours = (os.path.abspath(__file__), os.path.abspath(imports.__file__))
    frames = []
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if os.path.abspath(name) not in ours and not name.startswith("<frozen runpy"):
            frames.append(traceback)
        traceback = traceback.tb_next
    # A mistake in the script's syntax has no frame of the script.
    for first, second in pairwise(frames):
        first.tb_next = second
    return frames[0] if frames else None


if __name__ == "__main__":
    main(*sys.argv[1:])
