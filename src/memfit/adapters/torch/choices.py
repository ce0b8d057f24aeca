"""The choices of a device, put together: autocast, attention, dropout, recurrent layers."""

from typing import Any

import torch

from memfit.adapters.torch.attention import Attention, HostAttention
from memfit.adapters.torch.autocast import Autocast
from memfit.adapters.torch.host_recurrent import HostRecurrent
from memfit.adapters.torch.interception import Interceptor, call_plain
from memfit.adapters.torch.recurrent import Recurrent
from memfit.adapters.torch.rms_norm import FusedRmsNorm
from memfit.adapters.torch.shapes import Operator


def cuda_interceptors(capability: tuple[int, int], autocast: Autocast) -> dict[str, Interceptor]:
    """What a CUDA device decides above autograd."""
    return {
        **autocast.interceptors(),
        **Attention(capability, autocast).interceptors(),
        **Recurrent(autocast).interceptors(),
        "dropout": _native_dropout,
        "rms_norm": FusedRmsNorm(autocast),
    }


def host_interceptors(autocast: Autocast) -> dict[str, Interceptor]:
    """What the CPU decides above autograd."""
    return {**autocast.interceptors(), **HostAttention(autocast).interceptors(), **HostRecurrent().interceptors()}


def _native_dropout(op: Operator, tensor: torch.Tensor, p: float, train: bool) -> Any:
    """CUDA keeps a boolean mask instead of a scaled floating-point one."""
    if train and 0 < p < 1 and tensor.numel():
        return call_plain(torch.ops.aten.native_dropout.default, tensor, p, True)[0]
    return call_plain(op, tensor, p, train)
