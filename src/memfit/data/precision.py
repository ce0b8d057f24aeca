"""What a change of type does to numbers, measured value by value while they are converted.

A narrower type can lose three things: digits (the relative error of a value that stays an ordinary number, at most
2**-24 for float32), small values (they become zero, or subnormal numbers with fewer digits) and large ones (they become
infinite). Everything is counted on small pieces that stay in the processor's cache, so that looking at each value costs
less than reading it from a disk.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from memfit.core.errors import BadInput
from memfit.data.source import Array, Field

# Values of 128 KiB and as much for intermediate results stay in the cache of one core.
_PIECE = 16384


@dataclass(slots=True)
class ValueSummary:
    """What was seen of some numbers so far."""

    num_values: int = 0
    num_nan: int = 0
    num_infinite: int = 0
    minimum: float | None = None  # of finite values; None where there is none
    maximum: float | None = None

    def count(self, values: Array) -> None:
        """Takes more numbers in, at least one."""
        self.num_values += values.size
        low, high = values.min(), values.max()
        # Not a number compares as false, and then so does the whole.
        if values.dtype.kind != "f" or -np.inf < low <= high < np.inf:
            self.widen(low, high)
            return
        finite = values[np.isfinite(values)]
        num_nan = int(np.count_nonzero(np.isnan(values)))
        self.num_nan += num_nan
        self.num_infinite += values.size - finite.size - num_nan
        if finite.size:
            self.widen(finite.min(), finite.max())

    def widen(self, low: Any, high: Any) -> None:
        """Takes the least and the greatest of finite values into the range."""
        # An item of numpy's long floating type is one of numpy's own again, which JSON doesn't know.
        low, high = (float(low), float(high)) if low.dtype.kind == "f" else (low.item(), high.item())
        self.minimum = low if self.minimum is None else min(self.minimum, low)
        self.maximum = high if self.maximum is None else max(self.maximum, high)


@dataclass(slots=True)
class Statistics(ValueSummary):
    """The same of the values of a field before they were converted, and what became of them."""

    num_overflow: int = 0  # finite before and infinite after
    num_zeroed: int = 0  # zero after, and not before
    num_subnormal: int = 0  # after: with fewer digits than an ordinary number has
    max_absolute_error: float = 0.0  # of finite values that stay finite
    max_relative_error: float = 0.0  # of values that stay ordinary numbers
    first_overflow: list[Any] | None = None  # number of the sample, and the value as text


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
    """Converts blocks of one field to another type and keeps count of what that does."""

    def __init__(self, field: Field, dtype: np.dtype[Any], statistics: Statistics | None = None) -> None:
        self.field = field
        self.dtype = dtype
        self.statistics = Statistics() if statistics is None else statistics
        self._per_sample = max(1, math.prod(field.shape))
        self._apply = self._choose(field.dtype, dtype)
        kind = field.dtype if field.dtype.kind == "f" else np.dtype(np.float64)
        self._error = np.empty(_PIECE, kind)
        self._magnitude = np.empty(_PIECE, kind)

    def run(self, start: int, values: Array, out: Array) -> None:
        """Converts the samples from number `start` on into `out`; both are C-contiguous."""
        flat, target = values.reshape(-1), out.reshape(-1)
        with np.errstate(all="ignore"):
            for first in range(0, flat.size, _PIECE):
                piece, converted = flat[first : first + _PIECE], target[first : first + _PIECE]
                np.copyto(converted, piece, casting="unsafe")
                self._apply(start * self._per_sample + first, piece, converted)

    def _choose(self, before: np.dtype[Any], after: np.dtype[Any]) -> Callable[[int, Array, Array], None]:
        """What to do with a piece once it is converted, given the number of its first value."""
        if before == after or after.kind not in "fiu" or before.kind == "b":
            return self._count
        if before.kind == "f":
            return self._count_losses if after.itemsize < before.itemsize else self._count
        # numpy calls int64 to float64 safe, though it rounds beyond 2**53.
        holds_all = (
            np.finfo(after).nmant >= 8 * before.itemsize if after.kind == "f" else np.can_cast(before, after, "safe")
        )
        return self._count if holds_all else self._refuse_losses

    def _count(self, number: int, values: Array, out: Array) -> None:
        """Values that keep their type, or get a wider one."""
        if values.dtype.kind in "fiu":
            self.statistics.count(values)
        else:
            self.statistics.num_values += values.size

    def _count_losses(self, number: int, values: Array, out: Array) -> None:
        """Floating values in a floating type of fewer digits."""
        seen, limits = self.statistics, np.finfo(self.dtype)
        low, high = values.min(), values.max()
        if low >= limits.min and high <= limits.max:
            seen.num_values += values.size
            seen.widen(low, high)
        else:
            seen.count(values)
            is_finite, stays = np.isfinite(values), np.isfinite(out)
            overflows = is_finite & ~stays
            seen.num_overflow += int(np.count_nonzero(overflows))
            if seen.first_overflow is None and overflows.any():
                row = int(np.argmax(overflows))
                seen.first_overflow = [(number + row) // self._per_sample, str(values[row])]
            values, out = values[stays & is_finite], out[stays & is_finite]
        if values.size == 0:
            return
        error, magnitude = self._error[: values.size], self._magnitude[: values.size]
        np.copyto(error, out)
        np.subtract(values, error, out=error)
        np.abs(error, out=error)
        most = float(error.max())
        if most == 0.0 and seen.minimum is not None and seen.minimum >= limits.tiny:
            return
        seen.max_absolute_error = max(seen.max_absolute_error, most)
        np.abs(values, out=magnitude)
        if float(magnitude.min()) < float(limits.tiny):
            # Values below the least ordinary number are counted, and taken out of the relative error.
            small = magnitude < limits.tiny
            num_zero = out.size - int(np.count_nonzero(out))
            seen.num_zeroed += num_zero - (values.size - int(np.count_nonzero(values)))
            # A value just below the least ordinary number may be rounded up to it.
            rounded_up = int(np.count_nonzero(small & (np.abs(out) >= limits.tiny)))
            seen.num_subnormal += int(np.count_nonzero(small)) - num_zero - rounded_up
            np.copyto(magnitude, np.inf, where=small)
        np.divide(error, magnitude, out=error)
        seen.max_relative_error = max(seen.max_relative_error, float(error.max()))

    def _refuse_losses(self, number: int, values: Array, out: Array) -> None:
        """Integers in a type that may not hold all of them, which is refused rather than rounded."""
        self.statistics.count(values)
        if self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype)
            wrong = (values < limits.min) | (values > limits.max)
            why = f"{self.dtype.name} holds {limits.min} to {limits.max}"
        else:
            # 2**63 - 1 becomes 2**63, which no int64 is: what it would be as one again depends on the processor.
            beyond = 2.0 ** int(np.iinfo(values.dtype).max).bit_length()
            wrong = ~np.isfinite(out) | (out.astype(np.float64) >= beyond) | (out.astype(values.dtype) != values)
            why = f"{self.dtype.name} would round it"
        if not wrong.any():
            return
        row = int(np.argmax(wrong))
        raise BadInput(
            f"{self.field.name!r} can't become {self.dtype.name}: sample {(number + row) // self._per_sample} holds "
            f"{values[row]}, and {why}. Choose a wider type; integers are never changed on the way."
        )
