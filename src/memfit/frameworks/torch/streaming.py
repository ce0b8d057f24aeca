"""Streams as PyTorch datasets and loaders: tensors, workers, ranks, and a position that counts what was given out.

Workers of a loader work ahead, so that only the loader's own process knows how many batches the program has had; and
workers that aren't kept between epochs begin each time as fresh copies, which know nothing of epochs before. So the
dataset shares with all processes which epochs were begun, and loaders count what they give out.
"""

import contextlib
import gc
import json
import logging
import math
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from memfit.core import env
from memfit.core.errors import BadInput, MemfitError
from memfit.core.streams import BatchStream
from memfit.core.units import format_size
from memfit.core.worker_ends import describe_end
from memfit.frameworks.torch import internals

_log = logging.getLogger("memfit")

# Batches that each worker may have ready.
_MOST_PREFETCHED = 4
# How long workers wait for the first one to begin, which may have to load a large program.
_BEGIN_SECONDS = 600.0
# How long the end of a worker may take to show, after its sockets were closed.
_END_SECONDS = 2.0
# Options of a DataLoader that a stream leaves no choice in.
_DECIDED_BY = {
    "batch_size": "give it to `memfit.stream`",
    "shuffle": "give it to `memfit.stream`",
    "drop_last": "give it to `memfit.stream`",
    "prefetch_factor": "how far workers work ahead follows from the stream's memory",
    "generator": "the order follows from the stream's seed",
}
_DECIDED = {*_DECIDED_BY, "sampler", "batch_sampler", "in_order"}


class SharedEpochs:
    """What all processes know of a dataset: the state it was brought to, and which epochs were begun since.

    A loader tells its workers nothing of epochs: the first worker of an iterator takes one from here, and the others
    look up which. The memory is a tensor, which PyTorch shares with forked processes and with those started anew.
    """

    _SIZE = 2**15
    _NUM_GROUPS = 16
    # Numbers at the beginning: next epoch, whether it is kept, whether workers began one, how many they began, length
    # and version of the state; then of each group of workers its name, its iteration and the epoch that it took; then
    # the state as text.
    _NEXT, _IS_HELD, _IS_TAKEN, _NUM_TAKEN, _LENGTH, _VERSION, _GROUPS = range(7)
    _TEXT = (_GROUPS + 3 * _NUM_GROUPS) * 8

    def __init__(self) -> None:
        self._block = torch.zeros(self._SIZE, dtype=torch.uint8).share_memory_()

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy that wasn't made to start a process is a dataset of its own.
        self._block = state["_block"].share_memory_()

    @property
    def _numbers(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        numbers: np.ndarray[Any, np.dtype[np.int64]] = self._block[: self._TEXT].numpy().view(np.int64)
        return numbers

    @property
    def next_epoch(self) -> int:
        """The epoch that the next iteration takes."""
        return int(self._numbers[self._NEXT])

    @property
    def is_taken(self) -> bool:
        """Whether workers have begun an epoch since the position was last set."""
        return bool(self._numbers[self._IS_TAKEN])

    def set_next(self, epoch: int, *, is_held: bool = False) -> None:
        """The next iteration takes this epoch; with `is_held` it stays the next one."""
        numbers = self._numbers
        numbers[self._NEXT], numbers[self._IS_HELD], numbers[self._IS_TAKEN] = epoch, is_held, False

    @property
    def state(self) -> dict[str, Any]:
        """The state that the dataset was brought to."""
        numbers = self._numbers
        while True:
            version, length = int(numbers[self._VERSION]), int(numbers[self._LENGTH])
            text = self._block[self._TEXT : self._TEXT + length].numpy().tobytes()
            if version % 2 == 0 and version == numbers[self._VERSION]:
                state: dict[str, Any] = json.loads(text)
                return state
            time.sleep(0.001)  # it is being written

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        text = json.dumps(state).encode()
        assert len(text) <= self._SIZE - self._TEXT, "the state of a stream is small"
        numbers = self._numbers
        numbers[self._VERSION] += 1
        self._block[self._TEXT : self._TEXT + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        numbers[self._LENGTH] = len(text)
        numbers[self._VERSION] += 1

    def take(self, group: int | None = None, iteration: int = 0) -> int:
        """The epoch that begins now, in this process or, with `group`, in workers."""
        numbers = self._numbers
        epoch = int(numbers[self._NEXT])
        if not numbers[self._IS_HELD]:
            numbers[self._NEXT] = epoch + 1
        numbers[self._IS_TAKEN] = group is not None
        if group is None:
            return epoch
        place = self._GROUPS + 3 * int(numbers[self._NUM_TAKEN] % self._NUM_GROUPS)
        numbers[self._NUM_TAKEN] += 1
        # The name last: who finds it may read the rest.
        numbers[place] = -1
        numbers[place + 1 : place + 3] = iteration, epoch
        numbers[place] = group
        return epoch

    def taken_by(self, group: int, iteration: int) -> int:
        """The epoch that the first worker of a group took, when it has."""
        parent, deadline = os.getppid(), time.monotonic() + _BEGIN_SECONDS
        while time.monotonic() < deadline and os.getppid() == parent:
            rows = self._numbers[self._GROUPS :].reshape(-1, 3)
            taken = rows[(rows[:, 0] == group) & (rows[:, 1] == iteration)]
            if len(taken):
                return int(taken[0, 2])
            time.sleep(0.001)
        raise MemfitError(
            "the first worker of the DataLoader has not begun the epoch. If other threads of the program start "
            "processes at the same time, use `stream.loader(num_workers=...)`, which doesn't need to know them."
        )


class TorchStream(IterableDataset[Any]):
    """The batches of a stream as tensors; each iteration is an epoch.

    It has a position of its own, which begins at the stream's. In a program of several ranks it is this rank's share,
    unless the stream was split by hand. In a DataLoader it needs `batch_size=None`, since it gives whole batches.
    """

    def __init__(self, stream: BatchStream) -> None:
        super().__init__()
        ranks = env.launched_rank()
        if distributed.is_available() and distributed.is_initialized():
            ranks = (distributed.get_rank(), distributed.get_world_size())
        is_shared = stream.rank is None and ranks is not None and ranks[1] > 1
        self.stream = stream.split(*ranks) if ranks is not None and is_shared else stream.copy()
        self._shared = SharedEpochs()
        self._num_iterations = 0
        # The states that the iteration in this process, and that of a loader which counts, began from; None where there
        # is none; and how many batches they have given out since.
        self._begun: dict[str, Any] | None = None
        self._num_given = 0
        self.begun_by_loader: dict[str, Any] | None = None
        self.num_given_by_loader = 0
        # A state that this worker alone was given, by a loader that keeps a state of each worker.
        self._own: dict[str, Any] | None = None
        self.load_state_dict(self.stream.state_dict())

    def __len__(self) -> int:
        """Batches that this rank gives in a whole epoch."""
        return len(self.stream)

    def __iter__(self) -> Iterator[Any]:
        caller = sys._getframe(1).f_locals.get("self")
        if getattr(caller, "auto_collation", False) and isinstance(getattr(caller, "dataset", None), TorchStream):
            raise BadInput(
                "the stream gives whole batches, and this DataLoader would make batches of them. Give the DataLoader "
                "batch_size=None, and the stream the batch_size; or use `stream.loader(num_workers=...)`."
            )
        worker = get_worker_info()
        number, num_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if worker is not None and not gc.get_freeze_count():
            # Looking through what was there before the fork would copy the pages that it lies in.
            gc.freeze()
        state, self._own = self._own, None
        if state is not None:
            epoch = int(state["epoch"])
            self._shared.set_next(epoch + 1)
        else:
            epoch = self._take_epoch(number, is_worker=worker is not None)
            state = self._shared.state
        # Also for a later epoch: the order follows from its seed and its division of the budget.
        self.stream.load_state_dict(state)
        if epoch != state["epoch"]:
            self.stream.set_epoch(epoch)
        self._begun = self.stream.state_dict()
        self._num_given = 0
        return self._run(self._begun, number, num_workers)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch, from its beginning."""
        self.load_state_dict(self._beginning_of(epoch))

    def state_dict(self) -> dict[str, Any]:
        """The position: what this process, or this worker, has given out."""
        worker = get_worker_info()
        if self._begun is not None:
            # All workers that work have given as many, as far as one of them can tell.
            num_working = 1 if worker is None else self.stream.working(worker.num_workers)
            return self.state_after(self._num_given * num_working, self._begun)
        if worker is None and self._shared.is_taken:
            raise BadInput(
                "workers of a DataLoader make the batches, and the dataset doesn't know how many were given out. Use "
                "`stream.loader(num_workers=...)`, which does, or iterate over `guard.batches(loader)`."
            )
        return self.next_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration begins where `state` was taken, with however many workers; in a worker, its own one."""
        self.stream.load_state_dict(state)
        if get_worker_info() is not None:
            self._own = state
            return
        self._shared.state = state
        self._shared.set_next(int(state["epoch"]))
        self._begun = None

    def next_state(self, *, is_held: bool = False) -> dict[str, Any]:
        """The state that the next iteration begins from; where it is held so do others, until `set_epoch` is called."""
        state, epoch = self._shared.state, self._shared.next_epoch
        if epoch != state["epoch"]:
            state = self._beginning_of(epoch)
        if is_held:
            self._shared.set_next(epoch, is_held=True)
        return state

    def state_after(self, num_batches: int, begun: dict[str, Any]) -> dict[str, Any]:
        """The state when an iteration that began from `begun` has given out so many batches."""
        twin = self.stream.copy()
        twin.load_state_dict(begun)
        return twin.state_after(num_batches)

    def _beginning_of(self, epoch: int) -> dict[str, Any]:
        twin = self.stream.copy()
        # The order follows from its seed and its division of the budget.
        twin.load_state_dict(self._shared.state)
        twin.set_epoch(epoch)
        return twin.state_dict()

    def _take_epoch(self, number: int, *, is_worker: bool) -> int:
        iteration, self._num_iterations = self._num_iterations, self._num_iterations + 1
        if not is_worker:
            return self._shared.take()
        # The processes of one iterator are made one after the other, so this names the iterator.
        process: Any = multiprocessing.current_process()
        group = int(process._identity[-1]) - number
        return self._shared.take(group, iteration) if number == 0 else self._shared.taken_by(group, iteration)

    def _run(self, begun: dict[str, Any], number: int, num_workers: int) -> Iterator[Any]:
        is_worker = get_worker_info() is not None
        with contextlib.closing(self.stream.part(number, num_workers)) as batches:
            for batch in batches:
                if self._begun is begun:
                    self._num_given += 1
                # Shared here: PyTorch would do it in a thread, whose errors nobody hears of, and wait for ever.
                yield to_tensors(batch, is_shared=is_worker)
                del batch
        if self._begun is begun and not is_worker:
            self._begun = None


class _Counting:
    """The position of a loader over a `TorchStream`, counted in the process that takes the batches.

    The dataset keeps it for all loaders over it.
    """

    _dataset: TorchStream

    @property
    def epoch(self) -> int:
        """The epoch in progress, or the one that comes next, counted from 0."""
        return int((self._dataset.begun_by_loader or self._dataset.next_state())["epoch"])

    def state_dict(self) -> dict[str, Any]:
        """The position after what was given out, whatever workers have ready."""
        dataset = self._dataset
        if dataset.begun_by_loader is None:
            return dataset.next_state()
        return dataset.state_after(dataset.num_given_by_loader, dataset.begun_by_loader)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration begins where `state` was taken."""
        self._dataset.begun_by_loader = None
        self._dataset.load_state_dict(state)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch, from its beginning."""
        self._dataset.begun_by_loader = None
        self._dataset.set_epoch(epoch)

    def _count(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """The batches of the epoch that comes next, or what is left of the one that was loaded."""
        # One that was left before its end is over.
        self._end(self._dataset.begun_by_loader)
        # Held, because it is not known when workers come to take it.
        begun = self._dataset.begun_by_loader = self._dataset.next_state(is_held=True)
        self._dataset.num_given_by_loader = 0
        return self._run(begun, _told_of_ends(begin()))

    def _run(self, begun: dict[str, Any], batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            if self._dataset.begun_by_loader is begun:
                self._dataset.num_given_by_loader += 1
            yield batch
            del batch
        self._end(begun)

    def _end(self, begun: dict[str, Any] | None) -> None:
        if begun is not None and self._dataset.begun_by_loader is begun:
            self.set_epoch(int(begun["epoch"]) + 1)


class StreamLoader(_Counting, DataLoader[Any]):
    """A DataLoader over a stream, which can be saved and resumed at the exact batch.

    What workers have ready stays within the stream's budget. It draws no random numbers. Its state is the same
    whatever the number of workers, and of ranks.

    Args:
        stream: to take batches from.
        num_workers: processes that make batches; fewer are started where there is nothing to do for more, or no room in
            the budget or in /dev/shm.
        options: of PyTorch's DataLoader, such as pin_memory; `persistent_workers` is True if not given.
    """

    def __init__(self, stream: BatchStream, num_workers: int = 0, **options: Any) -> None:
        if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 0:
            raise BadInput(f"num_workers must be a whole number of at least 0, but {num_workers!r} was given.")
        refused = sorted(_DECIDED & options.keys())
        if refused:
            raise BadInput(
                f"a loader of a stream takes no {refused[0]}: {_DECIDED_BY.get(refused[0], 'the stream decides it')}."
            )
        dataset = TorchStream(stream)
        pin_memory = bool(options.pop("pin_memory", False))
        num_workers, prefetch_factor = _room(dataset.stream, num_workers, pin_memory=pin_memory)
        is_persistent = bool(options.pop("persistent_workers", True)) and num_workers > 0
        super().__init__(
            dataset,
            batch_size=None,
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=is_persistent,
            prefetch_factor=prefetch_factor,
            # PyTorch's own would make lists of tuples.
            collate_fn=options.pop("collate_fn", _as_it_is),
            # Of its own, so that the program's random numbers are the same with any number of workers.
            generator=torch.Generator(),
            **options,
        )
        self._dataset = dataset

    def __iter__(self) -> Any:
        """The batches of the epoch that comes next, or what is left of the one that was loaded."""
        return self._count(super().__iter__)


def _told_of_ends(batches: Any) -> Iterator[Any]:
    """The batches of a DataLoader; a worker that has ended too early is named, whatever PyTorch says of it.

    What that is depends on the moment: a socket that was reset, one that can't be connected to, an error of its own.
    """
    # A worker's end is told where a batch is asked for, and not in whatever line the program is at.
    internals.forget_workers(batches)
    try:
        yield from batches
    except (EOFError, OSError, RuntimeError, pickle.UnpicklingError) as error:
        ended = _ended_worker(batches, error)
        if ended is None:
            raise
        who = f"worker process {ended.pid} of the stream's loader"
        raise MemfitError(describe_end(who, ended.exitcode)) from error


def _ended_worker(batches: Any, error: Exception) -> Any:
    """The worker that ended before its work was done; None where all go on."""
    # One that ends with exit code 0 is done, unless its batches are still expected or PyTorch names it.
    workers, expected = internals.workers_of(batches)
    named = str(error) if str(error).endswith("exited unexpectedly") else ""
    deadline = time.monotonic() + (0 if isinstance(error, RuntimeError) else _END_SECONDS)
    while True:
        ended = [
            worker
            for worker, works in zip(workers, expected, strict=False)
            if worker.exitcode or (worker.exitcode == 0 and (works or str(worker.pid) in named))
        ]
        if ended or not workers or time.monotonic() >= deadline:
            # Those that PyTorch ends itself afterwards have this signal.
            return next((worker for worker in ended if worker.exitcode != -signal.SIGTERM), (ended or [None])[0])
        time.sleep(0.05)


class CountedLoader(_Counting):
    """A DataLoader over a `TorchStream` that the user made, with a state as `StreamLoader` has."""

    def __init__(self, loader: "DataLoader[Any]") -> None:
        assert isinstance(loader.dataset, TorchStream)
        self.loader = loader
        self._dataset = loader.dataset

    def __getattr__(self, name: str) -> Any:
        # What the loader draws its workers' seed from, and whether it keeps them.
        if name in ("generator", "persistent_workers", "_iterator"):
            return getattr(self.loader, name)
        raise AttributeError(name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return self._count(lambda: iter(self.loader))


class TorchRandomness:
    """PyTorch's random numbers on the CPU, which transforms draw from."""

    save = staticmethod(torch.default_generator.get_state)
    restore = staticmethod(torch.default_generator.set_state)
    # `torch.manual_seed` would seed devices too, which takes longer than most transforms.
    seed = staticmethod(torch.default_generator.manual_seed)


def is_stream(value: Any) -> bool:
    """True for a stream of arrays, of which a `StreamLoader` can be made."""
    return all(hasattr(value, name) for name in ("part", "working", "split", "state_after", "load_state_dict"))


def is_over_stream(loader: Any) -> bool:
    """True for a DataLoader that a user made over a `TorchStream`."""
    is_plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    return is_plain and loader.batch_size is None and isinstance(loader.dataset, TorchStream)


def to_tensors(batch: Any, *, is_shared: bool = False) -> Any:
    """The batch with tensors in the place of arrays, which they share their memory with.

    With `is_shared` they are in memory that other processes can map.
    """
    if isinstance(batch, np.ndarray | np.generic):
        tensor = _tensor(np.asarray(batch))
        if not is_shared:
            return tensor
        try:
            return tensor.share_memory_()
        except RuntimeError as error:
            free = _free_shared_bytes()
            raise MemfitError(
                f"a worker has no room for an array of {format_size(tensor.nbytes)} in the memory that it shares with "
                f"the program{'' if free is None else f': /dev/shm has {format_size(free)} free'}. Give the container "
                f"a larger --shm-size, or the loader fewer workers. ({error})"
            ) from None
    if isinstance(batch, dict):
        return {key: to_tensors(value, is_shared=is_shared) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        values = [to_tensors(value, is_shared=is_shared) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def _tensor(array: np.ndarray[Any, np.dtype[Any]]) -> torch.Tensor:
    if not array.flags.writeable or any(stride < 0 for stride in array.strides) or not array.dtype.isnative:
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    try:
        return torch.from_numpy(array)
    except TypeError:
        raise BadInput(
            f"an array of {array.dtype} can't become a tensor. Leave the column out with columns=..., or turn it into "
            "numbers in a transform."
        ) from None


def _room(stream: BatchStream, num_workers: int, *, pin_memory: bool) -> tuple[int, int | None]:
    """How many workers have room for their batches, and how many batches each may have ready."""
    if num_workers == 0:
        return 0, None
    num_workers = stream.working(num_workers)
    batch_bytes = max(1, stream.batch_bytes)
    # The program holds one while it takes the next; another is on its way to memory that a device copies from.
    num_held = 2 + int(pin_memory)
    num_ahead = max(1, stream.in_flight_bytes // batch_bytes - num_held)
    where = "the stream's budget"
    shared = _free_shared_bytes()
    if shared is not None and shared // batch_bytes - num_held < num_ahead:
        num_ahead, where = max(0, shared // batch_bytes - num_held), f"/dev/shm, which has {format_size(shared)} free,"
    if num_ahead < num_workers:
        _log.warning(
            "%d of %d workers are used: %s has room for no more batches of %s. Give the stream more memory%s, or "
            "smaller batches.",
            *(num_ahead, num_workers, where, format_size(batch_bytes)),
            " or the container a larger --shm-size" if where.startswith("/dev") else "",
        )
        num_workers = num_ahead
    if num_workers == 0:
        return 0, None
    return num_workers, min(_MOST_PREFETCHED, math.floor(num_ahead / num_workers))


def _free_shared_bytes() -> int | None:
    """Room for batches of workers, which PyTorch hands over in /dev/shm; None where there is no such limit."""
    try:
        shared = os.statvfs("/dev/shm")
    except (AttributeError, OSError):
        return None
    return shared.f_bavail * shared.f_frsize


def _as_it_is(batch: Any) -> Any:
    return batch
