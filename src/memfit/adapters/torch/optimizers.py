"""A stand-in for the user's optimizer: the same settings, no state, on shape-only parameters.

The user's own object must not move: neither its state nor whatever it holds besides (LBFGS's list of parameters, a
wrapped optimizer, counters). So it is copied deeply, with three exceptions: parameters become their shape-only copies,
states start empty, and hooks stay behind.
"""

import copy
from collections import OrderedDict, defaultdict
from typing import Any

import torch

from memfit.adapters.torch.failures import explained
from memfit.adapters.torch.stand_in import ShapeCopies
from memfit.core.errors import BadOptimizer

_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def optimizer_for(
    optimizer: Any, model: torch.nn.Module, copies: ShapeCopies, parameters: list[torch.nn.Parameter]
) -> torch.optim.Optimizer | None:
    """The user's optimizer, with a fresh state, on the shape-only parameters.

    Args:
        optimizer: an instance over the model's parameters, a callable that takes parameters, or None.
        model: the model, swapped.
        copies: knows the shape-only copy of each real parameter.
        parameters: the real parameters of the model.
    """
    if optimizer is None:
        return None
    if isinstance(optimizer, torch.optim.Optimizer):
        check_parameters(optimizer, parameters)
        return _copied(optimizer, copies, parameters)
    if not callable(optimizer):
        raise BadOptimizer(
            f"optimizer must be a torch.optim.Optimizer, a callable that takes parameters, or None, "
            f"but {type(optimizer).__name__} was given."
        )
    with explained("optimizer function"):
        made = optimizer([p for p in model.parameters() if p.requires_grad])
    if not isinstance(made, torch.optim.Optimizer):
        raise BadOptimizer(f"the optimizer callable returned {type(made).__name__}, not a torch.optim.Optimizer.")
    return made


def check_parameters(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> None:
    """Refuses an optimizer of another model."""
    own = {id(p) for p in parameters}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    strange = [p for p in held if id(p) not in own]
    if strange:
        shapes = ", ".join(str(tuple(p.shape)) for p in strange[:3])
        raise BadOptimizer(
            f"{len(strange)} of the optimizer's {len(held)} parameters are not the model's (shapes {shapes}). "
            "Make the optimizer from the parameters of this model."
        )


def _copied(
    optimizer: torch.optim.Optimizer, copies: ShapeCopies, parameters: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    memo: dict[int, Any] = {id(p): copies.of(p) for p in parameters}
    family = _with_wrapped(optimizer)
    for member in family:
        # Optimizers tell `copy` of their groups and state only, so each is made empty here and filled below.
        memo[id(member)] = object.__new__(type(member))
        memo.setdefault(id(member.state), defaultdict(dict))
        for name in _HOOKS:
            hooks = getattr(member, name, None)
            if hooks is not None:
                memo[id(hooks)] = OrderedDict()
    try:
        for member in family:
            # A learning-rate scheduler replaces `step` on the instance by one bound to the original.
            held = {name: value for name, value in vars(member).items() if name != "step"}
            vars(memo[id(member)]).update(copy.deepcopy(held, memo))
    except Exception as error:
        raise BadOptimizer(
            f"the optimizer ({type(optimizer).__name__}) can't be copied: {type(error).__name__}: {error}. "
            "Give a function that takes parameters and makes it instead."
        ) from error
    clone: torch.optim.Optimizer = memo[id(optimizer)]
    return clone


def _with_wrapped(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizer and those it wraps, however deep."""
    found = [optimizer]
    for member in found:
        for value in vars(member).values():
            if isinstance(value, torch.optim.Optimizer) and all(value is not known for known in found):
                found.append(value)
    return found
