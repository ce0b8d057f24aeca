"""The recorder: follows storages from allocation to free.

Lifetimes are not modelled, they are observed. The step runs on PyTorch's own autograd engine with shape-only tensors,
and a weak reference on each tensor's storage says when the last tensor, saved variable or view that holds it is gone.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import torch

from memfit.core.timeline import Block, Category, Mark, Phase, Timeline
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.shapes.shapes import ByStorage


@dataclass(frozen=True, slots=True)
class Kept:
    """A block that an operator takes and nothing ever frees, such as a library's workspace."""

    size_bytes: int
    name: str


Program = Sequence[int | torch.Tensor | Kept]
"""What an operator does inside, in order: see `Recorder.add_inside`."""


class _StorageRef(weakref.ref[Any]):
    __slots__ = ("index", "key")
    index: int
    key: int


# The event at which a phase begins; no block has this number.
_MARK = sys.maxsize


class Recorder:
    """Columns of blocks and one list of events; block number i allocated is event i, freed is event ~i.

    `origin` gives (module path, source line) of what runs now.
    """

    def __init__(self, origin: Callable[[], tuple[str, str]]) -> None:
        self.phase = Phase.SETUP
        self.step = 0
        self.events: list[int] = []
        self.sizes: list[int] = []
        self.categories: list[Category | None] = []
        self._phases: list[Phase] = []
        self._ops: list[str] = []
        self._origins: list[tuple[str, str]] = []
        self._marks: dict[int, tuple[Phase, int]] = {}
        self._origin = origin
        self.at_most = False
        """Whether the sizes of blocks that start now are upper bounds."""
        self.current_stream: Callable[[], int] = lambda: 0
        """The number of the stream on which blocks start now; 0 is the default one."""
        self._streams: dict[int, int] = {}
        self._bounded: set[int] = set()
        self.permanent: set[int] = set()
        """Blocks that nothing ever frees."""
        self._refs: dict[int, _StorageRef] = {}
        self._index_of: dict[int, int] = {}
        self._foreign: ByStorage[bool] = ByStorage()
        self.on_enter: Callable[[Phase, int], None] | None = None
        """Called with each phase and step, before it begins."""

    def enter(self, phase: Phase, step: int) -> None:
        """From now on blocks belong to `phase` of `step`."""
        if self.on_enter is not None:
            self.on_enter(phase, step)
        self.phase, self.step = phase, step
        self._marks[len(self.events)] = (phase, step)
        self.events.append(_MARK)

    def add(self, tensor: Any, op: str, category: Category | None = None) -> int | None:
        """Starts a block for the storage of `tensor`; None when it's known already or holds nothing."""
        return self._add_storage(tensor.untyped_storage(), op, category)

    def _add_storage(self, storage: Any, op: str, category: Category | None) -> int | None:
        key = internals.storage_address(storage)
        if key in self._index_of or self._foreign.get(storage):
            return None
        size_bytes = storage.nbytes()
        if not size_bytes:
            return None
        index = self._start(size_bytes, op, category)
        reference = _StorageRef(storage, self._freed)
        reference.index, reference.key = index, key
        self._refs[index] = reference
        self._index_of[key] = index
        return index

    def add_foreign(self, storage: Any) -> None:
        """A storage that another process holds, which counts there."""
        self._foreign.set(storage, True)

    def add_named(
        self, tensor: Any, op: str, category: Category | None, origin: tuple[str, str], *, stream: int = 0
    ) -> None:
        """Like `add`, for a tensor whose module is known beforehand."""
        with self._on_stream(stream) if stream else nullcontext():
            index = self.add(tensor, op, category)
        if index is not None:
            self._origins[index] = origin

    @contextmanager
    def _on_stream(self, stream: int) -> Iterator[None]:
        before, self.current_stream = self.current_stream, lambda: stream
        try:
            yield
        finally:
            self.current_stream = before

    def add_inside(self, program: Program, op: str, category: Category) -> None:
        """Blocks that live only inside one operator, by their sizes, and its outputs where they are made among them.

        ~i ends the i-th block before the others; outputs and what is kept are not counted.
        """
        started: list[int | None] = []
        try:
            for part in program:
                if isinstance(part, torch.Tensor):
                    self.add(part, op)
                elif isinstance(part, Kept):
                    self.add_permanent(part.size_bytes, part.name, category)
                elif part >= 0:
                    started.append(self._start_transient(part, op, category) if part else None)
                else:
                    index, started[~part] = started[~part], None
                    if index is not None:
                        self._end(index)
        finally:
            for index in reversed(started):
                if index is not None:
                    self._end(index)

    def _start_transient(self, size_bytes: int, op: str, category: Category) -> int | None:
        return self._start(size_bytes, op, category)

    def add_permanent(self, size_bytes: int, op: str, category: Category) -> None:
        """A block that nothing ever frees, such as a library's workspace."""
        self.permanent.add(self._start(size_bytes, op, category))

    def resized(self, storage: Any, op: str) -> None:
        """Follows a storage that changed its size in place."""
        index = self._index_of.pop(internals.storage_address(storage), None)
        if index is not None:
            if self.sizes[index] == storage.nbytes():
                self._index_of[internals.storage_address(storage)] = index
                return
            self._end(index)
            del self._refs[index]
        self._add_storage(storage, op, None if index is None else self.categories[index])

    def classify(self, tensor: Any, category: Category, module: str) -> None:
        """Says what the storage of `tensor` is for, and for which module."""
        index = self.block_of(tensor)
        if index is not None:
            self.categories[index] = category
            self._origins[index] = (module, self._origins[index][1])

    def classify_live(self, since: int, category: Category) -> None:
        """Says what all storages are for that started at block `since` or later, live, and have no category yet."""
        for index in list(self._refs):
            if index >= since and self.categories[index] is None:
                self.categories[index] = category

    def reclassify_copies(self, parameter_sizes: list[int]) -> None:
        """Says what a copy of a model's weights is for: it came from the host like data, or no model is called by it.

        Of parameters of so many bytes each a copy may be twice or half as wide.
        """
        batches = [index for index in list(self._refs) if self.categories[index] in (Category.BATCH, None)]
        for halves in (2, 1, 4):
            left = Counter(size * halves // 2 for size in parameter_sizes)
            copies = []
            for index in (index for index in batches if self._phases[index] is Phase.SETUP):
                if left[self.sizes[index]]:
                    left[self.sizes[index]] -= 1
                    copies.append(index)
            # Data may have the size of one parameter or another, and not of most of them.
            if copies and 2 * len(copies) >= len(parameter_sizes) and 2 * sum(left.values()) <= len(parameter_sizes):
                for index in copies:
                    self.categories[index] = Category.BUFFER
                return

    def category(self, tensor: Any) -> Category | None:
        """What the storage of `tensor` is for; None where that isn't known."""
        index = self.block_of(tensor)
        return None if index is None else self.categories[index]

    def block_of(self, tensor: Any) -> int | None:
        """The number of the live block that holds `tensor`; None where it is in no block."""
        return self._index_of.get(internals.storage_address(tensor.untyped_storage()))

    def stream_of(self, index: int) -> int:
        """The number of the stream on which a block started; 0 is the default one."""
        return self._streams.get(index, 0)

    def op_of(self, index: int) -> str:
        """The operator that made a block."""
        return self._ops[index]

    @property
    def tick(self) -> int:
        """How many blocks have been started or ended."""
        return len(self.events) - len(self._marks)

    def known(self, tensor: Any) -> bool:
        """Whether the storage of `tensor` is a live block."""
        return self.block_of(tensor) is not None

    def has_live(self, since: int, persistent: tuple[Category, ...]) -> bool:
        """Whether a storage that started at block `since` or later lives and is in none of `persistent`."""
        return any(index >= since and self.categories[index] not in persistent for index in list(self._refs))

    @property
    def num_blocks(self) -> int:
        """How many blocks have been started."""
        return len(self.sizes)

    def stop(self) -> None:
        """Forgets the live storages without recording their end."""
        self._refs.clear()
        self._index_of.clear()

    def _start(self, size_bytes: int, op: str, category: Category | None) -> int:
        index = len(self.sizes)
        self.sizes.append(size_bytes)
        self.categories.append(category)
        self._phases.append(self.phase)
        self._ops.append(op)
        self._origins.append(self._origin())
        self.events.append(index)
        stream = self.current_stream()
        if stream:
            self._streams[index] = stream
        if self.at_most:
            self._bounded.add(index)
        return index

    def keep_only(self, kept: list[int]) -> list[int]:
        """Forgets all blocks but these, which must include the live ones; gives the ticks that are left, in order.

        Blocks are numbered anew, in the same order.
        """
        number = {index: position for position, index in enumerate(kept)}
        events: list[int] = []
        marks: dict[int, tuple[Phase, int]] = {}
        ticks: list[int] = []
        tick = 0
        for position, event in enumerate(self.events):
            if event == _MARK:
                marks[len(events)] = self._marks[position]
                events.append(_MARK)
                continue
            known = number.get(event if event >= 0 else ~event)
            if known is not None:
                events.append(known if event >= 0 else ~known)
                ticks.append(tick)
            tick += 1
        self.events, self._marks = events, marks
        for name in ("sizes", "categories", "_phases", "_ops", "_origins"):
            column = getattr(self, name)
            setattr(self, name, [column[index] for index in kept])
        self.permanent = {number[index] for index in self.permanent}
        self._bounded = {number[index] for index in self._bounded if index in number}
        self._streams = {number[index]: stream for index, stream in self._streams.items() if index in number}
        self._refs = {number[index]: reference for index, reference in list(self._refs.items())}
        for index, reference in list(self._refs.items()):
            reference.index = index
        self._index_of = {key: number[index] for key, index in self._index_of.items()}
        return ticks

    def spans(self) -> tuple[list[int], dict[int, int]]:
        """(the tick at which each block started, the tick at which each one that is gone ended)."""
        starts, ends = [0] * len(self.sizes), {}
        tick = 0
        for event in self.events:
            if event == _MARK:
                continue
            if event >= 0:
                starts[event] = tick
            else:
                ends[~event] = tick
            tick += 1
        return starts, ends

    def _end(self, index: int) -> None:
        self.events.append(~index)

    def _freed(self, reference: "weakref.ref[Any]") -> None:
        assert isinstance(reference, _StorageRef)
        self._end(reference.index)
        self._refs.pop(reference.index, None)
        if self._index_of.get(reference.key) == reference.index:
            del self._index_of[reference.key]

    def timeline(self, segments: list[tuple[int, int]] | None = None) -> Timeline:
        """The timeline of all events, or of the given ranges of events one after another.

        A range may occur twice: its blocks are then allocated anew, so that a later step can be made from the record of
        an earlier one that does exactly the same.
        """
        starts: list[tuple[int, int]] = []
        ends: list[int | None] = []
        current: dict[int, int] = {}
        marks: list[Mark] = []
        tick = seen_forward = 0
        for position in chain.from_iterable(range(*ends) for ends in segments or [(0, len(self.events))]):
            event = self.events[position]
            if event == _MARK:
                phase, step = self._marks[position]
                # The forward pass of a further micro-batch follows a backward pass.
                if phase is Phase.FORWARD and (not marks or marks[-1].phase is not Phase.BACKWARD):
                    seen_forward += 1
                marks.append(Mark(tick, phase, step if segments is None or not step else seen_forward))
                continue
            if event >= 0:
                if event in current and event in self.permanent:
                    continue
                current[event] = len(starts)
                starts.append((event, tick))
                ends.append(None)
            else:
                block = current.pop(~event, None)
                if block is None:
                    continue
                ends[block] = tick
            tick += 1
        blocks = tuple(self._block(index, start, end) for (index, start), end in zip(starts, ends, strict=True))
        return Timeline(blocks, tick, tuple(marks))

    def _block(self, index: int, start: int, end: int | None) -> Block:
        module, source = self._origins[index]
        category = self.categories[index] or Category.TEMPORARY
        is_bound, stream = index in self._bounded, self._streams.get(index, 0)
        phase, op = self._phases[index], self._ops[index]
        return Block(self.sizes[index], start, end, category, phase, module, op, source, is_bound, stream)


def is_accumulated_in_place(args: tuple[Any, ...], kwargs: dict[str, Any], sole_owner: tuple[int, int] | None) -> bool:
    """Whether `add(*args, **kwargs)` is a sum that the autograd engine, as the first's sole owner, makes in place."""
    if kwargs or torch.is_grad_enabled() or internals.current_autograd_node() is None:
        return False
    old, new = args
    return (
        isinstance(old, torch.Tensor)
        and isinstance(new, torch.Tensor)
        and old.layout is torch.strided
        and old.shape == new.shape
        and old.dtype is new.dtype
        and internals.reference_counts(old) == sole_owner
        and torch.ops.aten.is_non_overlapping_and_dense.default(old)
    )


@cache
def references_of_sole_owner() -> tuple[int, int] | None:
    """References to a gradient that the engine alone holds: found out by making one."""
    seen: list[tuple[int, int]] = []

    class Watch(internals.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.add.Tensor and internals.current_autograd_node() is not None:
                seen.append(internals.reference_counts(args[0]))
            return func(*args, **(kwargs or {}))

    leaf = torch.empty(2, device="meta", requires_grad=True)
    middle = leaf * 2
    total = (middle.sin() + middle.cos()).sum()
    with Watch(), torch.autograd.set_multithreading_enabled(False):  # type: ignore[no-untyped-call]
        total.backward()
    return seen[-1] if seen else None
