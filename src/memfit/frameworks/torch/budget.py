"""A budget on real devices: PyTorch's allocator gives out no more, though the device has more."""

import contextlib

import torch

from memfit.frameworks.torch import internals


def limit_devices(budget_bytes: int) -> None:
    """Limits what this process takes of each CUDA device, from the moment on that CUDA is used.

    CUDA isn't started for it: a process that has started it can't be forked any more.
    """

    def limit() -> None:
        for index in range(torch.cuda.device_count()):
            total_bytes = torch.cuda.get_device_properties(index).total_memory
            # Allocators that replace PyTorch's own have no such limit.
            with contextlib.suppress(RuntimeError):
                torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / total_bytes), index)

    internals.lazy_cuda_call(limit)
