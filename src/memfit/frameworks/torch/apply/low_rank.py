"""Low-rank adapters (LoRA), 4-bit base weights (QLoRA), and freezing.

A linear layer keeps its place in the model and gets two small matrices, whose product is added to what its frozen
weight gives (Hu et al., https://arxiv.org/abs/2106.09685). With a quantized base the frozen weight is kept in 4 bits
and becomes floating-point for the time of a matrix product, once in the forward pass and once in the backward pass
(Dettmers et al., https://arxiv.org/abs/2305.14314).
"""

import math
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch

from memfit.core.errors import BadInput, BadModel
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.apply import bitsandbytes_kernels as kernels
from memfit.frameworks.torch.apply.tensor_memory import dense, simulated

DOWN, UP = "adapter_down", "adapter_up"
_SCALES = "weight_scales"
Undo = Callable[[], None]


def add_adapters(model: torch.nn.Module, rank: int, *, quantized: bool = False, freeze: tuple[str, ...] = ()) -> Undo:
    """Adds adapters of a rank, or none where it is 0, and freezes modules at some paths; returns what undoes it.

    All linear layers but the output head get an adapter; everything else is frozen. Undoing adds what adapters have
    learned to the weights under them, so that the model computes the same without. A quantized base (4 bits) comes
    back as it was before it was quantized; what was learned over its 4-bit twin is added to it.
    """
    if rank < 0:
        raise BadInput(f"the rank of adapters must be at least 1, or 0 for none, but {rank} was given.")
    if quantized and not rank:
        raise BadInput("4-bit base weights can't be trained: they need adapters. Set lora_rank, such as 16.")
    if quantized:
        kernels.load()
    layers = list(_layers(model)) if rank else []
    if rank and not layers:
        raise BadModel(
            f"{type(model).__name__} has no linear layers besides its output head, so there is nothing to adapt. "
            "Leave this move out."
        )
    with ExitStack() as undo:
        frozen = [*([model] if rank else []), *(_module(model, path) for path in freeze)]
        trained = [parameter for module in frozen for parameter in module.parameters() if parameter.requires_grad]
        for parameter in trained:
            undo.callback(parameter.requires_grad_, True)
            parameter.requires_grad_(False)
        weights = _Weights() if quantized else None
        if weights is not None:
            undo.callback(weights.close)
        for layer in layers:
            undo.callback(_adapted(layer, rank, weights))
        return undo.pop_all().close


def adapter_parameters(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """The parameters that `add_adapters` has added."""
    for module in model.modules():
        for name in (DOWN, UP):
            parameter = internals.parameters_of(module).get(name)
            if parameter is not None:
                yield parameter


def _module(model: torch.nn.Module, path: str) -> torch.nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise BadModel(
            f"the model has no module at {path!r} that could be frozen. Give a path of its modules, such as "
            f"{next((name for name, _ in model.named_modules() if name), '')!r}."
        ) from error


def _is_linear(module: torch.nn.Module) -> bool:
    # A class with a forward pass of its own may do anything.
    own = type(module).forward in (torch.nn.Linear.forward, _Adapted.forward)
    return own and isinstance(module, torch.nn.Linear)


def _can_adapt(module: torch.nn.Module) -> bool:
    """True for a linear layer, and for the `Conv1D` of GPT-2 in transformers, whose weight is transposed."""
    kind = type(module)
    return _is_linear(module) or (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


def _layers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The linear layers that get adapters, each once."""
    left_out = _head(model)
    holders = Counter(weight for module in model.modules() for weight in internals.parameters_of(module).values())
    inside = {
        part
        for module in model.modules()
        # It hands the weights of its layers to a function, without calling them.
        if isinstance(module, torch.nn.MultiheadAttention)
        for part in module.modules()
    }
    for module in model.modules():
        if not _can_adapt(module) or module in inside or module is left_out or isinstance(module, _Adapted):
            continue
        weight: Any = module.weight
        # A shared weight, such as that of an embedding, belongs to several layers.
        if holders[weight] == 1 and weight.is_floating_point() and "forward" not in vars(module):
            yield module


def _head(model: torch.nn.Module) -> torch.nn.Module | None:
    """The layer that makes the output: the one that the model names, or else its last linear layer."""
    named = getattr(model, "get_output_embeddings", None)
    if callable(named):
        try:
            head = named()
        except (AttributeError, NotImplementedError):
            head = None
        if isinstance(head, torch.nn.Module):
            return head
    linear = [module for module in model.modules() if _can_adapt(module)]
    return linear[-1] if linear else None


class _Weights:
    """Tensors that wait in one file without a name, so that neither the device nor the host holds or maps them."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open for as long as weights are in it
        self.close = weakref.finalize(self, self._file.close)

    def put(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Writes a tensor; returns what reads it, back to where it was."""
        tensor = tensor if dense(tensor) else tensor.contiguous()
        start, num = self._file.seek(0, 2), tensor.numel()
        shape, stride, dtype, device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        # In the order of memory, whatever the layout.
        self._file.write(tensor.as_strided((num,), (1,)).cpu().view(torch.uint8).numpy().data)

        def get() -> torch.Tensor:
            self._file.seek(start)
            held = bytearray(self._file.read(num * dtype.itemsize))
            return torch.frombuffer(held, dtype=dtype).as_strided(shape, stride).to(device)

        return get


class _Adapted(torch.nn.Module):
    """Mixed into the class of a linear layer that has an adapter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the frozen weight gives and what the adapter adds."""
        if torch.is_autocast_enabled(x.device.type):
            # Once, for both products.
            x = x.to(torch.get_autocast_dtype(x.device.type))
        held: Any = self._parameters
        change = torch.nn.functional.linear(torch.nn.functional.linear(x, held[DOWN]), held[UP])
        scales = self._buffers.get(_SCALES)
        if scales is None:
            result: torch.Tensor = super().forward(x)
        else:
            shape = (held[UP].shape[0], held[DOWN].shape[1])
            result = _four_bit_product(x, held["weight"].detach(), scales, shape, held.get("bias"))
        # Neither product needs its result in the backward pass.
        return change.add_(result)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The class is made at run time, so that pickle doesn't find it by its name.
        state: Any = super().__reduce_ex__(2)
        return (_made, (type(self).__bases__[1],), *state[2:])


@cache
def _adapted_class(plain: Any) -> type[torch.nn.Module]:
    # A class rather than a function on the instance: copies of the model are models of their own.
    return type(f"Adapted{plain.__name__}", (_Adapted, plain), {"__module__": __name__})


def _made(plain: Any) -> torch.nn.Module:
    """A layer with an adapter that has nothing yet: what pickle fills."""
    adapted = _adapted_class(plain)
    return adapted.__new__(adapted)


def _adapted(layer: torch.nn.Module, rank: int, weights: _Weights | None) -> Undo:
    """Adds an adapter to one layer; with a place for its weights, these become 4-bit numbers."""
    weight: Any = layer.weight
    outputs, inputs = weight.shape if _is_linear(layer) else reversed(weight.shape)
    down = torch.empty(rank, inputs, dtype=weight.dtype, device=weight.device)
    up = torch.zeros(outputs, rank, dtype=weight.dtype, device=weight.device)
    torch.nn.init.kaiming_uniform_(down, a=math.sqrt(5))
    can_quantize = weight.numel() > 0 and weight.numel() % 2 == 0
    restore = _quantized(layer, weights) if weights is not None and can_quantize else None
    layer.register_parameter(DOWN, torch.nn.Parameter(down))
    layer.register_parameter(UP, torch.nn.Parameter(up))
    plain: Any = type(layer)
    layer.__class__ = _adapted_class(plain)

    @torch.no_grad()
    def undo() -> None:
        layer.__class__ = plain
        learned_up, learned_down = (internals.parameters_of(layer).pop(name, None) for name in (UP, DOWN))
        if restore is not None:
            restore()
        if learned_up is not None and learned_down is not None and not simulated(learned_up) and learned_up.any():
            # The layer then computes the same without the adapter. Its weight may be another than before: loading with
            # `assign` replaces it.
            product = learned_up @ learned_down
            now: Any = layer.weight
            now.add_(product if _is_linear(layer) else product.t())

    return undo


def _quantized(layer: torch.nn.Module, weights: _Weights) -> Undo:
    """Makes the weight of one layer 4-bit numbers; what undoes it brings back the very same weight."""
    weight: Any = layer.weight
    # The parameter itself stays, because optimizers hold it; only what is in it changes.
    before = weight.detach()
    shape, stride, dtype = before.shape, before.stride(), before.dtype
    kept = None if simulated(before) else weights.put(before)
    # Linear layers are used row by row, whichever way the weight is stored.
    rows = before if _is_linear(layer) else before.t()
    codes, scales = kernels.quantize_4bit(rows.reshape(-1))
    weight.data = codes
    layer.register_buffer(_SCALES, scales)

    def undo() -> None:
        if kept is not None:
            weight.data = kept()
        else:
            # Nobody asks for the memory that this takes in a simulation.
            with internals.outside_simulation():
                weight.data = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        delattr(layer, _SCALES)

    return undo


class _FourBitProduct(torch.autograd.Function):
    """x @ weight.T + bias with a 4-bit weight, where neither weight nor bias is trained."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        shape: tuple[int, int],
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        # Parameters of the layer, which are there anyway: not among what is offloaded or computed again.
        ctx.weight = (codes, scales, shape)
        weight = kernels.dequantize_4bit(codes, scales, x.dtype).view(shape)
        return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        codes, scales, shape = ctx.weight
        weight = kernels.dequantize_4bit(codes, scales, gradient.dtype).view(shape)
        return gradient @ weight, None, None, None, None


_four_bit_product: Callable[..., torch.Tensor] = _FourBitProduct.apply
