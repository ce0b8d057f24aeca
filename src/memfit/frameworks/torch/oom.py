"""Memory of PyTorch that nobody uses, and whose memory a model takes. What an OOM looks like is in `core.oom`."""

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
