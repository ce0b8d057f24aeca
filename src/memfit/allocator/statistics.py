"""Counters as PyTorch's allocator keeps them: `torch.cuda.memory_stats()` shows these under these names.

Each quantity has a current value, the peak since the last reset, and how much it rose and fell in all since the last
reset (`c10/core/CachingDeviceAllocator.h`, `Stat`), once for each pool and once for both together.
"""

from typing import final


@final
class Level:
    """A quantity that rises and falls (`Stat`)."""

    __slots__ = ("base", "before", "current", "peak", "total")

    def __init__(self) -> None:
        self.current = 0
        self.peak = 0
        # The sum of all rises. That of all falls follows from it and from the value at the last reset.
        self.total = 0
        self.base = 0
        self.before = 0

    def move_to(self, current: int) -> None:
        """Takes a new value, in one rise or one fall."""
        if current > self.current:
            self.total += current - self.current
            if current > self.peak:
                self.peak = current
        self.current = current

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

    __slots__ = (
        "allocated_bytes",
        "allocation",
        "inactive_split",
        "inactive_split_bytes",
        "num_whole",
        "requested_bytes",
        "reserved_bytes",
        "segment",
        "whole_bytes",
    )

    def __init__(self) -> None:
        self.allocation = Level()
        self.allocated_bytes = Level()
        self.requested_bytes = Level()
        self.segment = Level()
        self.reserved_bytes = Level()
        self.inactive_split = Level()
        self.inactive_split_bytes = Level()
        # Segments that are free as a whole; all other free blocks are inactive splits.
        self.num_whole = 0
        self.whole_bytes = 0

    def add(self, small: "PoolStatistics", large: "PoolStatistics") -> None:
        """Makes this the sum of two pools, except for the peaks, which need not fall together."""
        pairs = zip(self.levels(), small.levels(), large.levels(), strict=True)
        for (_, level), (_, one), (_, other) in pairs:
            level.current = one.current + other.current
            level.total = one.total + other.total
            level.base = one.base + other.base

    def levels(self) -> tuple[tuple[str, Level], ...]:
        """Each quantity with its name."""
        return (
            ("allocation", self.allocation),
            ("allocated_bytes", self.allocated_bytes),
            ("active", self.allocation),
            ("active_bytes", self.allocated_bytes),
            ("requested_bytes", self.requested_bytes),
            ("segment", self.segment),
            ("reserved_bytes", self.reserved_bytes),
            ("inactive_split", self.inactive_split),
            ("inactive_split_bytes", self.inactive_split_bytes),
        )
