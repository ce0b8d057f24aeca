"""Linear layers whose input is no dense block of rows: they add their bias in place.

Other inputs are flattened into rows, and product and bias are one operator (native/Linear.cpp). For shape-only tensors
PyTorch adds the bias out of place instead, a copy of the output that no real device makes.
"""

from typing import Any

import torch

from memfit.frameworks.torch import internals
from memfit.frameworks.torch.kernels.autocast import Autocast
from memfit.frameworks.torch.shapes.interception import Interceptor, call_plain
from memfit.frameworks.torch.shapes.shapes import Operator

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def linear(autocast: Autocast) -> Interceptor:
    """The interceptor of `linear`, which casts as autocast does."""

    def apply(op: Operator, tensor: Any, weight: Any, bias: Any = None) -> Any:
        tensor, weight, bias = autocast.lower((tensor, weight, bias))
        if bias is None or tensor.dim() == 2 or tensor.is_contiguous() or not _are_plain(tensor, weight, bias):
            return call_plain(op, tensor, weight, bias)
        return call_plain(torch.ops.aten.matmul.default, tensor, weight.t()).add_(bias)

    return apply


def _are_plain(*tensors: Any) -> bool:
    return all(type(t) in _PLAIN and t.is_meta and not internals.is_functorch_tensor(t) for t in tensors)
