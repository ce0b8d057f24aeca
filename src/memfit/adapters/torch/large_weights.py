"""Weights of models that are too large for a laptop: after the first of them, the host holds shapes only.

A script builds its model on the host before it moves it to the device. Tensors on the host are real in a dry run, but
a model of 70 billion parameters would need 280 GB there, and minutes to fill them with numbers that nobody reads. So
what `torch.empty` makes while a module is being built is real up to a budget, and a shape beyond.
"""

import math
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from memfit.core.units import MIB, format_size

_BUDGET_BYTES = 256 * MIB
_LEAST_BYTES = MIB
_MAX_FRAMES = 30
AS_SHAPES = "weights-as-shapes"


class LargeWeights:
    """Decides which weights the host need not hold.

    Args:
        report: takes (code, text) of each assumption made.
        budget_bytes: weights that the host does hold.
    """

    def __init__(self, report: Callable[[str, str], None], budget_bytes: int = _BUDGET_BYTES) -> None:
        self._report = report
        self._left_bytes = budget_bytes
        self._budget_bytes = budget_bytes
        self._said = False

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether `torch.empty(*args, **kwargs)` makes a weight beyond the budget."""
        size = args[0] if args and isinstance(args[0], list | tuple) else kwargs.get("size", args)
        if not all(isinstance(n, int) for n in size):
            return False
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        size_bytes = math.prod(size) * dtype.itemsize
        if size_bytes < _LEAST_BYTES or not _builds_module(sys._getframe(1)):
            return False
        if size_bytes <= self._left_bytes:
            self._left_bytes -= size_bytes
            return False
        if not self._said:
            self._said = True
            limit = format_size(self._budget_bytes)
            self._report(AS_SHAPES, f"weights beyond the first {limit} were built as shapes only, without values")
        return True


def _builds_module(frame: FrameType | None) -> bool:
    """Whether a module's constructor is under way."""
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return False
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), torch.nn.Module):
            return True
        frame = frame.f_back
    return False
