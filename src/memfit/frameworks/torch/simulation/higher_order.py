"""Higher-order operators on shapes: what runs functions of the program's instead of a kernel.

PyTorch has no shape rules for them. Run as ordinary operators they are what they do when they aren't compiled:

- `torch.cond` runs one branch and keeps its operands only: its backward pass computes the branch again
  (`_higher_order_ops/cond.py`); so does `map` with each element (`map.py`);
- `while_loop` and `scan` are loops, whose results are stacked (`while_loop.py`, `scan.py`);
- `flex_attention` has two forms. Compiled it is one kernel, which keeps query, key, value, output and a number per row
  (`_inductor/kernel/flex/`). Uncompiled it computes the whole matrix of scores in float32, in both passes, and keeps
  none (`_higher_order_ops/flex_attention.py`).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from memfit.core.units import format_size
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.kernels.fallbacks import DATA_DEPENDENT, Report
from memfit.frameworks.torch.shapes.shapes import Arguments, Options

FLEX_AS_FUSED = "flex-as-fused"

_Handler = Callable[[Any, Arguments, Options], Any]


class HigherOrder:
    """Handlers of a function mode for these operators.

    `again` switches the mode on again, for the program's functions; `knows` says whether a tensor's value is known,
    `is_fused` whether attention that is called here counts as compiled.
    """

    def __init__(self, again: Callable[[], AbstractContextManager[None]], report: Report) -> None:
        self._again = again
        self._report = report
        self.knows: Callable[[torch.Tensor], bool] = lambda tensor: False
        self.is_fused: Callable[[], bool] = lambda: True

    def handlers(self) -> dict[Any, _Handler]:
        """A handler for every operator that this release has."""
        by_name: dict[str, Callable[..., Any]] = {
            "cond": self._cond,
            "while_loop": self._while_loop,
            "scan": _scan,
            "map_impl": _map,
            "flex_attention": self._attend,
        }
        operators = {name: getattr(torch.ops.higher_order, name, None) for name in by_name}
        return {op: self._handler(by_name[name]) for name, op in operators.items() if op is not None}

    def _handler(self, run: Callable[..., Any]) -> _Handler:
        def handle(func: Any, args: Arguments, kwargs: Options) -> Any:
            with self._again():
                return run(*args, **kwargs)

        return handle

    def _cond(self, pred: Any, true_fn: Any, false_fn: Any, operands: Sequence[Any] = ()) -> Any:
        return _recomputed(true_fn if pred else false_fn, *operands)

    def _while_loop(self, cond_fn: Any, body_fn: Any, carried_inputs: Sequence[Any], more: Sequence[Any] = ()) -> Any:
        carried = tuple(carried_inputs)
        while True:
            goes_on = cond_fn(*carried, *more)
            is_known = not isinstance(goes_on, torch.Tensor) or self.knows(goes_on)
            if is_known and not goes_on:
                return carried
            carried = tuple(_recomputed(body_fn, *carried, *more))
            if not is_known:
                self._report(DATA_DEPENDENT, "while_loop: how often it runs depends on data; one turn assumed")
                return carried

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        score_mod: Any,
        block_mask: Any,
        scale: float,
        kernel_options: Any,
        score_mod_other_buffers: Sequence[Any] = (),
        mask_mod_other_buffers: Sequence[Any] = (),
    ) -> Any:
        held = (cell.cell_contents for cell in getattr(score_mod, "__closure__", None) or ())
        learned = [each for each in (*score_mod_other_buffers, *held) if isinstance(each, torch.Tensor)]
        attention: Any = _FusedAttention if self.is_fused() else _UnfusedAttention
        if attention is _FusedAttention:
            size = format_size(query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] * 4)
            text = f"flex_attention was taken to be compiled: otherwise it computes matrices of scores of {size} each"
            self._report(FLEX_AS_FUSED, text)
        return attention.apply(query, key, value, *learned)


def _recomputed(function: Any, *operands: Any) -> Any:
    """The function's result, of which the operands only are kept for the backward pass."""
    if torch.is_grad_enabled():
        return checkpoint(function, *operands, use_reentrant=False, preserve_rng_state=False)
    return function(*operands)


def _scan(combine_fn: Any, init: Sequence[Any], xs: Sequence[Any], *rest: Any, **options: Any) -> list[Any]:
    more = options.get("additional_inputs", rest[-1] if rest else ())
    carried, made = list(init), []
    for index in range(xs[0].shape[0]):
        results = list(combine_fn(*carried, *(x[index] for x in xs), *more))
        carried, out = results[: len(carried)], results[len(carried) :]
        made.append(out)
    return [*carried, *(torch.stack(each) for each in zip(*made, strict=True))]


def _map(function: Any, xs: Sequence[Any], positional: Sequence[Any]) -> Any:
    rows = [_recomputed(function, *(x[index] for x in xs), *positional) for index in range(xs[0].shape[0])]
    return internals.tree_map(lambda *parts: torch.stack(parts), *rows)


def _rows(query: torch.Tensor) -> torch.Tensor:
    return query.new_empty(query.shape[:-1], dtype=torch.float32)


def _gradients(*tensors: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return tuple(torch.empty_like(tensor) if tensor.requires_grad else None for tensor in tensors)


def _like(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The output, whose dimensions lie in memory as those of the query do."""
    if query.shape[-1] == value.shape[-1]:
        return torch.empty_like(query)
    return query.new_empty(*query.shape[:-1], value.shape[-1])


class _FusedAttention(torch.autograd.Function):
    """One kernel forward, one backward."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, *learned: Any) -> Any:
        out = _like(query, value)
        sums, greatest = _rows(query), _rows(query)
        ctx.save_for_backward(query, key, value, out, sums, *learned)
        ctx.mark_non_differentiable(greatest)
        return out, sums, greatest

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, _, _, *learned = ctx.saved_tensors
        _ = _rows(query)  # the sum of output times its gradient
        return *(torch.empty_like(each) for each in (query, key, value)), *_gradients(*learned)


class _UnfusedAttention(torch.autograd.Function):
    """Every operator of the plain implementation that makes a matrix of scores."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, *learned: Any) -> Any:
        groups = query.shape[1] // key.shape[1]
        many = [each.repeat_interleave(groups, dim=1) for each in (key, value)]
        _, modified = _scores(query, many[0])
        sums = modified.logsumexp(dim=-1)
        sums = torch.where(torch.all(modified == -float("inf"), dim=-1), -float("inf"), sums)
        greatest = modified.amax(dim=-1)
        modified = torch.softmax(modified, dim=-1)
        out = _like(query, value).copy_(modified.to(query.dtype) @ many[1])
        ctx.save_for_backward(query, key, value, out, sums, *learned)
        ctx.mark_non_differentiable(greatest)
        return out, sums, greatest

    @staticmethod
    def backward(ctx: Any, grad_out: Any, *others: Any) -> Any:
        query, key, value, out, sums, *learned = ctx.saved_tensors
        results = [torch.empty_like(each) for each in (query, key, value)]
        groups = query.shape[1] // key.shape[1]
        many = [each.repeat_interleave(groups, dim=1) for each in (key, value)]
        scores, modified = _scores(query, many[0])
        weights = torch.exp(modified - sums.unsqueeze(-1))
        weights = torch.where((sums == -float("inf")).unsqueeze(-1), 0, weights)
        _ = weights.to(query.dtype).transpose(-2, -1) @ grad_out
        grad_weights = grad_out.to(weights.dtype) @ many[1].to(weights.dtype).transpose(-2, -1)
        products = torch.sum(out.to(weights.dtype) * grad_out.to(weights.dtype), -1, keepdim=True)
        grad_modified = weights * (grad_weights - products)
        grad_scores = (scores * grad_modified).to(query.dtype)
        _ = grad_scores @ many[0]
        _ = grad_scores.transpose(-2, -1) @ query
        return *results, *_gradients(*learned)


def _scores(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(scores, scores as they are modified and masked), in float32 at least."""
    working = torch.float64 if query.dtype is torch.float64 else torch.float32
    scores = query.to(working) @ key.to(working).transpose(-2, -1)
    scores = scores * 1.0
    return scores, torch.where(scores.new_empty(scores.shape[-2:], dtype=torch.bool), scores, -float("inf"))
