from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.frameworks.torch.kernels.host_kernels import HostConvolution, host_internals
from memfit.frameworks.torch.kernels.recurrent import host_lstm_rule
from memfit.frameworks.torch.simulation import dispatch
from tests.unit.frameworks.torch.builders import HOST, forward_blocks, observe, run
from tests.unit.frameworks.torch.measured import allocations, internal_bytes, needs_avx512

aten = torch.ops.aten
# Scalars of reductions and interpolation tables: bytes that no rule counts.
SLACK_BYTES = 8192


def images(*size, channels_last=False):
    made = torch.randn(size)
    return made.to(memory_format=torch.channels_last) if channels_last else made


def attention(length, keys, heads=4, head=32):
    return [torch.randn(2, heads, n, head) for n in (length, keys, keys)]


def flash_backward(length, keys, *, turned=False):
    query, key, value = attention(length, keys)
    out, log = aten._scaled_dot_product_flash_attention_for_cpu.default(query, key, value)
    gradient = torch.randn(2, length, 4, 32).transpose(1, 2) if turned else torch.randn(2, 4, length, 32)
    return gradient, query, key, value, out, log, 0.0, False


def batch_norm_backward(data, gradient):
    channels = data.shape[1]
    mean, deviation, weight = (torch.ones(channels) for _ in range(3))
    return gradient, data, weight, None, None, mean, deviation, True, 1e-5, [True, True, True]


def layer_norm_backward(gradient):
    data = torch.randn(8, 64, 96)
    statistics = torch.ones(8, 64, 1)
    return gradient, data, [96], statistics, statistics, torch.ones(96), torch.ones(96), [True, True, True]


def max_pool_backward(*, data_last, gradient_last):
    data = images(4, 32, 28, 28, channels_last=data_last)
    _, indices = aten.max_pool2d_with_indices.default(data, [2, 2], [2, 2])
    return images(4, 32, 14, 14, channels_last=gradient_last), data, [2, 2], [2, 2], [0, 0], [1, 1], False, indices


TURNED = torch.randn(8, 96, 64).transpose(1, 2)
PROBABILITIES = torch.rand(500, 40)

OPERATORS = {
    "batch norm backward": (
        aten.native_batch_norm_backward.default,
        batch_norm_backward(images(4, 32, 28, 28), images(4, 32, 28, 28)),
    ),
    "batch norm backward, other layout": (
        aten.native_batch_norm_backward.default,
        batch_norm_backward(images(4, 32, 28, 28), images(4, 32, 28, 28, channels_last=True)),
    ),
    "layer norm of a view": (aten.native_layer_norm.default, (TURNED, [96], torch.ones(96), torch.ones(96), 1e-5)),
    "layer norm backward": (aten.native_layer_norm_backward.default, layer_norm_backward(torch.randn(8, 64, 96))),
    "layer norm backward of a view": (aten.native_layer_norm_backward.default, layer_norm_backward(TURNED)),
    **{
        f"max pool backward, data channels-last {data}, gradient {gradient}": (
            aten.max_pool2d_with_indices_backward.default,
            max_pool_backward(data_last=data, gradient_last=gradient),
        )
        for data in (False, True)
        for gradient in (False, True)
    },
    "small nearest": (aten.upsample_nearest2d.default, (images(2, 32, 24, 24), [48, 48])),
    "small bilinear": (aten.upsample_bilinear2d.default, (images(2, 32, 24, 24), [48, 48], False)),
    "large bilinear": (aten.upsample_bilinear2d.default, (images(2, 32, 48, 48), [96, 96], False)),
    "channels-last nearest": (aten.upsample_nearest2d.default, (images(2, 32, 24, 24, channels_last=True), [48, 48])),
    "softmax backward of a view": (
        aten._softmax_backward_data.default,
        (TURNED, torch.rand(8, 64, 96), -1, torch.float32),
    ),
    "gelu backward": (aten.gelu_backward.default, (torch.randn(8, 64, 96), torch.randn(8, 64, 96))),
    "gelu backward of a view": (aten.gelu_backward.default, (TURNED, torch.randn(8, 64, 96))),
    "embedding backward of a view": (
        aten.embedding_dense_backward.default,
        (TURNED, torch.randint(0, 50, (8, 64)), 50, -1, False),
    ),
    "mean squared error": (aten.mse_loss.default, (PROBABILITIES, PROBABILITIES)),
    "squared errors": (aten.mse_loss.default, (PROBABILITIES, PROBABILITIES, 0)),
    "huber loss": (aten.huber_loss.default, (PROBABILITIES, PROBABILITIES)),
    "cross entropy of logits": (aten.binary_cross_entropy_with_logits.default, (PROBABILITIES, PROBABILITIES)),
    "cross entropies of logits": (
        aten.binary_cross_entropy_with_logits.default,
        (PROBABILITIES, PROBABILITIES, None, None, 0),
    ),
    "roll over two dimensions": (aten.roll.default, (torch.randn(8, 32, 32, 16), [1, 1], [1, 2])),
    "roll over one dimension": (aten.roll.default, (torch.randn(8, 32, 32, 16), [1], [1])),
    "matrix product": (aten.mm.default, (torch.randn(200, 200), torch.randn(200, 200))),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_what_an_operator_takes_inside_is_what_the_profiler_sees(name):
    op, args = OPERATORS[name]

    measured, predicted = internal_bytes(op, *args)

    assert predicted == pytest.approx(measured, abs=SLACK_BYTES)


def test_flash_attention_copies_a_gradient_whose_heads_come_first():
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    measured, predicted = internal_bytes(backward, *flash_backward(200, 300))
    copied, copy = internal_bytes(backward, *flash_backward(200, 300, turned=True))

    assert abs(copy - predicted) == abs(copied - measured) == 2 * 4 * 200 * 32 * 4


def test_most_operators_take_nothing():
    assert "aten::mm" not in host_internals()


def test_a_mean_loss_keeps_the_losses_of_all_elements():
    # GIVEN 1000 elements WHEN their mean squared error is taken
    _, traced = observe(lambda a, b: F.mse_loss(a, b) is None, torch.ones(1000), torch.ones(1000), device=HOST)

    # THEN beside the unreduced losses, a scalar as large as all of them is allocated, as on the real device
    sizes = [block.size_bytes for block in forward_blocks(traced) if block.op == "aten.mse_loss"]
    assert sizes == [4000, 4000]
    assert F.mse_loss(torch.ones(1000), torch.ones(1000)).untyped_storage().nbytes() == 4000


def test_the_peak_of_a_step_is_what_the_profiler_sees():
    # GIVEN a layer of a transformer
    model = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    batch = torch.randn(4, 20, 32)
    baseline = sum(t.numel() * 4 for t in (*model.parameters(), batch))

    # WHEN it runs for real, and on shapes
    measured = baseline + max(accumulate(allocations(lambda: model(batch).mean().backward())))
    predicted = run(model, batch, loss=lambda m, b: m(b).mean(), device=HOST).timeline.peak()[1]

    # THEN the peaks agree; there is no optimizer, so a second step is like the first
    assert predicted == pytest.approx(measured, rel=0.03)


# Scratch of constant size that oneDNN's kernels take beside their copies, 12 to 127 KB, is not counted.
CONVOLUTION_SLACK_BYTES = 140_000

# name: batch, input channels, spatial sizes, output channels, kernel, stride, padding, dilation, groups
SHAPES = {
    "3x3": (4, 64, (56, 56), 64, 3, 1, 1, 1, 1),
    "channels that fill no block": (4, 24, (56, 56), 40, 3, 1, 1, 1, 1),
    "1x1": (4, 64, (56, 56), 128, 1, 1, 0, 1, 1),
    "strided 3x3": (4, 64, (56, 56), 128, 3, 2, 1, 1, 1),
    "first layer": (4, 3, (112, 112), 64, 7, 2, 3, 1, 1),
    "four channels": (4, 4, (56, 56), 32, 3, 1, 1, 1, 1),
    "depthwise": (4, 96, (56, 56), 96, 3, 1, 1, 1, 96),
    "wide depthwise": (4, 96, (56, 56), 96, 7, 1, 3, 1, 96),
    "groups of 16": (4, 128, (28, 28), 128, 3, 1, 1, 1, 8),
    "dilated": (4, 64, (56, 56), 64, 3, 1, 2, 2, 1),
    "one dimension": (4, 96, (600,), 96, 3, 1, 1, 1, 1),
    "one dimension, dilated, causal": (4, 96, (632,), 96, 3, 1, 0, 16, 1),
    "three dimensions": (2, 32, (8, 28, 28), 32, 3, 1, 1, 1, 1),
    "three dimensions, flat": (2, 64, (2, 14, 14), 64, 3, 1, 1, 1, 1),
    "three dimensions, few channels": (2, 8, (16, 16, 16), 16, 3, 1, 1, 1, 1),
    "one image": (1, 32, (56, 56), 32, 3, 1, 1, 1, 1),
    "one small image": (1, 16, (14, 14), 16, 3, 1, 1, 1, 1),
}


def tensors(shape, *, transposed=False, channels_last=False):
    batch, channels, sizes, outputs, kernel, stride, padding, dilation, groups = shape
    dims = len(sizes)
    data = torch.randn(batch, channels, *sizes)
    first, second = (channels, outputs // groups) if transposed else (outputs, channels // groups)
    weight = torch.randn(first, second, *[kernel] * dims)
    if channels_last:
        data, weight = (t.to(memory_format=torch.channels_last) for t in (data, weight))
    options = ([stride] * dims, [padding] * dims, [dilation] * dims, transposed, [0] * dims, groups)
    return data, weight, options


def check(shape, **options):
    data, weight, rest = tensors(shape, **options)
    out = aten.convolution.default(data, weight, None, *rest)
    forward = internal_bytes(aten.convolution.default, data, weight, None, *rest)
    gradient = torch.randn_like(out)
    backward = internal_bytes(
        aten.convolution_backward.default, gradient, data, weight, None, *rest, [True, True, False]
    )
    for measured, predicted in (forward, backward):
        assert predicted == pytest.approx(measured, rel=0.08, abs=CONVOLUTION_SLACK_BYTES)


@needs_avx512
@pytest.mark.parametrize("name", SHAPES)
def test_channels_first(name):
    check(SHAPES[name])


@needs_avx512
@pytest.mark.parametrize("name", ["3x3", "1x1", "depthwise", "wide depthwise"])
def test_channels_last(name):
    check(SHAPES[name], channels_last=True)


@needs_avx512
@pytest.mark.parametrize("name", ["3x3", "strided 3x3", "channels that fill no block"])
def test_transposed(name):
    check(SHAPES[name], transposed=True)


@needs_avx512
def test_a_view_is_copied_first():
    data, weight, options = tensors(SHAPES["one dimension"])
    turned = torch.randn(4, 600, 96).transpose(1, 2)

    measured, predicted = internal_bytes(aten.convolution.default, turned, weight, None, *options)
    _, without_copy = internal_bytes(aten.convolution.default, data, weight, None, *options)

    assert predicted == without_copy + turned.numel() * 4
    assert predicted == pytest.approx(measured, rel=0.03, abs=CONVOLUTION_SLACK_BYTES)


def test_doubles_are_unfolded_without_onednn():
    data, weight, options = tensors(SHAPES["3x3"])

    measured, predicted = internal_bytes(aten.convolution.default, data.double(), weight.double(), None, *options)

    assert predicted == pytest.approx(measured, rel=0.03, abs=CONVOLUTION_SLACK_BYTES)
    assert predicted == 4 * 64 * 9 * 56 * 56 * 8


def test_only_wanted_gradients_cost_memory():
    data, weight, options = tensors(SHAPES["3x3"])
    shapes = tuple(torch.empty_like(t, device="meta") for t in (data, data, weight))

    def peak(*wanted):
        out = tuple(torch.empty_like(t) if w else None for t, w in zip(shapes[1:], wanted, strict=True))
        kept = sum(t.numel() * 4 for t in out if t is not None)
        return kept + sum(HostConvolution().backward((*shapes, None, *options, [*wanted, False]), (*out, None)))

    assert peak(False, False) == 0
    assert peak(True, False) < peak(True, True)
    assert peak(False, True) < peak(True, True)


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


@pytest.mark.parametrize("name", [name for name in LAYERS if "lstm" in name])
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


# oneDNN pads rows to whole cache lines, and more at some sizes, which is not modelled.
SIZES = [(50, 6, 96, 160), (50, 6, 320, 160), (20, 32, 64, 512), (64, 8, 256, 384), (30, 16, 256, 256)]


def rule_outputs(arguments, options):
    shapes = [part.to("meta") for part in arguments]
    return host_lstm_rule(aten.mkldnn_rnn_layer.default, (*shapes, *options), {}, None)


@pytest.mark.parametrize("size", SIZES)
def test_the_workspace_is_as_large_as_onednns(size):
    options = (False, [], 2, size[3], 1, True, False, False, True)
    arguments = layer_arguments(*size)

    out = aten.mkldnn_rnn_layer.default(*arguments, *options)

    assert rule_outputs(arguments, options)[3].numel() == pytest.approx(out[3].numel(), rel=0.05)


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
        assert predicted == pytest.approx(measured, rel=0.1, abs=100_000)


def test_without_training_there_is_no_workspace():
    options = (False, [], 2, 16, 1, True, False, False, False)

    assert rule_outputs(layer_arguments(5, 6, 12, 16), options)[3].numel() == 0
