"""Memory that kernels take for themselves on the CPU, which XLA's buffer assignment doesn't know.

An allowance, not a model of XLA's runtime: kernels are taken to run one after the other, in the program's order. Its
threads may run several at once, so that a step may take up to as much again. Rules were read off the allocations of
single instructions (jaxlib 0.10.2, two threads):

- Eigen packs the operands of a product, two slices of 320 numbers at a time; of one with many rows a block per thread
- a convolution is a product with a row per output pixel; one with groups is a product and a result for each group: all
  are begun without waiting for the first, and about half have ended when the last begins
- a transposed convolution (base-dilated: the input gradient of a strided one) multiplies first, into a matrix of one
  row per input pixel and one column per weight of an output channel, which stays while the next kernel runs
- the fused library packs the kernel of a convolution and copies its input, padded, or where nothing is padded, laid out
  as one row per output pixel, for each task of 64 output channels; it copies one operand of a product over a batch of
  matrices, and the input of a sum over the leading dimension
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from memfit.frameworks.xla.hlo import Instruction, Module, Shape
from memfit.frameworks.xla.liveness import Lives

_FUSED_LIBRARY = "__ynn_fusion"
_CHANNELS_PER_TASK = 64
_WEIGHTS_PER_TASK = 65536
_SLICE_DEPTH = 320
_NUM_SLICES = 2
# From so many numbers in a slice of the rows on, which is 16 blocks of a core's second cache, a thread packs the blocks
# of its own tasks only; the rest is asked for and never touched.
_MANY_NUMBERS = 1 << 20
# Of the peak: how far off an allowance may be in any case.
_LEAST_SPREAD = 0.05
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_LISTS = re.compile(r"(\w+)=\{([\d,]*)\}")
_GROUPS = re.compile(r"feature_group_count=(\d+)")


class Scratch(NamedTuple):
    """Scratch memory of one kernel."""

    time: int  # of its instruction in the program's order
    end: int  # of the next kernel that takes memory
    matrix_bytes: int  # kept until that one has ended
    own_bytes: int  # that it writes to while it runs
    asked_bytes: int  # that it asks for, whether it writes there or not


def scratch_of(module: Module, lives: Lives, num_threads: int) -> tuple[Scratch, ...]:
    """Every kernel of a program that takes memory for itself, in the program's order."""
    by_name = {one.name: one for computation in module.computations.values() for one in computation.instructions}
    taken = []
    for time, instruction in enumerate(lives.order):
        kernels = [instruction]
        is_fused = instruction.opcode == "fusion" and _FUSED_LIBRARY in instruction.attributes
        if is_fused:
            kernels = list(module.computations[instruction.called["calls"]].instructions)
        sizes = [_kernel(one, by_name, num_threads if is_fused else 0) for one in kernels]
        largest = max(sizes, key=sum, default=(0, 0, 0))
        if any(largest):
            taken.append((time, largest))
    ends = [*(time for time, _ in taken[1:]), len(lives.order)]
    return tuple(Scratch(time, end, *sizes) for (time, sizes), end in zip(taken, ends, strict=False))


def most_bytes(scratch: Sequence[Scratch]) -> int:
    """The greatest sum that is written to at once."""
    following = [one.matrix_bytes + one.own_bytes for one in scratch[1:]]
    return max(
        (
            one.matrix_bytes + max(one.own_bytes, after if one.matrix_bytes else 0)
            for one, after in zip(scratch, [*following, 0], strict=False)
        ),
        default=0,
    )


def most_asked_bytes(scratch: Sequence[Scratch]) -> int:
    """A bound of what kernels ask for at once: the two largest, where threads run them side by side."""
    return sum(sorted((one.matrix_bytes + one.asked_bytes for one in scratch), reverse=True)[:2])


def spread_of(total_bytes: int, scratch: Sequence[Scratch]) -> tuple[float, float]:
    """Least and greatest peak as multiples of the expected one: without scratch memory, and with twice as much."""
    share = most_bytes(scratch) / max(1, total_bytes)
    return min(1 - share, 1 - _LEAST_SPREAD), max(1 + share, 1 + _LEAST_SPREAD)


def _kernel(instruction: Instruction, by_name: Mapping[str, Instruction], fused_threads: int) -> tuple[int, int, int]:
    """(bytes of the matrix, of the rest, that are asked for) of one kernel, of the fused library or of Eigen."""
    nothing = 0, 0, 0
    # Loops that XLA writes itself, and has cut into parts, take nothing.
    if "outer_dimension_partitions" in instruction.attributes:
        return nothing
    if instruction.opcode in ("convolution", "dot"):
        rule = _convolution if instruction.opcode == "convolution" else _product
        left, right = (by_name[name].shape for name in instruction.operands[:2])
        return rule(instruction, left, right, fused_threads)
    is_sum = instruction.opcode == "reduce" and _list(instruction, "dimensions") == (0,)
    if fused_threads and is_sum and len(instruction.shape.dimensions) > 1:
        size_bytes = by_name[instruction.operands[0]].shape.size_bytes
        return 0, size_bytes, size_bytes
    return nothing


def _convolution(instruction: Instruction, left: Shape, right: Shape, fused_threads: int) -> tuple[int, int, int]:
    labels, window = _LABELS.search(instruction.attributes), _WINDOW.search(instruction.attributes)
    if labels is None:
        return 0, 0, 0
    settings = dict(part.split("=") for part in window.group(1).split()) if window else {}
    spatial = [letter for letter in labels.group(1) if letter.isdigit()]
    inputs = dict(zip(labels.group(1), left.dimensions, strict=True))
    kernel = dict(zip(labels.group(2), right.dimensions, strict=True))
    output = dict(zip(labels.group(3), instruction.shape.dimensions, strict=True))
    number_bytes = _number_bytes(left)
    taps = math.prod(kernel[letter] for letter in spatial)
    rows = inputs["b"] * math.prod(output[letter] for letter in spatial)
    depth, channels = taps * kernel["i"], kernel["o"]
    if fused_threads:
        padding = [sum(int(side) for side in part.split("_")) for part in settings.get("pad", "").split("x") if part]
        if any(padding):
            padded = math.prod(inputs[letter] + pad for letter, pad in zip(spatial, padding, strict=True))
            copy = inputs["b"] * padded * inputs["f"] * number_bytes
        else:
            copy = rows * depth * number_bytes
        num_tasks = min(-(-channels // _CHANNELS_PER_TASK), max(1, depth * channels // _WEIGHTS_PER_TASK))
        own = min(num_tasks, fused_threads) * copy + right.size_bytes
        return 0, own, num_tasks * copy + right.size_bytes
    groups = _GROUPS.search(instruction.attributes)
    num_groups = int(groups.group(1)) if groups else 1
    # Windows are added up after the product for images only, one step at a time.
    is_plain = "rhs_dilate" not in settings and "stride" not in settings and len(spatial) <= 2
    if "lhs_dilate" in settings and is_plain and num_groups == 1:
        pixels, columns = inputs["b"] * math.prod(inputs[letter] for letter in spatial), taps * channels
        return pixels * columns * number_bytes, *_packed(pixels, inputs["f"], columns, number_bytes)
    own, asked = _packed(rows, depth, channels // num_groups, number_bytes)
    if num_groups > 1:
        # Numbers of a group don't lie side by side in the output: each has a result of its own first.
        result = rows * channels * number_bytes
        own, asked = (num_groups * own + result) // 2, num_groups * asked + result
    return 0, own, asked


def _product(instruction: Instruction, left: Shape, right: Shape, fused_threads: int) -> tuple[int, int, int]:
    batch = math.prod(left.dimensions[place] for place in _list(instruction, "lhs_batch_dims"))
    depth = math.prod(left.dimensions[place] for place in _list(instruction, "lhs_contracting_dims"))
    across = max(1, batch * depth)
    rows, columns = math.prod(left.dimensions) // across, math.prod(right.dimensions) // across
    if min(rows, columns) <= 1:
        # A matrix times a vector is a loop that XLA writes itself.
        return 0, 0, 0
    if fused_threads:
        copied = right.size_bytes if _list(instruction, "lhs_batch_dims") else 0
        return 0, copied, copied
    own, asked = _packed(rows, depth, columns, _number_bytes(left))
    return 0, batch * own, batch * asked


def _packed(rows: int, depth: int, columns: int, number_bytes: int) -> tuple[int, int]:
    """(bytes that a product packs, that it asks for)."""
    row_bytes = min(depth, _NUM_SLICES * _SLICE_DEPTH) * number_bytes
    packed_rows = rows if rows * min(depth, _SLICE_DEPTH) < _MANY_NUMBERS else 0
    return row_bytes * (columns + packed_rows), row_bytes * (rows + columns)


def _number_bytes(shape: Shape) -> int:
    return max(1, shape.size_bytes // max(1, math.prod(shape.dimensions)))


def _list(instruction: Instruction, name: str) -> tuple[int, ...]:
    for key, inside in _LISTS.findall(instruction.attributes):
        if key == name:
            return tuple(int(part) for part in inside.split(",") if part)
    return ()
