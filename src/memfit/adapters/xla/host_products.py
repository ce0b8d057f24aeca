"""How Eigen, which multiplies matrices for XLA on the CPU, splits a product among threads, and what it packs.

The summed dimension is cut into slices, of which two are packed at once. One of the outer dimensions, mostly the rows,
is dealt to tasks: blocks as large as a core's cache lets them be, or several blocks, until a task takes long enough.
Where there are eight tasks a thread or more (up to four threads; fewer beyond), a thread packs the blocks of its tasks
into memory of its own, and of the sliced memory that was asked for hardly anything is ever touched. Where there are
fewer, tasks fill it as they begin. Sums that are dealt in parts of their depth are not modelled.

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
# Each thread beyond the first is worth it for so many more cycles; a task takes once to twice as many as the second.
_THREAD_CYCLES = 100_000
_TASK_CYCLES = 40_000
_STORE_CYCLES = 0.6875


@dataclass(frozen=True, slots=True)
class Product:
    """The work of a product.

    Args:
        num_tasks: that threads share.
        task_share: of the rows (or columns) that are dealt, what a task has; the last one may have less.
        tasks_bytes: packed by all tasks when they begin, kept until the last has ended.
        fixed_bytes: packed in any case.
        asked_bytes: that are asked for, at most; much of it may never be touched.
    """

    num_tasks: int = 1
    task_share: float = 1.0
    tasks_bytes: int = 0
    fixed_bytes: int = 0
    asked_bytes: int = 0


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
    first = _Split.of(rows, depth, columns, 2)
    worth = int((first.cycles + rows * depth * load_cycles - _THREAD_CYCLES) / _THREAD_CYCLES + 0.9)
    threads = min(num_threads, worth)
    if threads < 2:
        alone = _one_block(rows, depth, columns) * element_bytes
        return Product(fixed_bytes=alone, asked_bytes=alone)
    split = _Split.of(rows, depth, columns, threads)
    grain = split.grain(threads)
    num_dealt = _ratio(split.num_blocks, grain)
    num_tasks = num_dealt * split.num_others * split.num_slices
    packed_depth = split.slice_depth * min(split.num_slices, _NUM_SLICES)
    fixed = split.other * packed_depth * element_bytes
    task_share = min(1.0, grain * split.block / split.dealt)
    asked = split.sliced(element_bytes)
    if num_dealt >= _tasks_per_thread(num_threads) * num_threads:
        own = num_threads * grain * split.block * split.slice_depth * element_bytes
        return Product(num_tasks, task_share, 0, fixed + own, asked + own)
    return Product(num_tasks, task_share, split.dealt * packed_depth * element_bytes, fixed, asked)


@dataclass(frozen=True, slots=True)
class _Split:
    """Blocks of a product for a number of threads: of the dimension that is dealt, and of the other."""

    dealt: int
    other: int
    block: int
    other_block: int
    num_slices: int
    slice_depth: int

    @classmethod
    def of(cls, rows: int, depth: int, columns: int, num_threads: int) -> "_Split":
        dealt, other = (columns, rows) if _by_columns(rows, columns, num_threads) else (rows, columns)
        num_slices = _ratio(depth, _DEPTH)
        slice_depth = min(depth, 8 * _ratio(depth, 8 * num_slices))
        block, other_block = _block(dealt, depth, num_threads), _other_block(other, num_threads)
        return cls(dealt, other, block, other_block, num_slices, slice_depth)

    @property
    def num_blocks(self) -> int:
        return _ratio(self.dealt, self.block)

    @property
    def num_others(self) -> int:
        return _ratio(self.other, self.other_block)

    def sliced(self, element_bytes: int) -> int:
        """Bytes of all blocks of the slices that are packed at once."""
        # Only slices of float32 are made equally deep.
        is_even = element_bytes == _NUMBER_BYTES or self.num_slices == 1
        depth = self.slice_depth if is_even else _DEPTH
        numbers = sum(_ratio(size, _OTHER_ROUNDED) * _OTHER_ROUNDED for size in (self.dealt, self.other))
        return min(self.num_slices, _NUM_SLICES) * depth * numbers * element_bytes

    @property
    def pace(self) -> float:
        """Cycles of a number of the result, for one slice."""
        # A multiplication and addition of all lanes takes half a cycle, where blocks are large enough to fill them.
        is_full = self.block >= _COLUMNS and self.other_block >= _ROWS
        each = 4.0 if self.slice_depth == 1 else 0.5 if is_full else 2.0
        return self.slice_depth * each / _PACKET + _STORE_CYCLES

    @property
    def cycles(self) -> float:
        """Of the whole."""
        return self.dealt * self.other * self.num_slices * self.pace

    def grain(self, num_threads: int) -> int:
        """Blocks of a task: as many as keep all threads busy and take long enough."""

        def busy(grain: int) -> float:
            num_tasks = _ratio(self.num_blocks, grain) * self.num_others
            return num_tasks / (_ratio(num_tasks, num_threads) * num_threads)

        best = 1
        for grain in range(2, self.num_blocks + 1):
            size = grain * self.block * self.other_block * self.pace / _TASK_CYCLES
            if size > 2:
                break
            if _ratio(self.num_blocks, grain) == _ratio(self.num_blocks, grain - 1):
                continue
            if size < 1 or busy(grain) > busy(best) or busy(grain) == 1:
                best = grain
        return best


def _tasks_per_thread(num_threads: int) -> float:
    """From how many tasks for each thread on a thread packs for itself; fewer where there are many threads."""
    return next(
        (tasks for most, tasks in ((4, 8.0), (8, 4.0), (16, 2.0), (32, 1.0), (64, 0.8)) if num_threads <= most), 0.6
    )


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
