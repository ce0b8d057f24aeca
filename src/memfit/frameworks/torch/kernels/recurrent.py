"""Recurrent layers as cuDNN runs them: one operator with a reserve space, instead of a loop over time steps."""

from dataclasses import dataclass
from typing import Any

import torch

from memfit.frameworks.torch import internals
from memfit.frameworks.torch.kernels.autocast import Autocast
from memfit.frameworks.torch.shapes.interception import Interceptor, call_plain
from memfit.frameworks.torch.shapes.shapes import META, Arguments, Operator, Options, size_bytes

# cuDNN's numbers for the kinds of cell, and gates of each.
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}


@dataclass(frozen=True, slots=True)
class Layers:
    """Arguments of `lstm`, `gru` and `rnn_*`, in their own order; packed sequences have no `batch_first`."""

    data: torch.Tensor
    hx: Any
    params: list[torch.Tensor]
    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool = False

    @property
    def directions(self) -> int:
        """How often each layer runs."""
        return 2 if self.bidirectional else 1

    @property
    def per_layer(self) -> int:
        """Parameters of one layer in one direction."""
        return len(self.params) // (self.num_layers * self.directions)

    @property
    def projected(self) -> bool:
        """Whether the output of a cell is projected to another size."""
        return self.per_layer == (5 if self.has_biases else 3)


def recurrent_interceptors(autocast: Autocast) -> dict[str, Interceptor]:
    """Send `lstm`, `gru` and `rnn_*`, of padded and of packed sequences, to cuDNN's operator.

    Inputs and weights are cast first, as CUDA's autocast does.
    """

    def run(name: str, layers: Layers, batch_sizes: list[int]) -> Any:
        data, params = layers.data, list(layers.params)
        state, cell = layers.hx if name == "lstm" else (layers.hx, None)
        if autocast.dtype is not None:
            data, state, cell, params = autocast.cast((data, state, cell, params), autocast.dtype)
        # With a projection cuDNN's cell is larger than its output.
        hidden = cell.shape[-1] if cell is not None else state.shape[-1]
        projection = state.shape[-1] if layers.projected else 0
        sizes = (_MODES[name], hidden, projection, layers.num_layers)
        options = (layers.batch_first, layers.dropout, layers.train, layers.bidirectional, batch_sizes, None)
        cudnn = torch.ops.aten._cudnn_rnn.default
        out, h, c, _, _ = call_plain(cudnn, data, params, layers.per_layer, None, state, cell, *sizes, *options)
        return (out, h, c) if name == "lstm" else (out, h)

    table: dict[str, Interceptor] = {}
    for name in _MODES:
        table[f"{name}.input"] = lambda op, *args, name=name: run(name, Layers(*args), [])
        table[f"{name}.data"] = lambda op, data, batch_sizes, *args, name=name: run(
            name, Layers(data, *args), batch_sizes.tolist()
        )
    return table


def forward_rule(func: Operator, args: Arguments, kwargs: Options, report: Any) -> Any:
    """Outputs of `_cudnn_rnn`, with the reserve space that the backward pass needs."""
    data, _, _, weight_buffer, _, cell, mode, hidden, projection, num_layers = args[:10]
    batch_first, _, train, bidirectional, batch_sizes = args[10:15]
    directions = 2 if bidirectional else 1
    width = (projection or hidden) * directions
    # Packed sequences have one dimension for batch and time.
    leading = data.shape[:1] if batch_sizes else data.shape[:2]
    batch = batch_sizes[0] if batch_sizes else data.shape[0 if batch_first else 1]
    out = data.new_empty((*leading, width))
    hidden_out = data.new_empty((num_layers * directions, batch, projection or hidden))
    cell_out = data.new_empty((num_layers * directions, batch, hidden)) if cell is not None else data.new_empty((0,))
    reserve = reserve_bytes(mode, leading.numel(), hidden, num_layers, directions, data.element_size()) if train else 0
    # On a device the weights are views of one flat buffer already (`flatten_parameters`): no memory of its own.
    flat = weight_buffer if weight_buffer is not None else data.new_empty((0,))
    return out, hidden_out, cell_out, torch.empty((reserve,), dtype=torch.uint8, device=META), flat


def reserve_bytes(mode: int, rows: int, hidden: int, num_layers: int, directions: int, element_size: int) -> int:
    """Bytes cuDNN keeps for the backward pass.

    cuDNN does not publish the formula (`cudnnGetRNNTempSpaceSizes` answers on the device), so this is what
    back-propagation must have at hand: per row and layer the gates and the output, for an LSTM the cell as well, and
    between layers their input.
    """
    kept = _GATES[mode] + (2 if mode == _MODES["lstm"] else 1)
    per_layer = rows * hidden * directions * element_size
    return num_layers * per_layer * kept + (num_layers - 1) * per_layer


def backward_rule(func: Operator, args: Arguments, kwargs: Options, report: Any) -> Any:
    """Gradients of `_cudnn_rnn`: those of the weights are views of one flat buffer."""
    data, params, _, _, state, cell = args[:6]
    params = list(params)
    flat = data.new_empty((sum(p.numel() for p in params),))
    weights, offset = [], 0
    for parameter in params:
        weights.append(flat[offset : offset + parameter.numel()].view(parameter.shape))
        offset += parameter.numel()
    grad_cell = torch.empty_like(cell) if cell is not None else None
    return torch.empty_like(data), torch.empty_like(state), grad_cell, weights


def host_lstm(op: Operator, *args: Any) -> Any:
    """The interceptor of `lstm` on the CPU: oneDNN runs it, one operator per layer and direction (mkldnn/RNN.cpp).

    Packed sequences, projections and doubles, which oneDNN doesn't take, are left to the loop over time steps.
    """
    layers = Layers(*args)
    data = layers.data
    if layers.projected or data.dtype is torch.float64 or not torch.backends.mkldnn.is_available():
        return call_plain(op, *args)
    layer_input = (data.transpose(0, 1) if layers.batch_first else data).contiguous()
    states, cells = (state.contiguous() for state in layers.hx)
    last: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number in range(layers.num_layers):
        outputs = []
        for direction in range(layers.directions):
            index = number * layers.directions + direction
            weights = list(layers.params[index * layers.per_layer : (index + 1) * layers.per_layer])
            if not layers.has_biases:
                # Zeros in the shapes of the weights, not of biases.
                weights += [torch.zeros(w.shape, dtype=data.dtype, device=META) for w in weights]
            sizes: list[int] = []
            options = (sizes, _MODES["lstm"], states.shape[-1], layers.num_layers, layers.has_biases)
            flags = (layers.bidirectional, layers.batch_first, layers.train)
            layer = torch.ops.aten.mkldnn_rnn_layer.default
            out, state, cell, _ = call_plain(
                layer, layer_input, *weights, states[index], cells[index], direction == 1, *options, *flags
            )
            outputs.append(out)
            last.append((state, cell))
        layer_input = outputs[0] if layers.directions == 1 else torch.cat(outputs, -1)
        if layers.dropout and layers.train and number < layers.num_layers - 1:
            layer_input = torch.dropout(layer_input, layers.dropout, True)
    output = layer_input.transpose(0, 1) if layers.batch_first else layer_input
    return output, *(torch.stack(ends) for ends in zip(*last, strict=True))


def host_lstm_rule(func: Operator, args: Arguments, kwargs: Options, report: Any) -> Any:
    """Outputs of one LSTM layer; the fourth is what it keeps for its backward pass.

    That is the gates of every step, the output of every step, and for all points in time below and above the layer the
    states passed upwards and on in time, their gradients, the cells and theirs (`set_offsets` in oneDNN's rnn_utils).
    """
    data, state, cell, train = args[0], args[5], args[6], args[15]
    steps, batch, inputs = data.shape
    hidden = state.shape[-1]
    gates_and_outputs = (_GATES[_MODES["lstm"]] + 1) * steps * hidden
    states = (steps + 1) * (6 * max(inputs, hidden) + 4 * hidden)
    kept = (gates_and_outputs + states) * batch * data.element_size() if train else 0
    output = torch.empty((steps, batch, hidden), dtype=data.dtype, device=META)
    return output, torch.empty_like(state), torch.empty_like(cell), torch.empty(kept, dtype=torch.uint8, device=META)


def host_lstm_bytes(args: Arguments, out: Any) -> list[int]:
    """The weights in oneDNN's layout and the gates of all steps."""
    steps, batch = args[0].shape[:2]
    gates = _GATES[_MODES["lstm"]] * steps * batch * args[5].shape[-1] * args[0].element_size()
    return [size_bytes(args[1]), size_bytes(args[2]), gates]


def host_lstm_backward_bytes(args: Arguments, out: Any) -> list[int]:
    """Workspace of the forward pass, transposed weights and gradients that were not given."""
    *weights, gates = host_lstm_bytes(args, out)
    pairs = zip(args[7:10], args[10:13], strict=True)
    # Weights are copied the other way round where their rows are no whole cache lines, or multiples of 256.
    turned = [size_bytes(w) for w in args[1:3] if w.shape[1] % 16 or w.shape[1] % 256 == 0]
    missing = [size_bytes(value) for value, given in pairs if given is None or not given.is_contiguous()]
    return [*weights, *turned, *missing, gates]


def fused_rms_norm(autocast: Autocast) -> Interceptor:
    """The interceptor of `rms_norm`, which casts to float32 first, as CUDA's autocast does."""

    def normalise(op: Operator, tensor: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
        if autocast.dtype is not None:
            tensor, weight = autocast.cast((tensor, weight), torch.float32)
        exists = hasattr(torch.ops.aten, "_fused_rms_norm")
        if not exists or not tensor.is_meta or (weight is not None and weight.dtype is not tensor.dtype):
            return call_plain(op, tensor, shape, weight, eps)
        return call_plain(_FusedRmsNorm.apply, tensor, list(shape), weight, eps)

    return normalise


class _FusedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, normalized_shape: list[int], weight: Any, eps: float | None) -> Any:
        # Below autograd the operator stays whole.
        with internals.below_autograd():
            out, scale = torch.ops.aten._fused_rms_norm.default(tensor, normalized_shape, weight, eps)
        ctx.save_for_backward(tensor, scale, weight)
        ctx.normalized_shape = normalized_shape
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        tensor, scale, weight = ctx.saved_tensors
        needed = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        of_tensor, of_weight = torch.ops.aten._fused_rms_norm_backward.default(
            gradient, tensor, ctx.normalized_shape, scale, weight, needed
        )
        return of_tensor, None, of_weight if needed[1] else None, None


def rms_norm_forward_rule(func: Operator, args: Arguments, kwargs: Options, report: Any) -> Any:
    """Outputs of `_fused_rms_norm`: the normalised tensor and one float32 scale per row."""
    tensor, normalized_shape = args[:2]
    rows = tensor.shape[: tensor.dim() - len(normalized_shape)]
    scale = torch.empty((*rows, *(1 for _ in normalized_shape)), dtype=torch.float32, device=META)
    return torch.empty_like(tensor, memory_format=torch.contiguous_format), scale
