"""Snapshots as a real device would have written them, made from simulated timelines."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memfit.core.timeline import Block, Timeline
from tests.unit.snapshots.conftest import RecordedDevice

OVERLOADS = {"aten.add": "add_Tensor", "aten.sum": "sum_dim_IntList"}


def frames_of(block: Block) -> list[dict[str, Any]]:
    """The stack that PyTorch records with stacks="all"."""
    name = OVERLOADS.get(block.op, block.op.removeprefix("aten."))
    names = [
        ("c10::cuda::CUDACachingAllocator::Native::malloc(void**)", "??", 0),
        ("at::_ops::empty_strided::call(c10::ArrayRef<long>)", "??", 0),
        (f"at::_ops::{name}::redispatch(c10::DispatchKeySet, at::Tensor const&)", "??", 0),
        (f"at::_ops::{name}::call(at::Tensor const&)", "??", 0),
    ]
    path, _, line = block.source.partition(":")
    if path:
        names += [("forward", "/opt/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", 1)]
        names += [("loss", f"/work/run/{path}", int(line)), ("<module>", "/work/run/train.py", 1)]
    else:
        names += [("torch::autograd::generated::AddBackward0::apply(std::vector<at::Tensor>&&)", "??", 0)]
    return [{"name": name, "filename": filename, "line": line} for name, filename, line in names]


def written(
    timeline: Timeline, path: Path, *, first_tick: int = 0, keeps: Callable[[Block], bool] = lambda block: True
) -> Path:
    """The file of a snapshot of what a timeline asks for, without what isn't kept, from `first_tick` on."""
    device = RecordedDevice()
    blocks: dict[int, Any] = {}
    first = 0
    for tick, (index, is_start) in enumerate(timeline.events()):
        if tick == first_tick:
            first = len(device.events)
        block = timeline.blocks[index]
        if not keeps(block):
            continue
        if is_start:
            blocks[index] = device.malloc(block.size_bytes)
            device.events[-1]["frames"] = frames_of(block)
        else:
            device.free(blocks.pop(index))
    path.write_bytes(pickle.dumps(device.content(first)))
    return path
