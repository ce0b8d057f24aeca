"""Values that nobody computed: what a program reads, what a model chooses, how many elements a mask selects.

Without values every question of a program would have to be stood in for on its own (`fallbacks`), and the answers would
not agree with each other. So the following are assumed here, and all that follows from them is computed (`values`).

- Reads: a program that asks at one line again and again, without taking a step, waits for another answer and gets it.
  A softmax is read as equal probabilities, because programs draw from them; a mask as true everywhere, because programs
  select by it.
- Choices (tokens that are sampled, actions that are drawn): valid classes, which differ from choice to choice and come
  from the middle of a large vocabulary. Special tokens are at its ends, so that texts run on until the program's own
  limit ends them, which takes the most memory.
- Masks: a sampler of a detector takes at most 128 of the boxes whose label is 1 or more and 384 of those whose label is
  0, marks them in a mask of zeros, and selects by that mask. All of this shows in the operators: a mask of a comparison
  can be true everywhere, positions drawn from it are as many as the program draws, a mask of zeros is true at most
  where positions were set, and the labels at the positions in the end are 128 times 1 or more and 384 times 0. What is
  known of a mask or of positions is kept as parts: how many, and which comparison of which tensor holds there.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.frameworks.torch import internals
from memfit.frameworks.torch.kernels import fallbacks
from memfit.frameworks.torch.kernels.fallbacks import Report
from memfit.frameworks.torch.shapes.shapes import MASKS, META, Arguments, ByStorage, Operator, Options, is_mask, tensors
from memfit.frameworks.torch.shapes.values import KnownValues

MADE_UP = "made-up-choice"
_ATEN = torch.ops.aten
# Numbers read at one line within a step, after which the program is taken to wait for another.
_PATIENCE = 5_000
# A router chooses among fewer experts than this, and in training its choice decides sizes: those stay upper bounds.
_VOCABULARY = 1_000
_SMALL_CHOICE = 8
_MOST_VALUES = 1 << 18
# Fractions of these go round a range without an early repetition.
_STRIDE, _ROW_STRIDE = 7_919, 104_729


class HostReads:
    """Answers of the device to a program that reads; `line` gives the line of it that runs now."""

    def __init__(self, line: Callable[[], str], report: Report) -> None:
        self._line = line
        self._report = report
        self._num_asked: dict[str, int] = {}
        self._probabilities: ByStorage[bool] = ByStorage()

    def step_taken(self) -> None:
        """The program doesn't wait for an answer."""
        self._num_asked.clear()

    def waits(self) -> int | None:
        """Counts that the program asks at its line; how often it has done so since it had asked too often."""
        line = self._line()
        self._num_asked[line] = asked = self._num_asked.get(line, 0) + 1
        return asked - _PATIENCE if asked >= _PATIENCE else None

    def answer(self, stand_in: Any) -> Any:
        """`stand_in`, or another number where the program has asked too often for this one."""
        if self.waits() is None:
            return stand_in
        self._num_asked[self._line()] = 0
        other = type(stand_in)(not stand_in)
        self._report(fallbacks.STAND_IN, f"read {_PATIENCE:,} times within a step, and then given {other!r}")
        return other

    def are_probabilities(self, tensor: torch.Tensor) -> None:
        """Notes that `tensor` is the output of a softmax."""
        self._probabilities.set(tensor.untyped_storage(), True)

    def host_copy(self, tensor: torch.Tensor, dtype: torch.dtype) -> Any:
        """Equal probabilities for a softmax, True for a mask; NotImplemented for anything else."""
        if dtype is torch.bool and tensor.numel() > 1:
            # What a mask selects takes the most memory where it is true everywhere.
            value = self.answer(True)
            self._report(fallbacks.STAND_IN, f"a mask was copied from the device: {value} stands in for all of it")
            return torch.full(tensor.shape, value)
        if not tensor.dim() or not self._probabilities or not self._probabilities.get(tensor.untyped_storage()):
            return NotImplemented
        self._report(fallbacks.STAND_IN, "probabilities were copied from the device: equal ones stand in for them")
        return torch.full(tensor.shape, 1 / tensor.shape[-1], dtype=dtype)


class Draws:
    """Gives values to choices among classes; `waits` says how long the program has waited for another choice."""

    def __init__(self, values: KnownValues, waits: Callable[[], int | None], report: Report) -> None:
        self._values = values
        self._waits = waits
        self._report = report
        self._num_drawn = 0

    def follow(self, func: Operator, args: Arguments, kwargs: Options, out: Any) -> None:
        """Gives `out` values where `func` chooses classes by numbers that are not known."""
        if func in _LOOKUPS:
            self._look_up(args[0], out)
            return
        rule = _CHOICES.get(func)
        choice = None if rule is None else rule(args, kwargs, out)
        if choice is None:
            return
        chosen, num_classes, per_row = choice
        if num_classes >= 2 and self._is_unknown(chosen):
            self._draw(chosen, num_classes, per_row)

    def _is_unknown(self, tensor: torch.Tensor) -> bool:
        return tensor.is_meta and 0 < tensor.numel() <= _MOST_VALUES and self._values.of(tensor) is None

    def _look_up(self, table: torch.Tensor, out: torch.Tensor) -> None:
        """Numbers of the samples that chosen rows belong to, as the nodes that a graph's pooling keeps: of all samples.

        How many samples there are is read from the largest number. Other tables stay unknown: what is chosen from
        those may decide sizes, which have upper bounds.
        """
        if table.dim() != 1 or table.dtype is not torch.int64 or not self._is_unknown(out):
            return
        known = self._values.of(table)
        if known is None:
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


# What was chosen, among how many classes, and how many per row.
_Choice = tuple[torch.Tensor, int, int] | None


def _choice(scores: torch.Tensor, dim: int | None, chosen: torch.Tensor, per_row: int) -> _Choice:
    """A choice among the last dimension of scores, or of positions in their unknown order; None where it isn't one."""
    if not scores.dim():
        return None
    if dim is None:
        dim = -1 if scores.dim() == 1 else 0
    num_classes = int(scores.shape[-1])
    is_last = dim % scores.dim() == scores.dim() - 1
    is_choice = is_last and (num_classes >= _VOCABULARY or not torch.is_grad_enabled())
    return (chosen, num_classes, per_row) if is_choice else None


def _argmax(args: Arguments, kwargs: Options, out: Any) -> _Choice:
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return _choice(args[0], dim, out, 1) if args[0].is_floating_point() else None


def _topk(args: Arguments, kwargs: Options, out: Any) -> _Choice:
    dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
    return _choice(args[0], dim, out[1], int(args[1])) if args[1] and args[0].is_floating_point() else None


def _gather(args: Arguments, kwargs: Options, out: Any) -> _Choice:
    """A choice among sorted classes, looked up in their unknown order, as nucleus sampling does."""
    is_order = args[0].dtype is torch.int64 and args[0].dim()
    return _choice(args[0], args[1], out, max(1, int(out.shape[-1]))) if is_order else None


_LOOKUPS: frozenset[Operator] = frozenset((_ATEN.index.Tensor, _ATEN.index_select.default))
_CHOICES: dict[Operator, Callable[[Arguments, Options, Any], _Choice]] = {
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
        self._sizes: ByStorage[_Sizes] = ByStorage()

    def made_by_data(self, out: Any, args: Arguments) -> None:
        """Notes that the size of `out` depends on data."""
        known = {1} | {size for tensor in tensors(args) for size in tensor.shape}
        for tensor in tensors((out,)):
            if tensor.is_meta and tensor.dim():
                self._note(tensor, frozenset(set(tensor.shape) - known or {tensor.shape[0]}))

    def among(self, args: Arguments) -> _Sizes:
        """The sizes of the arguments that are upper bounds."""
        if not self._sizes:
            return _NONE
        bounds: set[int] = set()
        for tensor in tensors(args):
            known = self._of(tensor)
            if known and known.isdisjoint(tensor.shape):
                # A view that joins dimensions, or one of the first elements.
                joined = {n for n in tensor.shape if n and any(n % size == 0 for size in known)}
                known = frozenset(joined or tensor.shape[:1])
            bounds |= known
        return frozenset(bounds)

    def follow(self, out: Any, sizes: _Sizes) -> bool:
        """Whether `out`, made of tensors with these bounds, has one of them; notes it."""
        bounded = False
        for tensor in tensors((out,)):
            kept = sizes & frozenset(tensor.shape)
            if kept and tensor.is_meta and tensor.layout is torch.strided:
                self._note(tensor, kept | self._of(tensor))
                bounded = True
        return bounded

    def _of(self, tensor: torch.Tensor) -> _Sizes:
        if tensor.layout is not torch.strided or not tensor.is_meta:
            return _NONE
        return self._sizes.get(tensor.untyped_storage()) or _NONE

    def _note(self, tensor: torch.Tensor, sizes: _Sizes) -> None:
        # A single element, or none, is no bound to speak of, and every tensor has dimensions of that size.
        sizes = frozenset(size for size in sizes if size > 1)
        if sizes and tensor.layout is torch.strided:
            self._sizes.set(tensor.untyped_storage(), sizes)


@dataclass(frozen=True, slots=True)
class _Part:
    """Up to `count` elements, at which all of `tests` hold for the tensor `source` (None: nothing is known)."""

    count: int
    source: tuple[int, int] | None = None
    tests: tuple[tuple[Callable[[Any, Any], Any], float], ...] = ()

    def example(self) -> float | None:
        """A number for which the tests hold."""
        near = [number + step for _, number in self.tests for step in (0, 1, -1)]
        return next((number for number in near if all(test(number, other) for test, other in self.tests)), None)


_Parts = tuple[_Part, ...]


def _total(parts: _Parts) -> int:
    return sum(part.count for part in parts)


def _source(tensor: torch.Tensor) -> tuple[int, int]:
    return internals.storage_address(tensor.untyped_storage()), internals.version_of(tensor)


class Selections:
    """Follows masks and positions from operator to operator; `values` is told of tensors whose parts are known."""

    def __init__(self, values: KnownValues, report: Report) -> None:
        self._values = values
        self._report = report
        self._parts: ByStorage[tuple[int, _Parts]] = ByStorage()

    def bounded(self, func: Operator, args: Arguments) -> Any:
        """The output of an operator that selects by a mask, in the most elements it can have; or NotImplemented."""
        if func is _ATEN.nonzero.default:
            mask, what = args[0], "its size depends on data"
        elif func is _ATEN.index.Tensor and len(args[1]) == 1 and is_mask(args[1][0]):
            mask, what = args[1][0], "a boolean mask selects an unknown number of elements"
        else:
            return NotImplemented
        parts = self._of(mask)
        if not parts:
            return NotImplemented
        size = min(mask.numel(), _total(parts))
        fallbacks.upper_bound(func, self._report, what)
        if func is _ATEN.nonzero.default:
            return torch.empty(size, mask.dim(), dtype=torch.int64, device=META)
        return func(args[0], [torch.empty(size, dtype=torch.int64, device=META)] * mask.dim())

    def follow(self, func: Operator, args: Arguments, out: Any) -> None:
        """Notes what `func` has made; called before the values of what it writes are forgotten."""
        rule = _RULES.get(func)
        # Tensors of inference mode don't count how often they were written to.
        if rule is not None and isinstance(out, torch.Tensor) and out.is_meta and not out.is_inference():
            with internals.disable_torch_function():
                parts = rule(self, func, args, out)
                if parts:
                    # A write is counted when it is done, which is after this.
                    version = internals.version_of(out) + (func is _ATEN.index_put_.default)
                    self._parts.set(out.untyped_storage(), (version, parts))
                elif self._parts:
                    self._parts.drop(out.untyped_storage())

    def _of(self, tensor: Any) -> _Parts:
        """What is known of a mask or of positions; nothing where a view shows an unknown part of them."""
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            return ()
        known = self._parts.get(tensor.untyped_storage())
        if known is None or tensor.is_inference() or internals.version_of(tensor) != known[0]:
            return ()
        parts = known[1]
        if tensor.dtype not in MASKS and tensor.numel() != _total(parts):
            return (replace(parts[0], count=tensor.numel()),) if len(parts) == 1 else ()
        return parts

    def _of_mask(self, mask: torch.Tensor) -> _Parts:
        """What is known of a mask, as by `_of`, or from its values where these are known."""
        known = self._values.of(mask)
        return self._of(mask) if known is None else (_Part(int(known.count_nonzero())),)

    def _compared(self, func: Operator, args: Arguments, out: torch.Tensor) -> _Parts:
        source, number = args[:2]
        if not isinstance(number, int | float) or source.is_inference() or self._values.of(source) is not None:
            return ()
        return (_Part(out.numel(), _source(source), ((_TESTS[func], number),)),)

    def _both(self, func: Operator, args: Arguments, out: torch.Tensor) -> _Parts:
        left, right = self._of(args[0]), self._of(args[1])
        if len(left) == len(right) == 1 and left[0].source == right[0].source:
            count = min(left[0].count, right[0].count)
            return (replace(left[0], count=count, tests=left[0].tests + right[0].tests),)
        totals = [_total(parts) for parts in (left, right) if parts]
        return (_Part(min(totals)),) if totals else ()

    def _either(self, func: Operator, args: Arguments, out: torch.Tensor) -> _Parts:
        left, right = self._of_mask(args[0]), self._of_mask(args[1])
        return left + right if left and right else ()

    def _joined(self, func: Operator, args: Arguments, out: torch.Tensor) -> _Parts:
        known = [self._of_mask(part) if part.dtype in MASKS else self._of(part) for part in args[0]]
        return tuple(part for parts in known for part in parts) if all(known) else ()

    def _copied(self, func: Operator, args: Arguments, out: torch.Tensor) -> _Parts:
        return self._of(args[0]) if (args[0].dtype in MASKS) == (out.dtype in MASKS) else ()

    def _set(self, func: Operator, args: Arguments, out: torch.Tensor) -> _Parts:
        """Positions of a mask are set: it was true at so many elements before, and may be at these."""
        mask, indices, value = args[:3]
        if mask.dtype not in MASKS or mask.dim() != 1 or len(indices) != 1 or indices[0] is None:
            return ()
        before = self._of_mask(mask)
        known = self._values.of(value) if value.is_meta else value
        if not before or (known is not None and not bool(known.any())):
            return before
        return tuple(part for part in before if part.count) + (self._of(indices[0]) or (_Part(indices[0].numel()),))

    def _indexed(self, func: Operator, args: Arguments, out: torch.Tensor) -> _Parts:
        data, indices = args[:2]
        if data.dim() != 1 or data.is_inference() or len(indices) != 1 or indices[0] is None or is_mask(indices[0]):
            return ()
        held = self._of(data) if data.dtype is torch.int64 else ()
        if len(held) == 1:
            # Some of the positions, as a permutation draws them.
            return (replace(held[0], count=out.numel()),)
        parts = self._of(indices[0])
        examples = [part.example() if part.source == _source(data) else None for part in parts]
        if len(parts) > 1 and None not in examples:
            counts = torch.tensor([part.count for part in parts])
            made = torch.repeat_interleave(torch.tensor(examples, dtype=torch.float64), counts)
            self._values.learn(out, made.to(out.dtype))
        return ()

    def _positions(self, func: Operator, args: Arguments, out: torch.Tensor) -> _Parts:
        parts = self._of(args[0])
        return parts if args[0].dim() == 1 and _total(parts) == out.shape[0] else ()


_TESTS: dict[Operator, Callable[[Any, Any], Any]] = {
    getattr(_ATEN, name).Scalar: getattr(operator, name) for name in ("ge", "gt", "le", "lt", "eq", "ne")
}
_RULES: dict[Operator, Callable[[Selections, Operator, Arguments, torch.Tensor], _Parts]] = {
    **dict.fromkeys(_TESTS, Selections._compared),
    **dict.fromkeys((_ATEN.bitwise_and.Tensor, _ATEN.logical_and.default), Selections._both),
    **dict.fromkeys((_ATEN.bitwise_or.Tensor, _ATEN.logical_or.default), Selections._either),
    _ATEN.cat.default: Selections._joined,
    **dict.fromkeys((_ATEN._to_copy.default, _ATEN.clone.default), Selections._copied),
    _ATEN.index_put_.default: Selections._set,
    _ATEN.index.Tensor: Selections._indexed,
    _ATEN.nonzero.default: Selections._positions,
}
