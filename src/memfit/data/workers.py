"""Processes that make the batches of a stream, for programs that have no loader of their own with workers.

Each process makes every n-th batch and puts it into memory that it shares with the program; the program takes the
batches in turn, so that the order is the one without workers. That memory has no name: it can't be left behind,
whatever happens to the processes, and the size of /dev/shm, 64 MiB in many containers, doesn't bound it. How far the
processes work ahead is bounded by bytes.

Processes are forked where that is safe, since a forked process starts at once and needs nothing pickled. Threads of JAX
and TensorFlow don't survive a fork, so in a program that has loaded one of them, and on systems that don't fork,
processes are started anew; transforms then have to be picklable, and where they aren't, processes are forked all the
same.
"""

import contextlib
import logging
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import traceback
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import connection, reduction
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np

from memfit.core.errors import BadInput, MemfitError
from memfit.core.worker_ends import describe_end

_log = logging.getLogger("memfit")

# Libraries whose threads hold locks that a forked process would wait for.
_NOT_FORKABLE = ("jax", "jaxlib", "tensorflow")
# Batches that one process may have ready; more only help where the time that batches take varies much.
_MOST_SLOTS = 4
_ALIGNMENT = 64
# How often a process looks whether the program is still there, and how long one may take to end.
_LOOK_SECONDS = 1.0
_END_SECONDS = 5.0

# The program's ends of all pipes. A forked process has copies of them, and must close them: another process would
# otherwise never learn that the program has ended.
_open_ends: "weakref.WeakSet[Connection]" = weakref.WeakSet()
_told: set[str] = set()


class Divisible(Protocol):
    """What the processes need of a stream."""

    @property
    def batch_bytes(self) -> int:
        """Bytes of a full batch."""

    def working(self, num_workers: int) -> int:
        """How many of `num_workers` workers have something to do."""

    def part(self, worker: int, num_workers: int) -> Iterator[Any]:
        """The batches of one of them, in order."""


class WorkerBatches:
    """The batches of one epoch, from where the stream is, in order. Its processes end with it.

    Args:
        stream: it is copied to the processes, and its position isn't changed.
        num_workers: processes; fewer are started where there is not enough to do, or not enough room.
        limit_bytes: of batches that are ready or being made, all processes together. A single batch is always made.
    """

    def __init__(self, stream: Divisible, num_workers: int, *, limit_bytes: int) -> None:
        if multiprocessing.current_process().daemon:
            raise BadInput(
                "a worker of another loader can't start workers of its own. Iterate over the stream itself there, or "
                "give that loader no workers."
            )
        # Each process has a batch in the making and one that is ready.
        room = max(1, limit_bytes // max(1, 2 * stream.batch_bytes))
        self.num_workers = stream.working(max(1, min(num_workers, room)))
        self._turn = 0
        self._workers: list[_Worker] = []
        self._finalizer = weakref.finalize(self, _stop, self._workers, os.getpid())
        context, reason = _context(stream)
        if reason:
            _tell(reason)
        try:
            for number in range(self.num_workers):
                share = _Share(stream, number, self.num_workers, limit_bytes // self.num_workers)
                self._workers.append(_start(context, share))
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> "WorkerBatches":
        return self

    def __next__(self) -> Any:
        """The next batch; its arrays are the caller's own."""
        if not self._workers:
            raise StopIteration
        worker = self._workers[self._turn % self.num_workers]
        try:
            batch = worker.take()
        except BaseException:
            self.close()
            raise
        self._turn += 1
        return batch

    def close(self) -> None:
        """Ends the processes."""
        self._finalizer()


@dataclass(frozen=True, slots=True)
class _Share:
    """What one process makes."""

    stream: Divisible
    worker: int
    num_workers: int
    limit_bytes: int


@dataclass(slots=True)
class _Batch:
    """A message: a batch is ready.

    Attributes:
        tree: the batch, pickled without the contents of its arrays.
        places: (first byte, number of bytes) of each array in the shared memory; None where they follow in the pipe.
        sizes: bytes of each array.
        shared_bytes: size that the shared memory has now.
        slot: to be given back.
    """

    tree: bytes
    places: list[tuple[int, int]] | None
    sizes: list[int]
    shared_bytes: int = 0
    slot: int = 0


@dataclass(slots=True)
class _Failure:
    """A message: the user's function, or a file, raised an exception."""

    error: bytes | None
    name: str
    text: str
    trace: str


@dataclass(slots=True)
class _Remark:
    """A message: something for people."""

    text: str


class _End:
    """A message: the epoch is over."""


class _Memory:
    """A file without a name that two processes map.

    It lives in memory where the system has such files, and otherwise in the folder for temporary files.
    """

    def __init__(self, file: int) -> None:
        self.file = file
        self._map: mmap.mmap | None = None

    @classmethod
    def make(cls) -> "_Memory | None":
        """A new one of size 0; None where processes can't share files."""
        if sys.platform == "win32":
            return None
        try:
            if hasattr(os, "memfd_create"):
                return cls(os.memfd_create("memfit-batches"))
            with tempfile.TemporaryFile(prefix="memfit-batches") as file:
                return cls(os.dup(file.fileno()))
        except OSError:
            return None

    def __reduce__(self) -> Any:
        # Only ever pickled to start a process, which is given a copy of the descriptor.
        return _Memory._received, (reduction.DupFd(self.file),)

    @staticmethod
    def _received(file: Any) -> "_Memory":
        return _Memory(file.detach())

    def grow(self, size: int) -> None:
        """Sets room aside; raises OSError where there is none, which would otherwise end the process at a write."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self.file, 0, size)
        else:
            os.truncate(self.file, size)

    def view(self, size: int) -> memoryview:
        """Its first `size` bytes."""
        if self._map is None or len(self._map) < size:
            self._unmap()
            self._map = mmap.mmap(self.file, size)
        return memoryview(self._map)

    def close(self) -> None:
        """Lets go of it in this process."""
        self._unmap()
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def _unmap(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None


# The program's side.


class _Worker:
    """One process, as the program sees it."""

    def __init__(self, number: int, process: Any, pipe: Connection, memory: _Memory | None) -> None:
        self.number = number
        self.process = process
        self.pipe = pipe
        self.memory = memory

    def take(self) -> Any:
        """Its next batch; raises StopIteration after its last one, and what the process raised."""
        while True:
            message = self._receive()
            if isinstance(message, _Batch):
                return self._unpacked(message)
            if isinstance(message, _Failure):
                raise _rebuilt(message)
            if isinstance(message, _End):
                raise StopIteration
            assert isinstance(message, _Remark)
            _tell(message.text)

    def _receive(self) -> Any:
        connection.wait([self.pipe, self.process.sentinel])
        try:
            # A process that has ended may have said why before.
            if self.pipe.poll():
                return self.pipe.recv()
        except (EOFError, OSError):
            pass
        raise self._died()

    def _unpacked(self, message: _Batch) -> Any:
        buffers: list[Any] = []
        if message.places is None:
            for size in message.sizes:
                buffer = bytearray(size)
                try:
                    if size:
                        self.pipe.recv_bytes_into(buffer)
                except (EOFError, OSError):
                    raise self._died() from None
                buffers.append(buffer)
        elif message.places:
            assert self.memory is not None
            shared = self.memory.view(message.shared_bytes)
            with shared:
                for start, size in message.places:
                    own = np.empty(size, np.uint8)
                    own[...] = np.frombuffer(shared, np.uint8, size, start)
                    buffers.append(own)
        self._give_back(message.slot)
        return pickle.loads(message.tree, buffers=buffers)

    def _give_back(self, slot: int) -> None:
        # It may have died, which is seen when its next batch is asked for.
        with contextlib.suppress(OSError):
            self.pipe.send(slot)

    def _died(self) -> MemfitError:
        self.process.join(_END_SECONDS)
        who = f"worker {self.number} of the stream (process {self.process.pid})"
        return MemfitError(describe_end(who, self.process.exitcode))


def _start(context: Any, share: _Share) -> _Worker:
    memory = _Memory.make()
    near, far = context.Pipe()
    process = context.Process(
        target=_work, args=(share, far, memory, os.getpid()), name=f"memfit-worker-{share.worker}", daemon=True
    )
    worker = _Worker(share.worker, process, near, memory)
    _open_ends.add(near)
    try:
        with warnings.catch_warnings():
            # Python warns of forks in programs with threads; `_context` has looked at which there are.
            warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
            process.start()
    except BaseException:
        near.close()
        if memory is not None:
            memory.close()
        raise
    finally:
        far.close()
    return worker


def _stop(workers: list[_Worker], program: int) -> None:
    if os.getpid() != program:
        return  # a copy in a process that was forked since
    for worker in workers:
        # They only read: nothing is lost or left half done.
        worker.process.terminate()
        worker.pipe.close()
    for worker in workers:
        worker.process.join(_END_SECONDS)
        if worker.process.exitcode is None:
            worker.process.kill()
            worker.process.join()
        worker.process.close()
        if worker.memory is not None:
            worker.memory.close()
    workers.clear()


def _context(stream: Divisible) -> tuple[Any, str]:
    """How processes are started, and a sentence where that isn't as it should be."""
    can_fork = "fork" in multiprocessing.get_all_start_methods() and sys.platform != "darwin"
    loaded = [name for name in _NOT_FORKABLE if name in sys.modules]
    if can_fork and not loaded:
        return multiprocessing.get_context("fork"), ""
    try:
        pickle.dumps(stream)
    except Exception as error:
        if not can_fork:
            raise MemfitError(
                f"the stream can't be given to workers, which are started anew on this system: {error}. A transform "
                "must be a function that is defined at the top of a module, not a lambda or a function in a function."
            ) from error
        reason = (
            f"workers of the stream are forked although {loaded[0]} is loaded, because the stream can't be pickled "
            f"({error}); they may hang. A transform that is defined at the top of a module can be pickled."
        )
        return multiprocessing.get_context("fork"), reason
    return multiprocessing.get_context("spawn"), ""


def _rebuilt(failure: _Failure) -> BaseException:
    """The exception of a worker, with the worker's own traceback as its cause."""
    error: BaseException = MemfitError(f"{failure.name}: {failure.text}")
    if failure.error is not None:
        # Exceptions whose constructors want more than a message can be pickled, and not always unpickled.
        with contextlib.suppress(Exception):
            error = pickle.loads(failure.error)
    error.__cause__ = _WorkerTraceback(failure.trace)
    return error


class _WorkerTraceback(Exception):
    """Where in a worker an exception was raised."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'in a worker of the stream:\n"""\n{self.text}"""'


def _tell(text: str) -> None:
    if text not in _told:
        _told.add(text)
        _log.warning(text)


# The side of the processes.


def _work(share: _Share, pipe: Connection, memory: _Memory | None, program: int) -> None:
    # An interrupt from the keyboard reaches all processes; the program decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for end in list(_open_ends):
        end.close()
    sender = _Sender(pipe, memory, share.limit_bytes, program)
    try:
        batches = share.stream.part(share.worker, share.num_workers)
        for batch in batches:
            sender.send(batch)
            del batch
        pipe.send(_End())
        sender.wait_for_all()
    except (BrokenPipeError, ConnectionResetError, EOFError):
        pass  # the program has no more use for batches
    except BaseException as error:
        _send_failure(pipe, error)


def _send_failure(pipe: Connection, error: BaseException) -> None:
    try:
        packed: bytes | None = pickle.dumps(error)
    except Exception:
        packed = None
    trace = "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError):
        pipe.send(_Failure(packed, type(error).__name__, str(error), trace))


class _Sender:
    """Puts batches into shared memory, as many as there is room for."""

    def __init__(self, pipe: Connection, memory: _Memory | None, limit_bytes: int, program: int) -> None:
        self._pipe = pipe
        self._memory = memory
        self._limit_bytes = limit_bytes
        self._program = program
        self._slot_bytes = 0
        self._num_slots = 0
        self._free: list[int] = []

    def send(self, batch: Any) -> None:
        """Hands a batch over, when there is room."""
        found: list[pickle.PickleBuffer] = []
        tree = pickle.dumps(batch, protocol=5, buffer_callback=found.append)
        buffers = [buffer.raw() for buffer in found]
        sizes = [buffer.nbytes for buffer in buffers]
        starts = [0, *np.cumsum([_aligned(size) for size in sizes]).tolist()]
        self._make_room(starts[-1])
        slot = self._take_slot()
        if self._memory is None:
            self._pipe.send(_Batch(tree, None, sizes, slot=slot))
            for buffer in buffers:
                if buffer.nbytes:
                    self._pipe.send_bytes(buffer)
            return
        base = slot * self._slot_bytes
        shared_bytes = self._num_slots * self._slot_bytes
        if buffers:
            with self._memory.view(shared_bytes) as shared:
                for start, buffer in zip(starts, buffers, strict=False):
                    shared[base + start : base + start + buffer.nbytes] = buffer
        places = [(base + start, size) for start, size in zip(starts, sizes, strict=False)]
        self._pipe.send(_Batch(tree, places, sizes, shared_bytes, slot))

    def wait_for_all(self) -> None:
        """Until everything was taken: the memory, and what the pipe holds, would otherwise go with this process."""
        while len(self._free) < self._num_slots:
            self._free.append(self._receive())

    def _make_room(self, size: int) -> None:
        if size <= self._slot_bytes and self._num_slots:
            return
        self.wait_for_all()
        # Whole pages, so that the next batch, if it is a little larger, needs no new division.
        self._slot_bytes = max(mmap.PAGESIZE, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        # One batch more is in the making.
        self._num_slots = max(1, min(_MOST_SLOTS, self._limit_bytes // self._slot_bytes - 1))
        self._free = list(range(self._num_slots))
        if self._memory is not None:
            try:
                self._memory.grow(self._num_slots * self._slot_bytes)
            except OSError as error:
                self._memory.close()
                self._memory = None
                self._pipe.send(
                    _Remark(f"batches of the stream's workers go through pipes, which is slower: {error.strerror}.")
                )

    def _take_slot(self) -> int:
        if not self._free:
            self._free.append(self._receive())
        return self._free.pop()

    def _receive(self) -> int:
        while not self._pipe.poll(_LOOK_SECONDS):
            if os.getppid() != self._program:
                raise EOFError
        return int(self._pipe.recv())


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
