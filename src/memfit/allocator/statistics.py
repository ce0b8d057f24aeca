"""Counters as PyTorch's allocator keeps them: `torch.cuda.memory_stats()` shows these under these names.

Each quantity has a current value, the peak since the last reset, and how much it rose and fell in all since the last
reset (`c10/core/CachingDeviceAllocator.h`, `Stat`), once for each pool and once for both together.
"""

from typing import final

from memfit.allocator.pool import Block


@final
class Level:
    """A quantity that rises and falls (`Stat`)."""

    def __init__(self) -> None:
        self.current = self.peak = 0
        # The sum of all rises. That of all falls follows from it and from the value at the last reset.
        self.total = self.base = self.before = 0

    def add(self, change: int) -> None:
        """One rise or one fall."""
        self.current = current = self.current + change
        if change > 0:
            self.total += change
            if current > self.peak:
                self.peak = current

    def move_through(self, current: int, risen: int) -> None:
        """Takes a new value after several rises and falls; `risen` is the sum of all rises since the beginning."""
        self.total = risen - self.before
        self.peak = max(self.peak, current)
        self.current = current

    def reset_peak(self) -> None:
        """The peak is what there is now."""
        self.peak = self.current

    def reset_total(self) -> None:
        """Nothing has risen or fallen yet."""
        self.before += self.total
        self.total = 0
        self.base = self.current

    def items(self) -> tuple[tuple[str, int], ...]:
        """Names and values as `torch.cuda.memory_stats()` has them."""
        freed = self.total - (self.current - self.base)
        return ("current", self.current), ("peak", self.peak), ("allocated", self.total), ("freed", freed)


@final
class PoolStatistics:
    """What is counted for one pool, or for both.

    With a single stream a block is active exactly as long as it is allocated, so that `active` is `allocation`.
    """

    def __init__(self) -> None:
        self.allocation, self.allocated_bytes, self.requested_bytes = Level(), Level(), Level()
        self.segment, self.reserved_bytes = Level(), Level()
        self.inactive_split, self.inactive_split_bytes = Level(), Level()
        # Segments that are free as a whole; all other free blocks are inactive splits.
        self.num_whole = self.whole_bytes = 0

    def count(self, block: Block, sign: int) -> None:
        """Books a block that was handed out (1) or is taken back (-1)."""
        self.allocation.add(sign)
        self.allocated_bytes.add(sign * block.size)
        self.requested_bytes.add(sign * block.requested)

    def levels(self) -> dict[str, Level]:
        """Each quantity by its name."""
        own = {name: value for name, value in vars(self).items() if isinstance(value, Level)}
        return {**own, "active": self.allocation, "active_bytes": self.allocated_bytes}
