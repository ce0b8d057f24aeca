"""How much memory an optimizer's next update will take beyond what is there, known before anything changes.

The update is run on tensors that have shapes and no numbers: an optimizer of the same class with the same options,
over twins of the parameters that have a gradient. What is alive at the peak of that run (new state, temporaries) is
what the real one will ask for. Only PyTorch's own optimizers are run this way: others may do anything in their step.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from memfit.core.oom import clear_frames, recognise
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.apply.single_updates import plain_step
from memfit.frameworks.torch.internals import TorchDispatchMode

_KEPT = (int, float, str, bool, type(None), tuple)


@dataclass(frozen=True, slots=True)
class UpdateRoom:
    """What an update takes on one device."""

    device: torch.device
    pieces_bytes: tuple[int, ...]  # sizes of the tensors that are alive at the peak and weren't there before

    def probe(self) -> None:
        """Takes so much memory and gives it back at once; raises what the allocator raises where there isn't."""
        try:
            self._take((sum(self.pieces_bytes),))
            return
        except Exception as error:
            if recognise(error) is None:
                raise
            clear_frames(error)
        # It may be there in pieces, and the update asks for pieces.
        self._take(self.pieces_bytes)

    def _take(self, sizes_bytes: Iterable[int]) -> None:
        held = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes_bytes]
        held.clear()


class _Unknown(Exception):
    """This update can't be foreseen."""


def is_of_torch(optimizer: Any) -> bool:
    """Whether this is one of PyTorch's own optimizers."""
    module = type(optimizer).__module__
    return module == "torch.optim" or module.startswith("torch.optim.")


def rooms_of_update(optimizer: Any) -> tuple[UpdateRoom, ...]:
    """What the next update takes on each device; nothing for devices and optimizers where it can't be foreseen."""
    if not is_of_torch(optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        return ()
    held = (parameter for group in optimizer.param_groups for parameter in group["params"])
    devices = {parameter.device: None for parameter in held if parameter.grad is not None}
    rooms = []
    for device in devices:
        try:
            pieces = _pieces_at_peak(optimizer, device)
        except Exception as error:
            if recognise(error) is not None:
                raise
            # Whatever an optimizer can't do without numbers; the update itself is protected in other ways as well.
            continue
        if pieces:
            rooms.append(UpdateRoom(device, pieces))
    return tuple(rooms)


def _pieces_at_peak(optimizer: torch.optim.Optimizer, device: torch.device) -> tuple[int, ...]:
    with internals.disable_current_modes(), internals.disable_torch_function():
        twin = _twin(optimizer, device)
        live = _Live()
        with live:
            plain_step(twin)(twin)
        # A fused kernel has no temporaries: only what stays was new.
        return live.held if all(group.get("fused") for group in optimizer.param_groups) else live.at_peak


def _twin(optimizer: torch.optim.Optimizer, device: torch.device) -> torch.optim.Optimizer:
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            setattr(twin, name, type(value)())
        elif isinstance(value, _KEPT):
            setattr(twin, name, value)
    twin.defaults = dict(optimizer.defaults)
    twin.state = defaultdict(dict)
    twin.param_groups = []
    for group in optimizer.param_groups:
        parameters = [held for held in group["params"] if held.grad is not None and held.device == device]
        if not parameters:
            continue
        options = {name: _without_numbers(value) for name, value in group.items() if name != "params"}
        twins = []
        for parameter in parameters:
            twins.append(torch.nn.Parameter(_shape_of(parameter), requires_grad=parameter.requires_grad))
            twins[-1].grad = _shape_of(parameter.grad)
        twin.param_groups.append({**options, **_options_of_path(group, parameters), "params": twins})
        for parameter, other in zip(parameters, twins, strict=True):
            state = optimizer.state.get(parameter) or {}
            if any(
                isinstance(value, torch.Tensor) and value.dim() and value.device != device for value in state.values()
            ):
                raise _Unknown
            if state:
                twin.state[other] = {name: _without_numbers(value) for name, value in state.items()}
    return twin


def _options_of_path(group: dict[str, Any], parameters: list[torch.Tensor]) -> dict[str, Any]:
    """Options by which the twin takes the path that the real optimizer takes on its device."""
    chosen: dict[str, Any] = {}
    if group.get("capturable"):
        # Steps are counted on the device then; the temporaries are the same but for scalars.
        chosen["capturable"] = False
    if group.get("fused"):
        chosen.update(fused=False, foreach=False)
    elif "foreach" in group and group["foreach"] is None:
        _, foreach = internals.default_to_fused_or_foreach(
            parameters, bool(group.get("differentiable")), use_fused=False
        )
        is_fixed = isinstance(group.get("lr"), torch.Tensor) and not group.get("capturable")
        chosen["foreach"] = foreach and not is_fixed
    return chosen


def _without_numbers(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    # Single numbers on the host, such as a count of steps, are read by the optimizer's code.
    return value.clone() if not value.dim() and value.device.type == "cpu" else _shape_of(value)


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and layout that holds nothing; of a sharded one, the part that is here."""
    local = internals.local_part(tensor)
    if local.layout is not torch.strided or type(local) not in (torch.Tensor, torch.nn.Parameter):
        raise _Unknown
    return torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="meta")


class _Live(TorchDispatchMode):
    """Follows the storages that operators make, on tensors without numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._total = 0
        self._peak = 0
        self.at_peak: tuple[int, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is internals.local_scalar_dense and args[0].is_meta:
            # Any number will do: it decides about values, not about memory.
            return 1.0 if args[0].is_floating_point() else 1
        known = {_key(tensor) for tensor in internals.tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for tensor in internals.tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta and _key(tensor) not in known:
                self._add(tensor)
        if self._total > self._peak:
            self._peak = self._total
            self.at_peak = self.held
        return made

    @property
    def held(self) -> tuple[int, ...]:
        """Sizes of what is alive now."""
        return tuple(self._sizes.values())

    def _add(self, tensor: torch.Tensor) -> None:
        storage, key = tensor.untyped_storage(), _key(tensor)
        if key in self._sizes or not storage.nbytes():
            return
        self._sizes[key] = storage.nbytes()
        self._total += storage.nbytes()
        self._references[key] = weakref.ref(storage, lambda _, key=key: self._freed(key))  # type: ignore[misc]

    def _freed(self, key: int) -> None:
        del self._references[key]
        self._total -= self._sizes.pop(key)


def _key(tensor: torch.Tensor) -> int:
    return internals.storage_address(tensor.untyped_storage())
