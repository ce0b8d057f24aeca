import copy

import pytest
import torch
from torch import nn

from memfit.core.errors import BadInput, BadModel
from memfit.core.settings import Settings
from memfit.core.timeline import Category
from memfit.frameworks.torch.apply.low_rank import DOWN, UP, adapter_parameters, add_adapters
from memfit.frameworks.torch.apply.optimizers import FittedOptimizer
from memfit.frameworks.torch.kernels.torchvision_operators import define_missing_operators
from tests.unit.frameworks.torch.builders import AMPERE, HOST, run, total

LORA = Settings(lora_rank=2)


def make_model(dtype=torch.float64, width=8):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width, bias=False), nn.Tanh(), nn.Linear(width, 2)
    ).to(dtype)


def inputs(width=8, dtype=torch.float64):
    return torch.linspace(-1, 1, 4 * width, dtype=dtype).view(4, width)


def trainable(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_adapters_start_from_nothing_and_are_all_that_is_trained():
    model = make_model()
    names = list(model.state_dict())
    before = model(inputs())
    undo = add_adapters(model, 2)
    # The last linear layer is the head.
    assert trainable(model) == {f"{index}.{name}" for index in (0, 2) for name in (DOWN, UP)}
    assert torch.equal(model(inputs()), before)
    assert model[0].adapter_down.shape == (2, 8)
    undo()
    assert list(model.state_dict()) == names
    assert trainable(model) == set(names)
    assert type(model[0]) is nn.Linear
    assert torch.equal(model(inputs()), before)


def test_gradients_are_those_of_the_product():
    model = make_model()
    undo = add_adapters(model, 2)
    with torch.no_grad():
        model[0].adapter_up.normal_()
    model(inputs()).square().sum().backward()
    found = model[0].adapter_up.grad
    down, up = model[0].adapter_down.detach(), model[0].adapter_up.detach().requires_grad_()
    weight = model[0].weight.detach() + up @ down
    bias = model[0].bias.detach()
    hidden = torch.tanh(nn.functional.linear(inputs(), weight, bias))
    (expected,) = torch.autograd.grad(model[1:](hidden).square().sum() * 0 + _rest(model, hidden), up)
    assert torch.allclose(found, expected, rtol=1e-12)
    undo()


def _rest(model, hidden):
    return model[4](torch.tanh(model[2](hidden))).square().sum()


def test_the_optimizer_trains_the_adapters_and_a_scheduler_goes_on():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    held = list(optimizer.param_groups[0]["params"])
    undo = add_adapters(model, 2)
    fitted = FittedOptimizer(LORA, optimizer, model)
    assert fitted.in_use is optimizer
    before = copy.deepcopy(model.state_dict())
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(inputs()) - 1).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == trainable(model)
    fitted.undo()
    undo()
    assert optimizer.param_groups[0]["params"] == held
    assert not optimizer.state


def test_what_was_learned_stays_when_adapters_go():
    model = make_model()
    undo = add_adapters(model, 2)
    with torch.no_grad():
        for parameter in adapter_parameters(model):
            parameter.normal_()
    expected = model(inputs())
    undo()
    assert torch.allclose(model(inputs()), expected)


def test_a_copy_is_a_model_of_its_own():
    model = make_model()
    add_adapters(model, 2)
    other = copy.deepcopy(model)
    before = model(inputs())
    with torch.no_grad():
        other[0].weight.zero_()
        other[0].adapter_up.fill_(1.0)
    assert torch.equal(model(inputs()), before)
    assert not torch.equal(other(inputs()), before)


@pytest.mark.parametrize("quantized", [False, True])
def test_a_model_with_adapters_can_be_saved_whole(tmp_path, quantized):
    model = make_model(torch.float32)
    add_adapters(model, 2, quantized=quantized)
    torch.save(model, tmp_path / "model.pt")

    other = torch.load(tmp_path / "model.pt", weights_only=False)

    assert [type(module) for module in other] == [type(module) for module in model]
    assert torch.equal(other(inputs(dtype=torch.float32)), model(inputs(dtype=torch.float32)))


def test_layers_that_share_a_weight_are_left_alone():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    model[1].weight = model[0].weight
    add_adapters(model, 2)
    assert trainable(model) == {f"2.{name}" for name in (DOWN, UP)}


def test_freezing_alone():
    model = make_model()
    model[2].requires_grad_(False)
    undo = add_adapters(model, 0, freeze=("0", "2"))
    assert trainable(model) == {"4.weight", "4.bias"}
    undo()
    assert trainable(model) == {"0.weight", "0.bias", "4.weight", "4.bias"}


def test_the_weight_that_is_an_embedding_is_left_alone():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(10, 8)
            self.output = nn.Linear(8, 10, bias=False)
            self.output.weight = self.words.weight
            self.inner = nn.Linear(8, 8)
            self.last = nn.Linear(8, 8)

    model = Tied()
    add_adapters(model, 2)
    assert trainable(model) == {f"inner.{name}" for name in (DOWN, UP)}


def test_layers_that_are_not_called_are_left_alone():
    class Wrapped(nn.Linear):
        def forward(self, x):
            return x

    model = nn.Sequential(
        nn.MultiheadAttention(8, 2), nn.TransformerEncoderLayer(8, 2, 16), Wrapped(8, 8), nn.Linear(8, 1)
    )
    add_adapters(model, 2)
    assert trainable(model) == {f"1.{layer}.{name}" for layer in ("linear1", "linear2") for name in (DOWN, UP)}


@pytest.mark.parametrize("quantized", [False, True])
def test_a_transposed_layer_and_a_named_head(quantized):
    define_missing_operators()
    transformers = pytest.importorskip("transformers")
    if quantized:
        pytest.importorskip("bitsandbytes")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=64, vocab_size=50, n_positions=8)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    words = torch.arange(8).view(1, 8)
    before = model(words).logits
    undo = add_adapters(model, 2, quantized=quantized)
    assert len(list(adapter_parameters(model))) == 2 * 4
    after = model(words).logits
    assert torch.equal(after, before) or (quantized and (after - before).abs().max() < 0.1 * before.abs().max())
    model(words, labels=words).loss.backward()
    assert all(parameter.grad is not None for parameter in adapter_parameters(model))
    undo()
    assert torch.equal(model(words).logits, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_quantized_base(dtype):
    pytest.importorskip("bitsandbytes")
    model = make_model(dtype, width=64)
    weight = model[0].weight
    before, output = weight.detach().clone(), model(inputs(64, dtype)).detach()
    undo = add_adapters(model, 2, quantized=True)

    # The parameter is the same object, with half a byte per element and a scale for 64.
    assert model[0].weight is weight
    assert weight.numel() * weight.element_size() == 64 * 64 // 2
    assert model[0].weight_scales.shape == (64,)
    found = model(inputs(64, dtype))
    assert found.dtype is dtype
    assert 0 < (found - output).abs().max() < 0.3 * output.abs().max()
    found.square().sum().backward()
    assert model[0].adapter_up.grad.abs().sum() > 0

    undo()
    assert torch.equal(weight, before)
    assert weight.requires_grad
    assert torch.equal(model(inputs(64, dtype)), output)


def test_a_quantized_base_gives_the_gradients_of_its_weights():
    pytest.importorskip("bitsandbytes")
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 2))
    add_adapters(model, 2, quantized=True)
    x = inputs(64, torch.float32).requires_grad_()
    out = model[0](x)
    identity = torch.eye(64)
    # Adapters start from nothing, so that the layer's answers to unit vectors are its weight.
    weight = (model[0](identity) - model[0].bias).detach().t()
    out.sum().backward()
    assert torch.allclose(x.grad, torch.ones(4, 32) @ weight, atol=1e-5)


def test_a_quantized_base_under_autocast():
    pytest.importorskip("bitsandbytes")
    model = make_model(torch.float32, width=64)
    add_adapters(model, 2, quantized=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(inputs(64, torch.float32))
    assert out.dtype is torch.bfloat16
    out.float().square().sum().backward()
    assert model[0].adapter_up.grad.dtype is torch.float32


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"rank": -1}, BadInput, "-1 was given"),
        ({"rank": 0, "quantized": True}, BadInput, "they need adapters"),
        ({"rank": 2, "freeze": ("9",)}, BadModel, "no module at '9'"),
    ],
)
def test_what_cannot_be_done_is_said(options, error, words):
    model = make_model()
    with pytest.raises(error, match=words):
        add_adapters(model, **options)
    assert len(trainable(model)) == 5


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(BadModel, match="no linear layers besides its output head"):
        add_adapters(nn.Sequential(nn.Conv2d(3, 3, 3), nn.Linear(3, 1)), 2)


def test_what_was_learned_over_a_quantized_base_is_added_to_the_original():
    pytest.importorskip("bitsandbytes")
    model = make_model(torch.float32, width=64)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    undo = add_adapters(model, 2, quantized=True)
    with torch.no_grad():
        for parameter in adapter_parameters(model):
            parameter.fill_(0.1)
    undo()
    changed = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
    assert changed
    for name in changed:
        difference = dict(model.named_parameters())[name] - before[name]
        torch.testing.assert_close(difference, torch.full_like(difference, 2 * 0.1 * 0.1), rtol=1e-3, atol=1e-5)


LAYERS, WIDTH, RANK = 10, 128, 4
WEIGHT = WIDTH * WIDTH * 4


@pytest.mark.parametrize("device", [AMPERE, HOST], ids=["cuda", "host"])
@pytest.mark.parametrize("quantized", [False, True])
def test_traced_bytes(device, quantized):
    if quantized:
        pytest.importorskip("bitsandbytes")
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    settings = Settings(lora_rank=RANK, quantized_base=quantized)
    optimizer = torch.optim.AdamW(model.parameters())
    trace = run(model, torch.empty(4, WIDTH), optimizer=optimizer, settings=settings, device=device)
    end = trace.timeline.live_at(trace.timeline.num_ticks - 1)
    adapters = (LAYERS - 1) * 2 * RANK * WIDTH * 4
    base = (LAYERS - 1) * (WEIGHT // 8 if quantized else WEIGHT) + WEIGHT
    assert total(end, Category.PARAMETER) == base + adapters
    assert total(end, Category.BUFFER) == ((LAYERS - 1) * WIDTH * WIDTH // 64 * 4 if quantized else 0)
    assert total(end, Category.GRADIENT) == adapters
    assert total(end, Category.OPTIMIZER_STATE) == pytest.approx(2 * adapters, abs=8 * 2 * LAYERS)
    # One layer's weight at a time becomes floating-point, once forward and once backward.
    made = [block for block in trace.timeline.blocks if block.op == "bitsandbytes.dequantize_4bit"]
    assert len(made) == (2 * (2 * LAYERS - 3) if quantized else 0)
    assert all(block.size_bytes == WEIGHT and block.end is not None for block in made)
    # The user's model is what it was.
    assert list(model.state_dict()) == [f"{index}.weight" for index in range(LAYERS)]
    assert all(parameter.requires_grad and parameter.dtype is torch.float32 for parameter in model.parameters())


def test_undoing_adds_to_the_weight_that_the_layer_has_now():
    # GIVEN adapters over weights that were then replaced
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    undo = add_adapters(model, 2)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    with torch.no_grad():
        for parameter in adapter_parameters(model):
            parameter.fill_(0.5)
    x = torch.ones(3, 4)
    expected = model(x)

    undo()

    assert torch.allclose(model(x), expected)
