import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.adapters.torch import dispatch
from memfit.adapters.torch.host_recurrent import workspace_bytes
from memfit.core.timeline import Phase
from tests.unit.adapters.torch.builders import HOST, made_in, run
from tests.unit.adapters.torch.measured import internal_bytes

aten = torch.ops.aten


class Outputs(nn.Module):
    """A recurrent layer, of which only the outputs are used."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, data):
        return self.layer(data)[0]


LAYERS = {
    "lstm": lambda: nn.LSTM(12, 16),
    "lstm of several layers": lambda: nn.LSTM(12, 16, 2, batch_first=True, dropout=0.5),
    "lstm in both directions": lambda: nn.LSTM(12, 16, bidirectional=True),
    "lstm without biases": lambda: nn.LSTM(12, 16, bias=False),
    "gru": lambda: nn.GRU(12, 16),
    "gru of several layers": lambda: nn.GRU(12, 16, 2, dropout=0.5),
    "gru in both directions": lambda: nn.GRU(12, 16, bidirectional=True, batch_first=True),
    "gru without biases": lambda: nn.GRU(12, 16, bias=False),
    "tanh": lambda: nn.RNN(12, 16),
    "relu in both directions": lambda: nn.RNN(12, 16, nonlinearity="relu", bidirectional=True),
}
# Views, whose order says nothing, and zeros, which C++ makes in the order its compiler likes.
LEFT_OUT = ("detach.", "select.", "t.", "transpose.", "transpose_.", "unbind.", "view.", "zeros.")


def shapes(out):
    parts = out if isinstance(out, list | tuple) else [out]
    return tuple(tuple(part.shape) for part in parts if isinstance(part, torch.Tensor) and part.dtype.is_floating_point)


def compared(rows):
    return [row for row in rows if not row[0].removeprefix("aten.").startswith(LEFT_OUT)]


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen.append((str(func), shapes(out)))
        return out


@pytest.mark.parametrize("name", LAYERS)
def test_the_simulated_layer_runs_the_operators_of_the_real_one(name, monkeypatch):
    # GIVEN a layer that runs for real
    model = Outputs(LAYERS[name]())
    batch = torch.randn(5, 6, 12)
    with torch.no_grad(), Names() as real:
        model(batch)

    # WHEN its forward pass is traced
    simulated = []
    original = dispatch.SimulatedOperators.__torch_dispatch__

    def watched(self, func, types, args=(), kwargs=None):
        out = original(self, func, types, args, kwargs)
        simulated.append((str(func), shapes(out)))
        return out

    monkeypatch.setattr(dispatch.SimulatedOperators, "__torch_dispatch__", watched)
    run(model, batch, loss=lambda model, batch: model(batch), device=HOST, training=False)

    # THEN the same operators ran, in the same order, with outputs of the same shapes
    wanted = compared(real.seen)
    assert wanted
    assert compared(simulated)[: len(wanted)] == wanted


@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_have_the_real_shapes(name):
    seen = {}

    def loss(model, batch):
        output, state = model(batch)
        seen["output"] = tuple(output.shape)
        seen["states"] = [tuple(s.shape) for s in (state if isinstance(state, tuple) else (state,))]
        return output.mean()

    layer = LAYERS[name]()
    output, state = layer(torch.randn(5, 6, 12))
    run(layer, torch.randn(5, 6, 12), loss=loss, device=HOST)

    assert seen["output"] == tuple(output.shape)
    assert seen["states"] == [tuple(s.shape) for s in (state if isinstance(state, tuple) else (state,))]


def layer_arguments(steps, batch, inputs, hidden):
    weights = (torch.randn(4 * hidden, inputs), torch.randn(4 * hidden, hidden))
    biases = (torch.randn(4 * hidden), torch.randn(4 * hidden))
    states = (torch.zeros(batch, hidden), torch.zeros(batch, hidden))
    return torch.randn(steps, batch, inputs), *weights, *biases, *states


SIZES = [(50, 6, 96, 160), (50, 6, 320, 160), (20, 32, 64, 512), (64, 8, 256, 384), (30, 16, 256, 256)]


@pytest.mark.parametrize("size", SIZES)
def test_the_workspace_is_as_large_as_onednns(size):
    steps, batch, inputs, hidden = size
    options = (False, [], 2, hidden, 1, True, False, False, True)

    out = aten.mkldnn_rnn_layer.default(*layer_arguments(*size), *options)

    assert workspace_bytes(steps, batch, inputs, hidden, 4) == pytest.approx(out[3].numel(), rel=0.01)


@pytest.mark.parametrize("size", SIZES)
def test_what_the_layer_takes_inside_is_what_the_profiler_sees(size):
    hidden = size[3]
    options = (False, [], 2, hidden, 1, True, False, False, True)
    arguments = layer_arguments(*size)
    out = aten.mkldnn_rnn_layer.default(*arguments, *options)
    gradient = torch.randn_like(out[0])

    forward = internal_bytes(aten.mkldnn_rnn_layer.default, *arguments, *options)
    backward = internal_bytes(
        aten.mkldnn_rnn_layer_backward.default,
        *(*arguments, *out[:3], gradient, None, None, False, 2, hidden, 1, True, True, False, [], False, out[3]),
    )

    for measured, predicted in (forward, backward):
        assert predicted == pytest.approx(measured, rel=0.03, abs=100_000)


def test_without_training_there_is_no_workspace():
    model = Outputs(nn.LSTM(12, 16).eval())

    traced = run(model, torch.randn(5, 6, 12), device=HOST, training=False)

    kept = [b.size_bytes for b in made_in(traced, Phase.FORWARD) if b.op == "aten.mkldnn_rnn_layer"]
    assert max(kept) < workspace_bytes(5, 6, 12, 16, 4)
