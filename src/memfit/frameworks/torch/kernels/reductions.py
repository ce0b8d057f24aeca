"""Memory in which blocks of threads meet, when a reduction on CUDA gives several of them to one output.

PyTorch's reductions (sums, means, maxima, norms, variances) run in one kernel. Where a thread would read 256 values or
more and the outputs alone don't fill the device, the values of an output are shared out among blocks of threads, which
leave their partial results in a buffer: up to hundreds of MiB for outputs in thousands of columns. How many blocks is
decided in `setReduceConfig` (native/cuda/Reduce.cuh) by the number of multiprocessors, the threads that each holds,
shape and strides, and by nothing else. Shapes are seen there as `TensorIterator.cpp` leaves them: dimensions in the
order of their strides, reduced ones first, neighbours joined.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from memfit.core.device import Device
from memfit.frameworks.torch.shapes.recorder import Program

_WARP = 32
_MAX_THREADS = 512
_MIN_VALUES, _MAX_VALUES = 16, 256
_SEMAPHORE_BYTES = 4
_INT32_MAX = 2**31 - 1
# Resident threads of a multiprocessor, by compute capability; 2,048 in all others (CUDA C++ Programming Guide,
# technical specifications per compute capability).
_THREADS = {(7, 5): 1024, **dict.fromkeys([(8, 6), (8, 7), (8, 9), (12, 0), (12, 1)], 1536)}


@dataclass(frozen=True, slots=True)
class Multiprocessors:
    """What of a device decides how a reduction is shared out."""

    count: int
    threads: int


def multiprocessors(device: Device) -> Multiprocessors | None:
    """The multiprocessors of a CUDA device; None where their number is unknown."""
    if device.num_multiprocessors is None or device.capability is None:
        return None
    return Multiprocessors(device.num_multiprocessors, _THREADS.get(device.capability, 2048))


@dataclass(frozen=True, slots=True)
class Elements:
    """Sizes in bytes of an input element, of an output element, and of what is carried from one input to the next.

    `accumulates` is true where partial results of a tensor too large for 32-bit offsets are kept in the output.
    """

    input_bytes: int
    output_bytes: int
    carried_bytes: int
    accumulates: bool = True


@dataclass(frozen=True, slots=True)
class Layout:
    """An input as the kernel sees it: dimensions, fastest first, the first `num_reduced` of them to be reduced.

    Strides are in elements, those of the output 0 where a dimension is reduced.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    output_strides: tuple[int, ...]
    offset: int = 0

    @property
    def num_reduced(self) -> int:
        """Number of dimensions that are reduced."""
        return self.output_strides.count(0)

    @property
    def num_outputs(self) -> int:
        """Number of elements of the output."""
        return prod(size for size, stride in zip(self.shape, self.output_strides, strict=True) if stride)


def layout(shape: tuple[int, ...], strides: tuple[int, ...], reduced: frozenset[int], offset: int = 0) -> Layout:
    """The input with its dimensions in the kernel's order, neighbours joined (TensorIterator.cpp).

    >>> layout((4, 512, 2560), (1310720, 2560, 1), frozenset({0, 1})).shape
    (2048, 2560)
    """
    outputs = _contiguous(shape, reduced)
    order = list(range(len(shape) - 1, -1, -1))
    for position in range(1, len(order)):
        here = position
        for earlier in range(position - 1, -1, -1):
            verdict = _compare(order[earlier], order[here], shape, (outputs, strides))
            if verdict > 0:
                order[earlier], order[here] = order[here], order[earlier]
                here = earlier
            elif verdict < 0:
                break
    joined: list[tuple[int, int, int]] = []
    for dim in order:
        size, stride, output = shape[dim], strides[dim], outputs[dim]
        if joined:
            before, before_stride, before_output = joined[-1]
            if before == 1:
                joined[-1] = (size, stride, output)
                continue
            if size == 1 or (before * before_stride == stride and before * before_output == output):
                joined[-1] = (before * size, before_stride, before_output)
                continue
        joined.append((size, stride, output))
    sizes, inputs, kept = (tuple(column[part] for column in joined) for part in range(3))
    return Layout(sizes, inputs, kept, offset)


def _contiguous(shape: tuple[int, ...], reduced: frozenset[int]) -> tuple[int, ...]:
    """Strides of the output, which is new and contiguous, as they are spread over the dimensions of the input."""
    strides, step = [0] * len(shape), 1
    for dim in range(len(shape) - 1, -1, -1):
        if dim not in reduced:
            strides[dim] = step
            step *= shape[dim]
    return tuple(strides)


def _compare(first: int, second: int, shape: tuple[int, ...], operands: tuple[tuple[int, ...], ...]) -> int:
    """1 if two dimensions must change places, -1 if not, 0 if nothing says so."""
    for number, strides in enumerate(operands):
        one, other = strides[first], strides[second]
        if number == 0 and (one == 0) != (other == 0):
            return 1 if other == 0 else -1
        if one == 0 or other == 0:
            continue
        if one != other:
            return -1 if one < other else 1
        if shape[first] > shape[second]:
            return 1
    return 0


def buffers(given: Layout, elements: Elements, device: Multiprocessors) -> list[int]:
    """What the kernel allocates, as `Recorder.add_inside` takes it.

    A tensor that is too large for 32-bit offsets is reduced part by part.

    >>> whole = layout((4, 512, 2560), (1310720, 2560, 1), frozenset({0, 1}))
    >>> buffers(whole, Elements(4, 4, 4), Multiprocessors(188, 1536))
    [41943040, 80]
    """
    parts = _parts(given, elements)
    if len(parts) == 1:
        return list(_of_launch(given, elements, device))
    program: list[int] = []
    if not elements.accumulates and elements.carried_bytes > elements.output_bytes:
        program.append(given.num_outputs * elements.carried_bytes)
    return [*program, *one_after_another((_of_launch(part, elements, device) for part in parts), len(program))]


def one_after_another(passes: Iterable[Program], num_before: int = 0) -> list[Any]:
    """What an operator takes in several passes, each of which gives back what it has taken before the next begins.

    >>> one_after_another([[8, 4], [16]], num_before=1)
    [8, 4, -3, -2, 16, -4]
    """
    program: list[Any] = []
    first = num_before
    for part in passes:
        sizes = [isinstance(size, int) and size >= 0 for size in part]
        program += [size - first if isinstance(size, int) and size < 0 else size for size in part]
        program += [~(first + number) for number in range(sum(sizes) - 1, -1, -1)]
        first += sum(sizes)
    return program


def _parts(given: Layout, elements: Elements) -> list[Layout]:
    """Halves, and halves of halves, along the dimension that reaches furthest, until 32-bit offsets do."""
    operands = ((given.output_strides, elements.output_bytes), (given.strides, elements.input_bytes))
    reach = max(
        (sum((n - 1) * step * width for n, step in zip(given.shape, steps, strict=True)) for steps, width in operands),
        default=0,
    )
    if prod(given.shape) <= _INT32_MAX and reach < _INT32_MAX:
        return [given]
    furthest = max(
        range(len(given.shape) - 1, -1, -1),
        key=lambda dim: max((given.shape[dim] - 1) * steps[dim] * width for steps, width in operands),
    )
    half = given.shape[furthest] // 2

    def narrowed(size: int, skipped: int) -> Layout:
        shape = (*given.shape[:furthest], size, *given.shape[furthest + 1 :])
        return Layout(shape, given.strides, given.output_strides, given.offset + skipped * given.strides[furthest])

    return [
        part
        for piece in (narrowed(half, 0), narrowed(given.shape[furthest] - half, half))
        for part in _parts(piece, elements)
    ]


def _of_launch(given: Layout, elements: Elements, device: Multiprocessors) -> tuple[int, ...]:
    """The buffer and the semaphores of one launch; nothing where no two blocks share an output."""
    num_outputs = given.num_outputs
    num_inputs = prod(given.shape) // max(1, num_outputs)
    num_reduced = given.num_reduced
    along_inputs = num_reduced == len(given.shape) or given.strides[0] < given.strides[num_reduced]
    vector = 1
    if along_inputs:
        # Reads of several elements at once narrow a block only where it has too few values to be shared out.
        across, down = num_inputs, num_outputs
    else:
        if given.strides[num_reduced] == 1:
            # Outputs that a thread makes at once: four, two or one, as alignment allows.
            vector = 4
            others = (stride for dim, stride in enumerate(given.strides) if dim != num_reduced)
            for number in (given.offset, given.shape[num_reduced], *others):
                while number % vector:
                    vector //= 2
        across, down = num_outputs // vector, num_inputs
    width, height = _block(across, down, _MAX_THREADS // vector)
    step_input, step_output = (width, 1) if along_inputs else (1, width)
    if -(-num_inputs // step_input) < min(height * 16, _MAX_VALUES):
        # Each warp has an output of its own.
        return ()
    step_input *= height
    values = -(-num_inputs // step_input)
    target = device.count * (device.threads // (width * height))
    grid = -(-(num_outputs // vector) // step_output)
    if values < _MAX_VALUES or grid > target:
        return ()
    blocks = max(min(-(-target // grid), -(-values // _MIN_VALUES)), -(-values // _MAX_VALUES))
    if blocks <= 1:
        return ()
    size = elements.carried_bytes * num_outputs * blocks * (1 if along_inputs else width * vector)
    return size, _SEMAPHORE_BYTES * grid


def _block(across: int, down: int, most: int) -> tuple[int, int]:
    """Width and height of a block of threads."""
    across_power, down_power = (1 << (max(1, min(n, most)).bit_length() - 1) for n in (across, down))
    height = min(down_power, most // min(across_power, _WARP))
    return min(across_power, most // height), height
