"""Cross entropy over a large vocabulary, computed by chunks of tokens.

Around a user's unmodified loss function, `chunked_cross_entropy` defers the logits (`deferred_logits`). Where they meet
a cross entropy, each chunk of rows makes its logits, its losses, and forgets the logits; the backward pass makes them
again, chunk by chunk, and adds to one gradient of the weight. Instead of logits, their float32 copy, log-softmax and
two gradients of [tokens, vocabulary], memory holds those of one chunk. The price is one more matrix product.

PyTorch's own `linear_cross_entropy` (from release 2.13 on) chunks as well, but is another function: it has no
label smoothing and no cast between logits and loss, makes gradients in the forward pass, before a loss scale for
float16 could reach them, and is one opaque operator to a trace. It is therefore not used.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from memfit.frameworks.torch.apply.deferred_logits import (
    AutocastState,
    DeferredLogits,
    Recipe,
    Steps,
    deferred,
    finished,
    real,
)

SMALLEST_VOCABULARY = 8192
_PRODUCTS = frozenset({torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm})
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_ARGUMENTS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


class chunked_cross_entropy(TorchFunctionMode):
    """Around the forward pass with its loss: cross entropies over large vocabularies are computed in parts."""

    def __init__(self, num_chunks: int) -> None:
        super().__init__()
        self._num_chunks = num_chunks

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear or func in _PRODUCTS:
            recipe = _recipe(func, args, kwargs)
            if recipe is not None:
                return deferred(recipe)
        elif func is F.cross_entropy or func is F.nll_loss:
            value = self._loss(func, args, kwargs)
            if value is not None:
                return value
        if any(issubclass(kind, DeferredLogits) for kind in types):
            return DeferredLogits.__torch_function__(func, types, args, kwargs)
        return func(*args, **kwargs)

    def _loss(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        logits, target = given.pop("input"), real(given.pop("target"))
        if given.pop("size_average", None) is not None or given.pop("reduce", None) is not None:
            return None
        if isinstance(logits, DeferredLogits):
            recipe = None if logits._real is not None else logits.recipe
            if recipe is not None and _fits(recipe, target):
                return _chunked(func, recipe, recipe.hidden, target, given, self._num_chunks)
            logits = real(logits)
        if func is F.nll_loss or not _worth_chunking(logits, target):
            return None
        return _chunked(func, None, logits, target, given, self._num_chunks)


def _recipe(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recipe | None:
    """How to compute the output of a linear layer later; None where it has to be computed now."""
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    hidden, weight, bias = given.get("input"), given.get("weight"), given.get("bias")
    if len(given) < 2 or not isinstance(hidden, torch.Tensor) or not isinstance(weight, torch.Tensor):
        return None
    if any(type(t) not in _PLAIN_TYPES for t in (hidden, weight, *(() if bias is None else (bias,)))):
        return None
    if weight.ndim != 2 or hidden.ndim < 2 or weight.shape[0 if func is F.linear else 1] < SMALLEST_VOCABULARY:
        return None
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or _in_checkpoint():
        return None
    if func is not F.linear:
        weight = weight.t()
    if hidden.shape[-1] != weight.shape[1] or hidden.device != weight.device:
        return None
    return Recipe(hidden, weight, bias, AutocastState.now(hidden.device.type))


def _in_checkpoint() -> bool:
    """Whether a checkpointed function is being called: again, where nothing is deferred, it must save the same."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


def _fits(recipe: Recipe, target: Any) -> bool:
    """Whether targets are what the logits need; otherwise PyTorch is to say so itself."""
    rows = recipe.hidden.shape[:-1]
    if len(rows) != (2 if recipe.classes_second else 1) or rows.numel() == 0:
        return False
    if target.is_floating_point():
        return not recipe.classes_second and target.shape == (*rows, recipe.weight.shape[0])
    return bool(target.shape == rows)


def _worth_chunking(logits: Any, target: Any) -> bool:
    if type(logits) is not torch.Tensor or logits.ndim != 2 or logits.shape[1] < SMALLEST_VOCABULARY:
        return False
    if not (torch.is_grad_enabled() and logits.requires_grad) or logits.shape[0] == 0 or torch.compiler.is_compiling():
        return False
    return bool(target.shape in (logits.shape, logits.shape[:1])) and not _in_checkpoint()


@dataclass(frozen=True, slots=True)
class _Work:
    """The computation on each chunk of the logits."""

    function: Callable[..., torch.Tensor]
    """`cross_entropy` or `nll_loss`."""
    steps: Steps
    """What follows the linear layer."""
    dtype: torch.dtype | None
    """Of the linear layer's output; None where logits are given."""
    options: dict[str, Any]
    autocast: AutocastState
    num_chunks: int

    def losses(self, logits: torch.Tensor, target: torch.Tensor, class_weight: torch.Tensor | None) -> torch.Tensor:
        """One loss for each row."""
        with self.autocast.again():
            logits = finished(logits, self.steps)
            return self.function(logits, target, weight=class_weight, reduction="none", **self.options)

    def cast(self, tensor: torch.Tensor | None) -> Any:
        """`tensor` as the linear layer takes it.

        Not left to autocast, which would keep what it casts here, outside of the graph, for uses inside of it.
        """
        return tensor if tensor is None or self.dtype is None else tensor.to(self.dtype)

    def logits(self, rows: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        """The logits of a chunk."""
        return rows if weight is None else F.linear(self.cast(rows), weight, bias)


def _chunked(
    function: Callable[..., torch.Tensor],
    recipe: Recipe | None,
    source: torch.Tensor,
    target: torch.Tensor,
    given: dict[str, Any],
    num_chunks: int,
) -> torch.Tensor:
    class_weight, reduction = given.pop("weight", None), given.pop("reduction", "mean")
    steps, dtype = ((), None) if recipe is None else (recipe.steps, recipe.dtype)
    work = _Work(function, steps, dtype, given, AutocastState.now(source.device.type), num_chunks)
    rows = source.reshape(-1, source.shape[-1])
    by_class = not target.is_floating_point()
    flat = target.reshape(-1) if by_class else target
    linear = (None, None) if recipe is None else (recipe.weight, recipe.bias)
    losses: torch.Tensor = _ChunkedLosses.apply(work, rows, *linear, flat, class_weight)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses.reshape(target.shape if by_class else target.shape[:1])
    total = losses.sum()
    if reduction == "sum":
        return total
    if not by_class:
        return total / len(flat)
    # A mean divides by the number or weight of the rows that aren't ignored.
    counts: torch.Tensor = flat != given.get("ignore_index", -100)
    weights = counts if class_weight is None else class_weight[flat.where(counts, 0)] * counts
    mean: torch.Tensor = total / weights.sum()
    return mean


class _ChunkedLosses(torch.autograd.Function):
    """The losses of rows, from hidden states or from logits."""

    @staticmethod
    def forward(
        ctx: Any,
        work: _Work,
        rows: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        class_weight: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.work = work
        ctx.save_for_backward(rows, weight, bias, target, class_weight)
        linear = (work.cast(weight), work.cast(bias))
        parts = zip(rows.chunk(work.num_chunks), target.chunk(work.num_chunks), strict=True)
        return torch.cat([work.losses(work.logits(part, *linear), labels, class_weight) for part, labels in parts])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        work: _Work = ctx.work
        rows, weight, bias, target, class_weight = ctx.saved_tensors
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad[1:4]
        linear = (work.cast(weight), work.cast(bias))
        of_rows = torch.empty_like(rows) if needs_rows else None
        of_weight = torch.zeros_like(weight) if needs_weight else None
        of_bias = torch.zeros_like(bias) if needs_bias else None
        chunks = [tensor.chunk(work.num_chunks) for tensor in (rows, target, gradient)]
        into = [None] * len(chunks[0]) if of_rows is None else of_rows.chunk(work.num_chunks)
        for part, labels, factor, of_part in zip(*chunks, into, strict=True):
            logits = work.logits(part, *linear).detach().requires_grad_()
            with torch.enable_grad():
                (of_logits,) = torch.autograd.grad(work.losses(logits, labels, class_weight), logits, factor)
            del logits
            if of_part is not None:
                of_part.copy_(of_logits if weight is None else of_logits @ linear[0])
            if of_weight is not None and of_weight.dtype == of_logits.dtype:
                of_weight.addmm_(of_logits.t(), work.cast(part))
            elif of_weight is not None:
                of_weight.add_(of_logits.t() @ work.cast(part))
            if of_bias is not None:
                of_bias.add_(of_logits.sum(0))
            del of_logits
        return None, of_rows, of_weight, of_bias, None, None
