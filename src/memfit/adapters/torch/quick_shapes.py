"""Shape rules for the operators that training steps are made of.

PyTorch's own rules for these are written in Python and take a tenth of a millisecond to two milliseconds each time a
new shape comes by. The ones here cover the plain cases (same shapes, same strides, dense) and pass everything else on;
a test compares them with PyTorch's own, operator by operator.
"""

from collections.abc import Callable
from typing import Any

import torch

from memfit.adapters.torch.shapes import META, Operator

Rule = Callable[[tuple[Any, ...], dict[str, Any]], Any]

# Output like the first tensor; other tensors must have its shape, strides and dtype.
_ELEMENTWISE = (
    "add.Tensor",
    "sub.Tensor",
    "mul.Tensor",
    "mul.Scalar",
    "div.Tensor",
    "neg.default",
    "relu.default",
    "gelu.default",
    "silu.default",
    "sigmoid.default",
    "tanh.default",
    "hardswish.default",
    "exp.default",
    "sqrt.default",
    "rsqrt.default",
    "clone.default",
    "threshold_backward.default",
    "gelu_backward.default",
    "silu_backward.default",
    "sigmoid_backward.default",
    "tanh_backward.default",
    "hardswish_backward.default",
)
_LIKE = ("zeros_like.default", "ones_like.default", "empty_like.default")
# Lists of results like the first list; the rest of the family returns norms or maxima.
_FOREACH = (
    "add",
    "sub",
    "mul",
    "div",
    "sqrt",
    "rsqrt",
    "neg",
    "abs",
    "addcdiv",
    "addcmul",
    "lerp",
    "reciprocal",
    "sign",
)


def find(func: Operator) -> Rule | None:
    """The quick rule of `func`, if there is one."""
    return _RULES.get(func)


def _same(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device=META)


def _dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def _elementwise(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = args[0]
    if kwargs or not isinstance(first, torch.Tensor) or not first.is_floating_point() or not _dense(first):
        return NotImplemented
    for other in args[1:]:
        if isinstance(other, torch.Tensor):
            if other.shape != first.shape or other.stride() != first.stride() or other.dtype is not first.dtype:
                return NotImplemented
        elif isinstance(other, complex):
            return NotImplemented
    return _same(first)


def _like(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    extra = {k for k, v in kwargs.items() if v is not None and k not in ("dtype", "layout", "device", "pin_memory")}
    if kwargs.get("memory_format", torch.preserve_format) is torch.preserve_format:
        extra.discard("memory_format")
    device = kwargs.get("device")
    if extra or not _dense(tensor) or (device is not None and torch.device(device).type != "meta"):
        return NotImplemented
    return _same(tensor, kwargs.get("dtype"))


def _foreach(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = args[0]
    if kwargs or not all(t.is_floating_point() and t.is_contiguous() for t in tensors):
        return NotImplemented
    for other in args[1:]:
        if isinstance(other, list | tuple) and any(
            isinstance(b, torch.Tensor) and (a.shape != b.shape or a.dtype is not b.dtype)
            for a, b in zip(tensors, other, strict=False)
        ):
            return NotImplemented
    return [_same(t) for t in tensors]


def _foreach_in_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return None


def _batch_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, _, _, _, _, training = args[:6]
    if not training or not _dense(tensor):
        return NotImplemented
    statistics = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    channels = tensor.shape[1]
    mean, deviation = (torch.empty(channels, dtype=statistics, device=META) for _ in range(2))
    return _same(tensor), mean, deviation


def _batch_norm_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    gradient, tensor, weight = args[:3]
    mask = args[9]
    if not _dense(tensor) or gradient.stride() != tensor.stride():
        return NotImplemented
    dtype = weight.dtype if weight is not None else torch.float32
    parts = [torch.empty(tensor.shape[1], dtype=dtype, device=META) if wanted else None for wanted in mask[1:]]
    return (_same(tensor) if mask[0] else None, *parts)


def _byte_classes(func: Operator, place: int) -> Rule:
    """Losses take classes as uint8 too, which PyTorch's rule gathers with; kernels know no such index otherwise."""

    def rule(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) <= place or args[place].dtype is not torch.uint8:
            return NotImplemented
        classes = torch.empty(args[place].shape, dtype=torch.int64, device=META)
        return func(*args[:place], classes, *args[place + 1 :], **kwargs)

    return rule


def _table() -> dict[Operator, Rule]:
    aten: Any = torch.ops.aten
    rules: dict[Operator, Rule] = {}

    def add(name: str, rule: Rule) -> None:
        packet, _, overload = name.partition(".")
        if hasattr(aten, packet) and hasattr(getattr(aten, packet), overload):
            rules[getattr(getattr(aten, packet), overload)] = rule

    for name in _ELEMENTWISE:
        add(name, _elementwise)
    for name in _LIKE:
        add(name, _like)
    for name in _FOREACH:
        for suffix, rule in (("", _foreach), ("_", _foreach_in_place)):
            packet = getattr(aten, f"_foreach_{name}{suffix}", None)
            for overload in packet.overloads() if packet is not None else ():
                if not overload.endswith("out"):
                    rules[getattr(packet, overload)] = rule
    add("_foreach_zero_.default", _foreach_in_place)
    add("native_batch_norm.default", _batch_norm)
    add("native_batch_norm_backward.default", _batch_norm_backward)
    for name, place in (("nll_loss_forward", 1), ("nll_loss_backward", 2)):
        func = getattr(aten, name).default
        rules[func] = _byte_classes(func, place)
    return rules


_RULES = _table()
