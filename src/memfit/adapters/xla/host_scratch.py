"""Scratch memory of XLA's CPU kernels, which its buffer assignment doesn't know.

Convolutions and matrix products go to libraries that ask for memory of their own as they run. Each rule was read off
the allocations of single instructions (jaxlib 0.10.2, two threads):

- a transposed convolution (base-dilated: the input gradient of a strided one) multiplies first, into a matrix of one
  row per input pixel and one column per weight of an output channel; the matrix lives until the next one is there
- a convolution of the fused library copies its input, padded, or where nothing is padded, laid out as one row per
  output pixel; and its kernel. Large ones are split into tasks of 64 output channels, and each has its own copy
- Eigen's products pack two slices of the summed dimension of both operands, each up to 320 deep; where the left operand
  has rows for eight tasks a thread, the threads pack it block by block, and only the right one is packed as a whole.
  Eigen's convolutions pack about as much
- a fused product has each thread pack 64 columns of the right operand; one over a batch of matrices copies one operand,
  and a fused sum over the leading dimension its input
"""

import math
import re
from dataclasses import dataclass

from memfit.adapters.xla.hlo import Instruction, Module

_FUSED_LIBRARY = "__ynn_fusion"
_NUM_THREADS = 2
_CHANNELS_PER_TASK = 64
_WEIGHTS_PER_TASK = 65536
# Of the summed dimension, what Eigen's convolutions pack at once.
_PACKED_DEPTH = 3 * 192
# The depth of a slice, how many are packed at once, and the rows of a task, as seen with 32 KiB and 1 MiB of cache a
# core: Eigen chooses them by the caches. The switch lies between 3072 and 3328 rows; 205 to 221 rows a task explain it.
_SLICE_DEPTH, _NUM_SLICES = 320, 2
_ROWS_PER_TASK = 216
_TASKS_PER_THREAD = 8
_COLUMNS_PER_THREAD = 64
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_LISTS = re.compile(r"(\w+)=\{([\d,]*)\}")


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory that an instruction takes while it runs.

    Args:
        size_bytes: of all copies at once.
        lingering_bytes: what is given back only when the next of its kind has begun.
    """

    size_bytes: int
    lingering_bytes: int = 0


def scratch_of(instruction: Instruction, module: Module) -> Scratch | None:
    """What the kernel of an instruction asks for; None for most."""
    if instruction.opcode == "fusion":
        inside = module.computations[instruction.called["calls"]].instructions
        by_name = {inner.name: inner for inner in inside}
        sizes = [_inside(inner, by_name, instruction) for inner in inside]
        return Scratch(max(sizes)) if max(sizes, default=0) else None
    return None


def scratch_by_name(module: Module) -> dict[str, Scratch]:
    """What each instruction's kernel asks for, by the instruction's name."""
    fused = {i.called["calls"] for c in module.computations.values() for i in c.instructions if i.opcode == "fusion"}
    found = {}
    for computation in module.computations.values():
        if computation.name in fused:
            continue
        by_name = {instruction.name: instruction for instruction in computation.instructions}
        for instruction in computation.instructions:
            scratch = scratch_of(instruction, module)
            if instruction.opcode == "convolution":
                scratch = _plain_convolution(instruction, by_name)
            elif instruction.opcode == "dot":
                scratch = Scratch(_sliced(*_product(instruction, by_name)))
            if scratch is not None:
                found[instruction.name] = scratch
    return found


def _inside(inner: Instruction, by_name: dict[str, Instruction], fusion: Instruction) -> int:
    """Scratch of one instruction in a fusion."""
    if inner.opcode == "convolution":
        return _fused_convolution(inner, by_name)
    if _FUSED_LIBRARY not in fusion.attributes:
        return 0
    if inner.opcode == "dot" and _list(inner, "lhs_batch_dims"):
        return by_name[inner.operands[1]].shape.size_bytes
    if inner.opcode == "dot":
        _, depth, columns, element_bytes = _product(inner, by_name)
        return depth * min(columns, _COLUMNS_PER_THREAD * _NUM_THREADS) * element_bytes
    if inner.opcode == "reduce" and _list(inner, "dimensions") == (0,) and len(inner.shape.dimensions) > 1:
        return by_name[inner.operands[0]].shape.size_bytes
    return 0


@dataclass(frozen=True, slots=True)
class _Convolution:
    """Sizes of a convolution."""

    batch: int
    pixels: tuple[int, ...]
    input_channels: int
    window: tuple[int, ...]
    output_channels: int
    output_pixels: int
    padding: tuple[int, ...]
    is_base_dilated: bool
    input_bytes: int
    kernel_bytes: int

    @property
    def element_bytes(self) -> int:
        elements = self.batch * math.prod(self.pixels) * self.input_channels
        return max(1, self.input_bytes // max(1, elements))


def _convolution(instruction: Instruction, by_name: dict[str, Instruction]) -> _Convolution | None:
    labels, window = _LABELS.search(instruction.attributes), _WINDOW.search(instruction.attributes)
    if labels is None or len(instruction.operands) < 2:
        return None
    settings = dict(part.split("=") for part in window.group(1).split()) if window else {}
    left, right = (by_name[name].shape for name in instruction.operands[:2])
    spatial = [letter for letter in labels.group(1) if letter.isdigit()]
    padding = [sum(int(side) for side in part.split("_")) for part in settings.get("pad", "").split("x") if part]
    inputs = dict(zip(labels.group(1), left.dimensions, strict=True))
    kernel = dict(zip(labels.group(2), right.dimensions, strict=True))
    output = dict(zip(labels.group(3), instruction.shape.dimensions, strict=True))
    return _Convolution(
        batch=inputs["b"],
        pixels=tuple(inputs[letter] for letter in spatial),
        input_channels=inputs["f"],
        window=tuple(kernel[letter] for letter in spatial),
        output_channels=kernel["o"],
        output_pixels=math.prod(output[letter] for letter in spatial),
        padding=tuple(padding) or (0,) * len(spatial),
        is_base_dilated="lhs_dilate" in settings,
        input_bytes=left.size_bytes,
        kernel_bytes=right.size_bytes,
    )


def _plain_convolution(instruction: Instruction, by_name: dict[str, Instruction]) -> Scratch | None:
    sizes = _convolution(instruction, by_name)
    if sizes is None:
        return None
    if sizes.is_base_dilated:
        rows = sizes.batch * math.prod(sizes.pixels)
        columns = math.prod(sizes.window) * sizes.output_channels
        packed = _packed(rows, sizes.input_channels, columns, sizes.element_bytes)
        return Scratch(packed, rows * columns * sizes.element_bytes)
    depth = math.prod(sizes.window) * sizes.input_channels
    return Scratch(_packed(sizes.batch * sizes.output_pixels, depth, sizes.output_channels, sizes.element_bytes))


def _fused_convolution(instruction: Instruction, by_name: dict[str, Instruction]) -> int:
    sizes = _convolution(instruction, by_name)
    if sizes is None:
        return 0
    depth = math.prod(sizes.window) * sizes.input_channels
    if any(sizes.padding):
        padded = math.prod(size + pad for size, pad in zip(sizes.pixels, sizes.padding, strict=True))
        copy = sizes.batch * padded * sizes.input_channels * sizes.element_bytes
    else:
        copy = sizes.batch * sizes.output_pixels * depth * sizes.element_bytes
    tasks = min(
        -(-sizes.output_channels // _CHANNELS_PER_TASK), max(1, depth * sizes.output_channels // _WEIGHTS_PER_TASK)
    )
    return copy * min(tasks, _NUM_THREADS) + sizes.kernel_bytes


def _product(instruction: Instruction, by_name: dict[str, Instruction]) -> tuple[int, int, int, int]:
    """(rows, depth, columns, bytes of an element) of a matrix product."""
    left, right = (by_name[name].shape for name in instruction.operands[:2])
    summed = _list(instruction, "lhs_contracting_dims")
    depth = math.prod(left.dimensions[place] for place in summed)
    batch = math.prod(left.dimensions[place] for place in _list(instruction, "lhs_batch_dims"))
    elements = max(1, math.prod(left.dimensions))
    across = max(1, depth * batch)
    return (
        math.prod(left.dimensions) // across,
        depth,
        math.prod(right.dimensions) // across,
        max(1, left.size_bytes // elements),
    )


def _sliced(rows: int, depth: int, columns: int, element_bytes: int) -> int:
    """What Eigen packs of the operands of a product at once."""
    if not depth:
        return 0
    num = -(-depth // _SLICE_DEPTH)
    slice_depth = min(depth, 8 * -(-depth // (8 * num)))
    packed = columns if -(-rows // _ROWS_PER_TASK) >= _TASKS_PER_THREAD * _NUM_THREADS else rows + columns
    return packed * min(num, _NUM_SLICES) * slice_depth * element_bytes


def _packed(rows: int, depth: int, columns: int, element_bytes: int) -> int:
    """What a convolution of Eigen's packs at once."""
    return (rows + columns) * min(depth, _PACKED_DEPTH) * element_bytes


def _list(instruction: Instruction, name: str) -> tuple[int, ...]:
    for key, inside in _LISTS.findall(instruction.attributes):
        if key == name:
            return tuple(int(part) for part in inside.split(",") if part)
    return ()
