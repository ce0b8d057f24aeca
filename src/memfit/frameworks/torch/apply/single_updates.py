"""Updates parameters one at a time with an optimizer that was made for many, in place or in host memory.

The user's own optimizer does the work: for one call its groups are a single group with a single parameter. So its state
stays where it is, learning-rate schedulers that hold it go on, and nothing has to be carried over or back. This needs
an optimizer that treats each parameter by itself; `check_independent` makes sure.

In host memory, each parameter has a copy, the optimizer's state is there, and so is the update: a gradient goes down,
the new values come up. The device holds nothing for the optimizer, not even for a moment. Where the device is the
host, nothing is copied and the update runs in place.
"""

import copy
import inspect
import threading
from collections import OrderedDict, defaultdict
from typing import Any

import torch

from memfit.core.errors import BadOptimizer
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.apply.tensor_memory import simulated

_HOST = torch.device("cpu")


class _Entry:
    """The options of one parameter: those of its group, and what the optimizer itself has changed in them."""

    __slots__ = ("group", "own", "seen")

    def __init__(self, group: dict[str, Any]) -> None:
        self.group = group
        self.seen: dict[str, Any] = {}
        self.own: dict[str, Any] = {}

    def refresh(self) -> None:
        """Takes over what has changed in the group, such as the learning rate."""
        for name, value in self.group.items():
            if name != "params" and (name not in self.seen or self.seen[name] is not value):
                self.seen[name] = self.own[name] = value


class SingleUpdates:
    """Updates single parameters with the user's optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = OptionGroups(optimizer)
        self._step = plain_step(optimizer)
        self._entries: dict[torch.Tensor, _Entry] = {}
        # A model on several devices runs its backward pass in as many threads.
        self._lock = threading.Lock()

    def update(self, parameter: torch.nn.Parameter, stand_in: torch.nn.Parameter | None = None, **options: Any) -> None:
        """Updates `parameter`, or `stand_in` with the state of `parameter`; `options` go before the group's."""
        optimizer = self._optimizer
        with self._lock:
            group, entry = self._groups.of(parameter), self._entries.get(parameter)
            if entry is None or entry.group is not group:
                entry = self._entries[parameter] = _Entry(group)
            entry.refresh()
            entry.own["params"] = [parameter if stand_in is None else stand_in]
            groups, states = optimizer.param_groups, optimizer.state
            optimizer.param_groups = [{**entry.own, **options} if options else entry.own]
            if stand_in is not None:
                held: defaultdict[torch.Tensor, Any] = defaultdict(dict)
                held[stand_in] = states[parameter]
                optimizer.state = held
            try:
                self._step(optimizer)
            finally:
                optimizer.param_groups, optimizer.state = groups, states
                entry.own["params"] = []

    def close(self) -> None:
        """Writes what the optimizer has changed in its options, such as a count of steps, into the groups."""
        for entry in self._entries.values():
            for name, value in entry.own.items():
                if name != "params" and entry.seen.get(name) is not value:
                    entry.group[name] = value
        self._entries.clear()


class HostUpdates:
    """Updates parameters in host memory, where the optimizer's state goes parameter by parameter.

    With `copies`, parameters that are there already are copied as well.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, copies: bool = False) -> None:
        self._optimizer = optimizer
        self._single = SingleUpdates(optimizer)
        self._copies_always = copies
        self._last_bytes = 0
        self._copies: dict[torch.Tensor, torch.nn.Parameter] = {}
        for parameter, state in optimizer.state.items():
            if not simulated(parameter):
                _move(state, _HOST)

    def update(self, parameter: torch.nn.Parameter) -> None:
        """Updates `parameter` from its gradient."""
        if parameter.device.type == "cpu" and not self._copies_always:
            self._single.update(parameter)
            return
        if simulated(parameter):
            self._simulate(parameter)
            return
        held = self._copies.get(parameter)
        if held is None:
            held = self._copies[parameter] = torch.nn.Parameter(_on_host(parameter.detach()))
        assert parameter.grad is not None
        with torch.no_grad():
            # Always: no version tells of a change through `.data`, by what was loaded, clamped or averaged.
            held.copy_(parameter)
        held.grad = _on_host(parameter.grad)
        # A state that was loaded meanwhile is on the parameter's device.
        _move(self._optimizer.state[parameter], _HOST)
        self._single.update(parameter, held)
        held.grad = None
        with torch.no_grad():
            parameter.copy_(held)

    @property
    def host_bytes(self) -> int:
        """Bytes of parameters' copies and of their state, at last; 0 where these are in host memory anyway."""
        held_bytes = sum(
            tensor.numel() * tensor.element_size()
            for parameter, held in self._copies.items()
            for tensor in (held, *self._optimizer.state[parameter].values())
            if isinstance(tensor, torch.Tensor)
        )
        return held_bytes or self._last_bytes

    def _simulate(self, parameter: torch.nn.Parameter) -> None:
        """Makes the copy and the state of a simulated parameter, on nobody's account: the device holds none of it."""
        if parameter in self._copies:
            return
        with internals.outside_simulation():
            held = self._copies[parameter] = torch.nn.Parameter(torch.empty_like(parameter.detach()))
            held.grad = torch.empty_like(held)
            # A fused kernel insists on a real device.
            options = {"fused": False} if "fused" in self._optimizer.defaults else {}
            self._single.update(parameter, held, **options)
            held.grad = None

    def close(self) -> None:
        """Moves the state back to where the parameters are."""
        self._last_bytes = self.host_bytes
        self._single.close()
        groups = OptionGroups(self._optimizer)
        for parameter, state in self._optimizer.state.items():
            _move(state, parameter.device, counters=counts_on_device(groups.of(parameter)))
        self._copies.clear()


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return tensor.to(_HOST)
    # Transfers from pinned memory are several times faster.
    return torch.empty_like(tensor, device=_HOST, pin_memory=tensor.is_cuda).copy_(tensor)


def _move(state: dict[str, Any], device: torch.device, *, counters: bool = True) -> None:
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.device != device and (counters or value.dim()):
            state[name] = value.to(device)


class OptionGroups:
    """Finds the group of options that a parameter belongs to; a loaded checkpoint makes groups anew."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._known: dict[torch.Tensor, dict[str, Any]] = {}

    def of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """The group of `parameter`."""
        group = self._known.get(parameter)
        if group is None or not any(group is present for present in self._optimizer.param_groups):
            self._known = {held: present for present in self._optimizer.param_groups for held in present["params"]}
            group = self._known.get(parameter)
        if group is None:
            raise BadOptimizer(
                f"a parameter of shape {tuple(parameter.shape)} is in none of the optimizer's groups. "
                "Make the optimizer from the parameters of this model."
            )
        return group


def counts_on_device(group: dict[str, Any]) -> bool:
    """Whether the step counters of a group are beside the parameters, and not on the host."""
    return bool(group.get("fused") or group.get("capturable"))


def plain_step(optimizer: torch.optim.Optimizer) -> Any:
    """The optimizer's own step, without the hooks that PyTorch runs around it."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if hasattr(step, "hooked") and hasattr(step, "__wrapped__") else step


def check_independent(optimizer: torch.optim.Optimizer, purpose: str) -> None:
    """Refuses an optimizer that can't update one parameter without the others; `purpose` is for the message.

    PyTorch's own are known. Any other is tried out: two small tensors, updated together and one by one, must come to
    the same values.
    """
    name = type(optimizer).__name__
    closure = inspect.signature(plain_step(optimizer)).parameters.get("closure")
    needs_closure = closure is not None and closure.default is inspect.Parameter.empty
    if isinstance(optimizer, torch.optim.LBFGS) or needs_closure:
        raise BadOptimizer(
            f"{purpose} updates parameters one by one, but {name} computes the loss again in each step and needs all "
            "gradients at once. Use another optimizer, such as torch.optim.AdamW, or leave this move out."
        )
    if f"{type(optimizer).__module__}.".startswith("torch.optim."):
        return
    try:
        # Real numbers, also where the parameters are simulated.
        with internals.outside_simulation():
            together, one_by_one = _tried(optimizer, together=True), _tried(optimizer, together=False)
    except Exception as error:
        raise BadOptimizer(
            f"{purpose} updates parameters one by one, and {name} could not be tried out on small tensors "
            f"({type(error).__name__}: {error}). Use an optimizer of torch.optim, or leave this move out."
        ) from error
    if not all(torch.allclose(a, b, rtol=1e-9, atol=0) for a, b in zip(together, one_by_one, strict=True)):
        raise BadOptimizer(
            f"{purpose} updates parameters one by one, but {name} gives different results then: it looks at all "
            "gradients together. Use an optimizer of torch.optim, or leave this move out."
        )


def _tried(optimizer: torch.optim.Optimizer, *, together: bool) -> list[torch.Tensor]:
    """Two small parameters after two updates."""
    parameters = [
        torch.nn.Parameter(torch.linspace(0.5, 1.5, 12, dtype=torch.float64).view(3, 4)),
        torch.nn.Parameter(torch.linspace(-2.0, 2.0, 8, dtype=torch.float64).view(2, 4)),
    ]
    small = scratch_copy(optimizer, parameters)
    single = SingleUpdates(small)
    for number in range(2):
        gradients = [torch.cos(p.detach() * (3 + number)) * (1 + 10 * index) for index, p in enumerate(parameters)]
        if together:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            plain_step(small)(small)
            continue
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
            single.update(parameter)
            parameter.grad = None
    return [parameter.detach() for parameter in parameters]


def empty_copy(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> Any:
    """An optimizer of the same class and options with an empty state and no hooks, as are those that it wraps.

    `memo` is as for `copy.deepcopy`: what stands in for the parameters, by the ids of these.
    """
    family = [optimizer]
    for member in family:
        wrapped = [value for value in vars(member).values() if isinstance(value, torch.optim.Optimizer)]
        family += [value for value in wrapped if all(value is not known for known in family)]
        # Optimizers tell `copy` of their groups and state only, so each is made empty here and filled below.
        memo[id(member)] = object.__new__(type(member))
        memo.setdefault(id(member.state), defaultdict(dict))
        hooks = [value for name, value in vars(member).items() if name.endswith("_hooks") and isinstance(value, dict)]
        memo.update({id(value): OrderedDict() for value in hooks})
    for member in family:
        # A learning-rate scheduler replaces `step` on the instance by one bound to the original.
        held = {name: value for name, value in vars(member).items() if name != "step"}
        vars(memo[id(member)]).update(copy.deepcopy(held, memo))
    return memo[id(optimizer)]


def scratch_copy(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer of the same class, with the options of the first group, over other parameters."""
    memo: dict[int, Any] = {id(p): parameters[0] for group in optimizer.param_groups for p in group["params"]}
    scratch: torch.optim.Optimizer = empty_copy(optimizer, memo)
    scratch.param_groups = [{**scratch.param_groups[0], "params": list(parameters)}]
    return scratch
