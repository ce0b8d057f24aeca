"""Recurrent layers as the CPU runs them.

An LSTM goes to oneDNN, one operator per layer and direction, with a workspace for the backward pass. Other layers loop
over the time steps; unlike other devices the CPU multiplies the inputs of all steps with the weights at once, before
the loop. PyTorch decides both above autograd and by device (RNN.cpp), hence the interceptors. Packed sequences, and
LSTMs that oneDNN doesn't take (projections, doubles), are left to the loop that shape-only tensors take.
"""

from collections.abc import Callable
from typing import Any

import torch

from memfit.adapters.torch.interception import Interceptor, call_plain
from memfit.adapters.torch.recurrent import Layers
from memfit.adapters.torch.shapes import META, Operator, size_bytes

_LSTM_MODE = 2
_GATES = 4
_ONEDNN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CACHE_LINE_BYTES = 64

_Cell = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class HostRecurrent:
    """Runs `lstm`, `gru` and `rnn_*` on padded sequences as the CPU does."""

    def interceptors(self) -> dict[str, Interceptor]:
        """One per kind of layer."""
        return {
            "lstm.input": _lstm,
            "gru.input": _looped(_gru_cell),
            "rnn_tanh.input": _looped(_simple_cell(torch.tanh)),
            "rnn_relu.input": _looped(_simple_cell(torch.relu)),
        }


def _lstm(op: Operator, *args: Any) -> Any:
    """Layer by layer through oneDNN (mkldnn_rnn in mkldnn/RNN.cpp)."""
    layers = Layers(*args)
    data = layers.data
    if layers.projected or data.dtype not in _ONEDNN_DTYPES or not torch.backends.mkldnn.is_available():
        return call_plain(op, *args)
    layer_input = (data.transpose(0, 1) if layers.batch_first else data).contiguous()
    states, cells = layers.hx[0].contiguous(), layers.hx[1].contiguous()
    hidden = states.shape[-1]
    layer = torch.ops.aten.mkldnn_rnn_layer.default
    last_states, last_cells = [], []
    for number in range(layers.num_layers):
        outputs = []
        for direction in range(layers.directions):
            index = number * layers.directions + direction
            weights = list(layers.params[index * layers.per_layer : (index + 1) * layers.per_layer])
            if not layers.has_biases:
                # Zeros in the shapes of the weights, not of biases.
                weights += [torch.zeros(w.shape, dtype=data.dtype, device=META) for w in weights]
            sizes: list[int] = []
            options = (
                direction == 1,
                sizes,
                _LSTM_MODE,
                hidden,
                layers.num_layers,
                layers.has_biases,
                layers.bidirectional,
            )
            out, state, cell, _ = call_plain(
                layer, layer_input, *weights, states[index], cells[index], *options, layers.batch_first, layers.train
            )
            outputs.append(out)
            last_states.append(state)
            last_cells.append(cell)
        layer_input = outputs[0] if layers.directions == 1 else torch.cat(outputs, -1)
        if layers.dropout and layers.train and number < layers.num_layers - 1:
            layer_input = torch.dropout(layer_input, layers.dropout, True)
    output = layer_input.transpose(0, 1) if layers.batch_first else layer_input
    return output, torch.stack(last_states), torch.stack(last_cells)


def _looped(cell: _Cell) -> Interceptor:
    """A layer that loops over time steps, after one multiplication of all inputs (FullLayer in RNN.cpp)."""

    def intercept(op: Operator, *args: Any) -> Any:
        layers = Layers(*args)
        per_layer, directions = layers.per_layer, layers.directions
        layer_input = layers.data.transpose(0, 1) if layers.batch_first else layers.data
        states = layers.hx.unbind(0)
        last: list[torch.Tensor] = []
        for number in range(layers.num_layers):
            first = number * directions
            weights = [
                (*layers.params[index * per_layer : (index + 1) * per_layer], None, None)[:4]
                for index in range(first, first + directions)
            ]
            layer_input, ends = _run_layer(cell, layer_input, states[first : first + directions], weights)
            last += ends
            if layers.dropout and layers.train and number < layers.num_layers - 1:
                layer_input = torch.dropout(layer_input, layers.dropout, True)
        return (layer_input.transpose(0, 1) if layers.batch_first else layer_input), torch.stack(last)

    return intercept


def _run_layer(
    cell: _Cell, data: torch.Tensor, states: tuple[torch.Tensor, ...], weights: list[tuple[Any, ...]]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One layer, forwards and, with a second set of weights, backwards; also the state at each end.

    As in RNN.cpp, the multiplied inputs of a direction live until the next direction's replace them or the layer ends.
    """
    outputs, ends = [], []
    for reverse, (input_weight, state_weight, input_bias, state_bias) in enumerate(weights):
        steps = torch.nn.functional.linear(data, input_weight, input_bias).unbind(0)
        state = states[reverse]
        made = []
        for step in reversed(steps) if reverse else steps:
            state = cell(step, state, state_weight, state_bias)
            made.append(state)
        outputs.append(torch.stack(made[::-1] if reverse else made))
        ends.append(state)
    return (torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]), ends


def _gru_cell(step: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    from_input = step.unsafe_chunk(3, 1)
    from_state = torch.nn.functional.linear(state, weight, bias).unsafe_chunk(3, 1)
    reset = from_state[0].add_(from_input[0]).sigmoid_()
    update = from_state[1].add_(from_input[1]).sigmoid_()
    new = from_input[2].add(from_state[2].mul_(reset)).tanh_()
    return (state - new).mul_(update).add_(new)


def _simple_cell(activation: Callable[[torch.Tensor], torch.Tensor]) -> _Cell:
    def cell(step: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return activation(torch.nn.functional.linear(state, weight, bias).add_(step))

    return cell


def _padded_row(count: int, element_size: int) -> int:
    """Elements of a row as oneDNN lays it out: whole cache lines, one more at multiples of 256 (`get_good_ld`).

    >>> _padded_row(100, 4), _padded_row(1024, 4)
    (112, 1040)
    """
    line = _CACHE_LINE_BYTES // element_size
    row = -(-count // line) * line
    return row + line if row % 256 == 0 else row


def workspace_bytes(steps: int, batch: int, inputs: int, hidden: int, element_size: int) -> int:
    """Bytes of what one LSTM layer keeps for its backward pass (`set_offsets` in oneDNN's rnn_utils).

    The gates of every step. Then, for all points in time below and above the layer: in padded rows the states passed
    upwards, those passed on in time and the gradients passed downwards; in plain ones the cells and their gradients.
    Finally the output of every step.
    """
    gates = steps * batch * _padded_row(_GATES * hidden, element_size)
    padded = 3 * 2 * (steps + 1) * batch * _padded_row(max(inputs, hidden), element_size)
    plain = (2 * 2 * (steps + 1) + steps) * batch * hidden
    return (gates + padded + plain) * element_size


def forward_rule(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], report: Any) -> Any:
    """Outputs of one LSTM layer; the fourth is its workspace."""
    data, state, cell, train = args[0], args[5], args[6], args[15]
    steps, batch, inputs = data.shape
    hidden = state.shape[-1]
    kept = workspace_bytes(steps, batch, inputs, hidden, data.element_size()) if train else 0
    output = torch.empty((steps, batch, hidden), dtype=data.dtype, device=META)
    workspace = torch.empty((kept,), dtype=torch.uint8, device=META)
    return output, torch.empty_like(state), torch.empty_like(cell), workspace


def _copied_weights(weights: tuple[torch.Tensor, ...]) -> list[int]:
    """Both weights with rows of gates padded."""
    rows = [(w.shape[1], _padded_row(w.shape[0], w.element_size()), w.element_size()) for w in weights]
    return [count * row * element_size for count, row, element_size in rows]


def _gate_scratch(data: torch.Tensor, hidden: int) -> int:
    """The gates of all steps, and two states passed from one step to the next."""
    steps, batch = data.shape[:2]
    return (steps * _GATES + 2) * batch * hidden * data.element_size()


def forward_bytes(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[int]:
    """The weights in oneDNN's layout and the gates of all steps."""
    return [*_copied_weights(args[1:3]), _gate_scratch(args[0], args[5].shape[-1])]


def backward_bytes(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[int]:
    """The weights the other way round, their gradients in oneDNN's layout, the gates, and gradients that come in.

    Of those, the missing ones are made of zeros and the others made contiguous.
    """
    data, weights = args[0], args[1:3]
    turned = [
        w.shape[0] * _padded_row(w.shape[1], w.element_size()) * w.element_size()
        for w in weights
        if _padded_row(w.shape[1], w.element_size()) != w.shape[1]
    ]
    pairs = zip(args[7:10], args[10:13], strict=True)
    gradients = [size_bytes(value) for value, given in pairs if given is None or not given.is_contiguous()]
    return [*turned, *_copied_weights(weights), _gate_scratch(data, args[5].shape[-1]), *gradients]
