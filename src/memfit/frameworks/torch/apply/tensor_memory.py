"""What the memory of a tensor is like: whether there is any, and whether its elements fill it."""

import torch

from memfit.frameworks.torch import internals


def simulated(tensor: torch.Tensor) -> bool:
    """Whether `tensor` has a shape only; the simulation's function mode would hide it."""
    with internals.disable_torch_function():
        return bool(tensor.is_meta)


def dense(tensor: torch.Tensor) -> bool:
    """Whether the elements lie side by side, in whatever order, each once."""
    return tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))
