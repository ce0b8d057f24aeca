"""Operators of autograd's formulas that run in place on a real device.

Many formulas (torch/csrc/autograd/FunctionsManual.cpp) make a gradient of zeros and write into it, or go on computing
in a tensor that they have just made. While a dispatch mode is on, and for shape-only tensors in any case
(`areAnyTensorSubclassLike`, TensorSubclassLikeUtils.h), they take the out-of-place form of the operator instead, whose
copies no real device makes. Such a call is known by its first argument: a tensor that the same formula has made, of
zeros where the operator writes single elements.
"""

from typing import Any

import torch

from memfit.frameworks.torch import internals
from memfit.frameworks.torch.shapes.recorder import Recorder
from memfit.frameworks.torch.shapes.shapes import Arguments, Operator

_ZEROS = {"aten.zeros", "aten.new_zeros", "aten.zeros_like"}
# Of max, index, gather, index_select, masked_select, take, cummax, trace and their like.
_WRITING = {
    f"aten::{name}"
    for name in "scatter scatter_add index_put index_add masked_scatter put index_fill masked_fill".split()  # noqa: SIM905
}
# Formulas that write out of place into zeros whatever the tensors are.
_ALWAYS_COPYING = ("ScatterReduce", "IndexReduce")
# Of the full max and min, of clamp with tensors; of losses of logits and of probabilities.
_COMPUTING = {
    "aten::logical_and": "",
    "aten::logical_or": "",
    "aten::sub": "BinaryCrossEntropy",
    "aten::mul": "BinaryCrossEntropy",
}


class Formulas:
    """Follows which formula runs, and says which of its operators would run in place."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._node = -1
        self._first_block = 0

    def enter(self, node: Any) -> None:
        """Notes the autograd node whose formula runs."""
        number = internals.number_of(node)
        if number != self._node:
            self._node = number
            self._first_block = self._recorder.num_blocks

    def runs_in_place(self, func: Operator, args: Arguments) -> bool:
        """Whether `func`, which isn't in place itself, writes into its first argument on a real device."""
        name = internals.name_of(func)
        if name not in _WRITING and name not in _COMPUTING:
            return False
        node = internals.current_autograd_node()
        if node is None or torch.is_grad_enabled() or isinstance(node, torch.autograd.function.BackwardCFunction):
            return False
        index = self._recorder.block_of(args[0])
        if index is None or index < self._first_block:
            return False
        if name in _WRITING:
            return self._recorder.op_of(index) in _ZEROS and not node.name().startswith(_ALWAYS_COPYING)
        return bool(node.name().startswith(_COMPUTING[name]))
