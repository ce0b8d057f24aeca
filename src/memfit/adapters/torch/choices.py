"""The choices of a device, put together: autocast, attention, dropout, recurrent layers."""

from typing import Any

import torch

from memfit.adapters.torch.attention import Attention, HostAttention
from memfit.adapters.torch.autocast import Autocast
from memfit.adapters.torch.interception import Interceptor, call_plain
from memfit.adapters.torch.recurrent import Recurrent
from memfit.adapters.torch.shapes import Operator


def cuda_interceptors(capability: tuple[int, int], autocast: Autocast) -> dict[str, Interceptor]:
    """What a CUDA device decides above autograd."""
    return {
        **autocast.interceptors(),
        **Attention(capability, autocast).interceptors(),
        **Recurrent(autocast).interceptors(),
        "dropout": _native_dropout,
        "rms_norm": _FusedRmsNorm(autocast),
    }


def host_interceptors(autocast: Autocast) -> dict[str, Interceptor]:
    """What the CPU decides above autograd."""
    return {**autocast.interceptors(), **HostAttention().interceptors()}


def _native_dropout(op: Operator, tensor: torch.Tensor, p: float, train: bool) -> Any:
    """CUDA keeps a boolean mask instead of a scaled floating-point one."""
    if train and 0 < p < 1 and tensor.numel():
        return call_plain(torch.ops.aten.native_dropout.default, tensor, p, True)[0]
    return call_plain(op, tensor, p, train)


class _FusedRmsNorm:
    """One kernel on CUDA, seven operators elsewhere."""

    def __init__(self, autocast: Autocast) -> None:
        self._autocast = autocast

    def __call__(
        self, op: Operator, tensor: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
    ) -> Any:
        if self._autocast.dtype is not None:
            tensor, weight = self._autocast.cast((tensor, weight), torch.float32)
        fused = getattr(torch.ops.aten, "_fused_rms_norm", None)
        if fused is None or (weight is not None and weight.dtype is not tensor.dtype):
            return call_plain(op, tensor, normalized_shape, weight, eps)
        return call_plain(fused.default, tensor, normalized_shape, weight, eps)[0]
