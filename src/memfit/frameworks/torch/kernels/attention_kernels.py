"""Memory that CUDA's fused attention kernels take for themselves.

Flash attention: flash_api.cpp. Memory-efficient attention: transformers/cuda/attention_backward.cu for what is
allocated, mem_eff_attention/kernel_backward.h for the workspace, kernels/generate_kernels.py for the sizes of blocks.
"""

from typing import Any, NamedTuple

import torch

from memfit.core.stack import Version, since
from memfit.frameworks.torch.shapes.recorder import Program
from memfit.frameworks.torch.shapes.shapes import HALVES, Arguments, size_bytes

# Devices whose blocks of threads have 160 KiB of shared memory or more, and Volta, whose kernels need less: they run
# the variants with 128 rows (CUDA C++ Programming Guide, technical specifications per compute capability).
_ROOMY = {(7, 0), (8, 0), (8, 7), (9, 0), (10, 0), (10, 3), (11, 0)}
# Lock and counter before the accumulator of a tile of the query's gradient, padded to 128 bits.
_TILE_HEADER_BYTES = 16


# The releases from which on the state of the random numbers is on the device: always (flash attention), or where none
# is drawn (memory-efficient attention).
_FLASH_STATE, _EFFICIENT_STATE = (2, 7), (2, 2)


# Blocks of threads that a multiprocessor is taken to run by the rule for splitting keys, by release; none split before.
_BLOCKS_PER_MULTIPROCESSOR: dict[Version, int] = {(0,): 0, (2, 2): 1, (2, 5): 2}
_MOST_SPLITS = 128


class Blocks(NamedTuple):
    """Rows of queries and of keys that a block of threads works on, and whether it holds its results in registers."""

    queries: int
    keys: int
    in_registers: bool


def flash_forward(args: Arguments, out: Any, torch_version: Version, num_multiprocessors: int | None) -> Program:
    """The outputs that are on the device, and what split keys take."""
    numbers = (0, 1, 8) if torch_version < _FLASH_STATE else (0, 1, 6, 7, 8)
    outputs = [out[number] for number in numbers if isinstance(out[number], torch.Tensor)]
    return [*outputs, *split_keys(args, torch_version, num_multiprocessors)]


def split_keys(args: Arguments, torch_version: Version, num_multiprocessors: int | None) -> list[int]:
    """Where few rows don't fill the device, keys are split, and results of the parts wait to be joined in float32.

    `set_params_splitkv` in flash_api.cpp; never with dropout.
    """
    query, key = args[:2]
    batch, heads, length, width = query.shape
    slots = (num_multiprocessors or 0) * since(torch_version, _BLOCKS_PER_MULTIPROCESSOR)
    if not slots or (len(args) > 3 and args[3] > 0) or not query.numel():
        return []
    key_rows = 256 if width <= 64 else 128 if width <= 128 else 64
    splits = num_splits(batch * heads * -(-length // 64), slots, -(-key.shape[2] // key_rows))
    rows_bytes = splits * batch * heads * length * 4
    return [rows_bytes, rows_bytes * -(-width // 32) * 32] if splits > 1 else []


def num_splits(num_blocks: int, slots: int, num_key_blocks: int) -> int:
    """The fewest parts of the keys that fill at least 85% as many of the device's slots as the best number does.

    >>> num_splits(192, 264, 4), num_splits(212, 264, 4)
    (4, 1)
    """
    if 5 * num_blocks >= 4 * slots:
        return 1
    numbers = range(1, min(_MOST_SPLITS, slots, num_key_blocks) + 1)
    # Others would leave the last part without keys.
    eligible = [n for n in numbers if n == 1 or -(-num_key_blocks // n) != -(-num_key_blocks // (n - 1))]
    filled = {n: num_blocks * n / slots / -(-num_blocks * n // slots) for n in eligible}
    return next((n for n in eligible if filled[n] >= 0.85 * max(filled.values())), 1)


def flash_backward(args: Arguments, out: Any) -> list[int]:
    """Scratch memory where heads come before rows, as scaled dot-product attention has them."""
    return scratch_sizes(args[1].transpose(1, 2), args[2].transpose(1, 2), None)


def flash_direct_backward(args: Arguments, out: Any) -> list[int]:
    """As `flash_backward`, where rows come before heads: whole sequences, or packed ones with their ends."""
    query, key, boundaries = args[1], args[2], args[6]
    packed = query.dim() == 3 and boundaries is not None
    return scratch_sizes(query, key, boundaries.numel() - 1 if packed else None)


def scratch_sizes(query: torch.Tensor, key: torch.Tensor, num_sequences: int | None) -> list[int]:
    """A float32 accumulator of the query's gradient and a row sum; sequences are padded to 128 (flash_api.cpp).

    Packed sequences, [rows of all, heads, width], are padded each by itself (`mha_varlen_bwd`). Where queries are
    grouped, gradients of keys and values are made for every head and then summed.
    """
    heads, width = query.shape[-2:]
    if num_sequences is None:
        rows = query.shape[0] * -(-query.shape[1] // 128) * 128
    else:
        rows = query.shape[0] + 128 * num_sequences
    sizes = [rows * heads * -(-width // 32) * 32 * 4, rows * heads * 4]
    if key.shape[-2] != heads:
        sizes += [key.numel() // key.shape[-2] * heads * key.element_size()] * 2
    return sizes


def efficient_forward(args: Arguments, out: Any, torch_version: Version) -> Program:
    """The outputs; in half precision heads of more than 128 are summed up in memory, in float32 (kernel_forward.h)."""
    draws = len(args) > 5 and args[5] > 0
    outputs = out[:2] if draws or torch_version < _EFFICIENT_STATE else [*out[2:4], *out[:2]]
    value = args[2]
    batch, heads, length, head = args[0].shape
    if value.dtype not in HALVES or max(head, value.shape[-1]) <= 128:
        return [*outputs]
    return [*outputs, batch * heads * length * value.shape[-1] * 4]


def efficient_backward(args: Arguments, capability: tuple[int, int]) -> list[int]:
    """Row sums of gradient times output, and tiles in which gradients are summed up."""
    gradient, query, key, value, _, out = args[:6]
    batch, heads, length, head = query.shape
    rows_bytes = batch * heads * length * 4
    is_half = query.dtype in HALVES
    dropout = args[9] if len(args) > 9 else 0.0
    blocks = efficient_blocks(max(head, value.shape[-1]), capability, is_half=is_half, has_dropout=dropout > 0)
    copied = [] if gradient.transpose(1, 2).is_contiguous() else [size_bytes(gradient)]
    first = len(copied)
    if is_half and (blocks.in_registers or capability >= (7, 5)):
        # The kernel makes the row sums itself.
        sums = [rows_bytes]
    else:
        # The product of gradient and output, its sums, and these with heads before rows.
        product = out.numel() * 4
        casts = [product, product] if is_half else []
        kept = first + len(casts) + 2
        sums = [*casts, product, rows_bytes, rows_bytes, *(~place for place in range(kept - 1, first - 1, -1))]
    return [*copied, *sums, workspace_bytes(query, key, value, blocks, is_half=is_half)]


def efficient_blocks(head: int, capability: tuple[int, int], *, is_half: bool, has_dropout: bool) -> Blocks:
    """Sizes of the blocks of the first kernel that takes heads of this size on this device."""
    if head <= 64:
        return Blocks(64, 64, in_registers=is_half)
    is_ampere = capability >= (8, 0)
    if capability in _ROOMY and (is_half or is_ampere):
        in_registers = is_half and head <= 128
        return Blocks(128, 128 if in_registers and is_ampere else 64, in_registers)
    if is_half and head <= 96 and capability in ((8, 6), (8, 9)) and not has_dropout:
        return Blocks(128, 64, in_registers=True)
    return Blocks(64, 64, in_registers=False)


def workspace_bytes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: Blocks, *, is_half: bool
) -> int:
    """Accumulators of gradients, in float32, for every sequence and head.

    The query's gradient has contributions from every block of keys. In half precision, where it isn't held in
    registers, that of keys and values is summed up in memory as well, for each part of the keys that runs on its own.
    """
    batch, heads, length, head = query.shape
    num_keys = key.shape[2]
    tile = blocks.queries * blocks.queries * 4 + _TILE_HEADER_BYTES
    total = -(-length // blocks.queries) * -(-head // blocks.queries) * tile
    if is_half and not blocks.in_registers:
        splits = -(-num_keys // blocks.keys)
        if batch * heads >= 256 and num_keys <= 2 * blocks.keys:
            splits = 1
        splits = max(1, min(splits, 200 // (batch * heads)))
        columns = sum(-(-size // blocks.queries) * blocks.queries for size in (head, value.shape[-1]))
        total += splits * blocks.keys * columns * 4
    return batch * heads * -(-total // 16) * 16
