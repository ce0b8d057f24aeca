"""The child process of a dry run: `python -m memfit._child REQUEST.json`.

Puts the parts together on the other side of `memfit.runs`: the device's memory, and the script that runs on it.
"""

import json
import os
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from memfit import _interrupts
from memfit.allocator import memory_of
from memfit.allocator.shared import SharedDevice, can_share
from memfit.core import env
from memfit.core.dryrun import DryRun, Request
from memfit.runs import processes
from memfit.runs.shared_runs import DEVICE

if TYPE_CHECKING:
    from memfit.adapters.torch.script import ScriptRun

# How long the interpreter may take to end when the result has been written.
_ENDING_SECONDS = 10.0


def main(request_path: str) -> int:
    """Runs what the file asks for and writes the result where it says."""
    request = Request.from_json(Path(request_path).read_text(encoding="utf-8"))
    if request.until_fit:
        return _run_until_fit(request)
    # TorchScript runs as the Python it is made from; PyTorch reads this when it is imported.
    os.environ["PYTORCH_JIT"] = "0"
    # DistributedDataParallel has no clock for shape-only tensors, and says so in C++.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if request.settings is not None and request.settings.expandable_segments:
        given = env.allocator_settings()
        os.environ["PYTORCH_ALLOC_CONF"] = f"{given},expandable_segments:True" if given else "expandable_segments:True"
    from memfit.adapters.torch.processes import following

    run = _script_run(request, request_path, "")

    def write(result: DryRun) -> None:
        _write(request.result_path, {**result.to_json(), "loader_ordinal": run.loaders.training})

    def leave(result: DryRun) -> None:
        write(result)
        sys.stdout.flush()
        os._exit(0)

    run.leave_with(leave)
    _interrupts.raise_again()
    try:
        with following(request_path) if can_share() else nullcontext():
            result = run.run()
    except KeyboardInterrupt:
        # Before or after the script.
        return 130
    finally:
        _interrupts.end_at_once()
    write(result)
    return result.exit_code or 0


_followed: list["ScriptRun"] = []


def follow(request_path: str) -> None:
    """Simulates the device of a request in this process too, which the request's script has started."""
    request = Request.from_json(Path(request_path).read_text(encoding="utf-8"))
    run = _script_run(request, request_path, " ".join(map(os.path.basename, sys.argv[:1])) or "a process")
    run.follow(run.write_process)
    _followed.append(run)


def _script_run(request: Request, request_path: str, name: str) -> "ScriptRun":
    from memfit.adapters.torch.script import ScriptRun

    memory, configure = memory_of(request.device, unlimited=request.unlimited)
    shared = None
    if can_share():
        usable = None if request.unlimited else request.device.usable_bytes
        path = os.path.join(os.path.dirname(request_path), DEVICE)
        shared = SharedDevice(path, usable, request.device.context_bytes or 0, name)
        memory.share(shared)
    run = ScriptRun(request, memory, configure, shared)
    folder = os.path.dirname(request_path)
    run.write_process = lambda result: _write(os.path.join(folder, f"process-{os.getpid()}.json"), result.to_json())
    return run


def _run_until_fit(request: Request) -> int:
    from memfit._keras_script import KerasScriptRun

    _interrupts.raise_again()
    try:
        result = KerasScriptRun(request).run()
    except KeyboardInterrupt:
        return 130
    _write(request.result_path, result.to_json())
    return result.exit_code or 0


def _write(path: str, data: dict[str, Any]) -> None:
    temporary = Path(path + ".tmp")
    temporary.write_text(json.dumps(data), encoding="utf-8")
    temporary.replace(path)


def _end(code: int) -> NoReturn:
    """Ends the process, also where the interpreter's own end waits for processes that the script has left behind."""

    def leave() -> None:
        processes.end_descendants(os.getpid(), 0.0)
        os._exit(code)

    timer = threading.Timer(_ENDING_SECONDS, leave)
    timer.daemon = True
    timer.start()
    sys.exit(code)


if __name__ == "__main__":
    _end(main(sys.argv[1]))
