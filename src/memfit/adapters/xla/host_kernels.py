"""How instructions run on the CPU: in which threads, how long, and with what memory of their own.

XLA's buffer assignment doesn't know of that memory. Each rule was read off the allocations of single instructions
(jaxlib 0.10.2):

- a transposed convolution (base-dilated: the input gradient of a strided one) multiplies first, into a matrix of one
  row per input pixel and one column per weight of an output channel, from which the output is then gathered
- any other convolution of Eigen's is a product of a row per output pixel. One with groups is a product for each group,
  and all are begun before any is finished
- a convolution of the fused library copies its input, padded, or where nothing is padded, laid out as one row per
  output pixel. Large ones are split into tasks of 64 output channels, and each has its own copy; the kernel is packed
  once, unless there are so few images that it isn't worth it
- a product with a vector needs nothing. A fused product has each thread pack 64 columns of the right operand; one over
  a batch of matrices copies one operand, and a fused sum over the leading dimension its input

Times are of a core, from rates that are assumed: they only say who meets whom.
"""

import math
import re
from dataclasses import dataclass, replace
from enum import Enum

from memfit.adapters.xla.hlo import Computation, Instruction, Module
from memfit.adapters.xla.host_products import Product, split_product

_FUSED_LIBRARY = "__ynn_fusion"
_CHANNELS_PER_TASK = 64
_WEIGHTS_PER_TASK = 65536
_FEWEST_PACKED_IMAGES = 4
_COLUMNS_PER_THREAD = 64
_LIBRARY_TASKS = 4
# Operations per second of libraries and of loops that XLA writes itself; bytes per second that a core moves.
_LIBRARY_RATE, _LOOP_RATE = 25e9, 2e9
_BANDWIDTH = 4e9
# To gather a number of an image, those of up to eight channels at once, and the cycles that Eigen expects.
_GATHER_SECONDS = 10e-9
_GATHERED_CHANNELS = 8
_GATHER_CYCLES = 20.0
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_LISTS = re.compile(r"(\w+)=\{([\d,]*)\}")
_GROUPS = re.compile(r"feature_group_count=(\d+)")
_PARTITIONS = re.compile(r'"outer_dimension_partitions":\[([^\]]*)\]')


class Way(Enum):
    """How the runtime runs an instruction."""

    INLINE = "in the thread that reaches it"
    SHARED = "in parts that threads take; who reaches it goes on when its own are done"
    LIBRARY = "in parts that threads take; who reaches it waits for all, or leaves it to another"
    PRODUCT = "in tasks that are left to the threads; who reaches it goes on at once"


@dataclass(frozen=True, slots=True)
class Kernel:
    """How one instruction runs.

    Args:
        way: who does the work.
        seconds: of one core, in all, for each group.
        num_tasks: that threads share, for each group.
        fixed_bytes: that it takes in any case, for each group.
        task_share: of the work that is dealt to tasks, what one has; the last one may have less.
        tasks_bytes: that all tasks take as they begin, each its share, until the whole is done.
        own_bytes: that a task takes while it runs.
        asked_bytes: that it asks for when it begins, for each group, at most; much of it may never be touched. None: as
            much as it takes.
        matrix_bytes: taken before anything else, and kept until what runs next in the same thread has ended.
        num_groups: that are begun one after the other.
    """

    way: Way = Way.INLINE
    seconds: float = 0.0
    num_tasks: int = 1
    task_share: float = 1.0
    fixed_bytes: int = 0
    tasks_bytes: int = 0
    own_bytes: int = 0
    asked_bytes: int | None = None
    matrix_bytes: int = 0
    num_groups: int = 1

    @property
    def may_wait(self) -> bool:
        """Whether who runs it may have to wait for others."""
        return self.way is Way.LIBRARY and self.num_tasks > 1

    def most_bytes(self, num_threads: int) -> int:
        """What it takes at most when nothing else runs."""
        return self._with_groups(num_threads, self.fixed_bytes + self.tasks_bytes)

    def most_asked(self, num_threads: int) -> int:
        """What it asks for at most when nothing else runs."""
        taken = self.fixed_bytes + self.tasks_bytes
        return self._with_groups(num_threads, taken if self.asked_bytes is None else max(taken, self.asked_bytes))

    def _with_groups(self, num_threads: int, group_bytes: int) -> int:
        own = min(self.num_tasks, num_threads) * self.own_bytes
        return self.matrix_bytes + own + self.num_groups * group_bytes


class Kernels:
    """Knows how each instruction of a program runs.

    Args:
        module: the program.
        num_threads: that it may use.
    """

    def __init__(self, module: Module, num_threads: int) -> None:
        self._module = module
        self._num_threads = num_threads

    def of(self, instruction: Instruction, by_name: dict[str, Instruction], moved_bytes: int) -> Kernel:
        """How an instruction runs.

        Args:
            instruction: one that the runtime runs by itself, not inside of a fusion.
            by_name: the instructions of its computation.
            moved_bytes: that it reads and writes.
        """
        moving = moved_bytes / _BANDWIDTH
        parts = _partitions(instruction)
        loop = Kernel(Way.SHARED if parts > 1 else Way.INLINE, moving, parts)
        if instruction.opcode == "convolution" and (sizes := _convolution(instruction, by_name)) is not None:
            if parts > 1:
                return replace(loop, seconds=max(moving, sizes.flops / _LOOP_RATE))
            return self._convolved(sizes, moving)
        if instruction.opcode == "dot":
            batch, rows, depth, columns, element_bytes = _product(instruction, by_name)
            if min(rows, columns) == 1:
                # A matrix times a vector is a loop that XLA writes itself.
                return loop
            found = split_product(rows, depth, columns, element_bytes, self._num_threads)
            seconds = max(2 * rows * depth * columns / _LIBRARY_RATE, moving / 2 / batch)
            return replace(_multiplied(found, seconds), num_groups=batch)
        if instruction.opcode == "fusion" and _FUSED_LIBRARY in instruction.attributes:
            return self._fused(self._module.computations[instruction.called["calls"]], moving)
        if instruction.opcode == "call" and (inner := self._only_one(instruction)) is not None:
            return self.of(*inner, moved_bytes)
        if instruction.opcode in ("while", "call", "conditional"):
            inside = [
                kernel
                for name in instruction.called.values()
                for kernel in self._inside(self._module.computations[name])
            ]
            # What is inside is taken to run one after the other.
            taken = max((kernel.most_bytes(self._num_threads) for kernel in inside), default=0)
            asked = max((kernel.most_asked(self._num_threads) for kernel in inside), default=0)
            return Kernel(seconds=moving, fixed_bytes=taken, asked_bytes=asked)
        return loop

    def _only_one(self, call: Instruction) -> tuple[Instruction, dict[str, Instruction]] | None:
        """What a call runs, if that is one instruction: XLA puts those apart whose loops it has cut into parts."""
        called = self._module.computations.get(call.called.get("to_apply", ""))
        if called is None or sum(one.opcode not in ("parameter", "constant") for one in called.instructions) != 1:
            return None
        return called.root, {one.name: one for one in called.instructions}

    def _inside(self, computation: Computation) -> list[Kernel]:
        by_name = {instruction.name: instruction for instruction in computation.instructions}
        return [self.of(instruction, by_name, 0) for instruction in computation.instructions]

    def _convolved(self, sizes: "_Convolution", moving: float) -> Kernel:
        """A convolution of Eigen's."""
        if sizes.is_transposed and sizes.num_groups == 1:
            rows, columns = sizes.batch * math.prod(sizes.pixels), math.prod(sizes.window) * sizes.output_channels
            found = split_product(rows, sizes.input_channels, columns, sizes.element_bytes, self._num_threads)
            seconds = max(2 * rows * columns * sizes.input_channels / _LIBRARY_RATE, moving / 2)
            return replace(_multiplied(found, seconds), matrix_bytes=rows * columns * sizes.element_bytes)
        groups = sizes.num_groups
        rows, columns = sizes.batch * sizes.output_pixels, sizes.output_channels // groups
        found = split_product(
            rows, sizes.depth, columns, sizes.element_bytes, self._num_threads, load_cycles=_GATHER_CYCLES
        )
        gathered = rows * sizes.depth * _GATHER_SECONDS / min(_GATHERED_CHANNELS, sizes.input_channels // groups)
        kernel = _multiplied(found, max(sizes.flops / groups / _LIBRARY_RATE + gathered, moving / 2 / groups))
        if groups == 1:
            return kernel
        # Numbers of a group don't lie side by side in the output: each has a result of its own first.
        result = rows * columns * sizes.element_bytes
        asked = found.asked_bytes + result
        return replace(kernel, num_groups=groups, tasks_bytes=kernel.tasks_bytes + result, asked_bytes=asked)

    def _fused(self, inside: Computation, moving: float) -> Kernel:
        """What the fused library runs."""
        by_name = {inner.name: inner for inner in inside.instructions}
        fixed = own = flops = 0
        num_tasks = _LIBRARY_TASKS
        for inner in inside.instructions:
            if inner.opcode == "convolution" and (sizes := _convolution(inner, by_name)) is not None:
                flops += sizes.flops
                tasks, copy, packed = _fused_convolution(sizes)
                fixed = max(fixed, packed)
                if copy > own:
                    num_tasks, own = tasks, copy
            elif inner.opcode == "dot":
                batch, rows, depth, columns, element_bytes = _product(inner, by_name)
                flops += 2 * batch * rows * depth * columns
                packed = depth * min(columns, _COLUMNS_PER_THREAD * self._num_threads) * element_bytes
                if _list(inner, "lhs_batch_dims"):
                    packed = by_name[inner.operands[1]].shape.size_bytes
                fixed = max(fixed, packed)
            elif inner.opcode == "reduce" and _list(inner, "dimensions") == (0,) and len(inner.shape.dimensions) > 1:
                fixed = max(fixed, by_name[inner.operands[0]].shape.size_bytes)
        seconds = max(flops / _LIBRARY_RATE, moving)
        return Kernel(Way.LIBRARY, seconds, num_tasks, fixed_bytes=fixed, own_bytes=own)


def _multiplied(product: Product, seconds: float) -> Kernel:
    return Kernel(
        Way.PRODUCT,
        seconds,
        product.num_tasks,
        product.task_share,
        product.fixed_bytes,
        product.tasks_bytes,
        asked_bytes=product.asked_bytes,
    )


def _partitions(instruction: Instruction) -> int:
    """Parts into which XLA cut the loop of an instruction."""
    found = _PARTITIONS.search(instruction.attributes)
    return math.prod(int(part.strip('" ')) for part in found.group(1).split(",") if part.strip('" ')) if found else 1


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
    is_transposed: bool
    num_groups: int
    input_bytes: int
    kernel_bytes: int

    @property
    def element_bytes(self) -> int:
        elements = self.batch * math.prod(self.pixels) * self.input_channels
        return max(1, self.input_bytes // max(1, elements))

    @property
    def depth(self) -> int:
        """Products that make up a number of the output."""
        return math.prod(self.window) * self.input_channels // self.num_groups

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.output_pixels * self.depth * self.output_channels


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
    groups = _GROUPS.search(instruction.attributes)
    return _Convolution(
        batch=inputs["b"],
        pixels=tuple(inputs[letter] for letter in spatial),
        input_channels=inputs["f"],
        window=tuple(kernel[letter] for letter in spatial),
        output_channels=kernel["o"],
        output_pixels=math.prod(output[letter] for letter in spatial),
        padding=tuple(padding) or (0,) * len(spatial),
        is_transposed=_is_transposed(settings, len(spatial)),
        num_groups=int(groups.group(1)) if groups else 1,
        input_bytes=left.size_bytes,
        kernel_bytes=right.size_bytes,
    )


def _is_transposed(settings: dict[str, str], num_spatial: int) -> bool:
    """Whether the runtime multiplies first and adds windows up after: it does so for images, one step at a time."""
    is_plain = "rhs_dilate" not in settings and set(settings.get("stride", "1").split("x")) == {"1"}
    return "lhs_dilate" in settings and is_plain and num_spatial <= 2


def _fused_convolution(sizes: _Convolution) -> tuple[int, int, int]:
    """(tasks, bytes of a task's own copy of the input, bytes of the packed kernel)."""
    if any(sizes.padding):
        padded = math.prod(size + pad for size, pad in zip(sizes.pixels, sizes.padding, strict=True))
        copy = sizes.batch * padded * sizes.input_channels * sizes.element_bytes
    else:
        depth = math.prod(sizes.window) * sizes.input_channels
        copy = sizes.batch * sizes.output_pixels * depth * sizes.element_bytes
    channels = sizes.output_channels
    weights = math.prod(sizes.window) * sizes.input_channels * channels
    num_tasks = min(-(-channels // _CHANNELS_PER_TASK), max(1, weights // _WEIGHTS_PER_TASK))
    width = 4 if channels <= 4 else 8 if channels <= 32 else 16
    packed = sizes.kernel_bytes // channels * -(-channels // width) * width
    return num_tasks, copy, packed if sizes.batch >= _FEWEST_PACKED_IMAGES else 0


def _product(instruction: Instruction, by_name: dict[str, Instruction]) -> tuple[int, int, int, int, int]:
    """(matrices, rows, depth, columns, bytes of an element) of a matrix product."""
    left, right = (by_name[name].shape for name in instruction.operands[:2])
    summed = _list(instruction, "lhs_contracting_dims")
    depth = math.prod(left.dimensions[place] for place in summed)
    batch = math.prod(left.dimensions[place] for place in _list(instruction, "lhs_batch_dims"))
    elements = max(1, math.prod(left.dimensions))
    across = max(1, depth * batch)
    return (
        max(1, batch),
        math.prod(left.dimensions) // across,
        depth,
        math.prod(right.dimensions) // across,
        max(1, left.size_bytes // elements),
    )


def _list(instruction: Instruction, name: str) -> tuple[int, ...]:
    for key, inside in _LISTS.findall(instruction.attributes):
        if key == name:
            return tuple(int(part) for part in inside.split(",") if part)
    return ()
