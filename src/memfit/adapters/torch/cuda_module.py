"""All of PyTorch's CUDA interface for a machine without CUDA, as a list of replacements.

The parts: devices (`cuda_devices`), memory (`cuda_memory`), streams (`cuda_streams`), random numbers (`cuda_random`),
tensor types (`cuda_types`), libraries (`cuda_libraries`), addresses (`addresses`) and compilation (`compilation`).
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from memfit.adapters.torch.addresses import address_replacements
from memfit.adapters.torch.compilation import compilation_replacements
from memfit.adapters.torch.cuda_devices import CudaDevices
from memfit.adapters.torch.cuda_libraries import library_replacements
from memfit.adapters.torch.cuda_memory import CudaMemory, DeviceMemory
from memfit.adapters.torch.cuda_random import random_replacements
from memfit.adapters.torch.cuda_streams import stream_replacements
from memfit.adapters.torch.cuda_types import type_replacements
from memfit.adapters.torch.replacement import Replacement


def cuda_replacements(
    devices: CudaDevices, memory: DeviceMemory, report: Callable[[str, str], None], look: Any = None
) -> list[Replacement]:
    """What makes PyTorch take this machine for one with CUDA devices.

    Args:
        devices: which ones PyTorch finds.
        memory: that of the first; the others are empty.
        report: takes (code, text) of each assumption made.
        look: shows tensors as on the device; learns which devices there are, and the default that the program chooses.
    """
    shown_by = SimpleNamespace(default_device=None, default_type_is_cuda=False) if look is None else look
    shown_by.check_index = devices.check
    shown = CudaMemory(devices, memory, report)
    return [
        *devices.replacements(),
        *shown.replacements(),
        *stream_replacements(devices, report),
        *random_replacements(devices, devices.count),
        *type_replacements(shown_by),
        *library_replacements(devices, shown.info),
        *address_replacements(),
        *compilation_replacements(report),
    ]
