"""The child process of a dry run: `python -m memfit._child REQUEST.json`.

Puts the parts together on the other side of `memfit.runs`: the device's memory, and the script that runs on it.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from memfit.allocator import memory_of
from memfit.core import env
from memfit.core.dryrun import DryRun, Request
from memfit.runs import overlay

_MAX_NAMED = 3


def main(request_path: str) -> int:
    """Runs what the file asks for and writes the result where it says."""
    request = Request.from_json(Path(request_path).read_text(encoding="utf-8"))
    # Before anything starts a thread.
    private_files = bool(request.layers) and _keep_files_apart(request)
    if request.layers and not request.checkpoint_folder:
        # Ends with the run.
        request = replace(request, checkpoint_folder=os.path.join(request.layers[0], "checkpoints"))
    if request.until_fit:
        return _run_until_fit(request)
    # TorchScript runs as the Python it is made from; PyTorch reads this when it is imported.
    os.environ["PYTORCH_JIT"] = "0"
    if request.count > 1:
        # DistributedDataParallel has no clock for shape-only tensors, and says so in C++.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if request.settings is not None and request.settings.expandable_segments:
        given = env.allocator_settings()
        os.environ["PYTORCH_ALLOC_CONF"] = f"{given},expandable_segments:True" if given else "expandable_segments:True"
    from memfit.adapters.torch.script import ScriptRun

    memory, configure = memory_of(request.device, unlimited=request.unlimited)
    run = ScriptRun(request, memory, configure, private_files=private_files)

    def write(result: DryRun) -> None:
        _write(request, {**result.to_json(), "loader_ordinal": run.loaders.training})

    def leave(result: DryRun) -> None:
        write(result)
        sys.stdout.flush()
        os._exit(0)

    run.leave_with(leave)
    result = run.run()
    write(result)
    return result.exit_code or 0


def _keep_files_apart(request: Request) -> bool:
    """Whether what the script and its processes write from now on is theirs alone; what remains is said."""
    script = [] if request.module else [os.path.dirname(os.path.realpath(request.script))]
    written = [os.getcwd(), *script, os.path.expanduser("~")]
    # The script's own folder is no cache, wherever caches are said to be.
    caches = [path for path in env.download_folders() if not any(overlay.is_within(each, path) for each in written)]
    reason, read_only = overlay.enter(request.layers, shared=(*caches, *request.writable), written=written)
    if reason:
        _say(
            f"no view of files of the script's own here ({reason}): its checkpoints go elsewhere and yours are kept, "
            "but whatever else it writes or removes, and what its commands do, is real"
        )
    elif read_only:
        more = f" and {len(read_only) - _MAX_NAMED} more" if len(read_only) > _MAX_NAMED else ""
        _say(f"the script can't write below {', '.join(read_only[:_MAX_NAMED])}{more}: file systems without overlay")
    return not reason


def _say(text: str) -> None:
    print(f"memfit: {text}", file=sys.stderr, flush=True)


def _run_until_fit(request: Request) -> int:
    from memfit._keras_script import KerasScriptRun

    result = KerasScriptRun(request).run()
    _write(request, result.to_json())
    return result.exit_code or 0


def _write(request: Request, data: dict[str, Any]) -> None:
    temporary = Path(request.result_path + ".tmp")
    temporary.write_text(json.dumps(data), encoding="utf-8")
    temporary.replace(request.result_path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
