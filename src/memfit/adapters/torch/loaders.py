"""Watches the script's own data loaders, and finds the largest of their batches.

Runs that die in mid-epoch usually met a longer batch. The first run of a script finds out which loader feeds its
training loop: the one that gave a batch last before the first optimizer step, evaluations apart. A second run draws
many batches from that loader on the host, and hands the script the largest of them, again and again.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from memfit.adapters.torch.fitting.micro_batches import split
from memfit.adapters.torch.job import common_first_dimension
from memfit.adapters.torch.replacement import Replacement
from memfit.adapters.torch.stand_in import map_tensors
from memfit.core.dryrun import Scan, ScannedLeaf
from memfit.core.errors import BadBatch


@dataclass(slots=True)
class _Sizes:
    """How batches vary: per tensor (dtype, smallest, largest shape), the bytes of each batch, and the largest."""

    total: int | None
    leaves: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    bytes_of: list[int] = field(default_factory=list)
    largest_index: int = 0
    largest_tokens: int | None = None

    def note(self, batch: Any) -> int:
        """Takes one more batch into account and gives its bytes."""
        size_bytes = 0
        for name, array in arrays_in(batch):
            shape = tuple(int(n) for n in array.shape)
            size_bytes += int(array.nbytes)
            dtype, smallest, largest = self.leaves.get(name, (_dtype(array), shape, shape))
            self.leaves[name] = (dtype, min(smallest, shape, key=_count), max(largest, shape, key=_count))
        self.bytes_of.append(size_bytes)
        return size_bytes

    def scan(self) -> Scan:
        """The result as it is reported."""
        ordered = sorted(self.bytes_of)
        return Scan(
            num_batches=len(ordered),
            total=self.total,
            leaves=tuple(ScannedLeaf(name, *leaf) for name, leaf in self.leaves.items()),
            smallest_bytes=ordered[0],
            median_bytes=ordered[len(ordered) // 2],
            largest_bytes=ordered[-1],
            largest_index=self.largest_index,
            largest_tokens=self.largest_tokens,
        )


class Loaders:
    """Hears of every loader that the script iterates over.

    Args:
        num_scanned: batches to draw ahead; 0: none.
        scanned: which iteration of a loader to draw ahead from, counted from 0.
        progress: called after each batch drawn ahead, with its number.
        parts: each batch of the loader that is split is given in so many parts, one after the other.
        split: which iteration of a loader to begin with that; the same loader's later ones follow.
    """

    def __init__(
        self,
        num_scanned: int = 0,
        scanned: int | None = None,
        progress: Callable[[int], None] = lambda number: None,
        *,
        parts: int = 1,
        split: int | None = None,
    ) -> None:
        self._num_scanned = num_scanned
        self._scanned = scanned
        self._progress = progress
        self._parts = parts
        self._split = split
        self._split_loader: Any = None
        self._num_iterations = 0
        self._read_last: dict[int, _Reading] = {}
        self.training: int | None = None
        self.batch_size: int | None = None
        """First dimension that the tensors of the first training batch share, or None."""
        self._sizes: _Sizes | None = None

    def settle(self) -> None:
        """A step has been taken: the loader that was read last is the one that feeds it.

        An evaluation may come between the training batch and its step. It reads without gradients, or to the end.
        """
        if self.training is not None or not self._read_last:
            return
        # Of equals the first here, which was read last.
        readings = reversed(self._read_last.items())
        self.training, found = max(readings, key=lambda one: (one[1].with_grad, not one[1].has_ended))
        self.batch_size = found.batch_size

    def scan(self) -> Scan | None:
        """How the batches drawn ahead vary; None when there were none."""
        return self._sizes.scan() if self._sizes is not None and self._sizes.bytes_of else None

    def replacements(self) -> list[Replacement]:
        """Puts this object in front of `DataLoader.__iter__`."""
        plain = DataLoader.__iter__
        watch = self

        def __iter__(loader: Any) -> Any:
            ordinal = watch._num_iterations
            watch._num_iterations += 1
            iterator: Any = plain(loader)
            if ordinal == watch._scanned:
                iterator = watch._largest_first(iterator, loader)
            if watch._parts > 1 and ordinal == watch._split:
                watch._split_loader = loader
            parts = watch._parts if loader is watch._split_loader else 1
            return _Watched(iterator, lambda batch: watch._read(ordinal, batch), lambda: watch._ended(ordinal), parts)

        return [Replacement(DataLoader, "__iter__", __iter__)]

    def _read(self, ordinal: int, batch: Any) -> None:
        if self.training is None:
            self._read_last.pop(ordinal, None)
            self._read_last[ordinal] = _Reading(common_first_dimension(batch), torch.is_grad_enabled())

    def _ended(self, ordinal: int) -> None:
        if ordinal in self._read_last:
            self._read_last[ordinal].has_ended = True

    def _largest_first(self, iterator: Iterator[Any], loader: Any) -> Iterator[Any]:
        self._sizes = sizes = _Sizes(_length(loader))
        largest, most = None, -1
        for number, batch in enumerate(iterator):
            size_bytes = sizes.note(batch)
            if size_bytes > most:
                largest, most = batch, size_bytes
                sizes.largest_index, sizes.largest_tokens = number, _tokens(batch)
            self._progress(number + 1)
            if number + 1 >= self._num_scanned:
                break
        # For as many steps as there would have been: in the first, an optimizer has no state yet.
        for _ in sizes.bytes_of:
            yield map_tensors(largest, lambda tensor: tensor)
        del largest
        yield from iterator


@dataclass(slots=True)
class _Reading:
    """The last batch that was read in an iteration, before the first step."""

    batch_size: int | None
    with_grad: bool
    has_ended: bool = False


class _Watched:
    """An iterator that says when it is read and gives batches in parts; all else is the loader's own iterator."""

    def __init__(
        self, iterator: Any, read: Callable[[Any], None], ended: Callable[[], None] = lambda: None, parts: int = 1
    ) -> None:
        self._iterator = iterator
        self._said = read
        self._said_end = ended
        self._parts = parts
        self._waiting: list[Any] = []

    def __iter__(self) -> "_Watched":
        return self

    def __next__(self) -> Any:
        if not self._waiting:
            try:
                batch = next(self._iterator)
            except StopIteration:
                self._said_end()
                raise
            self._said(batch)
            self._waiting = [batch] if self._parts == 1 else _parts(batch, self._parts)
        return self._waiting.pop(0)

    def __len__(self) -> int:
        return len(self._iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def _parts(batch: Any, count: int) -> list[Any]:
    """The batch in parts; all of it where it can't be split, such as a last one with too few samples."""
    try:
        return split(batch, count)
    except BadBatch:
        return [batch]


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _dtype(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _tokens(batch: Any) -> int | None:
    whole = [
        _count(tuple(array.shape))
        for _, array in arrays_in(batch)
        if len(array.shape) >= 2 and _dtype(array) in ("int64", "int32")
    ]
    return max(whole, default=None)


def arrays_in(value: Any, name: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """(place, tensor or NumPy array) for each one in a batch, however it is nested; each object counts once."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, str | bytes | int | float | bool | None):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor) or (type(value).__module__ == "numpy" and hasattr(value, "nbytes")):
        yield name or "batch", value
        return
    parts: Any = ()
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    elif is_dataclass(value) and not isinstance(value, type):
        parts = ((part.name, getattr(value, part.name)) for part in fields(value))
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        parts = vars(value).items()
    for key, part in parts:
        yield from arrays_in(part, f"{name}.{key}" if name else str(key), seen)
