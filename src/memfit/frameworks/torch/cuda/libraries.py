"""The libraries around CUDA as PyTorch's Python code meets them: runtime, cuDNN, cuBLAS, NCCL, NVTX.

Programs ask for their versions and switch them on and off; none of it does anything here. The exception is moving
tensors between devices, which `DataParallel` does through NCCL's functions or their replacements.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import ProfilerActivity as _Activity  # type: ignore[attr-defined]

from memfit.allocator.live import LiveAllocator
from memfit.core.patching import Replacement
from memfit.frameworks.torch.cuda.devices import CudaDevices
from memfit.frameworks.torch.cuda.memory import CudaMemory
from memfit.frameworks.torch.cuda.random import random_replacements
from memfit.frameworks.torch.cuda.streams import stream_replacements
from memfit.frameworks.torch.shapes.device_labels import address_replacements
from memfit.frameworks.torch.shapes.patching import in_extension
from memfit.frameworks.torch.shapes.tensor_types import type_replacements
from memfit.frameworks.torch.shapes.unsimulated import compilation_replacements

# Bundled with official builds; the older one is the last for devices before 7.5.
_CUDNN_VERSION, _OLD_CUDNN_VERSION = 91900, 90501
_NCCL_VERSION = (2, 28, 9)


_WITHOUT_EFFECT = """
    _cuda_set_cudnn_benchmark_limit _cudnn_set_conv_benchmark_empty_cache _cuda_clearCublasWorkspaces
    _cuda_setCublasWorkspaceSize _cuda_resetCublasWorkspaceSize _cuda_setCublasLtWorkspaceSize
    _cuda_resetCublasLtWorkspaceSize
""".split()  # noqa: SIM905


class CudaError(IntEnum):
    """Codes of the CUDA runtime, as `torch.cuda.cudart().cudaError` has them."""

    success = 0
    errorMemoryAllocation = 2
    errorNotReady = 34


def library_replacements(
    devices: CudaDevices, memory_info: Callable[[int | None], tuple[int, int]]
) -> list[Replacement]:
    """All that PyTorch lacks of libraries without CUDA; `memory_info` gives (free, total) bytes of a device."""
    cuda: Any = torch.cuda
    # The module in sys.modules is a wrapper for flags; functions live in, and look into, the one inside.
    cudnn: Any = getattr(torch.backends.cudnn, "m", torch.backends.cudnn)
    version = _OLD_CUDNN_VERSION if devices.capability < (7, 5) else _CUDNN_VERSION
    calls = "ProfilerStart ProfilerStop HostRegister HostUnregister StreamCreate StreamDestroy DeviceSynchronize"
    runtime = SimpleNamespace(
        cudaError=CudaError,
        cudaGetErrorString=lambda error: f"error {int(error)} of a simulated device",
        cudaMemGetInfo=memory_info,
        **{f"cuda{call}": lambda *arguments: CudaError.success for call in calls.split()},
    )
    major, minor, patch = _NCCL_VERSION
    low = {
        **dict.fromkeys(_WITHOUT_EFFECT, lambda *arguments: None),
        "_has_cudnn": True,
        "_has_magma": True,
        "_cuda_get_cudnn_benchmark_limit": lambda: 10,
        "_cuda_get_conv_benchmark_empty_cache": lambda: True,
        "_cuda_getCublasWorkspaceSize": lambda: 0,
        "_cuda_getCublasLtWorkspaceSize": lambda: 0,
        "_cuda_getCurrentBlasHandle": lambda: 1,
        "_cuda_getCurrentSolverHandle": lambda: 1,
        "_is_flash_attention_available": lambda: True,
        "_nccl_version": lambda: major << 32 | minor << 16 | patch,
        "_nccl_version_suffix": lambda: b"",
        "_nccl_all_reduce": _no_collective,
        "_nccl_reduce": _reduce,
        "_broadcast": lambda tensor, devices: [tensor.to(_device(index)) for index in devices],
        "_broadcast_out": lambda tensor, out: [target.copy_(tensor) for target in out],
        "_broadcast_coalesced": lambda tensors, devices, buffer_size: [
            [tensor.to(_device(index)) for tensor in tensors] for index in devices
        ],
        "_scatter": _scatter,
        "_scatter_out": _scatter_out,
        "_gather": _gather,
        "_gather_out": lambda tensors, out, dim: out.copy_(_gather(tensors, dim)),
    }
    return [
        *in_extension({**low, "_cudart": runtime}),
        Replacement(cuda, "_cudart", runtime),
        Replacement(cuda, "has_magma", True),
        Replacement(cuda.nvtx, "_nvtx", _Ranges()),
        *_profiler_replacements(),
        Replacement(cuda.amp.common, "amp_definitely_not_available", lambda: False),
        Replacement(cudnn, "version", lambda: version),
        # Recurrent layers would join their weights into one buffer, which shape-only tensors can't.
        Replacement(torch.backends.cudnn, "is_acceptable", lambda tensor: False),
    ]


def _profiler_replacements() -> list[Replacement]:
    """The profiler believes that its library sees CUDA; otherwise it times with events that it can't make."""
    profiler: Any = torch.autograd.profiler
    plain_init = profiler.profile.__init__

    def init(self: Any, enabled: bool = True, **options: Any) -> None:
        if options.get("use_cuda") or options.get("use_device") == "cuda":
            options["use_kineto"] = True
        plain_init(self, enabled, **options)

    # Set by the profiler at its first use, from what it finds then.
    names = ("_cupti_monitor_module", "_cupti_monitor_checked")
    return [
        *(Replacement(profiler, name, getattr(profiler, name)) for name in names if hasattr(profiler, name)),
        Replacement(profiler, "_supported_activities", lambda: {_Activity.CPU, _Activity.CUDA}),
        Replacement(profiler.profile, "__init__", init),
    ]


class _Ranges:
    """NVTX without a profiler that would listen."""

    _depth = _num_started = 0

    def rangePushA(self, message: str) -> int:
        self._depth += 1
        return self._depth - 1

    def rangePop(self) -> int:
        self._depth -= 1
        return self._depth

    def rangeStartA(self, message: str) -> int:
        self._num_started += 1
        return self._num_started

    rangeEnd = markA = deviceRangeStart = deviceRangeEnd = lambda self, *arguments: None


def _device(index: int) -> torch.device:
    return torch.device("cpu") if index < 0 else torch.device("cuda", index)


def _no_collective(*arguments: Any) -> None:
    raise RuntimeError("NCCL's functions on a list of tensors aren't simulated; use torch.distributed.")


def _reduce(tensors: Sequence[torch.Tensor], out: torch.Tensor, *options: Any) -> None:
    """The sum of tensors on several devices, on that of the result."""
    for number, tensor in enumerate(tensors):
        moved = tensor.to(out.device)
        out.add_(moved) if number else out.copy_(moved)


def _scatter(
    tensor: torch.Tensor, devices: Sequence[int], chunk_sizes: Sequence[int] | None, dim: int, streams: Any
) -> list[torch.Tensor]:
    chunks = tensor.split(list(chunk_sizes), dim) if chunk_sizes is not None else tensor.chunk(len(devices), dim)
    return [chunk.to(_device(index)) for chunk, index in zip(chunks, devices, strict=False)]


def _scatter_out(tensor: torch.Tensor, out: Sequence[torch.Tensor], dim: int, streams: Any) -> list[torch.Tensor]:
    sizes = [target.size(dim) for target in out]
    return [target.copy_(chunk) for target, chunk in zip(out, tensor.split(sizes, dim), strict=True)]


def _gather(tensors: Sequence[torch.Tensor], dim: int, destination: int | None = None) -> torch.Tensor:
    target = tensors[0].device if destination is None else _device(destination)
    # A copy even of a single tensor, as on a device.
    return torch.cat([tensor.to(target) for tensor in tensors], dim)


def cuda_replacements(
    devices: CudaDevices,
    memory: LiveAllocator,
    report: Callable[[str, str], None],
    look: Any,
    *,
    compiles: bool = False,
) -> list[Replacement]:
    """What makes PyTorch take this machine for one with CUDA devices, all but the first of which are empty.

    `look`, which shows tensors as on the device, learns which devices there are, and the default that the program
    chooses. With `compiles`, `torch.compile` is left as it is.
    """
    look.check_index = devices.check
    shown = CudaMemory(devices, memory, report)
    return [
        *devices.replacements(),
        *shown.replacements(),
        *stream_replacements(devices, report),
        *random_replacements(devices, devices.count),
        *type_replacements(look),
        *library_replacements(devices, shown.info),
        *address_replacements(),
        *compilation_replacements(report, compiles=compiles),
    ]
