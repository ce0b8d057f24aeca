"""The work of a step: what each operator computes and moves, in the order in which the device runs them.

The time of a step follows from these figures and the device's rates. Floating-point operations come from PyTorch's own
formulas (`torch.utils.flop_counter`), with further ones here for operators that it leaves out. Bytes are those that a
kernel must touch at least: every input read once, every output written once.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from memfit.adapters.torch.shapes import Operator, tensors
from memfit.core.profile import Work
from memfit.core.timeline import Phase

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
_Formula = Callable[[tuple[Any, ...], dict[str, Any], Any], int]


class WorkLog:
    """Collects the operators of a step as `Work`."""

    def __init__(self) -> None:
        self.operations: list[Work] = []
        self._names: dict[Operator, str] = {}

    def add(
        self, module: str, phase: Phase, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        """Notes one operator, unless it does nothing."""
        moved_bytes = moved(func, args, kwargs, out)
        if not moved_bytes:
            return
        name = self._names.get(func)
        if name is None:
            name = self._names[func] = func._schema.name.replace("::", ".")
        dtype = _dtype((*args, *kwargs.values()), out)
        self.operations.append(Work(module, phase, name, flops(func, args, kwargs, out), moved_bytes, dtype))


def flops(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Floating-point operations of one call; 0 where no formula is known, as for operators that only move data."""
    formula = flop_registry.get(func._overloadpacket)
    if formula is not None:
        try:
            return int(formula(*args, **kwargs, out_val=out))
        except Exception:  # a formula of another release, or arguments that it doesn't foresee
            return 0
    own = _FORMULAS.get(func._schema.name)
    return own(args, kwargs, out) if own is not None else 0


def moved(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Bytes read and written by one call; 0 for what runs no kernel."""
    name = func._schema.name
    if name in _IDLE:
        return 0
    outputs = list(tensors((out,)))
    inputs = list(tensors((*args, *kwargs.values())))
    if not name.endswith("_") and outputs and inputs:
        storages = {_storage(tensor) for tensor in inputs}
        # A view by another name, as the gradient of a reshape often is.
        outputs = [tensor for tensor in outputs if _storage(tensor) not in storages]
        if not outputs:
            return 0
    written = sum({_storage(tensor): _accessed(tensor) for tensor in outputs}.values())
    if name in _LOOKUPS:
        return 2 * written + sum(_accessed(tensor) for tensor in inputs[1:])
    read: dict[int, int] = {}
    for tensor in inputs:
        key = _storage(tensor)
        read[key] = max(read.get(key, 0), _accessed(tensor))
    if not outputs:
        # Operators without an output, such as `_foreach_add_`, write into their first argument.
        written = sum(_accessed(tensor) for tensor in tensors(args[:1]))
    return written + sum(read.values())


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _accessed(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        return sum(_accessed(part) for part in (tensor._indices(), tensor._values())) if tensor.is_sparse else 0
    # An expanded tensor has more elements than there are in memory.
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _dtype(inputs: tuple[Any, ...], out: Any) -> str:
    for values in (inputs, (out,)):
        for tensor in tensors(values):
            if tensor.is_floating_point():
                return str(tensor.dtype).removeprefix("torch.")
    return ""


def _matrix_vector(matrix: torch.Tensor) -> int:
    return 2 * matrix.numel()


def _attention(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    query, key, value = args[:3]
    return _attention_products(query, key, value)


def _attention_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    # Scores again, then the gradients of values, probabilities, queries and keys: five products for two.
    return _attention_products(*args[1:4]) * 5 // 2


def _attention_products(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.shape[-2] * (width + value.shape[-1])


def _recurrent(rows: torch.Tensor, weights: list[torch.Tensor], width: int) -> int:
    """Each row of the input (one time step of one sample) meets each weight matrix once."""
    matrices = sum(weight.numel() for weight in weights if weight.dim() >= 2)
    return 2 * matrices * (rows.numel() // max(1, width))


def _cudnn(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    return _recurrent(args[0], list(args[1]), args[0].shape[-1])


def _onednn(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    return _recurrent(args[0], list(args[1:3]), args[0].shape[-1])


_FORMULAS: dict[str, _Formula] = {
    "aten::mv": lambda args, kwargs, out: _matrix_vector(args[0]),
    "aten::addmv": lambda args, kwargs, out: _matrix_vector(args[1]),
    "aten::dot": lambda args, kwargs, out: _matrix_vector(args[0]),
    "aten::addbmm": lambda args, kwargs, out: 2 * args[1].numel() * args[2].shape[-1],
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten::_cudnn_rnn": _cudnn,
    "aten::_cudnn_rnn_backward": lambda args, kwargs, out: 2 * _cudnn(args, kwargs, out),
    "aten::mkldnn_rnn_layer": _onednn,
    "aten::mkldnn_rnn_layer_backward": lambda args, kwargs, out: 2 * _onednn(args, kwargs, out),
}
