"""The kernels of bitsandbytes: blockwise 8-bit and 4-bit numbers.

Only its operators are used. They run on the CPU and on CUDA, and know their shapes, so that a simulated step runs the
very same code.
"""

import importlib
import logging
from functools import cache
from typing import Any

import torch

from memfit.core.errors import MissingDependency, how_to_install
from memfit.frameworks.torch import internals

BLOCK_8BIT = 256
BLOCK_4BIT = 64
_KIND_4BIT = "nf4"
_KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@cache
def load() -> Any:
    """The module `bitsandbytes`, or an error that says how to install it."""
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    # It speaks of optional inference kernels that nothing here uses.
    logger.setLevel(logging.ERROR)
    try:
        # Constants that it computes while it loads must be real, also inside of a simulation.
        with internals.outside_simulation():
            return importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise MissingDependency(
            f"optimizer states of 8 bits and weights of 4 bits need bitsandbytes: {how_to_install('bitsandbytes')}."
        ) from error
    finally:
        logger.setLevel(level)


@cache
def _numbers(signed: bool) -> list[float]:
    """The 256 numbers that 8 bits stand for (the dynamic tree of https://arxiv.org/abs/2110.02861)."""
    bitsandbytes = load()
    with internals.outside_simulation():
        numbers: list[float] = bitsandbytes.functional.create_dynamic_map(signed=signed).tolist()
    return numbers


def table(signed: bool, device: torch.device) -> torch.Tensor:
    """`_numbers` as a tensor on `device`."""
    return torch.tensor(_numbers(signed), dtype=torch.float32, device=device)


def quantize_8bit(values: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, largest magnitude of each block) of flat float32 values."""
    load()
    codes, scales = torch.ops.bitsandbytes.quantize_blockwise(values, numbers, BLOCK_8BIT)
    return codes, scales


def dequantize_8bit(codes: torch.Tensor, scales: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The flat float32 values of codes."""
    load()
    values: torch.Tensor = torch.ops.bitsandbytes.dequantize_blockwise(
        codes, scales, numbers, BLOCK_8BIT, torch.float32
    )
    return values


def quantize_4bit(values: torch.Tensor, part: int = 1 << 22) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, two to a byte; largest magnitude of each block) of flat values, an even number of them.

    Temporaries are several times as large, so that only `part` elements are done at a time.
    """
    load()
    num = values.numel()
    codes = torch.empty(num // 2, dtype=torch.uint8, device=values.device)
    scales = torch.empty(-(-num // BLOCK_4BIT), dtype=torch.float32, device=values.device)
    for start in range(0, num, part):
        end = min(start + part, num)
        piece = values[start:end].float()
        packed, largest = torch.ops.bitsandbytes.quantize_4bit(piece, BLOCK_4BIT, _KIND_4BIT, torch.uint8)
        codes[start // 2 : end // 2].copy_(packed.view(-1))
        scales[start // BLOCK_4BIT : -(-end // BLOCK_4BIT)].copy_(largest)
    return codes, scales


def dequantize_4bit(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of codes, as one row."""
    load()
    computed = dtype if dtype in _KERNEL_DTYPES else torch.float32
    shape = (1, codes.numel() * 2)
    values: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit(
        codes.view(-1, 1), scales, BLOCK_4BIT, _KIND_4BIT, shape, computed
    )
    return values if computed is dtype else values.to(dtype)
