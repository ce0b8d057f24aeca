"""The child process of a dry run: `python -m memfit._child REQUEST.json`.

Puts the parts together on the other side of `memfit.runs`: the device's memory, and the script that runs on it.
"""

import json
import os
import sys
from pathlib import Path

from memfit.allocator import LiveAllocator, parse_options
from memfit.core.device import Device
from memfit.core.dryrun import Request


def device_memory(device: Device, *, unlimited: bool = False) -> LiveAllocator:
    """The memory of `device` under the allocator settings in the environment."""
    text = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if unlimited or device.usable_bytes is None:
        return LiveAllocator(parse_options(text), None)
    return LiveAllocator(parse_options(text), max(1, device.usable_bytes - (device.context_bytes or 0)))


def main(request_path: str) -> int:
    """Runs what the file asks for and writes the result where it says."""
    request = Request.from_json(Path(request_path).read_text(encoding="utf-8"))
    from memfit.adapters.torch.script import ScriptRun

    run = ScriptRun(request, device_memory(request.device, unlimited=request.unlimited))
    result = run.run()
    data = {**result.to_json(), "loader_ordinal": run.loaders.training}
    temporary = Path(request.result_path + ".tmp")
    temporary.write_text(json.dumps(data), encoding="utf-8")
    temporary.replace(request.result_path)
    return result.exit_code or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
