"""Memory that CUDA kernels take for themselves, operator by operator.

A trace of operators sees their inputs and outputs. What a CUDA kernel allocates inside, and frees before it returns, is
stated here: one small rule per operator, each with its source. Nothing is fitted; where a library doesn't say what
it takes (cuDNN's workspaces), the rule is what its algorithm needs and the docs list it as assumed.

cuDNN's convolutions: tensor-core kernels work on channels-last data; given channels-first tensors they convert input,
weight and output in the workspace, with channels padded to the width of a load.
"""

from math import prod
from typing import Any

import torch

from memfit.core.device import Device
from memfit.core.estimate import LACKS_PRECISION
from memfit.core.timeline import Phase
from memfit.core.units import KIB
from memfit.frameworks.torch.kernels import attention_kernels, index_kernels, recurrent
from memfit.frameworks.torch.kernels.convolution_layout import channels_last_format
from memfit.frameworks.torch.kernels.fallbacks import Report, Rule
from memfit.frameworks.torch.kernels.reduction_rules import Reductions
from memfit.frameworks.torch.kernels.reductions import one_after_another
from memfit.frameworks.torch.shapes.recorder import Kept, Program, Recorder
from memfit.frameworks.torch.shapes.shapes import HALVES, META, Arguments, Operator, Options, size_bytes
from memfit.frameworks.torch.stack import cublas_workspace_bytes, cublaslt_workspace, stack_of

_GEMMS = ("mm", "bmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "_addmm_activation", "linear")
# Compute capabilities from which on there is arithmetic in these (CUDA C++ Programming Guide).
_BFLOAT16, _FLOAT8 = (8, 0), (8, 9)
# The first release whose layer norm sums the gradients of weight and bias in parts.
_PARTIAL_LAYER_NORM = (2, 8)
_WARP = 32
# Elements that a block of a foreach operator works on (MultiTensorApply.cuh).
_CHUNK = 64 * KIB
# Larger kernels of grouped convolutions are PyTorch's own, which need nothing (use_cudnn_depthwise, Convolution.cpp).
_LARGEST_GROUPED_KERNEL = 5


class CudaInternals:
    """What kernels of `device` take for themselves; workspaces that stay go to `recorder`."""

    def __init__(self, device: Device, recorder: Recorder, report: Report) -> None:
        self._capability = device.capability or (8, 0)
        stack = stack_of(device)
        self._workspace_bytes = cublas_workspace_bytes(stack, self._capability)
        self._lt_workspace_bytes, self._keeps_lt_workspace = cublaslt_workspace(stack)
        self._torch = stack.torch
        self._recorder = recorder
        self._report = report
        self._has_bfloat16 = self._capability >= _BFLOAT16
        self._threads_with_workspace: set[bool] = set()
        self._threads_with_lt_workspace: set[bool] = set()
        self._reductions = Reductions(device)
        self._num_multiprocessors = device.num_multiprocessors
        self.grouped_bytes = 0
        """The most that a grouped convolution may take beside what is counted."""

    def table(self) -> dict[str, Any]:
        """Bytes taken inside, by operator name."""
        return {
            **{f"aten::{name}": self._gemm for name in _GEMMS},
            "aten::addmm": self._addmm,
            "aten::convolution": self._convolution,
            "aten::convolution_backward": self._convolution_backward,
            # The softmax itself and a boolean mask of its -inf inputs; the output is a third tensor (SoftMax.cpp).
            "aten::_safe_softmax": lambda args, out: [size_bytes(out), args[0].numel()],
            # The product of gradient and output (native/cuda/SoftMax.cu).
            "aten::_softmax_backward_data": lambda args, out: [size_bytes(args[0]), *_copies(args[:2])],
            # These kernels read rows that lie one after another (`contiguous` in SoftMax.cu, layer_norm_kernel.cu).
            **dict.fromkeys(("aten::_softmax", "aten::_log_softmax"), lambda args, out: _copies(args[:1])),
            # Here the copy is made before the outputs.
            "aten::native_layer_norm": lambda args, out: [*_copies(args[:1]), *out],
            "aten::_log_softmax_backward_data": lambda args, out: _copies(args[:2]),
            "aten::embedding_dense_backward": index_kernels.embedding_backward,
            "aten::index": index_kernels.indexing,
            **dict.fromkeys(("aten::index_put", "aten::index_put_", "aten::_index_put_impl_"), index_kernels.index_put),
            # The mask first (`dropout_cuda`, Dropout.cu).
            "aten::native_dropout": lambda args, out: [out[1], out[0]],
            "aten::_scaled_dot_product_flash_attention": lambda args, out: attention_kernels.flash_forward(
                args, out, self._torch, self._num_multiprocessors
            ),
            "aten::_scaled_dot_product_flash_attention_backward": attention_kernels.flash_backward,
            **dict.fromkeys(
                ("aten::_flash_attention_backward", "torch_attn::_varlen_attn_backward"),
                attention_kernels.flash_direct_backward,
            ),
            "aten::_scaled_dot_product_efficient_attention": lambda args, out: attention_kernels.efficient_forward(
                args, out, self._torch
            ),
            "aten::_scaled_dot_product_efficient_attention_backward": lambda args, out: (
                attention_kernels.efficient_backward(args, self._capability)
            ),
            "aten::native_layer_norm_backward": self._layer_norm_backward,
            "aten::native_batch_norm_backward": _batch_norm_backward,
            "aten::native_group_norm": _group_norm,
            "aten::native_group_norm_backward": _group_norm_backward,
            "aten::_foreach_norm": _norms,
            **self._reductions.table(),
        }

    def rules(self) -> dict[str, Rule]:
        """Outputs that only CUDA has, by operator name."""
        return {
            "aten::_cudnn_rnn": recurrent.forward_rule,
            "aten::_cudnn_rnn_backward": recurrent.backward_rule,
            "aten::_scaled_mm": self._scaled_product,
            "aten::log_sigmoid_forward": _log_sigmoid,
        }

    def _scaled_product(self, func: Operator, args: Arguments, kwargs: Options, report: Report) -> Any:
        if self._capability < _FLOAT8:
            raise RuntimeError(
                "torch._scaled_mm (float8) is only supported on CUDA devices of compute capability 8.9 or more, "
                f"but the simulated one has {capability_name(self._capability)}"
            )
        return NotImplemented

    def _gemm(self, args: Arguments, out: Any) -> list[Any]:
        """The workspace of cuBLAS: one per thread that multiplies, kept for good (CublasHandlePool.cpp).

        The autograd engine runs the backward pass on a thread of its own, hence a second one.
        """
        if not self._has_bfloat16 and isinstance(out, torch.Tensor) and out.dtype is torch.bfloat16:
            self._has_bfloat16 = True  # to be told once
            self._report(
                LACKS_PRECISION,
                f"the device (compute capability {capability_name(self._capability)}) has no bfloat16 arithmetic and "
                "emulates it, slowly; it has that of float16 (amp-fp16, fp16)",
            )
        backward = self._recorder.phase is Phase.BACKWARD
        if backward in self._threads_with_workspace or not self._workspace_bytes:
            return []
        self._threads_with_workspace.add(backward)
        return [Kept(self._workspace_bytes, "cuBLAS workspace")]

    def _addmm(self, args: Arguments, out: Any) -> Program:
        """Those of a product; where a bias is added to each row cuBLASLt does it, with a workspace (Blas.cpp)."""
        sizes = self._gemm(args, out)
        bias, _, columns = args[:3]
        fused = bias.dim() == 1 and bias.shape[0] == columns.shape[1] and bias.is_contiguous()
        if not fused or not self._lt_workspace_bytes or min(columns.shape) <= 1:
            return sizes
        if not self._keeps_lt_workspace:
            return [*sizes, self._lt_workspace_bytes]
        backward = self._recorder.phase is Phase.BACKWARD
        if backward in self._threads_with_lt_workspace:
            return sizes
        self._threads_with_lt_workspace.add(backward)
        return [*sizes, Kept(self._lt_workspace_bytes, "cuBLASLt workspace")]

    def _convolution(self, args: Arguments, out: Any) -> Program:
        """As `cudnn_convolution` does it (Convolution.cpp, ConvShared.cpp)."""
        data, weight = args[:2]
        layout = channels_last_format(data, weight) or torch.contiguous_format
        inside = [*_copies((weight,), layout), *self._workspace(data, weight, out, args[8])]
        return [*_copies((data,), layout), out, *inside]

    def _convolution_backward(self, args: Arguments, out: Any) -> Program:
        """As `convolution_backward` does it: one gradient after another, that of the bias by a sum."""
        gradient, data, weight = args[:3]
        by_data, by_weight, by_bias = out
        layout = channels_last_format(data, weight) or torch.contiguous_format
        # The same for both passes.
        workspace = self._workspace(data, weight, gradient, args[9])
        copies = _copies((gradient,) if by_weight is None else (data, gradient), layout)
        passes: list[Program] = []
        if by_data is not None:
            passes.append([by_data, *_copies((weight,), layout), *workspace])
        if by_weight is not None:
            passes.append([by_weight, *workspace])
        convolved = [*copies, *one_after_another(passes, len(copies))]
        if by_bias is None:
            return convolved
        sums = self._reductions.sum_over(gradient, (0, *range(2, gradient.dim())))
        return one_after_another([convolved, [by_bias, *sums]])

    def _layer_norm_backward(self, args: Arguments, out: Any) -> Program:
        """A copy of the input, the outputs, a copy of the gradient (layer_norm_kernel.cu).

        Then partial gradients of weight and bias, where rows are many and columns few.
        """
        made = [gradient for gradient in out if gradient is not None]
        program = [*_copies(args[1:2]), *made, *_copies(args[:1])]
        if self._torch < _PARTIAL_LAYER_NORM or self._num_multiprocessors is None:
            return program
        columns = prod(args[2])
        rows = args[1].numel() // max(1, columns)
        if rows <= 64 * KIB or columns // _WARP >= self._num_multiprocessors // 2:
            return program
        num_parts = min(32 * KIB // -(-columns // _WARP), -(-rows // 32))
        return [*program, *(num_parts * size_bytes(gradient) for gradient in out[1:] if gradient is not None)]

    def _workspace(self, data: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, groups: int) -> list[int]:
        """Scratch memory of one pass of cuDNN."""
        is_last = channels_last_format(data, weight) is not None
        if data.dtype in HALVES:
            converts = self._capability >= (7, 0)
        else:
            converts = self._capability >= (8, 0) and torch.backends.cudnn.allow_tf32 and data.dtype is torch.float32
        if not is_last and groups > 1 and max(weight.shape[2:]) <= _LARGEST_GROUPED_KERNEL:
            # As a matrix product, it would lay out a window of the input for each position of the output.
            windows = out.numel() // max(out.shape[1], 1) * data.shape[1] * prod(weight.shape[2:])
            self.grouped_bytes = max(self.grouped_bytes, windows * data.element_size())
        if is_last or not converts or groups == data.shape[1] > 1:
            return []
        width = 8 if data.dtype in HALVES else 4
        return [_padded(data, width) + _padded(out, width) + size_bytes(weight)]


def _padded(tensor: torch.Tensor, width: int) -> int:
    """Bytes of a channels-last copy whose channels are padded to a multiple of `width`."""
    channels = tensor.shape[1]
    padded: int = -(-channels // width) * width
    return tensor.numel() // max(channels, 1) * padded * tensor.element_size()


def capability_name(capability: tuple[int, int]) -> str:
    """A compute capability as people write it, "7.5"."""
    return ".".join(map(str, capability))


def _copies(operands: tuple[Any, ...], layout: torch.memory_format = torch.contiguous_format) -> list[int]:
    """Copies of operands that are not in the layout that a kernel reads."""
    return [size_bytes(tensor) for tensor in operands if not tensor.is_contiguous(memory_format=layout)]


def _batch_norm_backward(args: Arguments, out: Any) -> list[int]:
    """In training cuDNN makes the gradients of weight and bias also where nobody asks for them (BatchNorm.cpp)."""
    tensor, weight, trains, wanted = args[1], args[2], args[7], args[9]
    if not trains or weight is None or tensor.dim() < 3:
        return []
    return [size_bytes(weight)] * wanted[1:].count(False)


def _group_norm(args: Arguments, out: Any) -> list[int]:
    """A factor and a summand for each channel of each sample, where there are weights (group_norm_kernel.cu)."""
    tensor, weight, bias, samples, channels, positions = args[:6]
    if positions == 1 or (weight is None and bias is None):
        return []
    return [samples * channels * max(4, tensor.element_size())] * 2


def _group_norm_backward(args: Arguments, out: Any) -> list[int]:
    """Two sums for each channel of each sample; then, for its gradient, two terms for each group and the factors."""
    tensor, weight = args[1], args[4]
    samples, channels, positions, groups = args[5:9]
    size = max(4, tensor.element_size())
    sums, terms = [samples * channels * size] * 2, [samples * groups * size] * 2
    if positions == 1 or out[0] is None:
        return sums
    return [*sums, *terms, *(sums[:1] if weight is not None else [])]


def _norms(args: Arguments, out: Any) -> list[int]:
    """A partial norm for each chunk, as many for each tensor as the largest has (ForeachReduceOp.cu)."""
    largest = max((tensor.numel() for tensor in args[0]), default=0)
    return [len(args[0]) * -(-largest // _CHUNK) * (8 if args[0][0].dtype is torch.float64 else 4)] if largest else []


def _log_sigmoid(func: Operator, args: Arguments, kwargs: Options, report: Report) -> Any:
    """The output, and a buffer that only the CPU fills (native/Activation.cpp)."""
    return torch.empty_like(args[0], device=META), torch.empty(0, dtype=args[0].dtype, device=META)
