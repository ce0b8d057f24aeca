"""A stream of batches: a source, read within a budget, in an order that depends on seed and epoch alone.

A stream is a description that can be copied to other processes; files and threads exist while it is iterated over. It
knows its position as a place in the order of an epoch, so that it can be continued with other numbers of workers and
ranks.
"""

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from memfit.core.errors import BadInput
from memfit.core.units import format_size
from memfit.data.geometry import (
    ALIGNMENT,
    NUM_IN_FLIGHT,
    Geometry,
    divide,
    in_flight_bytes,
    num_readers,
    sizes_of,
    windows_bytes,
)
from memfit.data.order import EpochShare, Order
from memfit.data.reader import Assembly, Transforms, read_epoch
from memfit.data.source import Field, Source
from memfit.data.workers import WorkerBatches

_log = logging.getLogger("memfit")

_FORMAT = 2
_FLOATING = ("float16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """What is seldom changed of a stream.

    Attributes:
        seed: of the order and of random transforms.
        batch_transform: function of a batch, as `transform` is of a sample.
        dtype: that floating values are given in: float16, float32 or float64; None for as stored.
        drop_last: whether samples that don't fill a batch on each rank are left out.
        on_error: what to do with images that can't be read: "fail" or "skip".
        on_change: what to do with a position that was saved before the files changed: "refuse" it, or "warn" and go on.
        follow_links: whether to read folders and files outside of what was given that links in it lead to.
    """

    seed: int = 0
    batch_transform: Callable[..., Any] | None = None
    dtype: str | None = "float32"
    drop_last: bool = False
    on_error: str = "fail"
    on_change: str = "refuse"
    follow_links: bool = False


DEFAULTS = StreamOptions()


class ArrayStream:
    """Batches of a source; each iteration is an epoch.

    Args:
        source: to read from; it can be read in blocks, or sample by sample.
        batch_size: samples of a batch.
        shuffle: whether each epoch has an order of its own; otherwise samples come as they are stored.
        transform: for each sample.
        memory_bytes: the budget of samples in memory, all workers together.
        options: as for `memfit.stream`.
        randomness: of libraries that transforms draw from, beside Python's and NumPy's.

    Attributes:
        num_samples: of an epoch, of all ranks together.
        fields: the arrays of a sample, as they are stored.
        dtypes: that the fields are given in, before transforms.
        classes: names of the classes that label numbers stand for; () where labels are as stored.
        batch_bytes: bytes of a full batch, before transforms.
        rank: this process's number, where the stream was split; None where it gives everything.
        epoch: in progress, or the one that comes next, counted from 0.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        shuffle: bool = True,
        transform: Callable[..., Any] | None = None,
        memory_bytes: int,
        options: StreamOptions = DEFAULTS,
        randomness: Sequence[Any] = (),
    ) -> None:
        seed = options.seed
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise BadInput(f"batch_size must be a whole number of at least 1, but {batch_size!r} was given.")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise BadInput(f"seed must be a whole number, but {seed!r} was given.")
        if options.on_change not in ("refuse", "warn"):
            raise BadInput(f'on_change must be "refuse" or "warn", but {options.on_change!r} was given.')
        self.source = source
        self.num_samples = source.num_samples
        self.fields = source.fields
        self.classes = source.classes
        self.batch_size = batch_size
        self.shuffle = bool(shuffle)
        self.seed = seed
        self.memory_bytes = memory_bytes
        self._options = options
        self.dtypes = given_dtypes(source.fields, options.dtype)
        self._sizes = sizes_of(source.fields, self.dtypes)
        self.batch_bytes = batch_size * self._sizes.given_bytes
        self._transforms = Transforms(transform, options.batch_transform, randomness)
        if self._transforms.takes_labels and not any(field.is_label for field in source.fields):
            raise BadInput(
                f"a transform takes features and labels, and {source.name} has no labels. Say which they are with "
                "labels=..., or let the transform take the features alone."
            )
        self.geometry = divide(
            source.num_samples, source.layout, self._sizes, batch_size, memory_bytes, shuffle=self.shuffle
        )
        self.rank: int | None = None
        self.num_ranks = 1
        self.epoch = 0
        # Once: each time would ask for the size and the time of every file, which takes long where they are remote.
        self._fingerprint = source.fingerprint()
        self._start = 0
        self._rounds = 0
        self._is_running = False

    @property
    def window_bytes(self) -> int:
        """Bytes of samples that are held in memory beside batches, all workers together."""
        if self.source.layout.is_by_sample:
            return max(self.memory_bytes // 2, 1)
        padding = self.geometry.num_windows_held * (len(self.fields) + 1) * ALIGNMENT
        return windows_bytes(self.geometry, self._sizes, shuffle=self.shuffle) + padding

    @property
    def in_flight_bytes(self) -> int:
        """Room for batches that are made and not yet given out, all workers together."""
        if self.source.layout.is_by_sample:
            # No windows are held, and transforms make batches smaller as often as larger.
            return min(NUM_IN_FLIGHT * self.batch_bytes, self.memory_bytes // 2)
        return in_flight_bytes(self.batch_bytes, self.memory_bytes)

    def __len__(self) -> int:
        """Batches that this rank gives in a whole epoch."""
        return self._share(0).num_batches

    @property
    def num_batches_left(self) -> int:
        """Batches that this rank still gives of the epoch in progress, or of the one that comes next."""
        return max(0, self._share(self._start).num_batches - self._rounds)

    def __iter__(self) -> Iterator[Any]:
        """The batches of the epoch that comes next, or what is left of the one that was loaded."""
        epoch = self._begin()
        return self._run(epoch, self._read(0, 1, start=self._start))

    def parallel(self, num_workers: int) -> Iterator[Any]:
        """An epoch, as iterating gives it, made by worker processes."""
        epoch = self._begin()
        try:
            batches = WorkerBatches(self, num_workers, limit_bytes=self.in_flight_bytes)
        except BaseException:
            self._is_running = False
            raise
        return self._run(epoch, batches)

    def part(self, worker: int, num_workers: int) -> Generator[Any]:
        """The batches that one worker makes of the epoch that comes next, in order; counts as no iteration.

        Batch `i` of this rank is made by worker `i % working(num_workers)`; the others make nothing.
        """
        working = self.working(num_workers)
        return self._read(worker, working, start=self._start if worker < working else self.num_samples)

    def working(self, num_workers: int) -> int:
        """How many of `num_workers` workers have something to do.

        Where lanes can't be dealt out evenly, fewer workers read each block once, which is faster than more workers
        that read blocks several times; except where transforms or decoding are what takes the time. No more than there
        is room for what reading takes.
        """
        lanes = self.geometry.num_lanes
        num_workers = min(num_workers, num_readers(self.source.layout, self.memory_bytes))
        apart = [count for count in range(1, num_workers + 1) if lanes % (self.num_ranks * count) == 0]
        reads_once = self.source.layout.is_by_sample or not self.shuffle
        if reads_once or (self._transforms.changes_samples and (lanes == 1 or not apart)):
            return max(1, num_workers)
        return max(apart, default=1)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch, from its beginning."""
        self.epoch = epoch
        self._start = self._rounds = 0
        self._is_running = False

    def split(self, rank: int, num_ranks: int) -> "ArrayStream":
        """The share of one of `num_ranks` processes that train together."""
        if not 0 <= rank < num_ranks:
            raise BadInput(f"rank {rank} of {num_ranks} ranks was asked for; ranks are counted from 0.")
        share = self.copy()
        share.rank, share.num_ranks = rank, num_ranks
        first, last = (replace(share._share(0), rank=number) for number in (0, num_ranks - 1))
        most, fewest = first.num_batches, last.num_batches
        if most != fewest and rank == 0:
            _log.warning(
                "ranks of the stream give different numbers of batches, %d and %d: there are too few samples for the "
                "last batch of each. Ranks that synchronize in every step would hang; drop_last=True "
                "leaves these samples out.",
                *(most, fewest),
            )
        return share

    def copy(self) -> "ArrayStream":
        """A stream of its own over the same source, at the same position."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def state_dict(self) -> dict[str, Any]:
        """The position: plain data. Ranks that have given equally many batches have the same state."""
        return self.state_after(0)

    def state_after(self, num_batches: int) -> dict[str, Any]:
        """The state when `num_batches` more batches of this epoch have been given out by each rank."""
        place = self._share(self._start).place_after(self._rounds + num_batches)
        state = {
            "format": _FORMAT,
            "seed": self.seed,
            "epoch": self.epoch,
            "samples": place,
            "shuffle": self.shuffle,
            "geometry": asdict(self.geometry),
            "fields": self._described(),
            "fingerprint": self._fingerprint,
        }
        return state | {"digest": _digest(state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration begins where `state` was taken, with the order that it had."""
        self.geometry = self._checked(state)
        self.seed = state["seed"]
        self.set_epoch(state["epoch"])
        self._start = state["samples"]

    def close(self) -> None:
        """Closes the files of the source."""
        self.source.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_is_running": False}

    def _begin(self) -> int:
        """The epoch of an iteration that begins now."""
        if self._is_running:
            # The last epoch was left before its end.
            self.set_epoch(self.epoch + 1)
        self._is_running = True
        self._rounds = 0
        return self.epoch

    def _run(self, epoch: int, batches: Any) -> Iterator[Any]:
        with contextlib.closing(batches):
            for batch in batches:
                # Counted before it is handed over: a state that is taken while the batch is used lies after it.
                if self._is_running and self.epoch == epoch:
                    self._rounds += 1
                yield batch
                del batch
        if self._is_running and self.epoch == epoch:
            self.set_epoch(epoch + 1)

    def _read(self, worker: int, num_workers: int, *, start: int) -> Generator[Any]:
        order = Order(self.geometry, self.source.layout.edges, self.seed if self.shuffle else None, self.epoch)
        return read_epoch(
            Assembly(self.source, self.dtypes, self._transforms, self.seed, parse_floating(self._options.dtype)),
            order,
            replace(self._share(start), worker=worker, num_workers=num_workers),
            epoch=self.epoch,
            limit_bytes=self.window_bytes // num_workers,
            num_readers=max(1, num_readers(self.source.layout, self.memory_bytes) // num_workers),
        )

    def _share(self, start: int) -> EpochShare:
        drop_last = bool(self._options.drop_last)
        return EpochShare(start, self.num_samples, self.batch_size, self.num_ranks, drop_last, self.rank or 0)

    def _described(self) -> list[str]:
        """What a sample is, for people and to compare."""
        return [f"{field.name} {field.dtype.name} {list(field.shape)}" for field in self.fields]

    def _checked(self, state: dict[str, Any]) -> Geometry:
        """The division of a state, all of which is checked before anything of it is used."""
        try:
            if state["format"] != _FORMAT:
                raise BadInput(
                    f"the state of a stream has format {state['format']!r}, and this version reads {_FORMAT}."
                )
            if state["digest"] != _digest(state):
                raise BadInput(
                    "the state of the stream is damaged: it is not as `state_dict` returned it. Give it unchanged, or "
                    "start over."
                )
            geometry, fields = Geometry(**state["geometry"]), state["fields"]
            is_shuffled, fingerprint = state["shuffle"], state["fingerprint"]
        except (AttributeError, KeyError, TypeError) as error:
            raise BadInput(f"this is no state of a stream: {error!r}. Give what `state_dict` returned.") from None
        if geometry.num_samples != self.num_samples or fields != self._described():
            raise BadInput(
                f"the state is of other data: it was taken with {geometry.num_samples} samples of {', '.join(fields)}, "
                f"and {self.source.name} has {self.num_samples} of {', '.join(self._described())}. Give the same "
                "files, or start over."
            )
        if is_shuffled != self.shuffle:
            raise BadInput(f"the state was taken with shuffle={is_shuffled}, and the stream has {self.shuffle}.")
        if fingerprint != self._fingerprint:
            what = f"{self.source.name} was written or copied since the position was saved, or has another name"
            if self._options.on_change == "refuse":
                raise BadInput(
                    f"{what}: samples could be repeated or skipped in this epoch. Give the files as they were, or "
                    'start over; if the contents are the same, use options=memfit.StreamOptions(on_change="warn").'
                )
            _log.warning("%s. If its contents changed as well, samples are repeated or skipped in this epoch.", what)
        held = windows_bytes(geometry, self._sizes, shuffle=self.shuffle)
        if held > self.memory_bytes and not self.source.layout.is_by_sample:
            raise BadInput(
                f"the state was taken with a larger budget: its order needs {format_size(held)} of memory, and "
                f"memory={format_size(self.memory_bytes)} was given. Give the budget that it was taken with."
            )
        return geometry


def _digest(state: dict[str, Any]) -> str:
    """Of all that a state says of the order: one that was edited since, or read back in part, has another."""
    order = {name: value for name, value in state.items() if name not in ("digest", "fingerprint")}
    return hashlib.sha256(json.dumps(order, sort_keys=True).encode()).hexdigest()[:32]


def parse_floating(dtype: Any) -> np.dtype[Any] | None:
    """The type that floating values are given in, by a name of NumPy's or PyTorch's; None for as stored."""
    if dtype is None:
        return None
    try:
        name = np.dtype(dtype).name
    except TypeError:
        # As PyTorch calls its own.
        name = str(dtype).removeprefix("torch.")
    if name not in _FLOATING:
        raise BadInput(
            f"dtype={dtype!r} can't be given: it is the type of floating values, one of {', '.join(_FLOATING)}, or "
            "None for as stored. Integers, such as the bytes of images, stay as they are."
        )
    floating: np.dtype[Any] = np.dtype(name)
    return floating


def given_dtypes(fields: Sequence[Field], dtype: Any) -> tuple[np.dtype[Any], ...]:
    """Types that fields are given in, where floating values are given as `dtype`."""
    floating = parse_floating(dtype)
    return tuple(
        floating
        if floating is not None and (field.dtype.kind == "f" or (field.is_tabular and not field.is_label))
        else field.dtype
        for field in fields
    )
