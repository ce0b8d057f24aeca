"""Operations that run out of memory run again, once room has been made.

A dispatch mode sees every operation of the thread that has it, those of backward passes too. One that fails has
returned nothing, so calling it again gives what the first call would have given, on three conditions, which are
checked for each operator once: random numbers that it drew are drawn again (the generator's state is read before
operators that draw); small tensors that it writes beside its result, the statistics of batch norms, are put back; and
larger ones that it writes in place have not been written to, or are overwritten as a whole. That holds for pointwise
operations, which get all their memory before they write, and for fills and copies. Other operators that write in place
are not run again: their failure is the script's to see.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch

from memfit.core.guarding import MemoryFailure
from memfit.core.oom import clear_frames, recognise
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.internals import TorchDispatchMode

Result = TypeVar("Result")
MakeRoom = Callable[[MemoryFailure, int, str], bool]
"""Makes room after the n-th failure of an operation of this name, from 0 on; False if nothing could be done."""

# PyTorch's schema of the older batch norms doesn't say that they write to these.
_STATISTICS = ("running_mean", "running_var")
_SMALL_BYTES = 1024**2
_OVERWRITING = frozenset(
    f"aten::{name}_" for name in ("bernoulli", "copy", "fill", "normal", "random", "set", "uniform", "zero")
)


def rerun(
    call: Callable[[], Result],
    make_room: MakeRoom,
    name: str = "",
    count: Callable[[], None] = lambda: None,
    undo: Callable[[], None] | None = None,
) -> Result:
    """What `call` gives; when it runs out of memory, room is made and it is called again, until nothing more is free.

    A failed call has no effect but what `undo` takes back; `count` is called when one has worked at last.
    """
    first: BaseException | None = None
    failures = 0
    while True:
        try:
            result = call()
        except Exception as error:
            failure = recognise(error)
            if failure is None:
                raise
            if first is None:
                first = error
            else:
                clear_frames(error)
        else:
            if failures:
                count()
            return result
        # Outside of the handler, and with the frames of the failed call cleared: they would keep its tensors.
        clear_frames(first)
        if not make_room(failure, failures, name):
            try:
                raise first
            finally:
                # The error has this frame in its traceback, and the frame would have the error.
                del first
        failures += 1
        if undo is not None:
            undo()


class Retrying(TorchDispatchMode):
    """Runs operations that ran out of memory again; `make_room` and `count` are those of `rerun`."""

    supports_higher_order_operators = True

    def __init__(self, make_room: MakeRoom, count: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._make_room = make_room
        self._count = count

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs the operation."""
        kwargs = kwargs or {}
        operator = operator_of(func)
        if not operator.retry:
            return func(*args, **kwargs)
        undo = None
        if operator.may_draw or operator.restored:
            written: list[torch.Tensor] = []
            for index, name in operator.restored:
                value = args[index] if index < len(args) else kwargs.get(name)
                values = value if isinstance(value, list | tuple) else [value]
                written += [tensor for tensor in values if isinstance(tensor, torch.Tensor)]
            if sum(tensor.numel() * tensor.element_size() for tensor in written) > _SMALL_BYTES:
                return func(*args, **kwargs)
            undo = self._undo(written, generator_states([*args, *kwargs.values()]) if operator.may_draw else [])
        return rerun(lambda: func(*args, **kwargs), self._make_room, operator.name, self._count, undo)

    def _undo(
        self, written: list[torch.Tensor], states: list[tuple[torch.Generator, torch.Tensor]]
    ) -> Callable[[], None]:
        copies = [(tensor, rerun(tensor.clone, self._make_room, "aten.clone", self._count)) for tensor in written]

        def undo() -> None:
            for tensor, copy in copies:
                tensor.copy_(copy)
            for generator, state in states:
                generator.set_state(state)

        return undo


@dataclass(frozen=True, slots=True)
class Operator:
    """What has to be known of an operator to call it again."""

    name: str
    retry: bool
    draws: bool = False  # random numbers, as PyTorch says
    may_draw: bool = False  # the same, or an operator of another library, which doesn't say
    writes: tuple[tuple[int, str], ...] = ()  # arguments that it writes to: (position, name)
    restored: tuple[tuple[int, str], ...] = ()  # those that have to be put back before another try
    list_position: int | None = None  # the first argument that is a list of tensors that it writes to


@cache
def operator_of(func: Any) -> Operator:
    """What PyTorch says about an operator."""
    schema = internals.schema_of(func)
    if schema is None:
        # A higher-order operator: runs functions of the script, which may do anything.
        return Operator(str(func), retry=False)
    known = schema.name.startswith(("aten::", "prims::"))
    draws = torch.Tag.nondeterministic_seeded in func.tags
    name = schema.name.replace("::", ".")
    writes = tuple(
        (index, argument.name)
        for index, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or (known and "batch_norm" in name and "backward" not in name and argument.name in _STATISTICS)
    )
    positional = ((index, schema.arguments[index]) for index, _ in writes if not schema.arguments[index].kwarg_only)
    lists = (index for index, argument in positional if str(argument.type).startswith("List["))
    is_pointwise = known and torch.Tag.pointwise in func.tags and not name.startswith("aten._foreach")
    restored = () if is_pointwise or schema.name in _OVERWRITING else writes
    return Operator(name, True, draws, draws or not known, writes, restored, next(lists, None))


def generator_states(arguments: Sequence[Any]) -> list[tuple[torch.Generator, torch.Tensor]]:
    """Generators that an operation with these arguments may draw from, with their states."""
    generators = [value for value in arguments if isinstance(value, torch.Generator)]
    generators.append(torch.default_generator)
    devices = {value.device for value in arguments if isinstance(value, torch.Tensor)}
    for device in devices | {value for value in arguments if isinstance(value, torch.device)}:
        if device.type == "cuda" and torch.cuda.is_initialized():
            index = torch.cuda.current_device() if device.index is None else device.index
            generators.append(torch.cuda.default_generators[index])
    return [(each, each.get_state()) for each in {id(generator): generator for generator in generators}.values()]
