"""Memory that CPU kernels take for themselves, operator by operator.

A trace of operators sees their inputs and outputs. What a CPU kernel allocates inside, and frees before it returns, is
stated here: one small function per operator, each with its source. All were checked, allocation by allocation, against
what PyTorch's profiler reports; an operator that is not listed takes nothing of its own, or bytes. Convolutions and
recurrent layers, which oneDNN runs, have modules of their own.
"""

from math import prod
from typing import Any

import torch

from memfit.adapters.torch import host_recurrent, sparse
from memfit.adapters.torch.convolution_layout import is_channels_last
from memfit.adapters.torch.fallbacks import Rule
from memfit.adapters.torch.host_convolution import HostConvolution
from memfit.adapters.torch.shapes import Operator, size_bytes

_FLOAT_BYTES = 4
# Queries per block by the length they are cut from, and keys per block (FlashAttentionKernel.cpp).
_QUERY_BLOCKS = ((768, 256), (192, 64), (0, 32))
_KEY_BLOCK = 512
# Largest sum of output height and width that the vectorised kernels of up-sampling are chosen for (UpSampleKernel.cpp).
_VECTORISED_UPSAMPLING = 128


def _copies(*tensors: torch.Tensor) -> list[int]:
    """A contiguous copy of each tensor that is not contiguous."""
    return [size_bytes(t) for t in tensors if not t.is_contiguous()]


class HostInternals:
    """What CPU kernels take for themselves, with as many threads as PyTorch uses here."""

    def __init__(self) -> None:
        self._threads = torch.get_num_threads()

    def table(self) -> dict[str, Any]:
        """Bytes taken inside, by operator name."""
        convolution = HostConvolution()
        return {
            "aten::convolution": convolution.forward,
            "aten::convolution_backward": convolution.backward,
            "aten::mkldnn_rnn_layer": host_recurrent.forward_bytes,
            "aten::mkldnn_rnn_layer_backward": host_recurrent.backward_bytes,
            "aten::native_batch_norm_backward": _batch_norm_backward,
            "aten::native_layer_norm": _copy_first,
            "aten::native_layer_norm_backward": self._layer_norm_backward,
            "aten::native_group_norm_backward": _group_norm_backward,
            "aten::upsample_nearest2d": _upsample,
            "aten::upsample_bilinear2d": _upsample,
            "aten::max_pool2d_with_indices_backward": _max_pool_backward,
            "aten::_scaled_dot_product_flash_attention_for_cpu": self._flash,
            "aten::_scaled_dot_product_flash_attention_for_cpu_backward": self._flash_backward,
            "aten::_safe_softmax": _safe_softmax,
            "aten::_softmax_backward_data": _copy_both,
            "aten::_log_softmax_backward_data": _copy_both,
            "aten::gelu_backward": _gelu_backward,
            "aten::embedding": _copy_indices,
            "aten::embedding_dense_backward": _copy_both,
            "aten::_embedding_bag_backward": _embedding_bag_backward,
            "aten::mse_loss": _unreduced_loss,
            "aten::smooth_l1_loss": _unreduced_loss,
            "aten::huber_loss": _unreduced_loss,
            "aten::binary_cross_entropy_with_logits": _logits_loss,
            "aten::_ctc_loss_backward": _ctc_loss_backward,
            "aten::roll": _roll,
            "aten::cumsum": _cumsum,
            **sparse.INTERNALS,
        }

    def rules(self) -> dict[str, Rule]:
        """Outputs that only the CPU has, by operator name."""
        return {"aten::mkldnn_rnn_layer": host_recurrent.forward_rule}

    def _layer_norm_backward(
        self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> list[int]:
        """Each thread's sums of the gradients of weight and bias (layer_norm_kernel.cpp)."""
        return [*_copies(args[0], args[1]), 2 * self._threads * prod(args[2]) * _FLOAT_BYTES]

    def _flash(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[int]:
        """Each thread's scores of a block, their maxima and sums, its block of output (FlashAttentionKernel.cpp)."""
        queries, keys = _attention_blocks(args[0], args[1])
        return [self._threads * queries * (keys + 2 + args[0].shape[3]) * _FLOAT_BYTES]

    def _flash_backward(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[int]:
        """Each thread's scores of a block and their gradients; a copy unless the gradient's heads come last but one."""
        gradient = args[0]
        queries, keys = _attention_blocks(args[1], args[2])
        return [*_copies(gradient.transpose(1, 2)), self._threads * queries * 2 * keys * _FLOAT_BYTES]


def _attention_blocks(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int]:
    """(queries, keys) that a thread of flash attention works on at a time."""
    length = query.shape[2]
    block = next(size for least, size in _QUERY_BLOCKS if length >= least)
    return min(block, length), min(_KEY_BLOCK, key.shape[2])


def _copy_first(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[int]:
    """The kernel reads contiguous input."""
    return _copies(args[0])


def _copy_both(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[int]:
    """The kernel reads its first two inputs, such as gradient and output, contiguously."""
    return _copies(args[0], args[1])


def _copy_indices(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[int]:
    """`embedding` reads its indices through index_select, contiguously."""
    return _copies(args[1])


def _batch_norm_backward(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[int]:
    """The gradient before it is written out, unless a strided loop is used (batch_norm_backward_cpu_template)."""
    gradient, data = args[0], args[1]
    dense = data.is_contiguous() or is_channels_last(data)
    return [size_bytes(data)] if dense and gradient.stride() == data.stride() else []


def _group_norm_backward(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[int]:
    """Two sums per image and channel (group_norm_kernel.cpp)."""
    data = args[1]
    return [data.shape[0] * data.shape[1] * data.element_size()] * 2


def _upsample(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[int]:
    """The vectorised kernels work on channels-last copies of input and output (UpSampleKernel.cpp)."""
    if is_channels_last(args[0]) or out.shape[-1] + out.shape[-2] > _VECTORISED_UPSAMPLING:
        return []
    return [size_bytes(args[0]), size_bytes(out)]


def _max_pool_backward(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[int]:
    """The layout of the gradient decides: what has another is copied (max_pool2d_backward_kernel_impl)."""
    wanted = torch.channels_last if is_channels_last(args[0]) else torch.contiguous_format
    return [size_bytes(t) for t in (args[0], args[-1], out) if not t.is_contiguous(memory_format=wanted)]


def _safe_softmax(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[int]:
    """A boolean mask of the -inf inputs and its reduction to rows (_safe_softmax in SoftMax.cpp)."""
    scores = args[0]
    return [scores.numel(), scores.numel() // max(scores.shape[-1], 1)]


def _gelu_backward(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[int]:
    """The kernel of oneDNN takes contiguous inputs: where only one is, both are copied (mkldnn/Gelu.cpp)."""
    gradient, data = args[0], args[1]
    return (
        [size_bytes(gradient), size_bytes(data)] if data.is_contiguous() and gradient.stride() != data.stride() else []
    )


def _embedding_bag_backward(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[int]:
    """Eight lists of indices: bags, sorted indices, positions, counts (EmbeddingBag.cpp); one if sparse."""
    indices, sparse = args[1], args[9]
    return [size_bytes(indices)] * (1 if sparse else 8)


def _unreduced_loss(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[int]:
    """The loss of each element, before they are averaged or summed (Loss.cpp)."""
    return [] if out.dim() else [size_bytes(args[0])]


def _logits_loss(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[int]:
    """log-sigmoid and, before the reduction, the loss of each element (Loss.cpp)."""
    return [size_bytes(args[0])] * (1 if out.dim() else 2)


def _ctc_loss_backward(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[int]:
    """Backward variables, as many as the forward ones (LossCTC.cpp)."""
    return [size_bytes(args[6])]


def _roll(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[int]:
    """One dimension after another, each into a new tensor (TensorTransformations.cpp)."""
    dims = args[2] if len(args) > 2 else ()
    return [size_bytes(out)] if len(dims) > 1 else []


def _cumsum(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[int]:
    """The input in the output's type, where they differ (ReduceOps.cpp)."""
    return [size_bytes(out)] if args[0].dtype is not out.dtype else []
