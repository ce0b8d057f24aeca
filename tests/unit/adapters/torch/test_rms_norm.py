import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memfit.core.timeline import Category, Phase
from tests.unit.adapters.torch.builders import HOST, forward_blocks, kept_bytes, made_in, observe, run, sizes, total

DATA = torch.empty(10, 20)
OUTPUT = 10 * 20 * 4


def sum_of_output(model, batch):
    return model(batch).sum()


def make_model(dtype=torch.float32):
    return nn.Sequential(nn.Linear(20, 20, bias=False), nn.RMSNorm(20)).to(dtype)


def test_it_is_one_kernel_that_keeps_a_number_per_row():
    traced = run(make_model(), DATA, loss=sum_of_output)

    made = [b.size_bytes for b in forward_blocks(traced) if b.category is not Category.WORKSPACE]
    assert made == [OUTPUT, OUTPUT, 10 * 4, 4]
    assert sizes(forward_blocks(traced), "_fused_rms_norm") == [OUTPUT, 10 * 4]
    # The norm's input, the scales, and the loss.
    assert kept_bytes(traced) == OUTPUT + 10 * 4 + 4


def test_the_scales_of_half_precision_are_float32():
    traced = run(make_model(torch.float16), DATA.half(), loss=sum_of_output)

    assert sizes(forward_blocks(traced), "_fused_rms_norm") == [OUTPUT // 2, 10 * 4]


def test_the_backward_pass_is_one_kernel_too():
    traced = run(make_model(), DATA, loss=sum_of_output)

    made = [b for b in made_in(traced, Phase.BACKWARD) if b.op == "aten._fused_rms_norm_backward"]
    assert [(b.size_bytes, b.category, b.module) for b in made] == [
        (OUTPUT, Category.TEMPORARY, "1"),
        (20 * 4, Category.GRADIENT, "1"),
    ]


def test_a_frozen_weight_gets_no_gradient():
    model = make_model()
    model[1].requires_grad_(False)

    traced = run(model, DATA, loss=sum_of_output)

    assert total(made_in(traced, Phase.BACKWARD), Category.GRADIENT) == 20 * 20 * 4


def test_no_weight_and_several_dimensions():
    def work(data):
        return F.rms_norm(data, (4, 5)).shape

    shape, traced = observe(work, torch.empty(3, 2, 4, 5))

    assert shape == (3, 2, 4, 5)
    assert sizes(forward_blocks(traced), "_fused_rms_norm") == [120 * 4, 6 * 4]


def test_autocast_makes_it_in_float32():
    def work(data):
        with torch.autocast("cuda"):
            return F.rms_norm(data, (20,)).dtype

    assert observe(work, DATA.half())[0] is torch.float32


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_weights_of_another_precision_are_not_fused():
    def work(data, weight):
        return F.rms_norm(data, (20,), weight).shape

    shape, traced = observe(work, DATA.half(), torch.empty(20))

    assert shape == (10, 20)
    assert sizes(forward_blocks(traced), "_fused_rms_norm") == []


def test_the_host_has_no_such_kernel():
    traced = run(make_model(), DATA, loss=sum_of_output, device=HOST)

    assert sizes(forward_blocks(traced), "_fused_rms_norm") == []
    assert kept_bytes(traced) > OUTPUT
