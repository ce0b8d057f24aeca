"""What an allocator made of a timeline: the result type of `memfit.allocator`."""

from dataclasses import dataclass

from memfit.core.errors import BadInput
from memfit.core.shown import Shown
from memfit.core.units import format_size


@dataclass(frozen=True, slots=True)
class AllocatorOptions:
    """The settings of PyTorch's CUDA caching allocator that change memory (`PYTORCH_CUDA_ALLOC_CONF`).

    Args:
        expandable_segments: grow segments page by page instead of asking for new ones.
        max_split_size_bytes: blocks larger than this are never split; None: no limit.
        garbage_collection_threshold: share of the capacity above which unused blocks are released; 0: never.
        roundup_power2_divisions: round sizes up to a power of two divided by this; 0: off.
    """

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.garbage_collection_threshold < 1:
            raise BadInput(
                f"garbage_collection_threshold must be from 0 up to, not including, 1, "
                f"but {self.garbage_collection_threshold!r} was given."
            )


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The allocation that failed in a replay."""

    tick: int
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True, repr=False)
class Replay(Shown):
    """Memory over time as the device saw it.

    Args:
        allocated: bytes in blocks handed to the program, after each tick (rounded as the allocator rounds).
        reserved: bytes taken from the device, after each tick.
        requested_peak_bytes: greatest sum of what the program asked for, unrounded.
        num_segments: segments held at the end.
        num_retries: how often the cache had to be released for an allocation to succeed.
        out_of_memory: the first allocation that the step can't do without and that didn't fit in the capacity, or None.
        num_left_out: how many workspaces that libraries can do without didn't fit.
    """

    allocated: tuple[int, ...]
    reserved: tuple[int, ...]
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    requested_peak_bytes: int
    num_segments: int
    num_retries: int = 0
    out_of_memory: OutOfMemory | None = None
    num_left_out: int = 0

    def summary(self) -> str:
        """The peaks."""
        allocated, reserved = format_size(self.allocated_peak_bytes), format_size(self.reserved_peak_bytes)
        failed = "" if self.out_of_memory is None else f", out of memory at tick {self.out_of_memory.tick}"
        return f"of {len(self.allocated):,} ticks: {allocated} allocated, {reserved} reserved{failed}"

    @property
    def fragmentation(self) -> float:
        """Share of the reserved peak that was never handed out, from 0 to 1."""
        if not self.reserved_peak_bytes:
            return 0.0
        return 1 - self.allocated_peak_bytes / self.reserved_peak_bytes
