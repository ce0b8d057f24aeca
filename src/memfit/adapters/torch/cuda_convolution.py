"""Workspaces of cuDNN convolutions.

cuDNN doesn't publish what a convolution will ask for: it depends on the algorithm its heuristics pick. What is known is
what each family of algorithms must hold. Tensor-core kernels work on channels-last data; given channels-first tensors
they convert input, weight and output in the workspace, with channels padded to the width of a load.
"""

from typing import Any

import torch

from memfit.adapters.torch.shapes import HALVES, Operator, size_bytes


class ConvolutionWorkspace:
    """Workspace of forward and backward convolutions.

    Args:
        capability: compute capability of the device.
    """

    def __init__(self, capability: tuple[int, int]) -> None:
        self._capability = capability

    def forward(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[int]:
        """Bytes taken during `convolution`: layout copies and the workspace."""
        data, weight = args[:2]
        return [*_layout_copies((data, weight), data, weight), self._bytes(data, weight, out, args[8])]

    def backward(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[int]:
        """Bytes taken during `convolution_backward`: layout copies and a workspace, the same for both of its passes."""
        grad_output, data, weight = args[:3]
        copies = _layout_copies((grad_output, data, weight), data, weight)
        return [*copies, self._bytes(data, weight, grad_output, args[9])]

    def _bytes(self, data: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, groups: int) -> int:
        if groups > 1 and groups == data.shape[1]:
            return 0
        if not self._converts(data, weight):
            return 0
        width = 8 if data.dtype in HALVES else 4
        return _padded(data, width) + _padded(out, width) + size_bytes(weight)

    def _converts(self, data: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether a tensor-core kernel runs on channels-first tensors."""
        if _channels_last(data) or _channels_last(weight):
            return False
        if data.dtype in HALVES:
            return self._capability >= (7, 0)
        return data.dtype is torch.float32 and self._capability >= (8, 0) and torch.backends.cudnn.allow_tf32


def _layout_copies(tensors: tuple[torch.Tensor, ...], data: torch.Tensor, weight: torch.Tensor) -> list[int]:
    """Copies of operands that are not in the layout the convolution runs in (`ConvShared.cpp`).

    The layout is channels-last if the input or the weight is, channels-first otherwise.
    """
    if data.dim() not in (4, 5):
        return [size_bytes(t) for t in tensors if not t.is_contiguous()]
    channels_last = torch.channels_last if data.dim() == 4 else torch.channels_last_3d
    wanted = channels_last if _channels_last(data) or _channels_last(weight) else torch.contiguous_format
    return [size_bytes(t) for t in tensors if not t.is_contiguous(memory_format=wanted)]


def _padded(tensor: torch.Tensor, width: int) -> int:
    """Bytes of a channels-last copy whose channels are padded to a multiple of `width`."""
    channels = tensor.shape[1]
    padded: int = -(-channels // width) * width
    return tensor.numel() // max(channels, 1) * padded * tensor.element_size()


def _channels_last(tensor: torch.Tensor) -> bool:
    if tensor.dim() == 4:
        return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
    if tensor.dim() == 5:
        return tensor.is_contiguous(memory_format=torch.channels_last_3d) and not tensor.is_contiguous()
    return False
