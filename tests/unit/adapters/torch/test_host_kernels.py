from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memfit.adapters.torch.host_kernels import HostInternals
from tests.unit.adapters.torch.builders import HOST, forward_blocks, observe, run
from tests.unit.adapters.torch.measured import allocations, internal_bytes

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


def group_norm_backward():
    data = images(4, 64, 16, 16)
    return data, data, torch.ones(4, 8), torch.ones(4, 8), torch.ones(64), 4, 64, 256, 8, [True, True, True]


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
    "group norm backward": (aten.native_group_norm_backward.default, group_norm_backward()),
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
    "flash attention": (aten._scaled_dot_product_flash_attention_for_cpu.default, attention(100, 100)),
    "long flash attention": (aten._scaled_dot_product_flash_attention_for_cpu.default, attention(800, 600)),
    "flash attention backward": (
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        flash_backward(200, 300),
    ),
    "flash attention backward, heads after positions": (
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        flash_backward(100, 100, turned=True),
    ),
    "safe softmax": (aten._safe_softmax.default, (torch.randn(4, 4, 64, 64), -1)),
    "softmax backward of a view": (
        aten._softmax_backward_data.default,
        (TURNED, torch.rand(8, 64, 96), -1, torch.float32),
    ),
    "gelu backward": (aten.gelu_backward.default, (torch.randn(8, 64, 96), torch.randn(8, 64, 96))),
    "gelu backward of a view": (aten.gelu_backward.default, (TURNED, torch.randn(8, 64, 96))),
    "embedding of a view": (aten.embedding.default, (torch.randn(50, 16), torch.randint(0, 50, (200, 30)).t())),
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
    "sums of booleans": (aten.cumsum.default, (torch.rand(200, 100) > 0.5, 1)),
    "sums of numbers": (aten.cumsum.default, (torch.ones(200, 100, dtype=torch.int64), 1)),
    "matrix product": (aten.mm.default, (torch.randn(200, 200), torch.randn(200, 200))),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_what_an_operator_takes_inside_is_what_the_profiler_sees(name):
    op, args = OPERATORS[name]

    measured, predicted = internal_bytes(op, *args)

    assert predicted == pytest.approx(measured, abs=SLACK_BYTES)


def test_most_operators_take_nothing():
    assert "aten::mm" not in HostInternals().table()


def test_the_number_of_threads_is_pytorchs_own():
    def bytes_with(threads):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            rule = HostInternals().table()["aten::_scaled_dot_product_flash_attention_for_cpu"]
        finally:
            torch.set_num_threads(before)
        return sum(rule(None, tuple(t.to("meta") for t in attention(100, 100)), {}, None))

    assert bytes_with(4) == 2 * bytes_with(2)


def test_a_mean_loss_keeps_the_losses_of_all_elements():
    # GIVEN 1000 elements WHEN their mean squared error is taken
    _, traced = observe(lambda a, b: F.mse_loss(a, b) is None, torch.ones(1000), torch.ones(1000), device=HOST)

    # THEN beside the unreduced losses, a scalar as large as all of them is allocated, as on the real device
    sizes = [block.size_bytes for block in forward_blocks(traced) if block.op == "aten.mse_loss"]
    assert sizes == [4000, 4000]
    assert F.mse_loss(torch.ones(1000), torch.ones(1000)).untyped_storage().nbytes() == 4000


def test_the_peak_of_a_step_is_what_the_profiler_sees():
    # GIVEN a recurrent layer
    model, batch = nn.GRU(32, 64, batch_first=True), torch.randn(4, 20, 32)
    baseline = sum(t.numel() * 4 for t in (*model.parameters(), batch))

    # WHEN it runs for real, and on shapes
    measured = baseline + max(accumulate(allocations(lambda: model(batch)[0].mean().backward())))
    predicted = run(model, batch, loss=lambda m, b: m(b)[0].mean(), device=HOST).timeline.peak()[1]

    # THEN the peaks agree; there is no optimizer, so a second step is like the first
    assert predicted == pytest.approx(measured, rel=0.005)
