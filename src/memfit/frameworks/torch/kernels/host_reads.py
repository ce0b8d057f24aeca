"""What a program reads from a device without values, so that it goes on as it would.

Beside the stand-ins of `fallbacks`: a program that asks at one line again and again, without taking a step, waits for
another answer and gets it; the output of a softmax is read as probabilities that add up to one, because programs
draw from them; and a mask is read as one that is true everywhere, because programs select by it.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from memfit.frameworks.torch.kernels import fallbacks

# Numbers read at one line within a step, after which the program is taken to wait for another.
_PATIENCE = 5_000


class Readings:
    """Answers of the device to a program that reads.

    Args:
        line: gives the line of the program that runs now.
        report: takes (code, text) of each assumption made.
    """

    def __init__(self, line: Callable[[], str], report: Callable[[str, str], None]) -> None:
        self._line = line
        self._report = report
        self._num_asked: dict[str, int] = {}
        self._probabilities: dict[int, weakref.ref[Any]] = {}

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
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._probabilities[key] = weakref.ref(storage, lambda _: self._probabilities.pop(key, None))

    def host_copy(self, tensor: torch.Tensor, dtype: torch.dtype) -> Any:
        """Equal probabilities for a softmax, True for a mask; NotImplemented for anything else."""
        if dtype is torch.bool and tensor.numel() > 1:
            # What a mask selects takes the most memory where it is true everywhere.
            value = self.answer(True)
            self._report(fallbacks.STAND_IN, f"a mask was copied from the device: {value} stands in for all of it")
            return torch.full(tensor.shape, value)
        known = self._probabilities.get(tensor.untyped_storage()._cdata) if self._probabilities else None
        if known is None or known() is None or not tensor.dim():
            return NotImplemented
        self._report(fallbacks.STAND_IN, "probabilities were copied from the device: equal ones stand in for them")
        return torch.full(tensor.shape, 1 / tensor.shape[-1], dtype=dtype)
