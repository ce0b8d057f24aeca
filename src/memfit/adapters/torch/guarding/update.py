"""The optimizer's update as a transaction, without a copy of the parameters.

An update changes parameters and moments in place, so an exception in the middle of it can't be undone. It is therefore
kept away from the optimizer's code: every operator of the update passes through a dispatch mode, and one that finds no
memory is called again after memory was freed. That is right because an operator asks for all its memory before it
writes to any argument. Operators on lists of tensors are the exception: on a CPU they are loops, and each turn asks by
itself, so there each turn is a call of its own.

The mode also notes which memory was written. Version counters can't tell: operators on lists and writes through
`.data` leave them as they are. When memory can't be found at all, what was written decides: nothing that lasts, and the
optimizer is put back as it was and the failure goes on; anything else, and the update is broken, which is said.
"""

import bisect
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.adapters.torch import oom
from memfit.adapters.torch.guarding.update_room import UpdateRoom, is_of_torch, rooms_of_update
from memfit.core.guarding import BrokenUpdate

# Memory may come back by itself: another thread or process gives some up, or the system writes pages out.
WAITS_SECONDS = (0.0, 0.05, 0.5)
_SIMPLE = (int, float, complex, bool, str, type(None))
# Given to an optimizer by a gradient scaler for the length of one step.
_OF_SCALER = ("grad_scale", "found_inf")


class Update:
    """Runs the updates of one optimizer so that running out of memory can't leave them half done.

    Args:
        optimizer: the user's; may be replaced.
        waits_seconds: how long to wait before each further try of an operator; as many tries as there are waits.

    Attributes:
        retries: how many calls of operators were repeated so far.
    """

    def __init__(self, optimizer: Any, waits_seconds: Sequence[float] = WAITS_SECONDS) -> None:
        self.optimizer = optimizer
        self.retries = 0
        self._waits_seconds = tuple(waits_seconds)
        self._callbacks: list[Callable[[], object]] = []
        self._rooms: dict[Any, tuple[UpdateRoom, ...]] = {}
        self._seen: weakref.ref[Any] | None = None

    def on_pressure(self, callback: Callable[[], object]) -> None:
        """Has `callback` called whenever memory must be freed; it may drop what can be made again."""
        self._callbacks.append(callback)

    def prepare(self) -> None:
        """Makes sure that the memory for new state and temporaries is there, as far as they can be foreseen.

        Raises what the allocator raises where it isn't; nothing has changed then.
        """
        for room in self._foreseen():
            try:
                room.probe()
                continue
            except Exception as error:
                if oom.recognise(error) is None:
                    raise
                oom.clear_frames(error)
            self.relieve()
            room.probe()

    def step(self, scaler: Any = None, run: Callable[[], object] | None = None) -> bool:
        """Updates the parameters; False where the scaler left the update out because of infinite gradients.

        Args:
            scaler: the user's gradient scaler; it is updated as well.
            run: called in place of the optimizer's own step, and has it run.

        Raises:
            BrokenUpdate: memory ran out for good after something had changed. Any other exception for want of memory
                means that parameters and state are as before; gradients may have been unscaled.
        """
        before = _Before(self.optimizer)
        mode = _Retrying(self.relieve, self._waits_seconds)
        try:
            with mode:
                happened = self._run(scaler) if run is None else run() is not False
        except Exception as error:
            if oom.recognise(error) is None:
                raise
            changed = before.changed(mode.written) or ("" if self._sees_writes() else "what it changes can't be seen")
            if changed:
                raise BrokenUpdate(_broken_message(self.optimizer, changed, error)) from error
            before.restore()
            raise
        if happened and not self._sees_writes() and before.all_parameters_in(mode.written):
            self._seen = weakref.ref(self.optimizer)
        return happened

    @contextmanager
    def retrying(self) -> Iterator[None]:
        """The same protection for other code that changes tensors in place, such as a moving average.

        Raises:
            BrokenUpdate: memory ran out for good after something was written.
        """
        mode = _Retrying(self.relieve, self._waits_seconds)
        try:
            with mode:
                yield
        except Exception as error:
            if oom.recognise(error) is None or not mode.written:
                raise
            raise BrokenUpdate(_broken_message(None, "some tensors", error)) from error

    def relieve(self) -> None:
        """Frees what can be freed."""
        self.retries += 1
        for callback in self._callbacks:
            callback()
        oom.release()

    def _run(self, scaler: Any) -> bool:
        if scaler is None:
            self.optimizer.step()
            return True
        scaler.step(self.optimizer)
        found = scaler._found_inf_per_device(self.optimizer) if scaler.is_enabled() else {}
        happened = not any(bool(value.item()) for value in found.values())
        scaler.update()
        return happened

    def _foreseen(self) -> tuple[UpdateRoom, ...]:
        """What the next update takes; worked out again whenever gradients or state appear or go."""
        optimizer = self.optimizer
        if not is_of_torch(optimizer):
            return ()
        state = optimizer.state
        key = (
            id(optimizer),
            *(
                (id(parameter), parameter.grad is None, len(state[parameter]) if parameter in state else 0)
                for group in optimizer.param_groups
                for parameter in group["params"]
            ),
        )
        rooms = self._rooms.get(key)
        if rooms is None:
            # Only the last few kinds of step matter; an optimizer's numbers may belong to another one later.
            if len(self._rooms) >= 8:
                self._rooms.clear()
            rooms = self._rooms[key] = rooms_of_update(optimizer)
        return rooms

    def _sees_writes(self) -> bool:
        """Whether the optimizer writes through PyTorch's dispatcher, not by kernels of its own."""
        return is_of_torch(self.optimizer) or (self._seen is not None and self._seen() is self.optimizer)


def reset_scaler(scaler: Any, optimizer: Any) -> None:
    """Makes `scaler` forget that gradients of `optimizer` were unscaled, so that they can be unscaled again."""
    states = getattr(scaler, "_per_optimizer_states", None)
    if states is not None:
        states.pop(id(optimizer), None)
    if getattr(scaler, "_scale", None) is not None and getattr(scaler, "_growth_tracker", None) is None:
        # Memory ran out between the two tensors that its first use makes; it would take itself for ready.
        scaler._scale = None


class _Kind:
    """What the mode has to know about an operator.

    Args:
        positions: of positional arguments that it writes.
        names: of arguments by name that it writes.
        list_position: of the first list of tensors that it writes, or None.
        is_random: whether it draws random numbers.
    """

    __slots__ = ("is_random", "list_position", "names", "positions")

    def __init__(
        self, positions: tuple[int, ...], names: tuple[str, ...], list_position: int | None, is_random: bool
    ) -> None:
        self.positions = positions
        self.names = names
        self.list_position = list_position
        self.is_random = is_random


def _kind_of(operator: Any) -> _Kind | None:
    """None for the many operators that only make new tensors or look at old ones."""
    schema = getattr(operator, "_schema", None)
    if schema is None:
        return None
    positions, names, list_position = [], [], None
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        names.append(argument.name)
        if not argument.kwarg_only:
            positions.append(position)
            if list_position is None and str(argument.type).startswith("List["):
                list_position = position
    is_random = torch.Tag.nondeterministic_seeded in operator.tags
    return _Kind(tuple(positions), tuple(names), list_position, is_random) if names or is_random else None


_KINDS: dict[Any, _Kind | None] = {}
_IS_PLAIN: dict[Any, bool] = {}


class _Retrying(TorchDispatchMode):
    """Calls an operator again that found no memory.

    Args:
        relieve: frees memory.
        waits_seconds: before each further try.
    """

    supports_higher_order_operators = True

    def __init__(self, relieve: Callable[[], None], waits_seconds: tuple[float, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._relieve = relieve
        self._waits_seconds = waits_seconds
        self.written: set[int] = set()
        """Addresses of the tensors that operators have written to."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing compiles this code, and the wrapper that would keep a compiler out costs a microsecond per call.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and not _are_plain(types):
            if any(issubclass(kind, FakeTensor) for kind in types):
                # A sharded tensor finds out the shape of a result on tensors without values.
                return func(*args, **(kwargs or {}))
            # A subclass, such as a sharded tensor, calls operators on what it holds, and they come here one by one.
            return NotImplemented
        try:
            kind = _KINDS[func]
        except KeyError:
            kind = _KINDS[func] = _kind_of(func)
        if kind is not None:
            return self._call_of_kind(kind, func, args, kwargs or {})
        try:
            return func(*args, **kwargs) if kwargs else func(*args)
        except Exception as error:
            failed = self._checked(error)
        return self._again(failed, func, args, kwargs or {})

    def _call_of_kind(self, kind: _Kind, func: Any, args: Any, kwargs: Any) -> Any:
        if kind.list_position is not None:
            tensors = args[kind.list_position]
            if len(tensors) > 1 and any(tensor.device.type == "cpu" for tensor in tensors):
                return self._one_by_one(kind, func, args, kwargs, len(tensors))
        random_states = _random_states(kwargs) if kind.is_random else ()
        if kwargs:
            # Arguments such as `out=` are no input: some operators fill one before they ask for the next.
            self._note_named(kind, kwargs)
        try:
            made = func(*args, **kwargs)
        except Exception as error:
            failed = self._checked(error)
        else:
            self._note(kind, args)
            return made
        if kind.list_position is not None and len({tensor.dtype for tensor in args[kind.list_position]}) > 1:
            # Tensors of one type are one kernel, which was started or not. Of these some may have been written.
            self._note(kind, args)
            raise failed
        made = self._again(failed, func, args, kwargs, random_states)
        self._note(kind, args)
        return made

    def _one_by_one(self, kind: _Kind, func: Any, args: Any, kwargs: Any, length: int) -> None:
        """What the operator does on a CPU anyway, but each tensor in a call of its own."""
        for index in range(length):
            part = [_part(value, index, length) for value in args]
            named = {name: _part(value, index, length) for name, value in kwargs.items()}
            self._call_of_kind(kind, func, part, named)

    def _again(self, failed: Exception, func: Any, args: Any, kwargs: Any, random_states: Any = ()) -> Any:
        for seconds in self._waits_seconds:
            if seconds:
                time.sleep(seconds)
            self._relieve()
            for generator, state in random_states:
                generator.set_state(state)
            try:
                return func(*args, **kwargs)
            except Exception as error:
                failed = self._checked(error)
        try:
            raise failed
        finally:
            # The exception's traceback holds this frame.
            del failed

    def _checked(self, error: Exception) -> Exception:
        """The failure to get memory, without what it holds; any other exception goes on."""
        if oom.recognise(error) is None:
            raise error
        oom.clear_frames(error)
        return error

    def _note(self, kind: _Kind, args: Any) -> None:
        num_given = len(args)
        for position in kind.positions:
            if position < num_given:
                self._note_value(args[position])

    def _note_named(self, kind: _Kind, kwargs: Any) -> None:
        for name in kind.names:
            if name in kwargs:
                self._note_value(kwargs[name])

    def _note_value(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            # Sparse tensors have no address; what they hold are tensors that are written by other calls.
            if value.layout is torch.strided:
                self.written.add(value.data_ptr())
        elif isinstance(value, list | tuple):
            for held in value:
                self._note_value(held)


def _part(value: Any, index: int, length: int) -> Any:
    return value[index : index + 1] if isinstance(value, list | tuple) and len(value) == length else value


def _are_plain(types: Any) -> bool:
    known = _IS_PLAIN.get(types)
    if known is None:
        disabled = torch._C._disabled_torch_dispatch_impl
        known = _IS_PLAIN[types] = all(kind.__torch_dispatch__ == disabled for kind in types)
    return known


def _random_states(kwargs: Any) -> list[tuple[Any, torch.Tensor]]:
    given = kwargs.get("generator")
    generators = [torch.default_generator] if given is None else [given]
    if given is None and torch.cuda.is_available() and torch.cuda.is_initialized():
        generators.extend(torch.cuda.default_generators)
    return [(generator, generator.get_state()) for generator in generators]


class _Before:
    """An optimizer as it was before its step: which tensors there are and where, and all plain values.

    Args:
        optimizer: any object with `param_groups` and `state`.
    """

    def __init__(self, optimizer: Any) -> None:
        self._groups = [(group, dict(group)) for group in getattr(optimizer, "param_groups", ())]
        self._state: Any = getattr(optimizer, "state", {})
        # State is held weakly: an optimizer that replaces its tensors must be able to free the old ones.
        self._entries = {
            key: (entries, {name: _held(value) for name, value in entries.items()} if isinstance(entries, dict) else {})
            for key, entries in self._state.items()
        }
        self._places = [
            (index, number, parameter, _place(parameter))
            for index, (group, _) in enumerate(self._groups)
            for number, parameter in enumerate(group["params"])
        ]
        self._attributes: dict[str, Any] = getattr(optimizer, "__dict__", {})
        self._own = {name: value for name, value in self._attributes.items() if isinstance(value, _SIMPLE)}
        self._of_scaler = [name for name in _OF_SCALER if name not in self._attributes]

    def changed(self, written: set[int]) -> str:
        """What is not as it was and can't be put back, in words; "" if there is nothing."""
        addresses = sorted(written)
        for index, number, parameter, place in self._places:
            if _place(parameter) != place or _is_within(addresses, place):
                return f"parameter {number} of group {index}, of shape {tuple(parameter.shape)}"
        for key, (entries, values) in self._entries.items():
            if self._state.get(key) is not entries:
                return "the state of a parameter"
            for name, value in values.items():
                if _differs(entries.get(name), value, addresses):
                    return f"{name!r} in the state of a parameter of shape {tuple(getattr(key, 'shape', ()))}"
        for _, options in self._groups:
            for name, value in options.items():
                if isinstance(value, torch.Tensor) and _is_within(addresses, _place(value)):
                    return f"the option {name!r}"
        return ""

    def restore(self) -> None:
        """Removes state that was newly made and sets plain values back."""
        for key in [key for key in self._state if key not in self._entries]:
            del self._state[key]
        for entries, values in self._entries.values():
            for name in [name for name in entries if name not in values]:
                del entries[name]
            entries.update({name: value for name, value in values.items() if not isinstance(value, weakref.ref)})
        for group, options in self._groups:
            for name in [name for name in group if name not in options]:
                del group[name]
            group.update(options)
        self._attributes.update(self._own)
        for name in self._of_scaler:
            self._attributes.pop(name, None)

    def all_parameters_in(self, written: set[int]) -> bool:
        """Whether every parameter with a gradient was seen to be written, so that writes can be seen at all."""
        addresses = sorted(written)
        return all(
            _place(parameter) != place or _is_within(addresses, place)
            for _, _, parameter, place in self._places
            if parameter.grad is not None and parameter.numel()
        )


def _held(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return weakref.ref(value)
    return list(value) if isinstance(value, list) else value


def _differs(now: Any, before: Any, addresses: list[int]) -> bool:
    """Whether a value of the state was replaced or written where it can't be put back."""
    if isinstance(before, weakref.ref):
        return before() is not now or not isinstance(now, torch.Tensor) or _is_within(addresses, _place(now))
    if isinstance(before, list):
        return any(isinstance(held, torch.Tensor) and _is_within(addresses, _place(held)) for held in before)
    return False


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """First address and the one after the last of the memory that holds the tensor."""
    # Of a sharded tensor the part that is here; asking for it in the public way would call operators.
    local: Any = getattr(tensor, "_local_tensor", tensor)
    if local.layout is not torch.strided:
        return (0, 0)
    storage = local.untyped_storage()
    first = storage.data_ptr()
    return (first, first + storage.nbytes())


def _is_within(addresses: list[int], place: tuple[int, int]) -> bool:
    index = bisect.bisect_left(addresses, place[0])
    return index < len(addresses) and addresses[index] < place[1]


def _broken_message(optimizer: Any, changed: str, error: Exception) -> str:
    name = "An update" if optimizer is None else f"The update of {type(optimizer).__name__}"
    first_line = next(iter(str(error).splitlines()), type(error).__name__)
    return (
        f"{name} could not be finished for want of memory, and it can't be undone: {changed} had changed already "
        f"({first_line}). Resume from the last checkpoint, with more memory or with a plan that needs less of it."
    )
