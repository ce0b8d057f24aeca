"""The child process of a dry run: `python -m memfit.api.dryrun_child REQUEST.json`.

Puts the parts together on the other side of `memfit.processes`: the device's memory, and the script that runs on it.
"""

import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from memfit.allocator import memory_of
from memfit.allocator.shared import SharedDevice, can_share
from memfit.core import env, redirected_files
from memfit.core import interrupts as _interrupts
from memfit.core.dryrun import DryRun, Outcome, Request
from memfit.core.progress import announce
from memfit.core.redirected_files import RedirectedFiles, is_within, unredirected
from memfit.core.units import format_size
from memfit.processes import overlay
from memfit.processes import process_tree as processes
from memfit.processes.launch import DEVICE

if TYPE_CHECKING:
    from memfit.frameworks.torch.script.script import ScriptRun

_MAX_NAMED = 3
# How long the interpreter may take to end when the result has been written.
_ENDING_SECONDS = 10.0
_ROOM_SECONDS = 1.0


def main(request_path: str) -> int:
    """Runs what the file asks for and writes the result where it says."""
    request = _read(request_path)
    # Before anything starts a thread.
    files = None
    if request.layers:
        files = _keep_files_apart(request)
        # A memfit that is killed can't end us, and the next one removes the folder with our files.
        processes.die_with_parent(processes.KILL)
    if request.until_fit:
        from memfit.api.keras_script import KerasScriptRun
        from memfit.frameworks.torch.shapes.imports import watch_imports

        if files is not None:
            watch_imports({"h5py": partial(_redirect_h5py, files)})
        _interrupts.raise_again()
        try:
            script = KerasScriptRun(request)
            result = script.run()
        except KeyboardInterrupt:
            return 130
        _write_result(request, {**_ended(result).to_json(), "on_torch": script.on_torch})
        return result.exit_code or 0
    # TorchScript runs as the Python it is made from; PyTorch reads this when it is imported.
    os.environ["PYTORCH_JIT"] = "0"
    # DistributedDataParallel has no clock for shape-only tensors, and says so in C++.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if request.settings is not None and request.settings.expandable_segments:
        settings = filter(None, (env.allocator_settings(), "expandable_segments:True"))
        os.environ["PYTORCH_ALLOC_CONF"] = ",".join(settings)
    from memfit.frameworks.torch.script.processes import following

    run = _script_run(request, request_path, "", files)

    def write(result: DryRun) -> None:
        _write_result(request, {**_ended(result).to_json(), "loader_ordinal": run.loaders.training})

    def leave(result: DryRun) -> None:
        write(result)
        sys.stdout.flush()
        os._exit(0)

    run.leave_with(leave)
    _interrupts.raise_again()
    try:
        with following(request_path, processes.DRYRUN[-1]) if can_share() else nullcontext():
            result = run.run()
    except KeyboardInterrupt:
        # Before or after the script.
        return 130
    finally:
        _interrupts.end_at_once()
    write(_with_advice(result))
    return result.exit_code or 0


def _redirect_h5py(files: RedirectedFiles, module: Any) -> None:
    module.File.__init__ = files.stand_in(module.File.__init__, files.open_h5py)


def _with_advice(result: DryRun) -> DryRun:
    """The result of a script that put nothing on the device, and has JAX loaded, says what to do instead."""
    if result.estimate is None or "jax" not in sys.modules:
        return result
    others = [name for module, name in (("tensorflow", "TensorFlow"), ("keras", "Keras")) if module in sys.modules]
    if others:
        # They load JAX themselves, so that the script need not use it.
        names = " and ".join(others)
        advice = (
            f"nothing was put on the device by PyTorch; {names} and JAX are loaded, and what they compute isn't "
            "followed on a simulated GPU. memfit.estimate estimates a Keras model, or a training step of JAX"
        )
    else:
        advice = (
            "nothing was put on the device: the script computes with JAX, whose programs a dry run doesn't follow. "
            "memfit.estimate(step, *arguments, device=...) estimates its training step"
        )
    notes = [replace(note, text=advice) if note.code == "nothing-on-device" else note for note in result.estimate.notes]
    return replace(result, estimate=replace(result.estimate, notes=tuple(notes)))


def _read(request_path: str) -> Request:
    return Request.from_json(Path(request_path).read_text(encoding="utf-8"))


def _keep_files_apart(request: Request) -> RedirectedFiles | None:
    """What the script and its processes write from now on is theirs alone, where that can be; what remains is said."""
    script = [] if request.module else [os.path.dirname(os.path.realpath(request.script))]
    written = [os.getcwd(), *script, os.path.expanduser("~")]
    # The script's own folder is no cache, wherever caches are said to be.
    caches = [path for path in env.download_folders() if not any(is_within(each, path) for each in written)]
    reason, read_only = overlay.enter(request.layers, shared=(*caches, *request.writable), written=written)
    files = None
    if reason:
        files = redirected_files.follow(request.layers[0], real=(*caches, *request.writable))
        os.environ[env.REDIRECTED_FILES] = request.layers[0]
        overlay.redirect(request.layers[0])
        announce(
            f"the kernel can't isolate the script's files here ({reason}): Python's functions on files do it instead. "
            "What commands and compiled libraries write or remove by themselves takes effect"
        )
    else:
        overlay.copy_renamed_folders()
    real = [path for path in dict.fromkeys((*caches, *request.writable, "/dev/shm")) if os.path.isdir(path)]
    real = [path for path in real if not any(path != each and is_within(path, each) for each in real)]
    others = "" if os.geteuid() == 0 else "; it can't write to files of other users (EOVERFLOW)"
    if files is not None:
        others = f"; what is new in {tempfile.gettempdir()} stays"
    announce(f"files that the script writes are discarded when it ends, except below {_named(real)}{others}")
    for layer in request.layers:
        if any(os.path.isdir(os.path.join(layer, name)) for name in ("view", redirected_files.LAYER)):
            threading.Thread(
                target=_watch_room, args=(layer, request.layers[0]), daemon=True, name="memfit-room"
            ).start()
    if read_only:
        announce(f"the script can't write below {_named(read_only)}: no overlay on these file systems")
    return files


def _watch_room(folder: str, first: str) -> None:
    """Interrupts the script when what is discarded at its end takes half of the room that there was on a folder's disk.

    The first of the folders given to `enter` says where it is.
    """
    free = shutil.disk_usage(folder).free
    while True:
        time.sleep(_ROOM_SECONDS)
        # Others write there, too: only then what is the script's is counted.
        if shutil.disk_usage(folder).free < free / 2 and (size := overlay.written_bytes(Path(first))) > free / 2:
            break
    text = (
        f"the script has written {format_size(size)}, half of the room in {os.path.dirname(folder)}, and is ended. "
        "Name a folder on a larger disk as TMPDIR, or let it write to its own with --allow-writes FOLDER"
    )
    announce(text)
    _reasons.append(text)
    os.kill(os.getpid(), signal.SIGINT)


_reasons: list[str] = []
"""Why we have ended the script."""


def _ended(result: DryRun) -> DryRun:
    """The result, which says so where we and not the script have made its end."""
    if not _reasons or result.outcome in (Outcome.COMPLETED, Outcome.OUT_OF_MEMORY):
        return result
    return replace(result, outcome=Outcome.INTERRUPTED, error=_reasons[0], exit_code=None, suspicion="")


def _named(folders: list[str]) -> str:
    more = f" and {len(folders) - _MAX_NAMED} more" if len(folders) > _MAX_NAMED else ""
    return ", ".join(folders[:_MAX_NAMED]) + more


_followed: list["ScriptRun"] = []


def follow(request_path: str) -> None:
    """Simulates the device of a request in this process too, which the request's script has started."""
    request = _read(request_path)
    folder = os.environ.get(env.REDIRECTED_FILES)
    files = redirected_files.follow(folder) if folder else None
    if request.layers and files is None:
        overlay.copy_renamed_folders()
    run = _script_run(request, request_path, " ".join(map(os.path.basename, sys.argv[:1])) or "a process", files)
    run.follow()
    _followed.append(run)


def _script_run(request: Request, request_path: str, name: str, files: RedirectedFiles | None) -> "ScriptRun":
    from memfit.frameworks.torch.script.script import ScriptRun

    # It looks for a CUDA library, which simulating its work doesn't need; its traceback reads as if the script failed.
    logger = logging.getLogger("bitsandbytes.cextension")
    logger.addFilter(lambda record: "library load error" not in record.getMessage())
    memory, configure = memory_of(request.device, unlimited=request.unlimited)
    folder, shared = os.path.dirname(request_path), None
    if can_share():
        usable = None if request.unlimited else request.device.usable_bytes
        shared = SharedDevice(os.path.join(folder, DEVICE), usable, request.device.context_bytes or 0, name)
        memory.share(shared)

    def write_process(result: DryRun) -> None:
        _write(os.path.join(folder, f"process-{os.getpid()}.json"), result.to_json())

    return ScriptRun(request, memory, configure, shared, files=files, write_process=write_process)


def _write_result(request: Request, data: dict[str, Any]) -> None:
    """Writes the result; into another of the run's folders, which are on other disks, where the first one's is full."""
    name = os.path.basename(request.result_path)
    for path in (request.result_path, *(os.path.join(folder, name) for folder in request.layers[1:])):
        try:
            return _write(path, data)
        except OSError as error:
            failed = error
    raise failed


def _write(path: str, data: dict[str, Any]) -> None:
    temporary = Path(path + ".tmp")
    with unredirected():
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
