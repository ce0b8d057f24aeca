"""A machine with simulated CUDA devices, for the tests of what PyTorch says of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memfit.allocator import LiveAllocator
from memfit.core.device import Device, Kind, Origin
from memfit.core.patching import replaced
from memfit.core.replay import AllocatorOptions
from memfit.core.units import GIB, MIB
from memfit.frameworks.torch.cuda.devices import CudaDevices
from memfit.frameworks.torch.cuda.libraries import cuda_replacements

T4 = Device(
    "t4",
    "NVIDIA Tesla T4",
    Kind.CUDA,
    nominal_bytes=16 * GIB,
    usable_bytes=15_000 * MIB,
    usable_origin=Origin.MEASURED,
    capability=(7, 5),
    num_multiprocessors=40,
    bandwidth_bytes_per_second=320e9,
    context_bytes=135 * MIB,
)


@dataclass
class Machine:
    memory: LiveAllocator
    notes: list[tuple[str, str]] = field(default_factory=list)
    device_view: Any = field(default_factory=lambda: SimpleNamespace(default_device=None, default_type_is_cuda=False))


@contextmanager
def machine(device: Device = T4, count: int = 1) -> Iterator[Machine]:
    """While it lasts, PyTorch finds `count` devices."""
    usable = device.usable_bytes
    capacity = None if usable is None else usable - (device.context_bytes or 0)
    found = Machine(LiveAllocator(AllocatorOptions(), capacity))
    report = lambda code, text: found.notes.append((code, text))  # noqa: E731
    with replaced(cuda_replacements(CudaDevices(device, count), found.memory, report, found.device_view)):
        yield found


class Shapes(TorchFunctionMode):
    """The least that shows meta tensors as tensors of a CUDA device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.is_cuda.__get__:
            func = torch.Tensor.is_meta.__get__
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = "meta"
            if func is torch.tensor:
                return torch.tensor(*args, **{**kwargs, "device": "cpu"}).to("meta")
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], str | torch.device):
            wanted = torch.device(args[1])
            args = (args[0], "meta" if wanted.type == "cuda" else wanted, *args[2:])
        return func(*args, **kwargs)
