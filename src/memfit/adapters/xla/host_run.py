"""A run of a program on XLA's CPU runtime, simulated: who runs what when, and how much memory is in use.

The runtime keeps a queue of what is ready, first come first served, in whichever thread makes it ready. Products of
matrices and convolutions are left to a pool of threads, each of which takes its own newest task first and then the
oldest of another. The thread itself goes on with what else is ready, and whoever ends the last task of a product goes
on with what waited for it, inside of the call that ended it. So scratch memory of several products is there at once,
and what is kept until such a call returns stays while all of that runs.

Which threads meet depends on times that nobody knows to the microsecond. Several runs with times that vary by chance
show what is typical, and what is possible.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field, replace

from memfit.adapters.xla.host_kernels import Kernel, Way
from memfit.adapters.xla.host_thunks import Thunk
from memfit.adapters.xla.placement import Placement

NUM_RUNS = 15
_PAGE_BYTES = 4096
# Half of a queue that is longer is handed to the pool, up to so many times at once.
_LONG_QUEUE, _MOST_HELPERS = 8, 4
# Times vary by so much, either way; what it takes to wake a thread.
_VARIATION = 0.2
_WAKING_SECONDS = 30e-6
# Pieces in which a part that takes longer than this is written to memory.
_NUM_PIECES, _LONG_SECONDS = 4, 0.5e-3
# Tasks of a product are alike, and so are groups: so many stand for more.
_MOST_TASKS = 24
_MOST_GROUPS = 128
# Bytes per second at which a matrix is filled with zeros, and gathered from; at which pages are made that are new.
_FILLING_RATE, _GATHERING_RATE, _NEW_RATE = 8e9, 4e9, 4e9

_Steps = Generator[float | None, None, None]
"""What a thread does: it works for so many seconds, or (None) waits to be called."""
_Task = Callable[[int], _Steps]
"""Work for a thread, given its number."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a run took.

    Args:
        peak_bytes: most of ranges that were written to and scratch memory, at once.
        scratch: (first time, last time in the program's order, bytes) of each kernel that took memory for itself; how
            long it stayed, and what else was there, isn't told.
        asked_bytes: most that kernels asked for at once, whether they wrote to it or not.
    """

    peak_bytes: int
    scratch: tuple[tuple[int, int, int], ...]
    asked_bytes: int


def simulate(thunks: Sequence[Thunk], placement: Placement, num_threads: int, seed: int = 0) -> Run:
    """One run of a program.

    Args:
        thunks: its pieces.
        placement: where their values lie.
        num_threads: of the pool.
        seed: of the times.
    """
    return _Machine(thunks, placement, num_threads, seed).run()


def several_runs(thunks: Sequence[Thunk], placement: Placement, num_threads: int) -> list[Run]:
    """Runs with times that differ, from the least peak to the greatest; the typical one is in the middle."""
    runs = [simulate(thunks, placement, num_threads, seed) for seed in range(NUM_RUNS)]
    return sorted(runs, key=lambda run: run.peak_bytes)


@dataclass(slots=True)
class _Event:
    """Whether something has ended, and what follows."""

    is_done: bool = False
    then: _Task | None = None


@dataclass(slots=True)
class _Work:
    """Parts that threads take one by one."""

    left_to_take: int
    left_to_end: int
    waiting: list[int] = field(default_factory=list)


class _Ledger:
    """Memory in use."""

    def __init__(self, thunks: Sequence[Thunk], placement: Placement) -> None:
        self._thunks = thunks
        self._ranges = placement.ranges
        self._touched = {number: bytearray(-(-size // _PAGE_BYTES)) for number, size in placement.ranges.items()}
        self._pages = dict.fromkeys(placement.ranges, 0)
        self._range_bytes = 0
        self._scratch: dict[Hashable, int] = {}
        self._scratch_bytes = 0
        self._asked: dict[Hashable, int] = {}
        self._asked_bytes = 0
        self.most_asked_bytes = 0
        self._of_thunk: dict[int, int] = {}
        self._most: dict[int, int] = {}
        self.peak_bytes = 0

    def write(self, number: int, part: int = 0, num_parts: int = 1) -> int:
        """A thunk, or a part of it, writes: pages are memory from then on. Gives the bytes of new ones."""
        before = self._range_bytes
        for piece in self._thunks[number].writes:
            offset, end = (piece.offset + piece.size_bytes * place // num_parts for place in (part, part + 1))
            pages = self._touched[piece.range]
            first, last = offset // _PAGE_BYTES, -(-end // _PAGE_BYTES)
            new = pages.count(0, first, last)
            if new:
                pages[first:last] = b"\x01" * (last - first)
                size = self._ranges[piece.range]
                had = min(size, self._pages[piece.range] * _PAGE_BYTES)
                self._pages[piece.range] += new
                self._range_bytes += min(size, self._pages[piece.range] * _PAGE_BYTES) - had
        self._look()
        return self._range_bytes - before

    def take(self, number: int, key: Hashable, size_bytes: int, asked_bytes: int | None = None) -> None:
        """A thunk takes scratch memory.

        Args:
            number: of the thunk.
            key: under which it is given back.
            size_bytes: that it writes to.
            asked_bytes: that it asks for; by default as much.
        """
        asked = size_bytes if asked_bytes is None else asked_bytes
        if asked:
            self._asked[number, key] = self._asked.get((number, key), 0) + asked
            self._asked_bytes += asked
            self.most_asked_bytes = max(self.most_asked_bytes, self._asked_bytes)
        if size_bytes:
            self._scratch[number, key] = self._scratch.get((number, key), 0) + size_bytes
            self._scratch_bytes += size_bytes
            self._of_thunk[number] = self._of_thunk.get(number, 0) + size_bytes
            self._most[number] = max(self._most.get(number, 0), self._of_thunk[number])
            self._look()

    def give_back(self, number: int, key: Hashable) -> None:
        """All that a thunk took under a key."""
        self._asked_bytes -= self._asked.pop((number, key), 0)
        size = self._scratch.pop((number, key), 0)
        if size:
            self._scratch_bytes -= size
            self._of_thunk[number] -= size

    def scratch(self) -> tuple[tuple[int, int, int], ...]:
        """(first time, last time, bytes) of each thunk that took memory."""
        return tuple((*self._thunks[number].times, most) for number, most in sorted(self._most.items()))

    def _look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self._range_bytes + self._scratch_bytes)


class _Machine:
    """Threads, their queues and the clock; the last thread is the caller's, which only begins."""

    def __init__(self, thunks: Sequence[Thunk], placement: Placement, num_threads: int, seed: int) -> None:
        self._thunks = thunks
        self._num_threads = num_threads
        self._random = random.Random(seed)
        self._ledger = _Ledger(thunks, placement)
        self._waits = [len(thunk.waits_for) for thunk in thunks]
        self._queues: list[deque[_Task]] = [deque() for _ in range(num_threads)]
        self._idle: set[int] = set()
        self._now = 0.0
        self._calls: list[tuple[float, int, int]] = []
        self._num_calls = 0
        self._num_helpers = 0
        self._num_begun = 0

    def run(self) -> Run:
        ready = deque(number for number, waits in enumerate(self._waits) if not waits)
        threads = [self._thread(number) for number in range(self._num_threads)]
        threads.append(self._execute(self._num_threads, ready))
        for number in range(len(threads)):
            self._call(number, 0.0)
        while self._calls:
            self._now, _, number = heapq.heappop(self._calls)
            self._idle.discard(number)
            seconds = next(threads[number], None)
            if seconds is not None:
                self._call(number, seconds)
        assert not any(self._waits) and self._num_begun == len(self._thunks)  # nobody waits for ever
        return Run(self._ledger.peak_bytes, self._ledger.scratch(), self._ledger.most_asked_bytes)

    # Threads.

    def _thread(self, thread: int) -> _Steps:
        while True:
            task = self._next_task(thread)
            if task is None:
                self._idle.add(thread)
                yield None
            else:
                yield from task(thread)

    def _next_task(self, thread: int) -> _Task | None:
        if self._queues[thread]:
            return self._queues[thread].popleft()
        for distance in range(1, self._num_threads):
            other = self._queues[(thread + distance) % self._num_threads]
            if other:
                return other.pop()
        return None

    def _schedule(self, thread: int, task: _Task) -> None:
        if thread < self._num_threads:
            self._queues[thread].appendleft(task)
        else:
            self._queues[self._random.randrange(self._num_threads)].append(task)
        if self._idle:
            woken = min(self._idle)
            self._idle.discard(woken)
            self._call(woken, self._varied(_WAKING_SECONDS))

    def _call(self, thread: int, seconds: float) -> None:
        self._num_calls += 1
        heapq.heappush(self._calls, (self._now + seconds, self._num_calls, thread))

    def _varied(self, seconds: float) -> float:
        return seconds * (1 + _VARIATION * (2 * self._random.random() - 1))

    # The runtime.

    def _execute(self, thread: int, ready: deque[int]) -> _Steps:
        """Runs what is ready, and what that makes ready, until it has to wait."""
        while ready:
            number = ready.popleft()
            while len(ready) > _LONG_QUEUE and self._num_helpers < _MOST_HELPERS:
                self._schedule(thread, self._helper(deque([ready.pop() for _ in range(-(-len(ready) // 2))][::-1])))
            if ready and self._thunks[number].kernel.may_wait:
                # Others could run in the meantime.
                self._schedule(thread, self._helper(deque((number,))))
                continue
            self._num_begun += 1
            event = yield from self._begin(thread, number, self._thunks[number].kernel)
            if event.is_done:
                self._release(number, ready)
            else:
                event.then = self._continuation(number)

    def _helper(self, ready: deque[int]) -> _Task:
        self._num_helpers += 1

        def task(thread: int) -> _Steps:
            yield from self._execute(thread, ready)
            self._num_helpers -= 1

        return task

    def _continuation(self, number: int) -> _Task:
        def task(thread: int) -> _Steps:
            ready: deque[int] = deque()
            self._release(number, ready)
            yield from self._execute(thread, ready)

        return task

    def _release(self, number: int, ready: deque[int]) -> None:
        for other in self._thunks[number].then:
            self._waits[other] -= 1
            if not self._waits[other]:
                ready.append(other)

    def _end(self, thread: int, event: _Event) -> _Steps:
        event.is_done = True
        if event.then is not None:
            yield from event.then(thread)

    # Kernels.

    def _begin(self, thread: int, number: int, kernel: Kernel) -> Generator[float | None, None, _Event]:
        event = _Event()
        if kernel.way is Way.INLINE:
            self._ledger.take(number, "", kernel.fixed_bytes, kernel.asked_bytes)
            yield self._varied(kernel.seconds + self._ledger.write(number) / _NEW_RATE)
            self._ledger.give_back(number, "")
            event.is_done = True
        elif kernel.way is Way.SHARED:
            yield from self._shared(thread, number, kernel, event)
        elif kernel.way is Way.LIBRARY:
            yield from self._library(thread, number, kernel)
            event.is_done = True
        else:
            yield from self._product(thread, number, kernel, event)
        return event

    def _shared(self, thread: int, number: int, kernel: Kernel, event: _Event) -> _Steps:
        work = _Work(kernel.num_tasks, kernel.num_tasks)
        seconds = kernel.seconds / kernel.num_tasks
        pieces = _NUM_PIECES if seconds > _LONG_SECONDS else 1

        def worker(thread: int) -> _Steps:
            taken = 0
            while work.left_to_take:
                part = kernel.num_tasks - work.left_to_take
                work.left_to_take -= 1
                taken += 1
                pace = self._varied(seconds) / pieces
                for piece in range(part * pieces, (part + 1) * pieces):
                    yield pace + self._ledger.write(number, piece, kernel.num_tasks * pieces) / _NEW_RATE
            work.left_to_end -= taken
            if taken and not work.left_to_end:
                yield from self._end(thread, event)

        for _ in range(min(self._num_threads, kernel.num_tasks) - 1):
            self._schedule(thread, worker)
        yield from worker(thread)

    def _library(self, thread: int, number: int, kernel: Kernel) -> _Steps:
        work = _Work(kernel.num_tasks, kernel.num_tasks)
        self._ledger.write(number)
        self._ledger.take(number, "", kernel.fixed_bytes)

        def worker(_: int) -> _Steps:
            while work.left_to_take:
                part = work.left_to_take
                work.left_to_take -= 1
                self._ledger.take(number, part, kernel.own_bytes)
                yield self._varied(kernel.seconds / kernel.num_tasks)
                self._ledger.give_back(number, part)
                work.left_to_end -= 1
            if not work.left_to_end and work.waiting:
                self._call(work.waiting.pop(), 0.0)

        for _ in range(min(self._num_threads, kernel.num_tasks) - 1):
            self._schedule(thread, worker)
        yield from worker(thread)
        while work.left_to_end:
            work.waiting.append(thread)
            yield None
        self._ledger.give_back(number, "")

    def _product(self, thread: int, number: int, kernel: Kernel, event: _Event) -> _Steps:
        self._ledger.write(number)
        if kernel.matrix_bytes:
            self._ledger.take(number, "matrix", kernel.matrix_bytes)
            yield self._varied(kernel.matrix_bytes / _FILLING_RATE)
        num_groups = min(kernel.num_groups, _MOST_GROUPS)
        if num_groups < kernel.num_groups:
            kernel = _merged(kernel, kernel.num_groups / num_groups)
        left = [num_groups]

        def group_ended(thread: int, group: int) -> _Steps:
            self._ledger.give_back(number, group)
            left[0] -= 1
            if not left[0]:
                if kernel.matrix_bytes:
                    yield self._varied(kernel.matrix_bytes / _GATHERING_RATE)
                # What waited for it runs now, and the matrix is there as long.
                yield from self._end(thread, event)
                self._ledger.give_back(number, "matrix")

        def some_groups(first: int, last: int) -> _Task:
            def task(thread: int) -> _Steps:
                for group in range(first, last):
                    yield from self._tasks(thread, number, kernel, group, group_ended)

            return task

        # Groups are dealt to threads, each of which begins all of its own.
        each = -(-num_groups // self._num_threads)
        for first in range(each, num_groups, each):
            self._schedule(thread, some_groups(first, min(num_groups, first + each)))
        yield from some_groups(0, each)(thread)

    def _tasks(
        self, thread: int, number: int, kernel: Kernel, group: int, ended: Callable[[int, int], _Steps]
    ) -> _Steps:
        """Tasks of a product: a thread leaves half of what it has to others, until one is left that it does itself."""
        num_tasks = min(kernel.num_tasks, max(_MOST_TASKS, 2 * self._num_threads))
        task_bytes = round(kernel.tasks_bytes * max(kernel.task_share, 1 / num_tasks))
        left, left_bytes = [num_tasks], [kernel.tasks_bytes]
        self._ledger.take(number, group, kernel.fixed_bytes, kernel.asked_bytes)

        def some(first: int, last: int) -> _Task:
            def task(thread: int) -> _Steps:
                end = last
                while end - first > 1:
                    middle = (first + end) // 2
                    self._schedule(thread, some(middle, end))
                    end = middle
                taken = min(task_bytes, left_bytes[0])
                left_bytes[0] -= taken
                self._ledger.take(number, group, taken, 0)
                yield self._varied(kernel.seconds / num_tasks)
                left[0] -= 1
                if not left[0]:
                    yield from ended(thread, group)

            return task

        yield from some(0, num_tasks)(thread)


def _merged(kernel: Kernel, ratio: float) -> Kernel:
    """A kernel whose groups stand for more of them."""
    return replace(
        kernel,
        seconds=kernel.seconds * ratio,
        fixed_bytes=round(kernel.fixed_bytes * ratio),
        tasks_bytes=round(kernel.tasks_bytes * ratio),
        asked_bytes=round((kernel.asked_bytes or 0) * ratio),
    )
