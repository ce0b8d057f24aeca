"""The batches of a script: what its data loaders give, or its training loop copies to the device.

Runs that die in mid-epoch usually met a longer batch. A first run finds the loader that feeds the training loop: the
one that gave a batch last before the first optimizer step, evaluations apart. A second run draws many batches from it
on the host, and hands the script the largest of them, again and again.

A loop without a loader (`x[indices].to("cuda")`) copies its batches at the same lines in every step, all with as many
samples. One run finds these lines; in another, what is copied there is cut down to the first micro-batch.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from memfit.core.dryrun import Scan, ScannedLeaf
from memfit.core.errors import BadBatch
from memfit.core.patching import Replacement, around
from memfit.frameworks.torch.apply.micro_batches import split
from memfit.frameworks.torch.shapes.batch import common_first_dimension
from memfit.frameworks.torch.shapes.stand_in import map_tensors

_END = object()
_TOKEN_DTYPES = ("int64", "int32")


# Place of each tensor of a batch -> its dtype, shape and bytes.
Batch = dict[str, tuple[str, tuple[int, ...], int]]


@dataclass(eq=False)
class Loaders:
    """Hears of every loader that the script iterates over."""

    num_scanned: int = 0  # batches to draw ahead; 0: none
    scanned: int | None = None  # which iteration of a loader to draw ahead from, counted from 0
    parts: int = 1  # each batch of the loader that is split is given in so many parts, one after the other
    split: int | None = None  # which iteration of a loader to begin with that; the same loader's later ones follow
    training: int | None = None  # which iteration feeds the training loop, once that is known
    batch_size: int | None = None  # first dimension that the tensors of the first training batch share, or None
    _split_loader: Any = None
    _num_iterations: int = 0
    # Of each iteration before the first step, its last batch: size, with gradients or not, the last of all or not.
    _read_last: dict[int, tuple[int | None, bool, bool]] = field(default_factory=dict)
    _drawn: list[Batch] = field(default_factory=list)  # ahead
    _total: int | None = None

    def settle(self) -> None:
        """A step has been taken: the loader that was read last is the one that feeds it.

        An evaluation may come between the training batch and its step. It reads without gradients, or to the end.
        """
        if self.training is None and self._read_last:
            read = self._read_last
            # With gradients, and not to its end; of equals the first here, which was read last.
            self.training = max(reversed(read), key=lambda ordinal: (read[ordinal][1], not read[ordinal][2]))
            self.batch_size = read[self.training][0]

    def scan(self) -> Scan | None:
        """How the batches drawn ahead vary; None when there were none."""
        if not self._drawn:
            return None
        sizes = list(map(_size_bytes, self._drawn))
        ordered, largest = sorted(sizes), sizes.index(max(sizes))
        whole = [_count(s) for dtype, s, _ in self._drawn[largest].values() if len(s) > 1 and dtype in _TOKEN_DTYPES]
        leaves = []
        for name in dict.fromkeys(name for batch in self._drawn for name in batch):
            shapes = [batch[name][1] for batch in self._drawn if name in batch]
            dtype = next(batch[name][0] for batch in self._drawn if name in batch)
            leaves.append(ScannedLeaf(name, dtype, min(shapes, key=_count), max(shapes, key=_count)))
        return Scan(
            num_batches=len(sizes),
            total=self._total,
            leaves=tuple(leaves),
            smallest_bytes=ordered[0],
            median_bytes=ordered[len(ordered) // 2],
            largest_bytes=ordered[-1],
            largest_index=largest,
            largest_tokens=max(whole, default=None),
        )

    def replacements(self) -> list[Replacement]:
        """Puts this object in front of `DataLoader.__iter__`."""

        def iterate(plain: Callable[[Any], Any], loader: Any) -> Any:
            ordinal = self._num_iterations
            self._num_iterations += 1
            iterator = plain(loader)
            if ordinal == self.scanned:
                iterator = self._largest_first(iterator, loader)
            if self.parts > 1 and ordinal == self.split:
                self._split_loader = loader
            parts = self.parts if loader is self._split_loader else 1
            return _WatchedLoader(iterator, functools.partial(self._read, ordinal), parts)

        return [around(DataLoader, "__iter__", iterate)]

    def _read(self, ordinal: int, batch: Any) -> None:
        """An iteration has given a batch, or `_END`."""
        if batch is _END and ordinal in self._read_last:
            self._read_last[ordinal] = (*self._read_last[ordinal][:2], True)
        elif batch is not _END and self.training is None:
            self._read_last.pop(ordinal, None)
            self._read_last[ordinal] = common_first_dimension(batch), torch.is_grad_enabled(), False

    def _largest_first(self, iterator: Iterator[Any], loader: Any) -> Iterator[Any]:
        with suppress(TypeError):
            self._total = len(loader)
        largest, most = None, -1
        for batch in itertools.islice(iterator, self.num_scanned):
            self._drawn.append(
                {
                    name: (str(a.dtype).removeprefix("torch."), tuple(map(int, a.shape)), int(a.nbytes))
                    for name, a in arrays_in(batch)
                }
            )
            if _size_bytes(self._drawn[-1]) > most:
                largest, most = batch, _size_bytes(self._drawn[-1])
        # For as many steps as there would have been: in the first, an optimizer has no state yet.
        for _ in self._drawn:
            yield map_tensors(largest, lambda tensor: tensor)
        del largest
        yield from iterator


@dataclass(eq=False)
class _WatchedLoader:
    """An iterator that says when it is read and gives batches in parts; all else is the loader's own iterator."""

    _iterator: Any
    _said: Callable[[Any], None]
    _parts: int
    _waiting: list[Any] = field(default_factory=list)

    def __iter__(self) -> "_WatchedLoader":
        return self

    def __next__(self) -> Any:
        if not self._waiting:
            batch = next(self._iterator, _END)
            self._said(batch)
            if batch is _END:
                raise StopIteration
            self._waiting = [batch]
            if self._parts > 1:
                # A last one with too few samples can't be split.
                with suppress(BadBatch):
                    self._waiting = split(batch, self._parts)
        return self._waiting.pop(0)

    def __len__(self) -> int:
        return len(self._iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _size_bytes(drawn: Batch) -> int:
    return sum(size_bytes for _, _, size_bytes in drawn.values())


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


@dataclass(eq=False)
class Arrivals:
    """Hears of every tensor that is copied from the host to the device."""

    line: Callable[[], str]  # the line of the user's code that runs
    num_steps: Callable[[], int]  # how many optimizer steps have been taken
    parts: int = 1  # micro-batches to a batch
    split_at: tuple[str, ...] = ()  # lines at which batches are copied that are to be cut down
    split_size: int | None = None  # samples of such a batch
    _sizes: dict[str, set[int]] = field(default_factory=dict)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or its first micro-batch."""
        if isinstance(tensor, torch.nn.Parameter) or not tensor.dim() or tensor.layout is not torch.strided:
            return tensor
        size = tensor.shape[0]
        if self.parts > 1 and size == self.split_size and self.line() in self.split_at:
            return tensor[: -(-size // self.parts)]
        # What is copied before the first update may be the model, or data that all steps share.
        if self.num_steps() and tensor.numel() > 1:
            self._sizes.setdefault(self.line(), set()).add(size)
        return tensor

    @property
    def batch_size(self) -> int | None:
        """The number of samples that all of the loop's batches have; None where they differ or there are none."""
        sizes = set().union(*self._sizes.values())
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def lines(self) -> tuple[str, ...]:
        """Where batches are copied; empty where they don't share a size."""
        return () if self.batch_size is None else tuple(sorted(filter(None, self._sizes)))
