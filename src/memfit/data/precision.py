"""What a change of type does to numbers, measured value by value while they are converted.

A narrower type can lose three things: digits (the relative error of a value that stays an ordinary number, at most
2**-24 for float32), small values (they become zero, or subnormal numbers with fewer digits) and large ones (they become
infinite). Everything is counted on small pieces that stay in the processor's cache, so that looking at each value costs
less than reading it from a disk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memfit.core.errors import BadInput
from memfit.data.source import Array, Field

# Values of 128 KiB and as much for intermediate results stay in the cache of one core.
_PIECE = 16384


@dataclass(slots=True)
class Statistics:
    """What was seen of one field so far.

    Attributes:
        num_values: looked at.
        num_nan: that were no number before.
        num_infinite: that were infinite before.
        num_overflow: finite before and infinite, or out of range, after.
        num_zeroed: that became zero without having been zero.
        num_subnormal: that became subnormal, with fewer digits than an ordinary number has.
        minimum: least finite value; None before the first one.
        maximum: greatest finite value.
        max_absolute_error: of finite values that stay finite.
        max_relative_error: of values that stay ordinary numbers.
        first_overflow: number of the first sample with an overflow, and the value as text.
    """

    num_values: int = 0
    num_nan: int = 0
    num_infinite: int = 0
    num_overflow: int = 0
    num_zeroed: int = 0
    num_subnormal: int = 0
    minimum: float | None = None
    maximum: float | None = None
    max_absolute_error: float = 0.0
    max_relative_error: float = 0.0
    first_overflow: Sequence[Any] | None = None

    def _widen(self, low: float, high: float) -> None:
        self.minimum = low if self.minimum is None else min(self.minimum, low)
        self.maximum = high if self.maximum is None else max(self.maximum, high)


def parse_dtype(given: Any) -> np.dtype[Any] | None:
    """The type that the user named; None for "as stored".

    >>> parse_dtype("float32")
    dtype('float32')
    """
    if given is None:
        return None
    try:
        dtype = np.dtype(given)
    except (TypeError, ValueError, SyntaxError):
        dtype = np.dtype(object)
    if dtype.kind not in "fiu":
        raise BadInput(
            f"dtype={given!r} is not a type of numbers that can be converted to. Name one of float16, float32, "
            "float64, int8 to int64 or uint8 to uint64."
        )
    native: np.dtype[Any] = dtype.newbyteorder("=")
    return native


def target_dtypes(fields: tuple[Field, ...], dtype: np.dtype[Any] | None) -> tuple[np.dtype[Any], ...]:
    """The type of each field after the conversion.

    A floating type is for floating fields: images of bytes and numbers of classes stay as they are, unless no field
    is floating, when nothing else can have been meant. An integer type is for features of an integer type.
    """
    if dtype is None:
        return tuple(field.dtype for field in fields)
    if dtype.kind == "f":
        changed = [field.dtype.kind == "f" for field in fields]
        if not any(changed):
            changed = [field.dtype.kind in "iub" and not field.is_label for field in fields]
        return tuple(dtype if change else field.dtype for change, field in zip(changed, fields, strict=True))
    for field in fields:
        if field.dtype.kind == "f" and not field.is_label:
            raise BadInput(
                f"{field.name!r} is {field.dtype.name}, and {dtype.name} was asked for: floats aren't converted to "
                "integers, because that would cut off all digits after the decimal point. Scale and round "
                "them in your own code first, or give a floating type such as float32 or float16."
            )
    return tuple(dtype if field.dtype.kind in "iub" and not field.is_label else field.dtype for field in fields)


class Converter:
    """Converts blocks of one field and keeps count of what that does.

    Args:
        field: as stored.
        dtype: to convert to.
        statistics: to go on with.
    """

    def __init__(self, field: Field, dtype: np.dtype[Any], statistics: Statistics | None = None) -> None:
        self.field = field
        self.dtype = dtype
        self.statistics = Statistics() if statistics is None else statistics
        self._per_sample = max(1, int(np.prod(field.shape, dtype=np.int64)))
        self._apply = _choose(field.dtype, dtype)
        kind = field.dtype if field.dtype.kind == "f" else np.dtype(np.float64)
        self._error = np.empty(_PIECE, kind)
        self._magnitude = np.empty(_PIECE, kind)

    def run(self, start: int, values: Array, out: Array) -> None:
        """Converts the samples from number `start` on into `out`; both are C-contiguous."""
        flat, target = values.reshape(-1), out.reshape(-1)
        with np.errstate(all="ignore"):
            for first in range(0, flat.size, _PIECE):
                piece = flat[first : first + _PIECE]
                self._apply(self, start, first, piece, target[first : first + _PIECE])
        self.statistics.num_values += flat.size

    def _sample(self, start: int, position: int) -> int:
        return start + position // self._per_sample

    def _copy(self, start: int, first: int, values: Array, out: Array) -> None:
        """Values that keep their type, or get a wider one."""
        np.copyto(out, values, casting="unsafe")
        if values.dtype.kind not in "fiu":
            return
        low, high = values.min(), values.max()
        if values.dtype.kind == "f" and not (np.isfinite(low) and np.isfinite(high)):
            finite = values[np.isfinite(values)]
            num_nan = int(np.count_nonzero(np.isnan(values)))
            self.statistics.num_nan += num_nan
            self.statistics.num_infinite += values.size - finite.size - num_nan
            if finite.size == 0:
                return
            low, high = finite.min(), finite.max()
        # An item of numpy's long floating type is one of numpy's own again, which JSON doesn't know.
        self.statistics._widen(*((float(low), float(high)) if values.dtype.kind == "f" else (low.item(), high.item())))

    def _narrow(self, start: int, first: int, values: Array, out: Array) -> None:
        """Floating values to a floating type of fewer digits."""
        found = self.statistics
        np.copyto(out, values, casting="unsafe")
        limits = np.finfo(self.dtype)
        low, high = values.min(), values.max()
        # Not a number compares as false, and then so does the whole.
        if not (low >= limits.min and high <= limits.max):
            values, out = self._finite(start, first, values, out)
            if values.size == 0:
                return
            low, high = values.min(), values.max()
        found._widen(float(low), float(high))
        error, magnitude = self._error[: values.size], self._magnitude[: values.size]
        np.copyto(error, out)
        np.subtract(values, error, out=error)
        np.abs(error, out=error)
        most = float(error.max())
        if most == 0.0 and low >= limits.tiny:
            return
        found.max_absolute_error = max(found.max_absolute_error, most)
        np.abs(values, out=magnitude)
        if float(magnitude.min()) < float(limits.tiny):
            self._count_small(values, out, magnitude)
        np.divide(error, magnitude, out=error)
        found.max_relative_error = max(found.max_relative_error, float(error.max()))

    def _count_small(self, values: Array, out: Array, magnitude: Array) -> None:
        """Counts values below the least ordinary number, and takes them out of the relative error."""
        small = magnitude < np.finfo(self.dtype).tiny
        num_zero_before = values.size - int(np.count_nonzero(values))
        num_zero = values.size - int(np.count_nonzero(out))
        self.statistics.num_zeroed += num_zero - num_zero_before
        # A value just below the least ordinary number may be rounded up to it.
        rounded_up = int(np.count_nonzero(small & (np.abs(out) >= np.finfo(self.dtype).tiny)))
        self.statistics.num_subnormal += int(np.count_nonzero(small)) - num_zero - rounded_up
        np.copyto(magnitude, np.inf, where=small)

    def _finite(self, start: int, first: int, values: Array, out: Array) -> tuple[Array, Array]:
        """The values that are finite before and after, once the others are counted."""
        found = self.statistics
        is_finite, stays = np.isfinite(values), np.isfinite(out)
        num_nan = int(np.count_nonzero(np.isnan(values)))
        found.num_nan += num_nan
        found.num_infinite += values.size - int(np.count_nonzero(is_finite)) - num_nan
        overflows = is_finite & ~stays
        num_overflow = int(np.count_nonzero(overflows))
        if num_overflow:
            position = int(np.argmax(overflows))
            found.num_overflow += num_overflow
            if found.first_overflow is None:
                found.first_overflow = [self._sample(start, first + position), str(values[position])]
            finite = values[is_finite]
            found._widen(float(finite.min()), float(finite.max()))
        return values[stays & is_finite], out[stays & is_finite]

    def _exact(self, start: int, first: int, values: Array, out: Array) -> None:
        """Integers to a type that may not hold all of them, which is refused rather than rounded."""
        np.copyto(out, values, casting="unsafe")
        low, high = values.min(), values.max()
        self.statistics._widen(low.item(), high.item())
        if self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype)
            if low >= limits.min and high <= limits.max:
                return
            wrong = (values < limits.min) | (values > limits.max)
            why = f"{self.dtype.name} holds {limits.min} to {limits.max}"
        else:
            # 2**63 - 1 becomes 2**63, which no int64 is: what it would be as one again depends on the processor.
            beyond = 2.0 ** int(np.iinfo(values.dtype).max).bit_length()
            wrong = ~np.isfinite(out) | (out.astype(np.float64) >= beyond) | (out.astype(values.dtype) != values)
            if not wrong.any():
                return
            why = f"{self.dtype.name} would round it"
        position = int(np.argmax(wrong))
        raise BadInput(
            f"{self.field.name!r} can't become {self.dtype.name}: sample {self._sample(start, first + position)} holds "
            f"{values[position]}, and {why}. Choose a wider type; integers are never changed on the way."
        )


def _choose(before: np.dtype[Any], after: np.dtype[Any]) -> Any:
    if before == after or after.kind not in "fiu" or before.kind == "b":
        return Converter._copy
    if before.kind == "f":
        return Converter._narrow if after.itemsize < before.itemsize else Converter._copy
    # numpy calls int64 to float64 safe, though it rounds beyond 2**53.
    holds_all = (
        np.finfo(after).nmant >= 8 * before.itemsize if after.kind == "f" else np.can_cast(before, after, "safe")
    )
    return Converter._copy if holds_all else Converter._exact
