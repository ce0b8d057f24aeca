"""The position of a run in its data: after a resume, each epoch goes on with the batch that would have come next.

The position is the number of batches that were given out, not of those that workers have fetched ahead. How a loader is
brought back there depends on what it is: one with a state of its own is given that state, and so are memfit's streams
and loaders over them; PyTorch's map-style loader draws the same order again and leaves out batches before they are
loaded; anything else that can be iterated over again is, and batches are dropped. What can't be begun again is said.
"""

import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypedDict

import torch
from torch.utils.data import DataLoader, IterableDataset

from memfit.core.guarding import BadCheckpoint
from memfit.core.typed_data import Count, mismatch
from memfit.frameworks.torch.guard.sample_order import Indices, Sources, is_warm, open_at
from memfit.frameworks.torch.guard.snapshot import RandomState
from memfit.frameworks.torch.guard.state_checks import check_generators, check_random
from memfit.frameworks.torch.streaming import CountedLoader, StreamLoader, is_over_stream, is_stream

# How a loader is brought to a position.
STATEFUL = "stateful"  # it has `state_dict` and `load_state_dict`
STATEFUL_DATASET = "stateful dataset"  # PyTorch's loader, without workers, over an iterable dataset that has both
ORDERED = "ordered"  # PyTorch's loader over a map-style dataset
SEQUENCE = "sequence"  # a list or tuple
AGAIN = "again"  # gives its batches again when it is iterated over again
ONCE = "once"  # a generator or another iterator


class _SavedPosition(TypedDict):
    """Where a run is in its data."""

    epoch: Count
    batch: Count
    is_running: bool
    told: dict[str, int]
    begin: dict[str, Any]
    order: int | None
    loader: Any
    now: dict[str, Any]
    is_exhausted: bool


class _Begin(TypedDict):
    """How an epoch began."""

    kind: str
    warm: bool
    length: Count | None
    sources: "_States"


class _States(TypedDict):
    """Random states from which the order of the data was drawn."""

    random: dict[str, Any]
    own: dict[str, Any]


class Batches:
    """Iterates over loaders, one epoch after the other; at the end of each a window that isn't full is finished."""

    def __init__(self, finish_window: Callable[[], None], say: Callable[[str], None]) -> None:
        self._finish_window = finish_window
        self._say = say
        self.epoch = 0  # the epoch in progress, or the one that comes next, counted from 0
        self.batch = 0  # batches of it that were given out
        self._is_running = False
        self._num_to_skip = 0
        self._resumed: dict[str, Any] | None = None
        self._random: RandomState | None = None
        self._loader: Callable[[], Any] = lambda: None
        self._begin: dict[str, Any] = {}
        self._iterating: Any = None
        self._indices: Indices | None = None
        self._told: dict[str, int] = {}
        self._of_streams: weakref.WeakKeyDictionary[Any, StreamLoader] = weakref.WeakKeyDictionary()

    def over(self, loader: Any) -> "Epochs":
        """The batches of a loader; each iteration is an epoch, and empty where that was complete before a resume."""
        return Epochs(self, loader)

    def epochs(self, total: int) -> Iterator[int]:
        """The numbers of the epochs that are left of `total`: code between epochs isn't run again after a resume."""
        self._num_to_skip = 0
        yield from range(self.epoch, total)

    def state(self) -> dict[str, Any]:
        """The position, as plain data and tensors."""
        if self._resumed is not None:
            return self._resumed
        state: dict[str, Any] = {"epoch": self.epoch, "batch": self.batch, "is_running": self._is_running}
        state |= {"told": dict(self._told), "begin": self._begin, "order": None, "loader": None, "now": {}}
        state["is_exhausted"] = False
        loader = self._with_position(self._loader())
        if loader is None:
            return state
        kind = self._begin["kind"]
        if kind in (STATEFUL, STATEFUL_DATASET):
            state["loader"] = _owner(loader, kind).state_dict()
        if kind == STATEFUL_DATASET and self._is_running:
            # A last batch that isn't full has taken the dataset past its end, maybe to its next beginning.
            fetcher = getattr(self._iterating, "_dataset_fetcher", None)
            state["is_exhausted"] = bool(getattr(fetcher, "ended", False))
        if self._indices is not None and self._is_running:
            state["order"] = self._indices.checksum
        if not self._is_running:
            state["now"] = Sources(loader).read_own()
        return state

    def check(self, state: Any) -> None:
        """Refuses what can't be a position, for `load`."""
        problem = mismatch(state, _SavedPosition)
        if not problem and state["is_running"]:
            problem = mismatch(state["begin"], _Begin)
        if problem:
            raise BadCheckpoint(f"the saved position in the data is invalid: {problem}")
        check_generators(state["now"])
        if state["is_running"]:
            check_random(RandomState(state["begin"]["sources"]["random"]))
            check_generators(state["begin"]["sources"]["own"])

    def load(self, state: dict[str, Any]) -> None:
        """The next epochs begin where `state` was taken; random states are those of then already."""
        self.epoch, self.batch = int(state["epoch"]), int(state["batch"])
        self._num_to_skip = self.epoch
        self._resumed = state
        # The program may draw numbers before it comes to its first batch, such as for epochs that are over.
        self._random = RandomState.now()
        self._is_running = False
        self._told = dict(state["told"])

    def _epoch(self, loader: Any) -> Iterator[Any]:
        if self._num_to_skip > 0:
            self._num_to_skip -= 1
            return
        if self._is_running:
            # The last epoch was left before its end.
            self._end()
        for batch in self._open(loader):
            self.batch += 1
            if self._indices is not None:
                self._indices.give_out()
            yield batch
            del batch
        self._end()

    def _end(self) -> None:
        # First, so that a checkpoint that this writes is one of the end of this epoch.
        self._finish_window()
        self._is_running = False
        self._indices = self._iterating = None
        self.epoch += 1
        self.batch = 0

    def _open(self, loader: Any) -> Iterator[Any]:
        resumed, self._resumed = self._resumed, None
        # Who made the loader decides how long it and its workers live.
        self._loader = weakref.ref(loader) if type(loader).__weakrefoffset__ else lambda: None
        loader = self._with_position(loader)
        self._is_running = True
        if resumed is not None and resumed["is_running"]:
            return self._reopen(loader, resumed)
        kind = _kind_of(loader)
        sources = Sources(loader)
        warm = is_warm(loader)
        if resumed is not None:
            assert self._random is not None
            self._random.restore()
            sources.write_own(resumed["now"], epochs=False)
            if kind in (STATEFUL, STATEFUL_DATASET) and resumed["loader"] is not None:
                _owner(loader, kind).load_state_dict(resumed["loader"])
            # Without the interruption, the workers of the epochs before would still be there.
            warm = self.epoch > 0 and bool(getattr(loader, "persistent_workers", False))
        self._told = sources.set_epoch(self.epoch, {} if resumed is not None else self._told)
        self._begin = {"kind": kind, "warm": warm, "length": _length(loader), "sources": sources.read()}
        return self._iterator(loader, kind, 0, warm=warm, sources=sources)

    def _reopen(self, loader: Any, resumed: dict[str, Any]) -> Iterator[Any]:
        """An iterator that goes on in the middle of an epoch."""
        kind, sources = _kind_of(loader), Sources(loader)
        begin, skip = resumed["begin"], self.batch
        self._compare(begin, kind, loader)
        sources.write(begin["sources"])
        self._told = sources.counts()
        self._begin = begin
        if kind in (STATEFUL, STATEFUL_DATASET) and resumed["loader"] is None:
            kind = AGAIN
        if kind in (STATEFUL, STATEFUL_DATASET):
            _owner(loader, kind).load_state_dict(resumed["loader"])
            skip = 0
        if resumed["is_exhausted"]:
            iterator: Iterator[Any] = iter(())
        else:
            iterator = self._iterator(loader, kind, skip, warm=bool(begin["warm"]), sources=sources)
        if self._indices is not None:
            if self._indices.begin() != resumed["order"]:
                self._say(
                    f"the order of the data can't be restored: the first {skip} batches of epoch {self.epoch} aren't "
                    "those that were given out. The data has changed, or the sampler draws random numbers in the "
                    "middle of an epoch; some samples may come twice in this epoch and others not at all."
                )
        elif skip and kind in (AGAIN, ONCE):
            for _ in range(skip):
                next(iterator, None)
        assert self._random is not None
        self._random.restore()
        if kind == ONCE and skip:
            self._say(
                f"epoch {self.epoch} comes from a {type(loader).__name__}, which can't be begun again: its first "
                f"{skip} items were dropped. If it doesn't begin where it did in the interrupted run, batches come "
                "twice or not at all. Give a loader, a list, or an object with state_dict and load_state_dict."
            )
        return iterator

    def _iterator(self, loader: Any, kind: str, skip: int, *, warm: bool, sources: Sources) -> Iterator[Any]:
        self._indices = None
        if kind == ORDERED:
            ordered, self._indices = open_at(loader, skip, warm=warm, sources=sources)
            return iter(ordered)
        if kind == SEQUENCE:
            return itertools.islice(loader, skip, None)
        states = sources.read() if warm and not is_warm(loader) else None
        iterator: Iterator[Any] = iter(loader)
        self._iterating = iterator if kind == STATEFUL_DATASET else None
        if states is not None:
            # A loader with workers draws a seed for them when it starts them, and only then.
            sources.write(states)
        return iterator

    def _with_position(self, loader: Any) -> Any:
        """A loader of tensors that knows its position, for a stream or a loader over one; any other as it is."""
        if is_over_stream(loader):
            return CountedLoader(loader)
        if not is_stream(loader):
            return loader
        if loader not in self._of_streams:
            self._of_streams[loader] = StreamLoader(loader)
        return self._of_streams[loader]

    def _compare(self, begin: dict[str, Any], kind: str, loader: Any) -> None:
        length = _length(loader)
        if begin["kind"] == kind and isinstance(loader, StreamLoader | CountedLoader):
            return  # a rank's share changes with their number, and whether the data is the same is seen by its state
        if begin["kind"] != kind or begin["length"] != length:
            self._say(
                f"the loader isn't the one that the checkpoint was written with: it had {_batches(begin['length'])} "
                f"({begin['kind']}), and now has {_batches(length)} ({kind}). The run goes on after the first "
                f"{self.batch} of epoch {self.epoch}; samples may come twice in it or not at all."
            )


class Epochs:
    """The batches of a loader; each iteration is an epoch. Made by `Batches.over`."""

    def __init__(self, batches: Batches, loader: Any) -> None:
        self._batches = batches
        self._loader = loader
        self._single: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self._batches._epoch(self._loader)

    def __next__(self) -> Any:
        if self._single is None:
            self._single = iter(self)
        return next(self._single)

    def __len__(self) -> int:
        """Batches that the next iteration gives."""
        if self._batches._num_to_skip > 0:
            return 0
        resumed = self._batches._resumed
        done = self._batches.batch if resumed is not None and resumed["is_running"] else 0
        return max(0, len(self._batches._with_position(self._loader)) - done)


def _kind_of(loader: Any) -> str:
    if _has_state(loader):
        return STATEFUL
    if isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__:
        if not isinstance(loader.dataset, IterableDataset):
            return ORDERED
        if loader.num_workers == 0 and _has_state(loader.dataset):
            return STATEFUL_DATASET
        return AGAIN
    if isinstance(loader, list | tuple):
        return SEQUENCE
    return ONCE if hasattr(type(loader), "__next__") else AGAIN


def _owner(loader: Any, kind: str) -> Any:
    """What has the state of a loader with one."""
    return loader if kind == STATEFUL else loader.dataset


def _has_state(value: Any) -> bool:
    if isinstance(value, torch.nn.Module) or not hasattr(value, "load_state_dict") or not hasattr(value, "state_dict"):
        return False
    try:
        value.state_dict()
    except (AttributeError, NotImplementedError, TypeError):
        return False  # loaders in wrappers have the methods, whether what they wrap has them or not
    return True


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _batches(length: int | None) -> str:
    return "an unknown number of batches" if length is None else f"{length} batches"
