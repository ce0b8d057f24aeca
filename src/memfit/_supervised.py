"""The process of a supervised script: `python -m memfit._supervised REQUEST.json [DESCRIPTOR]`.

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
import sysconfig
import threading
import traceback as tracebacks
from itertools import pairwise
from pathlib import Path
from types import ModuleType, TracebackType

from memfit import _interrupts
from memfit.adapters.torch import imports
from memfit.catalogue.host import cgroup_limit_bytes
from memfit.core.guarding import BrokenUpdate, CannotFit, OutOfMemory, Where
from memfit.core.own_memory import limits as own_limits
from memfit.core.printing import printable
from memfit.core.progress import announce
from memfit.core.run_events import RunRequest, keep_traceback, note
from memfit.runs import exhaustion, keeper, limits, processes
from memfit.runs.devices import has_devices

_MAX_TEXT = 500
_MAX_CODE = 100
# How long threads and handlers of the script may take to end when memory has run out.
_END_SECONDS = 30.0


def main(request_path: str, descriptor: str | None = None) -> None:
    """Runs what the file asks for; the script's end is this process's."""
    request = RunRequest.from_json(Path(request_path).read_text(encoding="utf-8"))
    keeper.divide(None if descriptor is None else int(descriptor))
    if request.data_limit_bytes is not None:
        limits.set_data_limit(request.data_limit_bytes)
    said: list[str] = []
    # Libraries ask whether others are there without importing them: only Keras tells that its backend is used.
    early = {name: lambda: said.extend(_flags(request)) for name in ("tensorflow", "jax")}
    late = {"torch": lambda module: _install(request), "keras": lambda module: _install_keras(module, said)}
    imports.watch_imports(late, before=early)
    _interrupts.raise_again()
    run_script(request)


def _install_keras(module: ModuleType, said: list[str]) -> None:
    from memfit import integrations

    backend = {"tensorflow": "TensorFlow", "jax": "JAX"}.get(module.backend.backend(), "none")
    texts = [text for text in said if text.startswith(backend) and ("GPU" not in text or has_devices())]
    if texts:
        announce("; ".join(texts))
    integrations.install_keras(module)


def _flags(request: RunRequest) -> list[str]:
    """Sets what backends of Keras read when they are imported; what was set, in words."""
    from memfit.adapters.keras.guarding import flags

    # TensorFlow is fastest with what can't stand a lack of memory: it keeps that where nothing says it will meet one.
    is_limited = request.budget_bytes is not None or request.attempt > 1 or cgroup_limit_bytes() is not None
    return flags.set_early(is_limited=is_limited)


def _install(request: RunRequest) -> None:
    from memfit import integrations
    from memfit.adapters.torch import supervised

    supervised.install(request, integrations.TRAINERS)


def run_script(request: RunRequest) -> None:
    """Runs the script in this process; an exception that ends it is told and shown, and ends the process."""
    sys.argv = [request.script, *request.arguments]
    try:
        if request.module:
            _run_module(request.script)
        else:
            _run_file(request.script)
    except SystemExit:
        raise
    except BaseException as error:
        # Our own frames are no part of the script.
        traceback = _of_script(error.__traceback__)
        is_told = tell(error.with_traceback(traceback))
        if sys.excepthook is not sys.__excepthook__:
            sys.excepthook(type(error), error, traceback)
        elif not is_told or request.verbose:
            # As Python would, but what an exception says can't steer the terminal.
            text = printable("".join(tracebacks.format_exception(error)), keep="\n\t")
            print(text, end="", file=sys.stderr, flush=True)
        if is_told:
            _end_in_time()
        if isinstance(error, KeyboardInterrupt):
            # Python ends a program that was interrupted by the signal itself, after its usual end.
            sys.excepthook = lambda *details: None
            raise
        sys.exit(1)


def _end_in_time() -> None:
    """Ends the process also where threads of the script wait for what will not come, now that memory ran out."""

    def end() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(_END_SECONDS, end)
    timer.daemon = True
    timer.start()


def _run_file(path: str) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    # Python gives the arguments the path as it was written, and the program its whole.
    path = os.path.abspath(path)
    with io.open_code(path) as file:
        source = file.read()
    module = _new_main()
    # What a program finds in its own namespace when Python has started it.
    module.__file__ = path
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    module.__dict__["__cached__"] = None
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)


def _run_module(name: str) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    _new_main()
    # What `python -m` itself calls. Unlike `runpy.run_module` it leaves the module in place for threads and functions
    # that run after it.
    runpy._run_module_as_main(name, alter_argv=True)  # type: ignore[attr-defined]


def _new_main() -> ModuleType:
    module = ModuleType("__main__")
    module.__dict__.update({"__builtins__": builtins, "__annotations__": {}})
    sys.modules["__main__"] = module
    return module


def tell(error: BaseException) -> bool:
    """Tells the supervisor of the exception that ends the script; whether the supervisor will explain it."""
    if isinstance(error, KeyboardInterrupt):
        return False
    failure = _recognise(error)
    # Device memory has no part in what the process has mapped.
    held = None if failure is not None and failure.where is not Where.HOST else processes.held_by(os.getpid())
    data_limit = own_limits()[0]
    if failure is not None:
        # Whoever shows the exception, and whoever clears up, needs memory too.
        limits.lift_data_limit()
    lines = str(error).strip().splitlines() or [""]
    is_written = note(
        "error",
        type=type(error).__name__,
        text=lines[0][:_MAX_TEXT],
        memory=failure is not None,
        source="" if failure is None else failure.source,
        requested_bytes=None if failure is None else failure.requested_bytes,
        importing="" if failure is None else exhaustion.importing(error),
        at=_place(error),
        may_stay_unused=exhaustion.may_stay_unused(error),
        data_bytes=None if held is None else held.data_bytes,
        used_bytes=None if held is None else held.used_bytes,
        data_limit_bytes=data_limit,
    )
    return failure is not None and is_written and keep_traceback("".join(tracebacks.format_exception(error)))


def _place(error: BaseException) -> str:
    """The last line of the script's own that an exception passed, which no installed library holds."""
    installed = tuple(
        os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib")
    )
    ours = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
    frames = [
        frame
        for frame in tracebacks.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*installed, ours, "<"))
    ]
    if not frames:
        return ""
    frame = frames[-1]
    code = f": {frame.line.strip()[:_MAX_CODE]}" if frame.line else ""
    return f"{os.path.basename(frame.filename)}, line {frame.lineno}{code}"


def _recognise(error: BaseException) -> OutOfMemory | None:
    """What ran out; None where the exception is about something else."""
    if isinstance(error, CannotFit):
        return error.failure or OutOfMemory(Where.HOST, "guard", text=str(error))
    if isinstance(error, BrokenUpdate):
        # Its last checkpoint is whole.
        return OutOfMemory(Where.HOST, "guard", text=str(error))
    if "keras" in sys.modules:
        from memfit.adapters.keras.guarding.oom import recognise as recognise_keras

        failure = recognise_keras(error)
        if failure is not None:
            return failure
    if "torch" in sys.modules and hasattr(sys.modules["torch"], "OutOfMemoryError"):
        from memfit.adapters.torch.oom import recognise

        failure = recognise(error)
        if failure is not None:
            return failure
    if not exhaustion.is_about_memory(error):
        return None
    # NumPy's own exception knows the size.
    size = getattr(error, "_total_size", None)
    return OutOfMemory(Where.HOST, "python", requested_bytes=size if isinstance(size, int) else None)


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
