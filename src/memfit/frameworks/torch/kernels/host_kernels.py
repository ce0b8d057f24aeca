"""Memory that CPU kernels take for themselves, close enough for the peak of a training step.

A trace of operators sees their inputs and outputs. What a CPU kernel allocates inside, and frees before it returns, is
stated here, with its source. An operator that is not listed takes nothing of its own, or little: sums per channel,
blocks per thread, masks of one byte.

Convolutions run in oneDNN, which copies channels-first tensors into layouts with channels in blocks as wide as a vector
register, and the result back at the end. Small ones and other types of numbers go to PyTorch's own kernels, which
unfold images into matrices. Which of oneDNN's many kernels runs isn't modelled.
"""

from math import prod
from typing import Any

import torch

from memfit.frameworks.torch.kernels import recurrent
from memfit.frameworks.torch.kernels.convolution_layout import channels_last_format, is_channels_last
from memfit.frameworks.torch.shapes import sparse
from memfit.frameworks.torch.shapes.shapes import Arguments, size_bytes

# Largest sum of output height and width that the vectorised kernels of up-sampling are chosen for (UpSampleKernel.cpp).
_VECTORISED_UPSAMPLING = 128
_ONEDNN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Widest depthwise kernel that the vector code for the weight's gradient takes (jit_uni_dw); where it multiplies
# matrices instead, a thread unfolds at most so many pixels at a time.
_WIDEST_DEPTHWISE_KERNEL, _UNFOLDED_PIXELS = 3, 416


def host_internals() -> dict[str, Any]:
    """Bytes that CPU kernels take inside, by operator name."""
    convolution = HostConvolution()
    return {
        "aten::convolution": convolution.forward,
        "aten::convolution_backward": convolution.backward,
        "aten::mkldnn_rnn_layer": recurrent.host_lstm_bytes,
        "aten::mkldnn_rnn_layer_backward": recurrent.host_lstm_backward_bytes,
        "aten::native_batch_norm_backward": _batch_norm_backward,
        # These kernels read contiguous inputs.
        "aten::native_layer_norm": lambda args, out: _copies(args[0]),
        "aten::native_layer_norm_backward": _copy_both,
        "aten::_softmax_backward_data": _copy_both,
        "aten::_log_softmax_backward_data": _copy_both,
        "aten::embedding_dense_backward": _copy_both,
        "aten::upsample_nearest2d": _upsample,
        "aten::upsample_bilinear2d": _upsample,
        "aten::max_pool2d_with_indices_backward": _max_pool_backward,
        # A copy of the gradient unless its heads come last but one (FlashAttentionKernel.cpp).
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward": lambda args, out: _copies(
            args[0].transpose(1, 2)
        ),
        "aten::gelu_backward": _gelu_backward,
        # The loss of each element, before they are averaged or summed (Loss.cpp).
        **dict.fromkeys(
            ("aten::mse_loss", "aten::smooth_l1_loss", "aten::huber_loss"),
            lambda args, out: [] if out.dim() else [size_bytes(args[0])],
        ),
        # log-sigmoid and, before the reduction, the loss of each element (Loss.cpp).
        "aten::binary_cross_entropy_with_logits": lambda args, out: [size_bytes(args[0])] * (1 if out.dim() else 2),
        # Backward variables, as many as the forward ones (LossCTC.cpp).
        "aten::_ctc_loss_backward": lambda args, out: [size_bytes(args[6])],
        # One dimension after another, each into a new tensor (TensorTransformations.cpp).
        "aten::roll": lambda args, out: [size_bytes(out)] if len(args) > 2 and len(args[2]) > 1 else [],
        **sparse.INTERNALS,
    }


def _copies(*tensors: torch.Tensor, layout: torch.memory_format = torch.contiguous_format) -> list[int]:
    return [size_bytes(t) for t in tensors if not t.is_contiguous(memory_format=layout)]


def _copy_both(args: Arguments, out: Any) -> list[int]:
    return _copies(args[0], args[1])


def _batch_norm_backward(args: Arguments, out: Any) -> list[int]:
    """The gradient before it is written out, unless a strided loop is used (batch_norm_backward_cpu_template)."""
    gradient, data = args[:2]
    dense = data.is_contiguous() or is_channels_last(data)
    return [size_bytes(data)] if dense and gradient.stride() == data.stride() else []


def _upsample(args: Arguments, out: Any) -> list[int]:
    """The vectorised kernels work on channels-last copies of input and output (UpSampleKernel.cpp)."""
    if is_channels_last(args[0]) or out.shape[-1] + out.shape[-2] > _VECTORISED_UPSAMPLING:
        return []
    return [size_bytes(args[0]), size_bytes(out)]


def _max_pool_backward(args: Arguments, out: Any) -> list[int]:
    """The layout of the gradient decides: what has another is copied (max_pool2d_backward_kernel_impl)."""
    layout = torch.channels_last if is_channels_last(args[0]) else torch.contiguous_format
    return _copies(args[0], args[-1], out, layout=layout)


def _gelu_backward(args: Arguments, out: Any) -> list[int]:
    """The kernel of oneDNN takes contiguous inputs: where only one is, both are copied (mkldnn/Gelu.cpp)."""
    gradient, data = args[:2]
    differ = data.is_contiguous() and gradient.stride() != data.stride()
    return [size_bytes(gradient), size_bytes(data)] if differ else []


class HostConvolution:
    """Workspace of forward and backward convolutions."""

    def __init__(self) -> None:
        self._threads = torch.get_num_threads()
        # Channels in a block: the float32 elements of a vector register.
        self._block = 16 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 8

    def forward(self, args: Arguments, out: Any) -> list[int]:
        """Bytes taken during `convolution`."""
        data, weight, options = args[0], args[1], args[3:9]
        if not self._uses_onednn(data, weight, options):
            return [_unfolded(data, weight, out, options)]
        layout = channels_last_format(data, weight)
        if layout is not None:
            return [*_copies(data, weight, layout=layout), size_bytes(weight)]
        first, second, _ = self._passes(data, weight, out, options)
        return [*_copies(data), (second if options[3] else first) - size_bytes(out)]

    def backward(self, args: Arguments, out: Any) -> list[int]:
        """Bytes taken during `convolution_backward`: first the data's gradient, then the weight's."""
        gradient, data, weight = args[:3]
        options, wanted = args[4:10], args[10]
        if not self._uses_onednn(data, weight, options):
            return [_unfolded(data, weight, gradient, options)]
        layout = channels_last_format(data, weight)
        if layout is not None:
            weights = self._threads * size_bytes(weight)
            if options[5] > 1 and weight.shape[-1] > _WIDEST_DEPTHWISE_KERNEL:
                # The general kernel pads the channels of each group.
                padded = [size + -size % self._block for size in (weight.shape[0] // options[5], weight.shape[1])]
                weights += options[5] * prod(padded) * prod(weight.shape[2:]) * weight.element_size()
            return [*_copies(gradient, data, weight, layout=layout), weights]
        to_result, to_source, to_weight = self._passes(data, weight, gradient, options)
        to_data = (to_result if options[3] else to_source) if wanted[0] else 0
        to_weight = to_weight + (size_bytes(data) if wanted[0] else 0) if wanted[1] else 0
        kept = sum(size_bytes(part) for part in out if part is not None)
        return [*_copies(gradient, data), max(to_data, to_weight) - kept]

    def _passes(
        self, data: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, options: Arguments
    ) -> tuple[int, int, int]:
        """Bytes live in each pass of oneDNN: from source to result, back, and both to the weight's gradient.

        A transposed convolution is an ordinary one with source and result exchanged.
        """
        stride, _, dilation, transposed, _, groups = options
        source, result = (out, data) if transposed else (data, out)
        source_bytes, result_bytes, weight_bytes = map(size_bytes, (source, result, weight))
        source_blocks, result_blocks = (self._blocked(tensor, groups) for tensor in (source, result))
        # The few channels of a first layer are taken as they are.
        copied = 0 if groups == 1 and source.shape[1] < self._block else source_blocks
        to_result = result_blocks + max(copied + weight_bytes, result_bytes)
        to_source = source_blocks + max(result_blocks + weight_bytes, source_bytes)
        if groups == 1 and any(step > 1 for step in stride):
            # Works on channels-last copies, each thread on one image, and copies the gradient twice more at the end.
            images = result_bytes + self._threads * result_bytes // result.shape[0]
            to_source = source_bytes + max(images + weight_bytes, 2 * source_bytes)
        to_weight = copied + result_blocks + min(self._threads, source.shape[0]) * weight_bytes
        kernel = weight.shape[2:]
        is_wide = groups == source.shape[1] > 1 and kernel[-1] > _WIDEST_DEPTHWISE_KERNEL
        if is_wide or (len(kernel) == 3 and (kernel[0] - 1) * dilation[0] >= source.shape[2]):
            # Each thread multiplies a matrix, and its gradient is booked by bytes where elements are meant.
            columns = source.shape[1] // groups * prod(kernel) * min(_UNFOLDED_PIXELS, prod(result.shape[-2:]))
            to_weight = weight_bytes + self._threads * (columns * source.element_size() + 4 * weight_bytes)
        return to_result, to_source, to_weight

    def _blocked(self, tensor: torch.Tensor, groups: int) -> int:
        """Bytes of a copy with channels in blocks; those of groups fill theirs, but for depthwise ones."""
        channels = tensor.shape[1] if groups in (1, tensor.shape[1]) else self._block
        return size_bytes(tensor) // channels * (-(-channels // self._block) * self._block)

    def _uses_onednn(self, data: torch.Tensor, weight: torch.Tensor, options: Arguments) -> bool:
        """Whether oneDNN is worth its copies (ConvParams::use_mkldnn in Convolution.cpp)."""
        stride, _, dilation, _, _, groups = options
        if data.dtype not in _ONEDNN_DTYPES:
            return False
        width, height = weight.shape[-1], weight.shape[-2] if weight.dim() > 3 else 1
        moves = any(s != 1 for s in stride) or any(d != 1 for d in dilation)
        shared = moves or data.shape[0] >= 16 or width != 1 or height != 1 or self._threads > 1
        large = groups > 1 or (width > 3 and height > 3) or data.shape[0] > 1 or data.numel() > 20480
        return bool(shared and large)


def _unfolded(data: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, options: Arguments) -> int:
    """Without oneDNN every image is unfolded into a matrix, but for 1x1 kernels (ConvolutionMM2d.cpp)."""
    taps = prod(weight.shape[2:])
    if taps == 1 and all(s == 1 for s in options[0]):
        return 0
    return data.shape[0] * weight.shape[1] * taps * prod(out.shape[2:]) * data.element_size()
