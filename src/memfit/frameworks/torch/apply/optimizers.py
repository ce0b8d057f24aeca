"""Puts the optimizer's part of the settings into practice on the user's optimizer.

The user's own object stays in use throughout: it keeps the state and the options, so that learning-rate schedulers,
checkpoints and the code around it go on as before. What changes is which kernels it uses, and who updates a parameter,
when and where.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from memfit.core.errors import BadOptimizer
from memfit.core.settings import OptimizerKernels, OptimizerState, Settings
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.apply.eight_bit import EightBitUpdates
from memfit.frameworks.torch.apply.low_rank import adapter_parameters
from memfit.frameworks.torch.apply.single_updates import HostUpdates, SingleUpdates, check_independent, counts_on_device


class FittedOptimizer:
    """The user's optimizer, or a stand-in for it on shape-only parameters, run as settings say.

    Parameters of adapters, if the model has any, join its first group. `around` is entered for each update in the
    backward pass.
    """

    def __init__(
        self,
        settings: Settings,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise BadOptimizer(
                f"a plan is applied to a torch.optim.Optimizer, but {type(optimizer).__name__} was given. "
                "Give the optimizer that was made from the model's parameters."
            )
        self.optimizer = optimizer
        self._around = around
        self._updates: SingleUpdates | HostUpdates | EightBitUpdates | None = None
        with ExitStack() as undo:
            undo.callback(_adapters_joined(optimizer, model))
            undo.callback(_kernels_set(settings.kernels, optimizer))
            if settings.state is OptimizerState.EIGHT_BIT:
                self._updates = EightBitUpdates(optimizer)
            elif settings.state is OptimizerState.HOST:
                check_independent(optimizer, "the optimizer in host memory")
                self._updates = HostUpdates(optimizer)
            elif settings.step_in_backward:
                check_independent(optimizer, "the optimizer step inside of the backward pass")
                self._updates = SingleUpdates(optimizer)
            if self._updates is not None:
                undo.callback(self._updates.close)
            for group in optimizer.param_groups if settings.step_in_backward else ():
                for parameter in group["params"]:
                    if parameter.requires_grad:
                        undo.callback(parameter.register_post_accumulate_grad_hook(self._update_in_backward).remove)
            self._undo = undo.pop_all()

    @property
    def in_use(self) -> Any:
        """What training code calls: the user's own optimizer where its own step does it all, else this object."""
        return self.optimizer if self._updates is None else self

    @property
    def host_bytes(self) -> int:
        """Host memory for what would otherwise be on the device: copies of parameters, and the state."""
        return self._updates.host_bytes if isinstance(self._updates, HostUpdates) else 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the user's optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        """The state of the user's optimizer."""
        return self.optimizer.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have a gradient; those that were updated in the backward pass have none."""
        if self._updates is None:
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # With the hooks around a step that the user may have registered.
        torch.optim.Optimizer.profile_hook_step(self._update_all)(self.optimizer)
        internals.note_step(self.optimizer)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Frees or zeroes the gradients."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The state and the options, for a checkpoint."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the state and the options of a checkpoint, made with or without these settings."""
        if isinstance(self._updates, EightBitUpdates):
            self._updates.load_state_dict(state_dict)
        else:
            self.optimizer.load_state_dict(state_dict)

    def undo(self) -> None:
        """Leaves the user's optimizer as it was, with the state it has now."""
        self._undo.close()

    def _update_all(self, optimizer: torch.optim.Optimizer) -> None:
        assert self._updates is not None
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._updates.update(parameter)

    def _update_in_backward(self, parameter: torch.Tensor) -> None:
        assert self._updates is not None
        with self._around():
            self._updates.update(parameter)  # type: ignore[arg-type]
            parameter.grad = None


def _adapters_joined(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> Callable[[], None]:
    """Puts the parameters of adapters into the first group: a scheduler goes by the number of groups."""
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    added = [parameter for parameter in adapter_parameters(model) if parameter not in held]
    if not added:
        return lambda: None
    # In place, because LBFGS holds the list itself.
    optimizer.param_groups[0]["params"].extend(added)

    def undo() -> None:
        gone = set(added)
        # A loaded checkpoint makes groups anew.
        for group in optimizer.param_groups:
            group["params"][:] = [parameter for parameter in group["params"] if parameter not in gone]
        for parameter in added:
            optimizer.state.pop(parameter, None)

    return undo


def _kernels_set(kernels: OptimizerKernels, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    if kernels is OptimizerKernels.KEEP:
        return lambda: None
    fused = kernels is OptimizerKernels.FUSED
    if fused and "fused" not in optimizer.defaults:
        raise BadOptimizer(
            f"{type(optimizer).__name__} has no fused kernel. torch.optim.Adam, AdamW, SGD and Adagrad do: use one of "
            "them, or leave this move out."
        )
    wanted = {"foreach": False, "fused": fused}
    saved = [
        (options, {name: options[name] for name in wanted if name in options})
        for options in (optimizer.defaults, *optimizer.param_groups)
    ]
    scaling = getattr(optimizer, internals.TAKES_SCALE, None)
    for options, before in saved:
        options.update({name: wanted[name] for name in before})
    _place_counters(optimizer)
    if scaling is not None or fused:
        # As the constructor does: gradient scalers hand their scale over to a fused step.
        setattr(optimizer, internals.TAKES_SCALE, fused)

    def undo() -> None:
        # A loaded checkpoint makes groups anew, in the same order.
        for options, (_, before) in zip((optimizer.defaults, *optimizer.param_groups), saved, strict=False):
            options.update(before)
        if scaling is not None:
            setattr(optimizer, internals.TAKES_SCALE, scaling)
        elif fused:
            vars(optimizer).pop(internals.TAKES_SCALE, None)
        _place_counters(optimizer)

    return undo


def _place_counters(optimizer: torch.optim.Optimizer) -> None:
    """Moves step counters to where the kernels expect them: fused ones beside the parameter, others on the host."""
    for group in optimizer.param_groups:
        on_device = counts_on_device(group)
        for parameter in group["params"]:
            counter = optimizer.state[parameter].get("step") if parameter in optimizer.state else None
            if isinstance(counter, torch.Tensor):
                counter = counter.float()
                optimizer.state[parameter]["step"] = counter.to(parameter.device) if on_device else counter.cpu()
