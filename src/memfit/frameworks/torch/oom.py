"""Memory of PyTorch: unused, of a model, of a budget. What an OOM looks like is in `core.oom`."""

import contextlib
import gc

import torch

from memfit.core import heap
from memfit.core.guarding import Where
from memfit.frameworks.torch import internals


def release() -> None:
    """Gives back all memory that nobody uses: cycles of dead objects, caches of the allocators, the heap's free end."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        # Page-locked host memory has a cache of its own.
        internals.empty_host_cache()
    if hasattr(torch, "xpu") and torch.xpu.is_available() and torch.xpu.is_initialized():
        torch.xpu.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
    heap.give_back()


def where_of(model: torch.nn.Module) -> Where:
    """Whose memory the passes of `model` take: the device's, if any of its tensors is on one."""
    tensors = [*model.parameters(), *model.buffers()]
    return Where.HOST if all(tensor.device.type == "cpu" for tensor in tensors) else Where.DEVICE


def limit_devices(budget_bytes: int) -> None:
    """Limits what this process takes of each CUDA device, though it has more, from the moment on that CUDA is used.

    CUDA isn't started for it: a process that has started it can't be forked any more.
    """

    def limit() -> None:
        for index in range(torch.cuda.device_count()):
            total_bytes = torch.cuda.get_device_properties(index).total_memory
            # Allocators that replace PyTorch's own have no such limit.
            with contextlib.suppress(RuntimeError):
                torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / total_bytes), index)

    internals.lazy_cuda_call(limit)
