"""The recorder of a run on a device of limited memory: each block is asked of the device as the program goes.

Where `Recorder` notes what a step would like to have, this one has a memory that can be full. Then the operator that
asked gets PyTorch's own error, at that very moment.
"""

import threading
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from memfit.allocator.live import LiveAllocator
from memfit.core.replay import OutOfMemory, Replay
from memfit.core.timeline import Category, is_optional
from memfit.frameworks.torch.shapes.recorder import Recorder

# A timeline of this many blocks can still be drawn and written.
_MANY_BLOCKS = 300_000
_RECENT_TICKS = 100_000


@dataclass(frozen=True, slots=True)
class Tidied:
    """The blocks and the ticks that were kept, in order, by their numbers before."""

    blocks: list[int]
    ticks: list[int]

    def block(self, index: int) -> int:
        """What the number of a block, or of the first after it that was kept, is now."""
        return bisect_left(self.blocks, index)

    def tick(self, tick: int) -> int:
        """The number that an earlier tick has now."""
        return bisect_left(self.ticks, tick)


class LiveRecorder(Recorder):
    """A recorder that asks a memory for every block.

    `refuse` takes the bytes that were asked for and the operator, and returns the exception to raise; `configure` is
    called before the first block is asked for.
    """

    def __init__(
        self,
        origin: Callable[[], tuple[str, str]],
        memory: LiveAllocator,
        refuse: Callable[[int, str], Exception],
        configure: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(origin)
        self._memory = memory
        self._refuse = refuse
        self._configure = configure
        self._held: dict[int, Any] = {}
        self._allocated: list[int] = []
        self._reserved: list[int] = []
        self._requested_peak = self._allocated_peak = self._reserved_peak = self._requested = 0
        self._lock = threading.RLock()
        self._busy = False
        # The garbage collector may run, and free storages, at any moment: also in the middle of an allocation.
        self._waiting: deque[int] = deque()
        self.dropped_workspace = False
        self._num_left = 0

    @property
    def num_ticks(self) -> int:
        """Allocations and frees so far."""
        return len(self._allocated)

    def _start_transient(self, size_bytes: int, op: str, category: Category) -> int | None:
        """Starts a block inside an operator; cuDNN does without a workspace where there is no room for it."""
        index = self._try_start(size_bytes, op, category)
        if index is None:
            if not is_optional(category, op):
                raise self._refuse(size_bytes, op)
            self.dropped_workspace = True
        return index

    def tidy(self) -> "Tidied | None":
        """Forgets what is long gone and had no part in the peak, where there is much of it; None where there isn't.

        To be called between operators only: blocks are numbered anew.
        """
        if self.num_blocks < self._num_left + _MANY_BLOCKS:
            return None
        with self._working():
            peak = self._allocated.index(max(self._allocated))
            starts, ends = self.spans()
            recent = len(self._allocated) - _RECENT_TICKS
            kept = [
                index
                for index, start in enumerate(starts)
                if index in self._held or start >= recent or start <= peak < ends.get(index, 0)
            ]
            number = {index: position for position, index in enumerate(kept)}
            ticks = self.keep_only(kept)
            self._allocated = [self._allocated[tick] for tick in ticks]
            self._reserved = [self._reserved[tick] for tick in ticks]
            self._held = {number[index]: block for index, block in self._held.items()}
            self._waiting = deque(number[index] for index in self._waiting if index in number)
            self._num_left = len(kept)
            return Tidied(kept, ticks)

    def live_bytes(self) -> dict[str, int]:
        """Bytes of the live blocks by category, largest first."""
        groups: Counter[str] = Counter()
        for index in list(self._held):
            groups[str(self.categories[index] or Category.TEMPORARY)] += self.sizes[index]
        return dict(sorted(groups.items(), key=lambda item: (-item[1], item[0])))

    def replay(self, out_of_memory: OutOfMemory | None) -> Replay:
        """What the device made of the run."""
        return Replay(
            allocated=tuple(self._allocated),
            reserved=tuple(self._reserved),
            allocated_peak_bytes=self._allocated_peak,
            reserved_peak_bytes=self._reserved_peak,
            requested_peak_bytes=self._requested_peak,
            num_segments=self._memory.num_segments,
            num_retries=self._memory.num_retries,
            out_of_memory=out_of_memory,
        )

    def _start(self, size_bytes: int, op: str, category: Category | None) -> int:
        index = self._try_start(size_bytes, op, category)
        if index is None:
            raise self._refuse(size_bytes, op)
        return index

    def _try_start(self, size_bytes: int, op: str, category: Category | None) -> int | None:
        with self._working():
            if not self._allocated:
                self._configure()
            block = self._memory.malloc(size_bytes, self.current_stream())
            if block is None:
                return None
            index = super()._start(size_bytes, op, category)
            self._held[index] = block
            self._requested += size_bytes
            self._requested_peak = max(self._requested_peak, self._requested)
            self._note_level()
            return index

    def _end(self, index: int) -> None:
        self._waiting.append(index)
        if not self._busy:
            with self._working():
                pass

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Blocks that are freed while this lasts wait for its end."""
        with self._lock:
            self._busy = True
            try:
                yield
            finally:
                self._end_waiting()
                self._busy = False
                if self._waiting:
                    # Freed by another thread, or by the garbage collector, in the last moment.
                    self._end_waiting()

    def _end_waiting(self) -> None:
        while self._waiting:
            index = self._waiting.popleft()
            block = self._held.pop(index, None)
            if block is not None:
                super()._end(index)
                self._memory.free(block)
                self._requested -= self.sizes[index]
                self._note_level()

    def _note_level(self) -> None:
        allocated, reserved = self._memory.allocated_bytes, self._memory.reserved_bytes
        self._allocated.append(allocated)
        self._reserved.append(reserved)
        self._allocated_peak = max(self._allocated_peak, allocated)
        self._reserved_peak = max(self._reserved_peak, reserved)
