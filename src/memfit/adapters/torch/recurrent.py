"""Recurrent layers as cuDNN runs them: one operator with a reserve space, instead of a loop over time steps."""

from dataclasses import dataclass
from typing import Any

import torch

from memfit.adapters.torch.autocast import Autocast
from memfit.adapters.torch.interception import Interceptor, call_plain
from memfit.adapters.torch.shapes import META, Operator

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


class Recurrent:
    """Sends `lstm`, `gru` and `rnn_*` to cuDNN's operator.

    Args:
        autocast: casts inputs and weights first, as CUDA's autocast does.
    """

    def __init__(self, autocast: Autocast) -> None:
        self._autocast = autocast

    def interceptors(self) -> dict[str, Interceptor]:
        """One per kind of layer, for padded and for packed sequences."""
        table: dict[str, Interceptor] = {}
        for name in _MODES:
            table[f"{name}.input"] = self._padded(name)
            table[f"{name}.data"] = self._packed(name)
        return table

    def _padded(self, name: str) -> Interceptor:
        return lambda op, *args: self._run(name, Layers(*args), [])

    def _packed(self, name: str) -> Interceptor:
        def intercept(op: Operator, data: torch.Tensor, batch_sizes: torch.Tensor, *args: Any) -> Any:
            return self._run(name, Layers(data, *args), batch_sizes.tolist())

        return intercept

    def _run(self, name: str, layers: Layers, batch_sizes: list[int]) -> Any:
        data, params = layers.data, list(layers.params)
        state, cell = (layers.hx[0], layers.hx[1]) if name == "lstm" else (layers.hx, None)
        dtype = self._autocast.dtype
        if dtype is not None:
            data, state, cell, params = self._autocast.cast((data, state, cell, params), dtype)
        # With a projection cuDNN's cell is larger than its output.
        hidden = cell.shape[-1] if cell is not None else state.shape[-1]
        out, h, c, _, _ = call_plain(
            torch.ops.aten._cudnn_rnn.default,
            data,
            params,
            layers.per_layer,
            None,
            state,
            cell,
            _MODES[name],
            hidden,
            state.shape[-1] if layers.projected else 0,
            layers.num_layers,
            layers.batch_first,
            layers.dropout,
            layers.train,
            layers.bidirectional,
            batch_sizes,
            None,
        )
        return (out, h, c) if name == "lstm" else (out, h)


def forward_rule(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], report: Any) -> Any:
    """Outputs of `_cudnn_rnn`, with the reserve space that the backward pass needs."""
    data, _, _, weight_buffer, _, cell, mode, hidden, projection, num_layers = args[:10]
    batch_first, _, train, bidirectional, batch_sizes = args[10:15]
    directions = 2 if bidirectional else 1
    width = (projection or hidden) * directions
    if batch_sizes:
        rows, batch, shape = data.shape[0], batch_sizes[0], (data.shape[0], width)
    else:
        rows, batch, shape = (
            data.shape[0] * data.shape[1],
            data.shape[0 if batch_first else 1],
            (*data.shape[:2], width),
        )
    out = data.new_empty(shape)
    hidden_out = data.new_empty((num_layers * directions, batch, projection or hidden))
    cell_out = data.new_empty((num_layers * directions, batch, hidden)) if cell is not None else data.new_empty((0,))
    reserve = reserve_bytes(mode, rows, hidden, num_layers, directions, data.element_size()) if train else 0
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


def backward_rule(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], report: Any) -> Any:
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
