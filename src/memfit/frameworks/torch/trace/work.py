"""The work of a step: what each operator computes and moves, in the order in which the device runs them.

The time of a step follows from these figures and the device's rates. Floating-point operations come from PyTorch's own
formulas (`torch.utils.flop_counter`), with further ones here for operators that it leaves out. Bytes are those that a
kernel must touch at least: every input read once, every output written once.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from memfit.core.profile import MovingSizes, Work
from memfit.core.timeline import Category, Phase
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.apply.chunked_loss import SMALLEST_VOCABULARY
from memfit.frameworks.torch.compilation.fused_kernels import FUSED, FusedKernel
from memfit.frameworks.torch.shapes.recorder import Recorder
from memfit.frameworks.torch.shapes.shapes import HALVES, Arguments, Known, Operator, Options, tensors
from memfit.frameworks.torch.trace.kernel_sizes import flops_of, sizes_of

# They set memory aside or read a number: no kernel runs.
_IDLE = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::lift_fresh",
    "aten::resize_",
    "aten::set_",
    "aten::_local_scalar_dense",
    "aten::record_stream",
}
# They read only the rows that their indices name.
_LOOKUPS = {"aten::embedding", "aten::index", "aten::index_select", "aten::gather", "aten::_embedding_bag"}
_FLOATING = [value for value in vars(torch).values() if isinstance(value, torch.dtype) and value.is_floating_point]
_DTYPES = {dtype: str(dtype).removeprefix("torch.") for dtype in _FLOATING}


class _Figures(NamedTuple):
    """What a call of an operator does, wherever it belongs; the last fields of `Work`."""

    op: str
    flops: int
    moved_bytes: int
    dtype: str
    sizes: tuple[int, ...] = ()


# Of a call that moves nothing.
_NOTHING = _Figures("", 0, 0, "")


class WorkLog:
    """Collects the operators of a step.

    What an operator does follows from its signature alone, so that it is computed once for each signature: a step calls
    the same few again and again.
    """

    def __init__(self) -> None:
        self.is_on = True
        self._noted: list[tuple[str, Phase, _Figures, bool]] = []

    def __len__(self) -> int:
        return len(self._noted)

    @property
    def operations(self) -> tuple[Work, ...]:
        """All that were noted, in order."""
        return tuple(Work(module, phase, *figures, is_compiled) for module, phase, figures, is_compiled in self._noted)

    def add(
        self,
        module: str,
        phase: Phase,
        func: Operator,
        args: Arguments,
        kwargs: Options,
        out: Any,
        known: Known | None = None,
        *,
        is_compiled: bool = False,
    ) -> None:
        """Notes one operator, unless it does nothing; `known` is what is kept of its signature."""
        if not self.is_on or _runs_no_kernel(func):
            return
        known = known or Known(None)
        if known.figures is None:
            known.figures = _figures(func, args, kwargs, out)
        if known.figures is not _NOTHING:
            self._noted.append((module, phase, known.figures, is_compiled))

    def add_kernel(self, module: str, phase: Phase, kernel: FusedKernel) -> None:
        """Notes a kernel of a compiled graph."""
        if self.is_on and kernel.moved_bytes:
            figures = _Figures(FUSED, 0, kernel.moved_bytes, "", MovingSizes(kernel.written_bytes, 0, 0))
            self._noted.append((module, phase, figures, True))


@cache
def _runs_no_kernel(func: Operator) -> bool:
    # Reading a schema's name makes a string each time.
    return internals.name_of(func) in _IDLE


def _figures(func: Operator, args: Arguments, kwargs: Options, out: Any) -> _Figures:
    name = internals.name_of(func)
    # What is given as `out=` is only written.
    options = (value for option, value in kwargs.items() if option != "out")
    inputs, outputs = list(tensors((*args, *options))), list(tensors((out,)))
    moved_bytes = _moved(name, args, inputs, outputs)
    if not moved_bytes:
        return _NOTHING
    dtype = next((_DTYPES[t.dtype] for t in (*inputs, *outputs) if t.dtype in _DTYPES), "")
    sizes = sizes_of(name, args, inputs, outputs)
    count = flops_of(sizes)
    if count is None:
        count = flops(func, args, kwargs, out)
    return _Figures(name.replace("::", "."), count, moved_bytes, dtype, sizes or ())


def flops(func: Operator, args: Arguments, kwargs: Options, out: Any) -> int:
    """Floating-point operations of one call; 0 where no formula is known, as for operators that only move data."""
    formula = flop_registry.get(internals.packet_of(func))
    if formula is not None:
        try:
            return int(formula(*args, **kwargs, out_val=out))
        except Exception:  # a formula of another release, or arguments that it doesn't foresee
            return 0
    own = _FORMULAS.get(internals.name_of(func))
    return own(args) if own is not None else 0


def _moved(name: str, args: Arguments, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> int:
    """Bytes read and written by one call; 0 for what makes only a view."""
    read = _sizes(inputs)
    written = _sizes(outputs)
    if not name.endswith("_") and written and inputs:
        # A view by another name, as the gradient of a reshape often is.
        written = {key: size for key, size in written.items() if key not in read}
        if not written:
            return 0
    if name in _LOOKUPS:
        return 2 * sum(written.values()) + sum(_memory(tensor)[1] for tensor in inputs[1:])
    if not outputs:
        # Operators without an output, such as `_foreach_add_`, write into their first argument.
        return sum(_memory(tensor)[1] for tensor in tensors(args[:1])) + sum(read.values())
    return sum(written.values()) + sum(read.values())


def _sizes(operands: list[torch.Tensor]) -> dict[int, int]:
    """Bytes of each storage among some tensors that an operator reads or writes; of views, the largest."""
    sizes: dict[int, int] = {}
    for tensor in operands:
        key, size = _memory(tensor)
        if size > sizes.get(key, -1):
            sizes[key] = size
    return sizes


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """(what tells its storage from others, bytes in it that an operator reads or writes)."""
    if tensor.layout is not torch.strided:
        parts = internals.sparse_parts(tensor) if tensor.is_sparse else ()
        return id(tensor), sum(_memory(part)[1] for part in parts)
    num_elements = tensor.numel()
    if num_elements:
        # An expanded tensor, or one of windows that overlap, has more elements than there are in memory.
        reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        num_elements = min(num_elements, reach)
    return internals.storage_address(tensor.untyped_storage()), num_elements * tensor.element_size()


def _attention_products(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.shape[-2] * (width + value.shape[-1])


def _recurrent(rows: torch.Tensor, weights: Iterable[torch.Tensor]) -> int:
    """Each row of the input (one time step of one sample) meets each weight matrix once."""
    matrices = sum(weight.numel() for weight in weights if weight.dim() >= 2)
    return 2 * matrices * (rows.numel() // max(1, rows.shape[-1]))


# By operator: operations of a call with these arguments.
_FORMULAS: dict[str, Callable[[Arguments], int]] = {
    "aten::mv": lambda args: 2 * args[0].numel(),
    "aten::addmv": lambda args: 2 * args[1].numel(),
    "aten::dot": lambda args: 2 * args[0].numel(),
    "aten::addbmm": lambda args: 2 * args[1].numel() * args[2].shape[-1],
    "aten::_scaled_dot_product_flash_attention_for_cpu": lambda args: _attention_products(*args[:3]),
    # Scores again, then the gradients of values, probabilities, queries and keys: five products for two.
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": lambda args: _attention_products(*args[1:4]) * 5 // 2,
    "aten::_cudnn_rnn": lambda args: _recurrent(args[0], args[1]),
    "aten::_cudnn_rnn_backward": lambda args: 2 * _recurrent(args[0], args[1]),
    "aten::mkldnn_rnn_layer": lambda args: _recurrent(args[0], args[1:3]),
    "aten::mkldnn_rnn_layer_backward": lambda args: 2 * _recurrent(args[0], args[1:3]),
}

_FUSABLE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
_DROPOUTS = {"aten::native_dropout", "aten::bernoulli_", "aten::bernoulli"}
_PRODUCTS = {"aten::mm", "aten::addmm", "aten::linear", "aten::bmm"}
# What stands between a linear layer and its cross entropy without computing anything new.
_CARRYING = {"aten::_to_copy", "aten::clone", "aten::copy", "aten::slice_copy", "aten::index"}


class FeatureWatch:
    """Recognises features by the operators of a step, whose blocks the recorder knows."""

    def __init__(self, recorder: Recorder) -> None:
        self.found: set[str] = set()
        self._recorder = recorder
        self._products: set[int] = set()

    def ran(self, func: Operator, args: Arguments, out: Any, phase: Phase) -> None:
        """Looks at one operator."""
        name = internals.name_of(func)
        if phase is Phase.OPTIMIZER:
            if "_fused_" in name:
                self.found.add("fused")
                # Fused updates count their steps by a foreach kernel.
                self.found.discard("foreach")
            elif "_foreach_" in name and "fused" not in self.found:
                self.found.add("foreach")
        elif phase is Phase.FORWARD:
            if "convolution" in name:
                self.found.add("convolution")
            elif name in _DROPOUTS:
                self.found.add("dropout")
            elif "batch_norm" in name and args[0].shape[0] > 1 and any(value is True for value in args[5:6]):
                # Statistics over samples: those of single images come as one large sample.
                self.found.add("batch-norm")
            self._follow_products(name, args, out)

    def _follow_products(self, name: str, args: Arguments, out: Any) -> None:
        if name in _PRODUCTS and isinstance(out, torch.Tensor):
            self._add(out)
            return
        source = next(tensors(args), None)
        if source is None or source.layout is not torch.strided:
            return
        block = self._recorder.block_of(source)
        if block is None:
            return
        if name == "aten::_to_copy" and self._recorder.categories[block] is Category.PARAMETER:
            if out.dtype in HALVES and source.dtype not in HALVES:
                self.found.add("autocast")
        elif block in self._products:
            if name in _CARRYING:
                self._add(out)
            elif name == "aten::_log_softmax" and source.shape[args[1]] >= SMALLEST_VOCABULARY:
                self.found.add("cross-entropy")

    def _add(self, tensor: torch.Tensor) -> None:
        block = self._recorder.block_of(tensor)
        if block is not None:
            self._products.add(block)


def features_of(model: torch.nn.Module, optimizer: Any) -> set[str]:
    """What can be read off the objects themselves."""
    found: set[str] = set()
    for module in model.modules():
        if isinstance(module, internals.BatchNorm) and module.training:
            found.add("batch-norm")
        elif isinstance(module, internals.Dropout) and module.training and module.p > 0:
            found.add("dropout")
        elif isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
            found.add("sparse-gradients")
        elif isinstance(module, torch.nn.Linear):
            found.add("linear")
        elif (
            isinstance(module, internals.Convolution)
            and module.weight.dim() == 4
            and (module.weight.is_contiguous() or not module.weight.is_contiguous(memory_format=torch.channels_last))
        ):
            found.add("channels-first")
    names = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    if len(set(names)) < len(names):
        found.add("shared-parameters")
    if any(not parameter.requires_grad for parameter in model.parameters()):
        found.add("frozen-parameters")
    if optimizer is not None and any(group.get("fused") for group in optimizer.param_groups):
        found.add("fused")
    elif type(optimizer) in _FUSABLE:
        found.add("fusable")
    is_adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    if is_adam and not any(group.get("amsgrad") for group in optimizer.param_groups):
        found.add("adam")
    if isinstance(optimizer, torch.optim.Optimizer) and not isinstance(optimizer, torch.optim.LBFGS):
        found.add("steppable")
    return found
