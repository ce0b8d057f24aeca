"""Watches a step from close up: the calls of modules, and what autograd saves in each of them.

Whether a block is needed until the backward pass, and by whom, is not visible in a timeline. Autograd tells: each
tensor that an operator saves passes through a hook when it is saved, when it is used and, by the end of the object that
the hook returns, when it is let go. The stack of module calls at the first of these moments says whose it is.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy
import torch
from torch.nn.utils.rnn import PackedSequence

from memfit.core.patching import Replacement, replaced
from memfit.core.timeline import Phase
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.shapes.origin import OriginTracker
from memfit.frameworks.torch.shapes.recorder import Recorder
from memfit.frameworks.torch.shapes.shapes import Behaviour, Known, Operator, behaviour, tensors
from memfit.frameworks.torch.shapes.stand_in import tensors_in
from memfit.frameworks.torch.simulation.dispatch import SimulatedOperators
from memfit.frameworks.torch.trace.work import FeatureWatch, WorkLog

CHANGES_INPUT = "changes its input in place"
INPUT_CHANGED_LATER = "its input is changed in place after it has run"
CHANGES_BUFFER = "changes a buffer in its forward pass"
REMEMBERS = "remembers something from call to call ({name})"
FILLS_ARGUMENT = "changes an object that it is given ({kind}), which computing it again would do twice"
ARGUMENT_CHANGED_LATER = "an object that it is given ({kind}) changes after it has run"
STRANGE_OUTPUT = "returns something other than tensors ({kind})"
COMPILED = "is compiled"
NO_GRADIENTS = "runs without gradients"
DRAWS_ELSEWHERE = "draws random numbers of Python's or numpy's own, which computing it again would draw anew"
NO_BACKWARD = "no gradient flows through it"

# Statistics that are put back after a second forward pass.
RUNNING_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_CONTAINERS = (list, dict, set)
_DEPTH = 4


@dataclass(frozen=True, slots=True)
class Before:
    """What a module and its arguments were before a call."""

    state: dict[str, Any]
    generators: int
    held: tuple[tuple[str, Any, tuple[int, ...]], ...]


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether no call of `module` can be computed again because its operators are hidden."""
    return isinstance(module, torch.jit.ScriptModule) or internals.is_compiled(module)


def before_call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Before:
    """Takes down what a call must leave alone."""
    # What a call could change without a trace: containers, and objects that hold something.
    held = tuple(
        (type(value).__name__, value, _tensor_ids(value))
        for value in (*args, *kwargs.values())
        if not isinstance(value, (*_PLAIN, torch.Tensor, torch.nn.Module))
        and (isinstance(value, _CONTAINERS) or (hasattr(value, "__dict__") and not callable(value)))
    )
    return Before(_state(module), _generators(), held)


def after_call(module: torch.nn.Module, before: Before, out: Any) -> str:
    """Why the call that just ended can't be computed again, or ""."""
    changed = changed_object(before)
    if changed:
        return FILLS_ARGUMENT.format(kind=changed)
    state = _state(module)
    for name, value in before.state.items():
        if state.get(name) != value:
            return CHANGES_BUFFER if name in internals.buffers_of(module) else REMEMBERS.format(name=name)
    if _generators() != before.generators:
        return DRAWS_ELSEWHERE
    strange = _strange(out)
    return STRANGE_OUTPUT.format(kind=strange) if strange else ""


def _generators() -> int:
    """A mark of the generators that PyTorch doesn't put back."""
    state: Any = numpy.random.get_state()
    return hash((random.getstate(), state[1].tobytes(), state[2]))


def changed_object(before: Before) -> str:
    """The class of the first argument that holds other tensors by now, or ""."""
    return next((kind for kind, value, ids in before.held if _tensor_ids(value) != ids), "")


def _state(module: torch.nn.Module) -> dict[str, Any]:
    """Numbers, sizes of containers and identities of buffers that the module itself holds."""
    found: dict[str, Any] = {}
    for name, value in module.__dict__.items():
        kind = type(value)
        if kind is int or kind is float:
            found[name] = value
        elif kind in _CONTAINERS and not name.startswith("_"):
            found[name] = len(value)
    for name, value in internals.buffers_of(module).items():
        if name not in RUNNING_STATISTICS:
            found[name] = id(value)
    return found


def _tensor_ids(value: Any, depth: int = _DEPTH) -> tuple[int, ...]:
    """Identities of all tensors within reach."""
    if isinstance(value, torch.Tensor):
        return (id(value),)
    if depth == 0 or isinstance(value, (*_PLAIN, torch.nn.Module, type)):
        return ()
    parts: Any = ()
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, list | tuple | set):
        parts = list(value)
    elif hasattr(value, "__dict__") and not callable(value):
        parts = list(vars(value).values())
    return tuple(number for part in parts for number in _tensor_ids(part, depth - 1))


def _strange(value: Any) -> str:
    """The class of the first thing in an output that is no tensor, container of tensors or plain value; or ""."""
    if isinstance(value, (*_PLAIN, torch.Tensor, PackedSequence)):
        return ""
    if isinstance(value, Mapping):
        parts: Any = value.values()
    elif isinstance(value, list | tuple | set):
        parts = value
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name) for field in fields(value)]
    else:
        return type(value).__name__
    return next((name for name in map(_strange, parts) if name), "")


OUTSIDE = -1
_WRITING = (Behaviour.IN_PLACE, Behaviour.SILENT, Behaviour.OTHER)


@dataclass(slots=True)
class Save:
    """A tensor that a node of the graph saved: its block, the innermost call around (or `OUTSIDE`), and three ticks."""

    block: int
    call: int
    packed: int
    unpacked: int | None = None
    """When it was used first."""
    released: int | None = None


@dataclass(slots=True)
class ModuleCall:
    """A call of a module as it was seen; numbers count calls in the order in which they began.

    Args:
        parent: number of the call around it, or `OUTSIDE`.
        last: number of the last call inside of it, its own where there is none.
        ticks: at its beginning and at its end; `blocks` and `operations` likewise, the first and the one after.
        inputs: blocks of the tensors that it was given.
        refused: why it can't be computed again, or "".
        backward: first and last tick of an operator of its backward pass, without those of calls inside of it.
    """

    module: torch.nn.Module
    path: str
    number: int
    parent: int
    last: int
    ticks: tuple[int, int]
    blocks: tuple[int, int]
    operations: tuple[int, int]
    inputs: frozenset[int]
    refused: str = ""
    backward: tuple[int, int] | None = None


class _Kept:
    """Stands in the graph for a saved tensor; its own end is the moment at which the tensor is let go."""

    __slots__ = ("_recorder", "save", "tensor")

    def __init__(self, tensor: torch.Tensor, save: Save, recorder: Recorder) -> None:
        self.tensor, self.save, self._recorder = tensor, save, recorder

    def __del__(self) -> None:
        self.save.released = self._recorder.tick


@dataclass(slots=True)
class CallWatch:
    """Follows the first forward pass, its backward pass and the first update."""

    recorder: Recorder
    origin: OriginTracker
    operators: SimulatedOperators
    features: FeatureWatch
    calls: list[ModuleCall] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    log: WorkLog = field(default_factory=WorkLog)
    backward: int = 0
    """Tick at which the backward pass begins."""
    end_of_backward: int = 0
    sees_objects: bool = False
    """Whether a call was given something that can change: a list, a cache."""
    objects: list[tuple[int, Before]] | None = None
    """Where not None: collects them, by the number of the call. That keeps them alive."""
    _stack: list[int] = field(default_factory=list)
    _call_of_node: dict[int, int] = field(default_factory=dict)
    _buffers: dict[int, str] = field(default_factory=dict)
    _writes: list[tuple[int, int]] = field(default_factory=list)
    _seen: list[Phase] = field(default_factory=list)
    _over: bool = False

    @contextmanager
    def watching(self, model: torch.nn.Module, *, hooks: bool) -> Iterator[None]:
        """Watches the steps of `model` that run while this lasts; what autograd saves only with `hooks`."""
        with internals.disable_torch_function():
            for name, buffer in model.named_buffers():
                block = self.recorder.block_of(buffer) if buffer.layout is torch.strided else None
                if block is not None:
                    self._buffers[block] = name.rpartition(".")[2]
        plain: Callable[..., Any] = torch.nn.Module.__call__
        watch = self

        def call(self: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if not watch._in_forward:
                return plain(self, *args, **kwargs)
            return watch._call(plain, self, args, kwargs)

        self.recorder.on_enter, self.operators.on_run = self._entered, self._ran
        saving = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack) if hooks else nullcontext()
        try:
            with replaced([Replacement(torch.nn.Module, "__call__", call)]), saving:
                yield
        finally:
            self.recorder.on_enter = self.operators.on_run = None

    def begin(self) -> None:
        """The forward pass begins now; for a watch that isn't told of phases."""
        self._seen.append(Phase.FORWARD)

    @property
    def _in_forward(self) -> bool:
        return len(self._seen) == 1

    def _entered(self, phase: Phase, step: int) -> None:
        self._over = self._over or step > 1
        if self._over:
            return
        tick = self.recorder.tick
        if len(self._seen) == 1:
            self.backward = tick
            self._refuse_changed_later()
        elif len(self._seen) == 2:
            self.end_of_backward = tick
        self._seen.append(phase)

    def _call(
        self, plain: Callable[..., Any], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        path = self.origin.path(module)
        if not path or any(self.calls[number].module is module for number in self._stack):
            return plain(module, *args, **kwargs)
        with internals.disable_torch_function():
            given = [self._block(tensor) for tensor in tensors_in((args, kwargs))]
        number, parent = len(self.calls), self._innermost
        refused = ""
        if is_compiled(module) or (parent != OUTSIDE and self.calls[parent].refused == COMPILED):
            refused = COMPILED
        elif not torch.is_grad_enabled():
            refused = NO_GRADIENTS
        inputs = frozenset(block for block in given if block is not None)
        begun = self._now()
        ticks, blocks, operations = zip(begun, begun, strict=True)
        record = ModuleCall(module, path, number, parent, number, ticks, blocks, operations, inputs, refused)
        self.calls.append(record)
        before = before_call(module, args, kwargs)
        self.sees_objects = self.sees_objects or bool(before.held)
        if self.objects is not None:
            self.objects.append((number, before))
        self._stack.append(number)
        try:
            out = plain(module, *args, **kwargs)
        finally:
            self._stack.pop()
        record.last = len(self.calls) - 1
        record.ticks, record.blocks, record.operations = zip(begun, self._now(), strict=True)
        reason = after_call(module, before, out)
        record.refused = record.refused or reason
        # What a call remembers, or a buffer that it changes, keeps those around it from being computed again as well.
        # Those that change their input, or return something strange, may do so inside of an outer call alone.
        if reason.startswith(REMEMBERS.partition("(")[0]) or reason == CHANGES_BUFFER:
            for outer in self._stack:
                self.calls[outer].refused = self.calls[outer].refused or reason
        return out

    def _now(self) -> tuple[int, int, int]:
        return self.recorder.tick, self.recorder.num_blocks, len(self.log)

    @property
    def _innermost(self) -> int:
        return self._stack[-1] if self._stack else OUTSIDE

    def _pack(self, tensor: torch.Tensor) -> Any:
        with internals.disable_torch_function():
            # The tensor itself would hold the node that saves it, if it is the node's own output. For plain tensors
            # nobody notices that it is detached.
            is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
            with internals.disable_torch_dispatch() if is_plain else nullcontext():
                kept = tensor.detach()
            if internals.is_view(tensor):
                # Autograd makes a node of its own for a view that was changed in place.
                self.origin.remember()
            block = self._block(tensor) if self._in_forward else None
        if block is None:
            return kept
        self._call_of_node.setdefault(_sequence(), self._innermost)
        save = Save(block, self._innermost, self.recorder.tick)
        self.saves.append(save)
        return _Kept(kept, save, self.recorder)

    def _unpack(self, kept: Any) -> torch.Tensor:
        if type(kept) is not _Kept:
            return kept  # type: ignore[no-any-return]
        if kept.save.unpacked is None:
            kept.save.unpacked = self.recorder.tick
        return kept.tensor

    def _block(self, tensor: torch.Tensor) -> int | None:
        if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return None
        return self.recorder.block_of(tensor)

    def _ran(
        self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, known: Known | None
    ) -> None:
        if self._over or not self._seen:
            return
        phase = self._seen[-1]
        self.log.add(self.origin.module(), phase, func, args, kwargs, out, known)
        self.features.ran(func, args, out, phase)
        if self._in_forward:
            self._call_of_node.setdefault(_sequence(), self._innermost)
            if behaviour(func) in _WRITING:
                self._note_writes(func, args, kwargs)
        elif len(self._seen) == 2:
            node = internals.current_autograd_node()
            number = OUTSIDE if node is None else self._call_of_node.get(internals.number_of(node), OUTSIDE)
            if number != OUTSIDE:
                tick = self.recorder.tick
                span = self.calls[number].backward
                self.calls[number].backward = (span[0] if span else tick, tick)

    def _note_writes(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        written = [
            args[position] if position < len(args) else kwargs.get(argument.name)
            for position, argument in enumerate(internals.schema_of(func).arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for tensor in tensors(written):
            block = self._block(tensor)
            if block is None:
                continue
            self._writes.append((block, len(self.log)))
            name = self._buffers.get(block)
            for number in self._stack:
                record = self.calls[number]
                if name is not None and name not in RUNNING_STATISTICS:
                    record.refused = record.refused or CHANGES_BUFFER
                elif block in record.inputs:
                    record.refused = record.refused or CHANGES_INPUT

    def _refuse_changed_later(self) -> None:
        """Computing a call again needs its inputs as they were."""
        last: dict[int, int] = {}
        for block, operation in self._writes:
            last[block] = max(operation, last.get(block, 0))
        for record in self.calls:
            # The position of a write counts the operators up to its own.
            if not record.refused and any(last.get(block, 0) > record.operations[1] for block in record.inputs):
                record.refused = INPUT_CHANGED_LATER


def _sequence() -> int:
    """Number of the node that is being made."""
    return int(internals.sequence_number()) - 1
