"""Processes that make the batches of a stream, for programs that have no loader of their own with workers.

Each process makes every n-th batch and puts it into memory that it shares with the program; the program takes the
batches in turn, so that the order is the one without workers. That memory has no name: it can't be left behind,
whatever happens to the processes, and the size of /dev/shm, 64 MiB in many containers, doesn't bound it. How far the
processes work ahead is bounded by bytes.

Processes are forked where that is safe, since a forked process starts at once and needs nothing pickled. Threads of JAX
and TensorFlow don't survive a fork, so in a program that has loaded one of them, and on systems that don't fork,
processes are started anew; transforms then have to be picklable, and where they aren't, processes are forked all the
same. A forked process that finds a lock held by a thread of the program would wait for ever: one that doesn't begin its
work in time is ended, and that is said.
"""

import contextlib
import functools
import gc
import logging
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from multiprocessing import connection, reduction
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from memfit.core.errors import BadInput, MemfitError
from memfit.core.streams import DividedStream
from memfit.core.worker_ends import describe_end

_log = logging.getLogger("memfit")

# Libraries whose threads hold locks that a forked process would wait for.
_NOT_FORKABLE = ("jax", "jaxlib", "tensorflow")
# Batches that one process may have ready; more only help where the time that batches take varies much.
_MOST_SLOTS = 4
_ALIGNMENT = 64
# How often one side looks whether the other is still there, how long a process may take to begin (one that is started
# anew loads the program's libraries first), and how long to end.
_LOOK_SECONDS = 1.0
_BEGIN_SECONDS = 300.0
_END_SECONDS = 5.0

# The program's ends of all pipes. A forked process has copies of them, and must close them: another process would
# otherwise never learn that the program has ended.
_open_ends: "weakref.WeakSet[Connection]" = weakref.WeakSet()
# One process at a time: another that is forked meanwhile would hold copies of the ends that show this one's death.
_starting = threading.Lock()
os.register_at_fork(after_in_child=_starting._at_fork_reinit)  # type: ignore[attr-defined]
# What a process says beside its batches.
_BEGUN, _END = "begun", "end"


class WorkerBatches:
    """The batches of one epoch, from where the stream is, in order. Its processes end with it.

    Args:
        stream: it is copied to the processes, and its position isn't changed.
        num_workers: processes; fewer are started where there is not enough to do, or not enough room.
        limit_bytes: of batches that are ready or being made, all processes together. A single batch is always made.
    """

    def __init__(self, stream: DividedStream, num_workers: int, *, limit_bytes: int) -> None:
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
        context = _context(stream)
        try:
            for number in range(self.num_workers):
                self._workers.append(_start(context, stream, number, self.num_workers, limit_bytes))
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


class _Batch(NamedTuple):
    """A batch that is ready in the shared memory."""

    tree: bytes  # the batch, pickled without the contents of its arrays
    spans: list[tuple[int, int]]  # first byte and number of bytes of each array in the shared memory
    shared_bytes: int  # that the shared memory has now
    slot: int  # to be given back


class _Failure(NamedTuple):
    """An exception of the user's function, or of a file; pickled where that can be done."""

    error: bytes | None
    text: str
    trace: str


class _Memory:
    """A file without a name that two processes map; in memory where the system has such, or else a temporary one."""

    def __init__(self, file: int | None = None) -> None:
        if file is None and hasattr(os, "memfd_create"):
            file = os.memfd_create("memfit-batches")
        elif file is None:
            with tempfile.TemporaryFile(prefix="memfit-batches") as temporary:
                file = os.dup(temporary.fileno())
        self.file = file
        self._map: mmap.mmap | None = None

    def __reduce__(self) -> Any:
        # Only ever pickled to start a process, which is given a copy of the descriptor.
        return _received, (reduction.DupFd(self.file),)

    def grow(self, size: int) -> None:
        """Sets room aside; raises OSError where there is none, which would otherwise end the process at a write."""
        getattr(os, "posix_fallocate", lambda file, _, size: os.truncate(file, size))(self.file, 0, size)

    def view(self, size: int) -> memoryview:
        """Its first `size` bytes."""
        if self._map is None or len(self._map) < size:
            if self._map is not None:
                self._map.close()
                self._map = None
            self._map = mmap.mmap(self.file, size)
        return memoryview(self._map)

    def close(self) -> None:
        """Lets go of it in this process."""
        if self._map is not None:
            self._map.close()
            self._map = None
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


def _received(file: Any) -> _Memory:
    return _Memory(file.detach())


# The program's side.


class _Worker:
    """One process, as the program sees it."""

    def __init__(self, number: int, process: Any, pipe: Connection, memory: _Memory) -> None:
        self._name = f"worker {number} of the stream (process {getattr(process, 'pid', None)})"
        self.process = process
        self.pipe = pipe
        self.memory = memory
        self._deadline: float | None = time.monotonic() + _BEGIN_SECONDS

    def take(self) -> Any:
        """Its next batch; raises StopIteration after its last one, and what the process raised."""
        message = self._receive()
        if message == _BEGUN:
            self._deadline = None
            message = self._receive()
        if message == _END:
            raise StopIteration
        if isinstance(message, _Failure):
            raise _rebuilt(message)
        buffers: list[Any] = []
        with self.memory.view(message.shared_bytes) as shared:
            for start, size in message.spans:
                own = np.empty(size, np.uint8)
                own[...] = np.frombuffer(shared, np.uint8, size, start)
                buffers.append(own)
        # It may have died, which is seen when its next batch is asked for.
        with contextlib.suppress(OSError):
            self.pipe.send(message.slot)
        return pickle.loads(message.tree, buffers=buffers)

    def _receive(self) -> Any:
        """The next message; how long a batch takes is the user's affair, but a process has to begin in time."""
        while not connection.wait([self.pipe, self.process.sentinel], _LOOK_SECONDS):
            if self._deadline is not None and time.monotonic() > self._deadline:
                raise MemfitError(
                    f"{self._name} has not begun its work in {_BEGIN_SECONDS:.0f} seconds: a forked process waits for "
                    "ever for a lock that a thread of the program held at that moment. Run it again, start the workers "
                    "before other threads, or use none."
                )
        try:
            # A process that has ended may have said why before.
            if self.pipe.poll():
                return self.pipe.recv()
        except (EOFError, OSError):
            pass
        self.process.join(_END_SECONDS)
        raise MemfitError(describe_end(self._name, self.process.exitcode))


def _start(context: Any, stream: DividedStream, number: int, num_workers: int, limit_bytes: int) -> _Worker:
    with _starting:
        memory = _Memory()
        near, far = context.Pipe()
        arguments = (stream, number, num_workers, limit_bytes // num_workers, far, memory, os.getpid())
        process = context.Process(target=_work, args=arguments, name=f"memfit-worker-{number}", daemon=True)
        _open_ends.add(near)
        try:
            with warnings.catch_warnings():
                # Python warns of forks in programs with threads; `_context` has looked at which there are.
                warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
                process.start()
        except BaseException:
            near.close()
            memory.close()
            raise
        finally:
            far.close()
    return _Worker(number, process, near, memory)


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
            worker.process.join(_END_SECONDS)
        if worker.process.exitcode is not None:
            worker.process.close()
        worker.memory.close()
    workers.clear()


def _context(stream: DividedStream) -> Any:
    """How processes are started."""
    can_fork = "fork" in multiprocessing.get_all_start_methods() and sys.platform != "darwin"
    loaded = [name for name in _NOT_FORKABLE if name in sys.modules]
    if can_fork and not loaded:
        return multiprocessing.get_context("fork")
    try:
        pickle.dumps(stream)
    except Exception as error:
        if not can_fork:
            raise MemfitError(
                f"the stream can't be given to workers, which are started anew on this system: {error}. A transform "
                "must be a function that is defined at the top of a module, not a lambda or a function in a function."
            ) from error
        _warn_once(
            f"workers of the stream are forked although {loaded[0]} is loaded, because the stream can't be pickled "
            f"({error}); they may hang. A transform that is defined at the top of a module can be pickled."
        )
        return multiprocessing.get_context("fork")
    return multiprocessing.get_context("spawn")


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning(text)


def _rebuilt(failure: _Failure) -> BaseException:
    """The exception of a worker, with the worker's own traceback as its cause."""
    error: BaseException = MemfitError(failure.text)
    if failure.error is not None:
        # Exceptions whose constructors want more than a message can be pickled, and not always unpickled.
        with contextlib.suppress(Exception):
            error = pickle.loads(failure.error)
    error.__cause__ = _WorkerTraceback(f'in a worker of the stream:\n"""\n{failure.trace}"""')
    return error


class _WorkerTraceback(Exception):
    """Where in a worker an exception was raised."""


# The side of the processes.


def _work(
    stream: DividedStream,
    number: int,
    num_workers: int,
    limit_bytes: int,
    pipe: Connection,
    memory: _Memory,
    program: int,
) -> None:
    # An interrupt from the keyboard reaches all processes; the program decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for end in list(_open_ends):
        end.close()
    if multiprocessing.parent_process() is not None:
        # What was there before a fork is neither copied by looking through it, nor ended here: what the program reads
        # ahead waits for threads that this process has not.
        gc.freeze()
    sender = _Sender(pipe, memory, limit_bytes, program)
    try:
        pipe.send(_BEGUN)
        for batch in stream.part(number, num_workers):
            sender.send(batch)
            del batch
        pipe.send(_END)
        sender.wait_for_all()
    except (BrokenPipeError, ConnectionResetError, EOFError):
        pass  # the program has no more use for batches
    except BaseException as error:
        packed: bytes | None = None
        with contextlib.suppress(Exception):
            packed = pickle.dumps(error)
        failure = _Failure(packed, f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))
        with contextlib.suppress(OSError):
            pipe.send(failure)


class _Sender:
    """Puts batches into shared memory, as many as there is room for."""

    def __init__(self, pipe: Connection, memory: _Memory, limit_bytes: int, program: int) -> None:
        self._pipe = pipe
        self._memory = memory
        self._limit_bytes = limit_bytes
        self._program = program
        self._slot_bytes = 0
        self._num_slots = 0
        self._free: list[int] = []

    def send(self, batch: Any) -> None:
        """Hands a batch over, when there is room."""
        arrays: list[pickle.PickleBuffer] = []
        tree = pickle.dumps(batch, protocol=5, buffer_callback=arrays.append)
        buffers = [array.raw() for array in arrays]
        starts = [0, *np.cumsum([-(-buffer.nbytes // _ALIGNMENT) * _ALIGNMENT for buffer in buffers]).tolist()]
        if starts[-1] > self._slot_bytes or not self._num_slots:
            self._divide(starts[-1])
        slot = self._free.pop() if self._free else self._receive()
        base, shared_bytes = slot * self._slot_bytes, self._num_slots * self._slot_bytes
        spans = [(base + start, buffer.nbytes) for start, buffer in zip(starts, buffers, strict=False)]
        with self._memory.view(shared_bytes) as shared:
            for (start, size), buffer in zip(spans, buffers, strict=True):
                shared[start : start + size] = buffer
        self._pipe.send(_Batch(tree, spans, shared_bytes, slot))

    def wait_for_all(self) -> None:
        """Until everything was taken: the memory, and what the pipe holds, would otherwise go with this process."""
        while len(self._free) < self._num_slots:
            self._free.append(self._receive())

    def _divide(self, size: int) -> None:
        """Cuts the memory into slots for batches of so many bytes."""
        self.wait_for_all()
        # Whole pages, so that the next batch, if it is a little larger, needs no new division.
        self._slot_bytes = max(mmap.PAGESIZE, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        # One batch more is in the making.
        self._num_slots = max(1, min(_MOST_SLOTS, self._limit_bytes // self._slot_bytes - 1))
        self._free = list(range(self._num_slots))
        try:
            self._memory.grow(self._num_slots * self._slot_bytes)
        except OSError as error:
            raise MemfitError(
                f"a worker of the stream has no room for batches of {self._slot_bytes} bytes in the memory that it "
                f"shares with the program: {error.strerror}. Make room, or use smaller batches or fewer workers."
            ) from error

    def _receive(self) -> int:
        while not self._pipe.poll(_LOOK_SECONDS):
            if os.getppid() != self._program:
                raise EOFError
        return int(self._pipe.recv())
