"""Plausible values for what a model chooses: tokens that are sampled, actions that are drawn.

A program that generates looks at each token: whether it is the one that ends a text, where that one is, what it reads
as. Without values every such question would have to be stood in for on its own, and the answers would not agree with
each other. So choices get values of their own here, and all that follows from them is computed (`values`).

The values are valid classes, differ from choice to choice, and come from the middle of a large vocabulary: special
tokens are at its ends, so that texts run on until the program's own limit ends them, which takes the most memory.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from memfit.frameworks.torch import internals
from memfit.frameworks.torch.shapes.shapes import Operator, tensors
from memfit.frameworks.torch.shapes.values import KnownValues

MADE_UP = "made-up-choice"
_ATEN = torch.ops.aten
# A router chooses among fewer experts than this, and in training its choice decides sizes: those stay upper bounds.
_VOCABULARY = 1_000
_SMALL_CHOICE = 8
_MOST_VALUES = 1 << 18
# Fractions of these go round a range without an early repetition.
_STRIDE, _ROW_STRIDE = 7_919, 104_729


class Draws:
    """Gives values to choices among classes.

    Args:
        values: where they are kept.
        waits: counts that the program is at its line; how often it has been there since it was there too often for
            one step, as a program is that waits for another choice. None: not yet.
        report: takes (code, text) of each assumption made.
    """

    def __init__(
        self, values: KnownValues, waits: Callable[[], int | None], report: Callable[[str, str], None]
    ) -> None:
        self._values = values
        self._waits = waits
        self._report = report
        self._num_drawn = 0

    def follow(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Gives `out` values where `func` chooses classes by numbers that are not known."""
        if func in _LOOKUPS:
            self._look_up(args, out)
            return
        choice = _CHOICES.get(func)
        found = None if choice is None else choice(args, kwargs, out)
        if found is None:
            return
        chosen, num_classes, per_row = found
        if num_classes < 2 or not 0 < chosen.numel() <= _MOST_VALUES or not chosen.is_meta:
            return
        if self._values.of(chosen) is None:
            self._draw(chosen, num_classes, per_row)

    def _look_up(self, args: tuple[Any, ...], out: torch.Tensor) -> None:
        """Numbers of the samples that chosen rows belong to, as the nodes that a graph's pooling keeps: of all samples.

        How many samples there are is read from the largest number. Other tables stay unknown: what is chosen from
        those may decide sizes, which have upper bounds.
        """
        table = args[0]
        if table.dim() != 1 or table.dtype is not torch.int64 or not 0 < out.numel() <= _MOST_VALUES or not out.is_meta:
            return
        known = self._values.of(table)
        if known is None or self._values.of(out) is not None:
            return
        with internals.disable_torch_function():
            # Fewer may be the levels of a detector, whose sizes are upper bounds.
            if known[0] != 0 or known[-1] < _SMALL_CHOICE or bool((known.diff() < 0).any()):
                return
            chosen = torch.linspace(0, len(known) - 1, out.numel(), dtype=torch.float64).round().long()
            self._values.learn(out, known[chosen].view(out.shape))
        self._report(MADE_UP, "rows selected by the model's values were taken evenly from all samples")

    def _draw(self, chosen: torch.Tensor, num_classes: int, per_row: int) -> None:
        low, width = (0, num_classes) if num_classes < _SMALL_CHOICE else (num_classes // 4, num_classes // 2)
        if per_row > width:
            low, width = 0, num_classes
        rows = torch.arange(chosen.numel() // per_row).unsqueeze(1) * _ROW_STRIDE + self._num_drawn * _STRIDE
        drawn = low + (rows + torch.arange(per_row)) % width
        self._num_drawn += 1
        late = self._waits()
        if late is not None:
            # The token that ends a text is likely one of the first or of the last: 0, n - 1, 1, n - 2 and so on.
            turn, from_end = divmod(late % num_classes, 2)
            drawn.fill_(num_classes - 1 - turn if from_end else turn)
        self._report(MADE_UP, "the model's choices (tokens, actions, classes) were made up; text has maximum length")
        with internals.disable_torch_function():
            self._values.learn(chosen, drawn.view(chosen.shape))


_Choice = tuple[torch.Tensor, int, int] | None


def _last(tensor: Any, dim: int | None) -> int | None:
    """The number of classes where `dim` is the last one of numbers that compete, else None."""
    if not tensor.dim() or not tensor.is_floating_point():
        return None
    if dim is None:
        return tensor.numel() if tensor.dim() == 1 else None
    return int(tensor.shape[-1]) if dim % tensor.dim() == tensor.dim() - 1 else None


def _is_choice(num_classes: int | None) -> bool:
    return num_classes is not None and (num_classes >= _VOCABULARY or not torch.is_grad_enabled())


def _argmax(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> _Choice:
    num_classes = _last(args[0], args[1] if len(args) > 1 else kwargs.get("dim"))
    return (out, num_classes or 0, 1) if _is_choice(num_classes) else None


def _topk(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> _Choice:
    num_classes = _last(args[0], args[2] if len(args) > 2 else kwargs.get("dim", -1))
    return (out[1], num_classes or 0, int(args[1])) if args[1] and _is_choice(num_classes) else None


def _gather(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> _Choice:
    """A choice among sorted classes, looked up in their unknown order, as nucleus sampling does."""
    tensor, dim = args[0], args[1]
    if tensor.dtype is not torch.int64 or not tensor.dim() or dim % tensor.dim() != tensor.dim() - 1:
        return None
    num_classes = int(tensor.shape[-1])
    return (out, num_classes, max(1, int(out.shape[-1]))) if _is_choice(num_classes) else None


_LOOKUPS: frozenset[Operator] = frozenset((_ATEN.index.Tensor, _ATEN.index_select.default))
_CHOICES: dict[Operator, Callable[[tuple[Any, ...], dict[str, Any], Any], _Choice]] = {
    _ATEN.multinomial.default: lambda args, kwargs, out: (out, int(args[0].shape[-1]), max(1, int(out.shape[-1]))),
    _ATEN.argmax.default: _argmax,
    _ATEN.max.dim: lambda args, kwargs, out: _argmax(args, kwargs, out[1]),
    _ATEN.topk.default: _topk,
    _ATEN.gather.default: _gather,
}


_Sizes = frozenset[int]
_NONE: _Sizes = frozenset()


class SizeBounds:
    """Follows the sizes that are upper bounds from operator to operator."""

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[weakref.ref[Any], _Sizes]] = {}

    def made_by_data(self, out: Any, args: tuple[Any, ...]) -> None:
        """Notes that the size of `out` depends on data."""
        given = {1} | {size for tensor in tensors(args) for size in tensor.shape}
        for tensor in tensors(out if isinstance(out, list | tuple) else (out,)):
            if tensor.is_meta and tensor.dim():
                self._note(tensor, frozenset(set(tensor.shape) - given or {tensor.shape[0]}))

    def among(self, args: tuple[Any, ...]) -> _Sizes:
        """The sizes of the arguments that are upper bounds."""
        if not self._sizes:
            return _NONE
        found: set[int] = set()
        for tensor in tensors(args):
            known = self._of(tensor)
            if known and known.isdisjoint(tensor.shape):
                # A view that joins dimensions, or one of the first elements.
                joined = {n for n in tensor.shape if n and any(n % size == 0 for size in known)}
                known = frozenset(joined or tensor.shape[:1])
            found |= known
        return frozenset(found)

    def follow(self, out: Any, sizes: _Sizes) -> bool:
        """Whether `out`, made of tensors with these bounds, has one of them; notes it."""
        bounded = False
        for tensor in tensors(out if isinstance(out, list | tuple) else (out,)):
            kept = sizes & frozenset(tensor.shape)
            if kept and tensor.is_meta and tensor.layout is torch.strided:
                self._note(tensor, kept | self._of(tensor))
                bounded = True
        return bounded

    def _of(self, tensor: torch.Tensor) -> _Sizes:
        if tensor.layout is not torch.strided or not tensor.is_meta:
            return _NONE
        known = self._sizes.get(tensor.untyped_storage()._cdata)
        return _NONE if known is None else known[1]

    def _note(self, tensor: torch.Tensor, sizes: _Sizes) -> None:
        # A single element, or none, is no bound to speak of, and every tensor has dimensions of that size.
        sizes = frozenset(size for size in sizes if size > 1)
        if not sizes or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._sizes[key] = (weakref.ref(storage, lambda _: self._sizes.pop(key, None)), sizes)
