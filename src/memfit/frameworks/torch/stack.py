"""The stack that is installed here, and what releases of PyTorch and its libraries do by default.

Nothing is imported to find what is installed: reports name it before a framework is loaded. Each table gives a value
by the release that brought it; `since` picks the one that holds. They were read in the sources of the releases' wheels
and, where those hold binaries alone, in the pull request that is named.
"""

import re
from functools import cache

from memfit.core import env
from memfit.core.device import Device
from memfit.core.stack import Stack, Version, default_cuda, read_version, since
from memfit.core.units import KIB, MIB

# Optimizers and gradient clipping work on lists of tensors where nobody says otherwise (torch/optim/optimizer.py).
_USES_LISTS = {(0,): False, (2, 0): True}
# Adam on lists keeps the root of the second moment beside the denominator (torch/optim/adam.py, adamw.py).
_KEEPS_ROOTS = {(0,): True, (2, 1): False}
# `scaled_dot_product_attention`; transformers and timm computed attention step by step before.
_FUSES_ATTENTION = {(0,): False, (2, 0): True}
# Major compute capabilities whose cuBLAS handles get 32 MiB; the others get :4096:2:16:8, two buffers of 4096 KiB and
# eight of 16 KiB (CublasHandlePool.cpp; pytorch#91564, #175344). Up to 1.13 cuBLAS takes its own.
_LARGE_WORKSPACES: dict[Version, tuple[int, ...]] = {(0,): (), (2, 0): (9,), (2, 12): (9, 10, 12)}
_WORKSPACES_ARE_ALLOCATED = {(0,): False, (2, 0): True}
# Bytes that a product with a bias takes for cuBLASLt, and whether the handle keeps them (CUDABlas.cpp; pytorch#73439,
# #156495); since pytorch#168175 it shares the workspace of cuBLAS.
_LT_WORKSPACES: dict[Version, tuple[int, bool]] = {
    (0,): (0, False),
    (1, 12): (MIB, False),
    (2, 9): (MIB, True),
    (2, 11): (0, False),
}
# Products with weights of 4 bits keep their input for the backward pass, and those with 8 bits a transposed copy in
# 8 bits of theirs (bitsandbytes/autograd/_functions.py).
_KEEPS_4BIT_INPUT = {(0,): True, (0, 43, 2): False}
_KEEPS_8BIT_COPY = {(0,): True, (0, 45): False}


@cache
def installed_stack() -> Stack | None:
    """The versions that are installed; None where PyTorch isn't."""
    written = _written("torch")
    torch = read_version(written)
    if len(torch) < 2:
        return None
    build = written.partition("+")[2]
    digits = re.fullmatch(r"cu(\d+)(\d)", build)
    # A wheel of PyPI doesn't say what it was built for: it is the release's usual one.
    cuda = (int(digits[1]), int(digits[2])) if digits else None if build else default_cuda(torch)
    libraries = (read_version(_written(name)) or None for name in ("transformers", "peft", "bitsandbytes"))
    return Stack(torch, cuda, *libraries, is_installed=True)


def stack_of(device: Device) -> Stack:
    """What runs on a device: what was asked for, or else what is installed."""
    stack = device.stack or installed_stack()
    assert stack is not None, "PyTorch simulates the device"
    return stack


def uses_lists(stack: Stack) -> bool:
    """Whether optimizers work on lists of tensors by default."""
    return since(stack.torch, _USES_LISTS)


def keeps_roots(stack: Stack) -> bool:
    """Whether Adam on lists of tensors keeps a second list of temporaries."""
    return since(stack.torch, _KEEPS_ROOTS)


def fuses_attention(stack: Stack) -> bool:
    """Whether there are kernels that compute attention without its matrix of scores."""
    return since(stack.torch, _FUSES_ATTENTION)


def cublas_workspace_bytes(stack: Stack, capability: tuple[int, int]) -> int:
    """Size of the workspace that PyTorch gives to each cuBLAS handle; CUBLAS_WORKSPACE_CONFIG may ask for another."""
    if not since(stack.torch, _WORKSPACES_ARE_ALLOCATED):
        return 0
    asked = env.cublas_workspace_bytes()
    if asked is not None:
        return asked
    return 32 * MIB if capability[0] in since(stack.torch, _LARGE_WORKSPACES) else 2 * 4096 * KIB + 8 * 16 * KIB


def cublaslt_workspace(stack: Stack) -> tuple[int, bool]:
    """(bytes that a product with a bias takes for cuBLASLt, whether its handle keeps them)."""
    return since(stack.torch, _LT_WORKSPACES)


def keeps_4bit_input(stack: Stack) -> bool:
    """Whether bitsandbytes keeps the input of a product with weights of 4 bits."""
    return stack.bitsandbytes is not None and since(stack.bitsandbytes, _KEEPS_4BIT_INPUT)


def keeps_8bit_copy(stack: Stack) -> bool:
    """Whether bitsandbytes keeps a transposed copy of the input of a product with weights of 8 bits."""
    return stack.bitsandbytes is not None and since(stack.bitsandbytes, _KEEPS_8BIT_COPY)


def _written(package: str) -> str:
    """The version of a package as it says itself; "" where it isn't installed."""
    # Slow to import, and `import memfit` needs no version.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return ""
