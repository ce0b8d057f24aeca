"""What PyTorch and bitsandbytes of another release do otherwise, in the place of what the installed ones do.

A simulated step runs the code that is installed. Where the stack of the device is of a release that frees less, keeps
more or loops where today's works on lists, that is put in its place for the time of the simulation.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from memfit.core.patching import Replacement, around, replaced
from memfit.core.stack import Stack
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.stack import keeps_4bit_input, keeps_8bit_copy, keeps_roots, uses_lists


def release_replacements(stack: Stack, is_on: Callable[[], bool]) -> list[Replacement]:
    """What differs on a stack that isn't the installed one; `is_on` says whether the calling thread is simulated."""
    if stack.is_installed:
        return []
    found = []
    if not stack.frees_gradients:
        found += [_keeping_gradients(owner, is_on) for owner in (torch.optim.Optimizer, torch.nn.Module)]
    if not uses_lists(stack):
        for name in ("foreach_devices", "foreach_devices_of_optimizers"):
            found.append(around(*internals.place(name), lambda plain: [], is_on))
    if keeps_roots(stack):
        found += [around(module, name, _with_roots, is_on) for module, name in internals.adam_on_lists()]
    return found + _quantized(stack, is_on)


def _keeping_gradients(owner: type, is_on: Callable[[], bool]) -> Replacement:
    """`zero_grad`, which fills gradients with zeros unless it is told to free them."""

    def zero_grad(plain: Callable[..., None], self: Any, set_to_none: bool = False) -> None:
        plain(self, set_to_none=set_to_none)

    return around(owner, "zero_grad", zero_grad, is_on)


def _with_roots(plain: Callable[..., None], *args: Any, **options: Any) -> None:
    """A step of Adam whose denominators are a further list, beside the roots that they are made from."""
    eps, plain_add, denominators = options["eps"], internals.foreach_add_in_place, []

    def add(tensors: Any, other: Any, *rest: Any, **others: Any) -> None:
        if isinstance(other, float) and other == eps:
            denominators.append(internals.foreach_add(tensors, other))
        else:
            plain_add(tensors, other, *rest, **others)

    with replaced([Replacement(*internals.place("foreach_add_in_place"), add)]):
        plain(*args, **options)


def _quantized(stack: Stack, is_on: Callable[[], bool]) -> list[Replacement]:
    """Products with quantized weights that keep more for the backward pass."""
    keeps_input, keeps_copy = keeps_4bit_input(stack), keeps_8bit_copy(stack)
    if not (keeps_input or keeps_copy) or importlib.util.find_spec("bitsandbytes") is None:
        return []
    functions = importlib.import_module("bitsandbytes.autograd._functions")

    def four_bits(plain: Callable[..., Any], ctx: Any, values: torch.Tensor, *rest: Any) -> Any:
        result = plain(ctx, values, *rest)
        if any(ctx.needs_input_grad[:2]):
            ctx.tensors = (values, *ctx.tensors[1:])
        return result

    def eight_bits(plain: Callable[..., Any], ctx: Any, values: torch.Tensor, *rest: Any) -> Any:
        result = plain(ctx, values, *rest)
        if any(ctx.needs_input_grad[:2]) and ctx.tensors[0] is None:
            flat = values.reshape(-1, values.shape[-1])
            ctx.tensors = (torch.empty_like(flat.t(), dtype=torch.int8), *ctx.tensors[1:])
        return result

    kept = (("MatMul4Bit", four_bits, keeps_input), ("MatMul8bitLt", eight_bits, keeps_copy))
    owners = [(getattr(functions, name), call) for name, call, is_kept in kept if is_kept]
    return [Replacement(o, "forward", staticmethod(around(o, "forward", call, is_on).value)) for o, call in owners]
