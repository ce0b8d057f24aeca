"""How Eigen, which multiplies matrices for XLA on the CPU, splits a product among threads, and what it packs.

The summed dimension is cut into slices, of which two are packed at once. One of the outer dimensions, mostly the rows,
is dealt to tasks: blocks as large as a core's cache lets them be, or several blocks, until a task takes long enough.
Where there are eight tasks a thread or more, a thread packs the blocks of its tasks into memory of its own, and of the
sliced memory that was asked for hardly anything is ever touched. Where there are fewer, tasks fill it as they begin.

Sizes of caches are those of one machine on which allocations were watched (jaxlib 0.10.2).
"""

from dataclasses import dataclass

_DEPTH = 320
_NUM_SLICES = 2
# Of a core's caches, and numbers that its registers take at once: rows and columns of the innermost kernel, a packet.
_L1_BYTES, _L2_BYTES = 32 * 1024, 1024 * 1024
_ROWS, _COLUMNS, _PACKET = 24, 4, 8
_NUMBER_BYTES = 4
# Multiples of these are what blocks of the two outer dimensions are rounded to.
_ROUNDED, _OTHER_ROUNDED = 24, 48
# A second thread is worth it from twice as many cycles on; a task takes once to twice as many as this.
_THREAD_CYCLES = 100_000
_TASK_CYCLES = 40_000
_TASKS_PER_THREAD = 8
_STORE_CYCLES = 0.6875


@dataclass(frozen=True, slots=True)
class Product:
    """The work of a product.

    Args:
        num_tasks: that threads share.
        share: of the rows (or columns) that are dealt, what a task has; the last one may have less.
        tasks_bytes: packed by all tasks when they begin, kept until the last has ended.
        fixed_bytes: packed in any case.
    """

    num_tasks: int = 1
    share: float = 1.0
    tasks_bytes: int = 0
    fixed_bytes: int = 0


def split_product(
    rows: int, depth: int, columns: int, element_bytes: int, num_threads: int, load_cycles: float = 1.0
) -> Product:
    """How a product is computed.

    Args:
        rows: of the left operand.
        depth: what is summed over.
        columns: of the right operand.
        element_bytes: of a number.
        num_threads: that can work on it.
        load_cycles: to fetch a number of the left operand: many where it is gathered from an image.

    >>> split_product(1024, 4096, 1024, 4, 2).tasks_bytes == 1024 * 2 * 320 * 4
    True
    """
    if not (rows and depth and columns):
        return Product()
    alone = Product(fixed_bytes=_one_block(rows, depth, columns) * element_bytes)
    if num_threads < 2:
        return alone
    dealt, other = (columns, rows) if _by_columns(rows, columns, num_threads) else (rows, columns)
    num_slices = _ratio(depth, _DEPTH)
    slice_depth = min(depth, 8 * _ratio(depth, 8 * num_slices))
    block, other_block = _block(dealt, depth, num_threads), _other_block(other, num_threads)
    # A multiplication and addition of all lanes takes half a cycle, where blocks are large enough to fill them.
    pace = 4.0 if slice_depth == 1 else 0.5 if block >= _COLUMNS and other_block >= _ROWS else 2.0
    cycles = slice_depth * pace / _PACKET + _STORE_CYCLES
    total = dealt * other * num_slices * cycles + rows * depth * load_cycles
    if total < 2.1 * _THREAD_CYCLES:
        return alone
    grain = _grain(_ratio(dealt, block), _ratio(other, other_block), block * other_block * cycles, num_threads)
    num_dealt = _ratio(_ratio(dealt, block), grain)
    num_tasks = num_dealt * _ratio(other, other_block) * num_slices
    packed_depth = slice_depth * min(num_slices, _NUM_SLICES)
    fixed = other * packed_depth * element_bytes
    share = min(1.0, grain * block / dealt)
    if num_dealt >= _TASKS_PER_THREAD * num_threads:
        return Product(num_tasks, share, 0, fixed + num_threads * grain * block * slice_depth * element_bytes)
    return Product(num_tasks, share, dealt * packed_depth * element_bytes, fixed)


def _ratio(size: int, part: int) -> int:
    return -(-size // part)


def _one_block(rows: int, depth: int, columns: int) -> int:
    """Numbers that a thread packs which computes a product alone: a block of each operand."""
    return (_block(rows, depth, 1) + _block(columns, depth, 1)) * min(depth, _DEPTH)


def _by_columns(rows: int, columns: int, num_threads: int) -> bool:
    """Whether columns are dealt to tasks: where there are too few rows for that."""
    few = rows // num_threads < _COLUMNS or (rows // num_threads < 16 * _COLUMNS and columns > 32 * rows)
    return few and columns // num_threads >= _COLUMNS


def _block(size: int, depth: int, num_threads: int) -> int:
    """Of the dimension that is dealt, what a core's second cache holds, or a thread's share."""
    cached = (_L2_BYTES - _L1_BYTES) // (_COLUMNS * _NUMBER_BYTES * min(depth, _DEPTH))
    share = _ratio(size, num_threads)
    block = cached - cached % _COLUMNS if cached <= share else _ratio(share, _COLUMNS) * _COLUMNS
    return min(size, _ratio(block, _ROUNDED) * _ROUNDED)


def _other_block(size: int, num_threads: int) -> int:
    return min(size, _ratio(_ratio(size, num_threads) * 3 // 2, _OTHER_ROUNDED) * _OTHER_ROUNDED)


def _grain(num_blocks: int, num_others: int, block_cycles: float, num_threads: int) -> int:
    """Blocks of a task."""

    def busy(grain: int) -> float:
        num_tasks = _ratio(num_blocks, grain) * num_others
        return num_tasks / (_ratio(num_tasks, num_threads) * num_threads)

    best = 1
    for grain in range(2, num_blocks + 1):
        size = grain * block_cycles / _TASK_CYCLES
        if size > 2:
            break
        if _ratio(num_blocks, grain) == _ratio(num_blocks, grain - 1):
            continue
        if size < 1 or busy(grain) > busy(best) or busy(grain) == 1:
            best = grain
    return best
