"""The child process of a dry run: `python -m memfit._child REQUEST.json`.

Puts the parts together on the other side of `memfit.runs`: the device's memory, and the script that runs on it.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from memfit.allocator import memory_of
from memfit.core import env
from memfit.core.dryrun import DryRun, Request


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
    from memfit.adapters.torch.script import ScriptRun

    run = ScriptRun(request, *memory_of(request.device, unlimited=request.unlimited))

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
