"""The choices of a device, put together: autocast, attention, dropout, recurrent layers."""

from collections.abc import Callable
from typing import Any

import torch

from memfit.adapters.torch.attention import Attention, HostAttention
from memfit.adapters.torch.autocast import Autocast
from memfit.adapters.torch.host_recurrent import HostRecurrent
from memfit.adapters.torch.interception import Interceptor, call_plain
from memfit.adapters.torch.recurrent import Recurrent
from memfit.adapters.torch.rms_norm import FusedRmsNorm
from memfit.adapters.torch.shapes import Operator


def cuda_interceptors(
    capability: tuple[int, int], autocast: Autocast, report: Callable[[str, str], None] = lambda code, text: None
) -> dict[str, Interceptor]:
    """What a CUDA device decides above autograd."""
    return {
        **autocast.interceptors(),
        **Attention(capability, autocast, report).interceptors(),
        **Recurrent(autocast).interceptors(),
        "dropout": _native_dropout,
        "rms_norm": FusedRmsNorm(autocast),
        "ctc_loss.Tensor": _ctc_by_lengths,
    }


def host_interceptors(autocast: Autocast) -> dict[str, Interceptor]:
    """What the CPU decides above autograd."""
    return {**autocast.interceptors(), **HostAttention(autocast).interceptors(), **HostRecurrent().interceptors()}


def _ctc_by_lengths(
    op: Operator,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    *options: Any,
) -> Any:
    """CUDA reads the lengths on the host; with a dispatch mode on, PyTorch would take another way."""
    most_inputs, most_targets = log_probs.shape[0], targets.shape[-1]
    given = _lengths(input_lengths, most_inputs), _lengths(target_lengths, most_targets)
    return torch.ops.aten.ctc_loss.IntList(log_probs, targets, *given, *options)


def _lengths(tensor: torch.Tensor, most: int) -> list[int]:
    read = [int(length) for length in tensor.to("cpu").flatten().tolist()]
    # Zeros stand in for lengths that are not known.
    return read if any(read) else [most] * len(read)


def _native_dropout(op: Operator, tensor: torch.Tensor, p: float, train: bool) -> Any:
    """CUDA keeps a boolean mask instead of a scaled floating-point one."""
    if train and 0 < p < 1 and tensor.numel():
        return call_plain(torch.ops.aten.native_dropout.default, tensor, p, True)[0]
    return call_plain(op, tensor, p, train)
