"""How many elements masks without values can select, where a program limits them itself.

A sampler of a detector takes at most 128 of the boxes whose label is 1 or more and 384 of those whose label is 0, marks
them in a mask of zeros, and selects by that mask. All of this shows in the operators: a mask of a comparison can be
true everywhere, positions drawn from it are as many as the program draws, a mask of zeros is true at most where
positions were set, and the labels at the positions in the end are 128 times 1 or more and 384 times 0. What is known of
a mask or of positions is kept as parts: how many, and which comparison of which tensor holds there.
"""

import operator
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.frameworks.torch import internals
from memfit.frameworks.torch.kernels import fallbacks
from memfit.frameworks.torch.shapes.shapes import META, Operator
from memfit.frameworks.torch.shapes.values import KnownValues

_ATEN = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)
_Arguments = tuple[Any, ...]


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


class Selections:
    """Follows masks and positions from operator to operator.

    Args:
        values: knows masks that were made of numbers, and is told of tensors whose parts are known.
        report: takes (code, text) of each assumption made.
    """

    def __init__(self, values: KnownValues, report: Callable[[str, str], None]) -> None:
        self._values = values
        self._report = report
        self._parts: dict[int, tuple[weakref.ref[Any], int, tuple[_Part, ...]]] = {}

    def bounded(self, func: Operator, args: _Arguments) -> Any:
        """The output of an operator that selects by a mask, in the most elements it can have; or NotImplemented."""
        if func is _ATEN.nonzero.default:
            size = self._at_most(args[0])
            if size is None:
                return NotImplemented
            fallbacks.upper_bound(func, self._report, "its size depends on data")
            return torch.empty(size, args[0].dim(), dtype=torch.int64, device=META)
        if func is _ATEN.index.Tensor and len(args[1]) == 1 and args[1][0] is not None:
            mask = args[1][0]
            size = self._at_most(mask) if mask.dtype in _MASKS else None
            if size is None:
                return NotImplemented
            fallbacks.upper_bound(func, self._report, "a boolean mask selects an unknown number of elements")
            return func(args[0], [torch.empty(size, dtype=torch.int64, device=META)] * mask.dim())
        return NotImplemented

    def follow(self, func: Operator, args: _Arguments, kwargs: dict[str, Any], out: Any) -> None:
        """Notes what `func` has made; called before the values of what it writes are forgotten."""
        rule = _RULES.get(func)
        # Tensors of inference mode don't count how often they were written to.
        if rule is not None and isinstance(out, torch.Tensor) and out.is_meta and not out.is_inference():
            with internals.disable_torch_function():
                parts = rule(self, func, args, out)
                if parts:
                    # A write is counted when it is done, which is after this.
                    self._note(out, parts, out._version + (func is _ATEN.index_put_.default))
                elif self._parts:
                    self._parts.pop(out.untyped_storage()._cdata, None)

    def _note(self, tensor: torch.Tensor, parts: tuple[_Part, ...], version: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._parts[key] = (weakref.ref(storage, lambda _: self._parts.pop(key, None)), version, parts)

    def _of(self, tensor: Any) -> tuple[_Part, ...]:
        """What is known of a mask or of positions; nothing where a view shows an unknown part of them."""
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            return ()
        known = self._parts.get(tensor.untyped_storage()._cdata)
        if known is None or tensor.is_inference() or tensor._version != known[1]:
            return ()
        parts = known[2]
        if tensor.dtype not in _MASKS and tensor.numel() != sum(part.count for part in parts):
            return (replace(parts[0], count=tensor.numel()),) if len(parts) == 1 else ()
        return parts

    def _of_mask(self, mask: torch.Tensor) -> tuple[_Part, ...]:
        """As `_of`, for a mask whose values may be known as well."""
        known = self._values.of(mask)
        return self._of(mask) if known is None else (_Part(int(known.count_nonzero())),)

    def _at_most(self, mask: torch.Tensor) -> int | None:
        parts = self._of(mask)
        return min(mask.numel(), sum(part.count for part in parts)) if parts else None

    def _compared(self, func: Operator, args: _Arguments, out: torch.Tensor) -> tuple[_Part, ...]:
        source, number = args[:2]
        if not isinstance(number, int | float) or source.is_inference() or self._values.of(source) is not None:
            return ()
        test = _TESTS[func]
        return (_Part(out.numel(), (source.untyped_storage()._cdata, source._version), ((test, number),)),)

    def _both(self, func: Operator, args: _Arguments, out: torch.Tensor) -> tuple[_Part, ...]:
        left, right = self._of(args[0]), self._of(args[1])
        if len(left) == len(right) == 1 and left[0].source == right[0].source:
            count = min(left[0].count, right[0].count)
            return (replace(left[0], count=count, tests=left[0].tests + right[0].tests),)
        totals = [sum(part.count for part in parts) for parts in (left, right) if parts]
        return (_Part(min(totals)),) if totals else ()

    def _either(self, func: Operator, args: _Arguments, out: torch.Tensor) -> tuple[_Part, ...]:
        left, right = self._of_mask(args[0]), self._of_mask(args[1])
        return left + right if left and right else ()

    def _joined(self, func: Operator, args: _Arguments, out: torch.Tensor) -> tuple[_Part, ...]:
        known = [self._of_mask(part) if part.dtype in _MASKS else self._of(part) for part in args[0]]
        return tuple(part for parts in known for part in parts) if all(known) else ()

    def _copied(self, func: Operator, args: _Arguments, out: torch.Tensor) -> tuple[_Part, ...]:
        return self._of(args[0]) if (args[0].dtype in _MASKS) == (out.dtype in _MASKS) else ()

    def _set(self, func: Operator, args: _Arguments, out: torch.Tensor) -> tuple[_Part, ...]:
        """Positions of a mask are set: it was true at so many elements before, and may be at these."""
        mask, indices, value = args[:3]
        if mask.dtype not in _MASKS or mask.dim() != 1 or len(indices) != 1 or indices[0] is None:
            return ()
        before = self._of_mask(mask)
        if not before:
            return ()
        known = self._values.of(value) if value.is_meta else value
        if known is not None and not bool(known.any()):
            return before
        parts = self._of(indices[0]) or (_Part(indices[0].numel()),)
        return tuple(part for part in before if part.count) + parts

    def _indexed(self, func: Operator, args: _Arguments, out: torch.Tensor) -> tuple[_Part, ...]:
        data, indices = args[:2]
        if data.dim() != 1 or data.is_inference() or len(indices) != 1 or indices[0] is None:
            return ()
        if indices[0].dtype in _MASKS:
            return ()
        held = self._of(data) if data.dtype is torch.int64 else ()
        if len(held) == 1:
            # Some of the positions, as a permutation draws them.
            return (replace(held[0], count=out.numel()),)
        parts = self._of(indices[0])
        source = (data.untyped_storage()._cdata, data._version)
        examples = [part.example() if part.source == source else None for part in parts]
        if len(parts) > 1 and None not in examples:
            counts = torch.tensor([part.count for part in parts])
            made = torch.repeat_interleave(torch.tensor(examples, dtype=torch.float64), counts)
            self._values.learn(out, made.to(out.dtype))
        return ()

    def _positions(self, func: Operator, args: _Arguments, out: torch.Tensor) -> tuple[_Part, ...]:
        parts = self._of(args[0])
        return parts if args[0].dim() == 1 and sum(part.count for part in parts) == out.shape[0] else ()


_TESTS: dict[Operator, Callable[[Any, Any], Any]] = {
    _ATEN.ge.Scalar: operator.ge,
    _ATEN.gt.Scalar: operator.gt,
    _ATEN.le.Scalar: operator.le,
    _ATEN.lt.Scalar: operator.lt,
    _ATEN.eq.Scalar: operator.eq,
    _ATEN.ne.Scalar: operator.ne,
}
_RULES: dict[Operator, Callable[[Selections, Operator, _Arguments, torch.Tensor], tuple[_Part, ...]]] = {
    **dict.fromkeys(_TESTS, Selections._compared),
    **dict.fromkeys((_ATEN.bitwise_and.Tensor, _ATEN.logical_and.default), Selections._both),
    **dict.fromkeys((_ATEN.bitwise_or.Tensor, _ATEN.logical_or.default), Selections._either),
    _ATEN.cat.default: Selections._joined,
    _ATEN._to_copy.default: Selections._copied,
    _ATEN.clone.default: Selections._copied,
    _ATEN.index_put_.default: Selections._set,
    _ATEN.index.Tensor: Selections._indexed,
    _ATEN.nonzero.default: Selections._positions,
}
