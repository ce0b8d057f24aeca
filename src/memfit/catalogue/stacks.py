"""Devices with the software that runs on them, and what that makes of their CUDA context.

Up to CUDA 11.6 the runtime loads every kernel of a library when the library is first used, so that a context holds
PyTorch's, those of cuBLAS (with the first product of matrices) and of cuDNN (with the first convolution). CUDA 11.7
can load them when they are called (CUDA C++ Programming Guide, lazy loading), and PyTorch 1.13 turns that on
(pytorch/pytorch#86509). What such a context holds beyond that of today is the size of the kernels' images.
"""

from dataclasses import replace

from memfit.core.device import Device, Kind, Origin
from memfit.core.errors import BadInput
from memfit.core.stack import Stack, Version, builds_of, read_stack, since
from memfit.core.units import MIB

# First CUDA version that compiles for devices of a compute capability (release notes of the CUDA toolkit); a device of
# 8.9 runs what was compiled for 8.6. CUDA 13 compiles for 7.5 and above only.
_FIRST_CUDA: dict[Version, Version] = {(0, 0): (0,), (8, 0): (11, 1), (9, 0): (11, 8), (10, 0): (12, 8)}
_LAST_OF_OLD, _FIRST_OF_NEW = (12, 9), (7, 5)

_LAZY_TORCH, _LAZY_CUDA = (1, 13), (11, 7)
# MiB of kernels by the compute capability they are compiled for: (libtorch_cuda_cu and _cpp; libcublas and
# libcublasLt; libcudnn_ops and _cnn, _infer and _train). These are the sections of every embedded cubin that are
# loaded (SHF_ALLOC: code, constants, globals), uncompressed, in the wheels torch 1.13.1, nvidia-cublas-cu11 11.10.3
# and nvidia-cudnn-cu11 8.5.0; those of the libraries before them are not on PyPI. Not in it: kernels of linear
# algebra (72 MiB for 8.6) and of recurrent layers and attention in cuDNN (99 MiB), which few steps use.
_KERNELS_MIB: dict[Version, tuple[float, float, float]] = {
    (3, 7): (216.2, 55.2, 106.7),
    (5, 0): (338.7, 80.9, 160.1),
    (6, 0): (344.4, 87.2, 170.4),
    (6, 1): (344.4, 90.2, 166.1),
    (7, 0): (414.1, 143.8, 238.0),
    (7, 5): (415.8, 185.7, 244.7),
    (8, 0): (425.6, 325.0, 285.0),
    (8, 6): (432.1, 324.2, 295.0),
}


def on_stack(device: Device, stack: str | Stack | None) -> Device:
    """The device with other software than what is installed; None leaves it as it is.

    Raises:
        BadInput: there is no such stack, or it has nothing for this device; the message names the nearest.
    """
    if stack is None:
        return device
    wanted = read_stack(stack)
    if device.kind is Kind.CUDA and device.capability is not None and not _runs(wanted.device_cuda, device.capability):
        others = [cuda for cuda in builds_of(wanted.torch) if _runs(cuda, device.capability)]
        other = f"; this one does: {replace(wanted, cuda=others[0]).text}" if others else "; use another release"
        raise BadInput(
            f"{wanted.described()[0]} has no kernels for {device.title} (compute capability "
            f"{'.'.join(map(str, device.capability))}){other}."
        )
    known = replace(device, stack=wanted)
    eager_bytes = kernels_bytes(wanted, device.capability)
    if device.context_bytes is None or not eager_bytes:
        return known
    return replace(known, context_bytes=device.context_bytes + eager_bytes, context_origin=Origin.ASSUMED)


def kernels_bytes(stack: Stack, capability: tuple[int, int] | None) -> int:
    """Kernels that a stack loads before they are called; 0 where it loads them as they are.

    >>> kernels_bytes(read_stack("torch1.12-cu113"), (8, 6)) // MIB, kernels_bytes(read_stack("torch1.13"), (8, 6))
    (1051, 0)
    """
    if capability is None or (stack.torch >= _LAZY_TORCH and stack.device_cuda >= _LAZY_CUDA):
        return 0
    return round(sum(since(capability, _KERNELS_MIB)) * MIB)


def _runs(cuda: Version, capability: tuple[int, int]) -> bool:
    """Whether a CUDA version has kernels for devices of a compute capability."""
    return cuda >= since(capability, _FIRST_CUDA) and (capability >= _FIRST_OF_NEW or cuda <= _LAST_OF_OLD)
