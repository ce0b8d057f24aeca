"""Updates parameters one at a time with an optimizer that was made for many.

The user's own optimizer does the work: for one call its groups are a single group with a single parameter. So its state
stays where it is, learning-rate schedulers that hold it go on, and nothing has to be carried over or back. This needs
an optimizer that treats each parameter by itself; `check_independent` makes sure.
"""

import copy
import inspect
import threading
from collections import defaultdict
from typing import Any, Protocol

import torch

from memfit.core.errors import BadOptimizer
from memfit.frameworks.torch import internals

_HOOKS = "_hooks"


class Updates(Protocol):
    """Something that updates one parameter from its gradient."""

    def update(self, parameter: torch.nn.Parameter) -> None:
        """Updates `parameter`, whose gradient is there."""

    def close(self) -> None:
        """Leaves the optimizer as if it had always been used directly."""


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
        self._groups = Groups(optimizer)
        self._step = plain_step(optimizer)
        self._entries: dict[torch.Tensor, _Entry] = {}
        # A model on several devices runs its backward pass in as many threads.
        self._lock = threading.Lock()

    def update(self, parameter: torch.nn.Parameter, stand_in: torch.nn.Parameter | None = None, **options: Any) -> None:
        """Updates `parameter`, or `stand_in` with the state of `parameter`; `options` go before the group's."""
        optimizer = self._optimizer
        with self._lock:
            entry = self._entry(parameter)
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

    def _entry(self, parameter: torch.nn.Parameter) -> _Entry:
        group = self._groups.of(parameter)
        entry = self._entries.get(parameter)
        if entry is None or entry.group is not group:
            entry = self._entries[parameter] = _Entry(group)
        return entry


class Groups:
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
    small = _small_copy(optimizer, parameters)
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


def _small_copy(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer of the same class and options, with an empty state, over other parameters."""
    left_out = {"param_groups", "state", "step"}
    memo: dict[int, Any] = {id(p): parameters[0] for group in optimizer.param_groups for p in group["params"]}
    memo[id(optimizer)] = small = object.__new__(type(optimizer))
    held = {name: value for name, value in vars(optimizer).items() if name not in left_out}
    hooks = {name: type(value)() for name, value in held.items() if name.endswith(_HOOKS) and isinstance(value, dict)}
    plain = {name: value for name, value in held.items() if name not in hooks}
    vars(small).update(copy.deepcopy(plain, memo), **hooks)
    options = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    small.param_groups = [{**copy.deepcopy(options, memo), "params": list(parameters)}]
    small.state = defaultdict(dict)
    return small
