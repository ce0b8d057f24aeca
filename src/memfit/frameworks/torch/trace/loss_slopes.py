"""The slope of a loss along one direction of its parameters.

Losses of parts may add up while their gradients don't: a loss that is divided by its own value, held constant, is 1 for
any samples. The gradient of a sum is the sum of gradients, and so are numbers made of them: slopes along a direction
must add up as losses do, and are as cheap to compare.
"""

import math
from dataclasses import replace
from typing import Any

import torch

from memfit.frameworks.torch import internals
from memfit.frameworks.torch.trace.loss_hypotheses import Loss

Directions = list[tuple[torch.nn.Parameter, torch.Tensor]]

# Gradients are compared for so many parameters, the last ones, up to this share of them or so many times the loss's
# rounding; what is less than so many times the rounding of the loss itself is what norms leave of a gradient.
_MOST_DIRECTIONS = 4_000_000
_GRADIENT_ROUNDING, _TIMES_ROUNDING, _NOTHING_LEFT = 1e-3, 100, 10


def directions(modules: list[torch.nn.Module]) -> Directions:
    """The last parameters that are trained, each with a direction of its own; hooks of the user's are left alone."""
    found: Directions = []
    left = _MOST_DIRECTIONS
    for parameter in reversed(list({id(p): p for module in modules for p in module.parameters()}.values())):
        is_plain = type(parameter) is torch.nn.Parameter and parameter.is_floating_point() and parameter.requires_grad
        if is_plain and parameter.numel() <= left and not internals.has_hooks(parameter, after_accumulation=False):
            left -= parameter.numel()
            numbers = torch.arange(1, parameter.numel() + 1, dtype=torch.float32, device=parameter.device)
            found.append((parameter, numbers.cos().view(parameter.shape)))
    return found


def slope(result: Any, loss: Loss, given: Directions) -> Loss:
    """The slope of the loss along directions in its value's stead, and how far that may be off."""
    value = result[0] if isinstance(result, tuple | list) else result
    gradients = torch.autograd.grad(value, [parameter for parameter, _ in given], allow_unused=True)
    pairs = zip(gradients, given, strict=True)
    parts = [gradient.to_dense().float() * direction for gradient, (_, direction) in pairs if gradient is not None]
    length = math.sqrt(sum(float((part * part).sum()) for part in parts))
    off = max(_GRADIENT_ROUNDING, _TIMES_ROUNDING * loss.rounding) * length
    off = max(off, _NOTHING_LEFT * loss.rounding * abs(loss.value))
    return replace(loss, value=sum(float(part.sum()) for part in parts), floor=off)
