from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memfit.core.stack import read_stack
from memfit.core.timeline import Category, Phase
from memfit.core.units import MIB
from memfit.frameworks.torch.simulation.releases import release_replacements
from memfit.frameworks.torch.stack import installed_stack
from tests.unit.frameworks.torch.builders import (
    AMPERE,
    kept_bytes,
    made_in,
    observe,
    parameter_bytes,
    peak_of_temporaries,
    run,
    sizes,
)


def on(stack):
    return replace(AMPERE, stack=read_stack(stack))


def test_the_installed_stack_replaces_nothing():
    assert release_replacements(installed_stack(), lambda: True) == []


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
def test_temporaries_of_adam_by_release(optimizer):
    # GIVEN four layers of the same size
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))

    def peak(stack):
        traced = run(model, torch.empty(4, 512), optimizer=optimizer, device=on(stack))
        return peak_of_temporaries(traced, Phase.OPTIMIZER, 2)

    # THEN it goes through them one by one, with three of a layer's size; then has two lists of all; then one
    every = parameter_bytes(model)
    assert [peak(stack) for stack in ("torch1.13", "torch2.0", "torch2.1")] == [every * 3 // 4, 2 * every, every]


def test_zero_grad_keeps_gradients_until_release_2():
    model = nn.Linear(64, 64, bias=False)

    @torch.enable_grad()
    def gradients_left(how):
        model.to("cuda")
        optimizer = torch.optim.SGD(model.parameters())
        model(torch.ones(2, 64, device="cuda")).sum().backward()
        (optimizer if how == "optimizer" else model).zero_grad()
        return next(model.parameters()).grad is not None

    for how in ("optimizer", "module"):
        for stack, is_left in (("torch1.13", True), ("torch2.0", False)):
            assert observe(lambda how=how: gradients_left(how), device=on(stack))[0] is is_left


def test_attention_keeps_its_scores_before_release_2():
    heads = torch.empty(2, 4, 128, 64, dtype=torch.float16, requires_grad=True)

    def attend(model, batch):
        return F.scaled_dot_product_attention(batch, batch, batch).float().sum() + next(model.parameters()).sum()

    old, new = (run(nn.Linear(1, 1), heads, loss=attend, device=on(stack)) for stack in ("torch1.13", "torch2.0"))

    assert kept_bytes(old) - kept_bytes(new) > 2 * 4 * 128 * 128 * 2


def test_the_workspace_of_a_product_with_a_bias_by_release():
    def workspaces(stack, bias):
        traced = run(nn.Linear(8, 8, bias=bias), torch.empty(4, 8), device=on(stack))
        blocks = [block for block in made_in(traced, Phase.FORWARD) if block.category is Category.WORKSPACE]
        return sizes(blocks, "addmm") + sizes(blocks, "cuBLASLt workspace")

    assert workspaces("torch2.8", bias=True) == [MIB]
    assert workspaces("torch2.10", bias=True) == [MIB]
    assert workspaces("torch2.11", bias=True) == []
    assert workspaces("torch2.8", bias=False) == []


def test_a_product_with_weights_of_4_bits_keeps_its_input_in_old_releases():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = nn.Linear(128, 128, bias=False).half()

    def loss(model, batch):
        codes, state = bitsandbytes.functional.quantize_4bit(model.weight.detach(), quant_type="nf4")
        values = (batch * next(model.parameters()).sum()).sin()
        return bitsandbytes.matmul_4bit(values, codes.t(), state).float().sum()

    def kept(version):
        batch = torch.empty(64, 128, dtype=torch.float16)
        return kept_bytes(run(model, batch, loss=loss, device=on(f"torch2.4-bitsandbytes{version}")))

    # `sin` keeps its own input; its output is kept by the product alone.
    assert kept("0.43.1") - kept("0.43.2") == 64 * 128 * 2


def test_a_product_with_weights_of_8_bits_keeps_a_copy_in_old_releases():
    functions = pytest.importorskip("bitsandbytes.autograd._functions")

    def copies(version):
        stack = read_stack(f"torch2.4-bitsandbytes{version}")
        return [each for each in release_replacements(stack, lambda: True) if each.owner is functions.MatMul8bitLt]

    assert [len(copies(version)) for version in ("0.44.1", "0.45.0")] == [1, 0]
