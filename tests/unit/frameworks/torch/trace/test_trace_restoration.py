"""A trace leaves everything of the user's as it was, whether it succeeds or fails."""

import collections
import copy
import gc
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memfit.core.errors import BadLoss, StepFailed
from memfit.frameworks.torch.shapes import interception
from tests.unit.frameworks.torch.builders import AMPERE, HOST, run

DEVICES = pytest.mark.parametrize("device", [AMPERE, HOST], ids=["cuda", "host"])


class Careless(nn.Module):
    """Dropout, batch norm, tied weights, and a forward pass that keeps caches, hooks and modes."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.norm = nn.BatchNorm1d(8)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 20)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("absent", None)
        self.cache = None
        self.tables = {"seen": []}
        self.latest = collections.deque(maxlen=3)

    def forward(self, tokens):
        self.calls += 1
        data = self.embed(tokens)
        self.cache = data
        self.tables["seen"].append(data)
        self.latest.append(data)
        self.fresh = data.detach()
        data = self.norm(data.transpose(1, 2)).transpose(1, 2)
        data, _ = self.recurrent(data)
        return self.head(self.drop(data))


TOKENS = torch.randint(0, 20, (4, 5), generator=torch.Generator().manual_seed(0))


def token_loss(model, tokens):
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def make_trained():
    """A model and its optimizer after a real step, with gradients at hand."""
    torch.manual_seed(0)
    model = Careless()
    optimizer = torch.optim.Adam(model.parameters())
    token_loss(model, TOKENS).backward()
    optimizer.step()
    return model, optimizer


def attributes(model):
    """Every attribute of every module, by identity."""
    return {
        (path, name): (id(value), copy.copy(value) if isinstance(value, dict | list) else None)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
    }


def values(model, optimizer):
    """Every number that belongs to the user."""
    found = {f"weight {name}": p.detach().clone() for name, p in model.named_parameters()}
    found |= {f"gradient {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    found |= {f"buffer {name}": b.clone() for name, b in model.named_buffers()}
    for index, state in optimizer.state_dict()["state"].items():
        found |= {f"state {index} {name}": value.clone() for name, value in state.items()}
    return found


def assert_same(before, after):
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def break_it(model, tokens):
    value = token_loss(model, tokens)
    model.eval()
    model.head.weight.requires_grad_(False)
    model.drop = nn.Identity()
    raise ValueError(f"after {value}")


def break_backward(model, tokens):
    value = token_loss(model, tokens)
    value.register_hook(lambda gradient: 1 / 0)
    return value


FAILURES = {
    "in the forward pass": (break_it, StepFailed),
    "in the backward pass": (break_backward, StepFailed),
    "by its loss": (lambda model, tokens: model(tokens), BadLoss),
}


def trace_it(model, optimizer, device, how):
    if how == "succeeds":
        run(model, TOKENS, loss=token_loss, optimizer=optimizer, device=device, precision="amp-bf16")
        return
    loss, error = FAILURES[how]
    with pytest.raises(error):
        run(model, TOKENS, loss=loss, optimizer=optimizer, device=device, precision="amp-bf16")


@DEVICES
@pytest.mark.parametrize("how", ["succeeds", *FAILURES])
def test_model_and_optimizer_are_untouched(device, how):
    model, optimizer = make_trained()
    objects = attributes(model)
    numbers = values(model, optimizer)
    modes = [module.training for module in model.modules()]
    cache, seen, latest = model.cache, list(model.tables["seen"]), list(model.latest)
    parameters = [(id(p), id(p.grad), p.requires_grad) for p in model.parameters()]
    groups = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])

    trace_it(model, optimizer, device, how)

    assert attributes(model) == objects
    assert_same(numbers, values(model, optimizer))
    assert [module.training for module in model.modules()] == modes
    assert model.cache is cache
    assert len(model.tables["seen"]) == len(seen)
    assert all(a is b for a, b in zip(model.latest, latest, strict=True))
    assert [(id(p), id(p.grad), p.requires_grad) for p in model.parameters()] == parameters
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == groups
    assert model.head.weight is model.embed.weight
    assert all(not p.is_meta for group in optimizer.param_groups for p in group["params"])


@DEVICES
@pytest.mark.parametrize("how", ["succeeds", *FAILURES])
def test_training_goes_on_as_if_nothing_had_happened(device, how):
    def train(interrupted):
        random.seed(0)
        np.random.seed(0)
        model, optimizer = make_trained()
        losses = []
        for step in range(3):
            if interrupted and step == 1:
                trace_it(model, optimizer, device, how)
            optimizer.zero_grad()
            loss = token_loss(model, TOKENS) * (1 + random.random() + np.random.rand())
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses, values(model, optimizer)

    (plain_losses, plain), (losses, after) = train(False), train(True)

    assert torch.equal(torch.stack(plain_losses), torch.stack(losses))
    assert_same(plain, after)


def draw(model, batch):
    random.random()
    np.random.rand()
    torch.rand(3)
    torch.manual_seed(5)
    return model(batch).mean()


@pytest.mark.parametrize("fails", [False, True])
def test_random_states_are_restored(fails):
    def loss(model, batch):
        value = draw(model, batch)
        if fails:
            raise ValueError
        return value

    model = nn.Linear(2, 2)
    before = (random.getstate(), torch.get_rng_state(), repr(np.random.get_state(legacy=False)))
    try:
        run(model, torch.ones(3, 2), loss=loss)
    except StepFailed:
        assert fails

    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert repr(np.random.get_state(legacy=False)) == before[2]


def globals_of_torch():
    """What a trace replaces in PyTorch for its time."""
    return {
        "call": nn.Module.__call__,
        "clear cache": torch.clear_autocast_cache,
        "bf16": torch.cuda.is_bf16_supported,
        "amp": torch.cuda.amp.common.amp_definitely_not_available,
        "cudnn": torch.backends.cudnn.is_acceptable,
        "grad": torch.is_grad_enabled(),
        "autocast": (torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")),
        "modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "collector": gc.isenabled(),
        "interceptors": dict(interception._active),
        "default device": torch.get_default_device(),
        "default dtype": torch.get_default_dtype(),
    }


@DEVICES
@pytest.mark.parametrize("how", ["succeeds", *FAILURES])
def test_pytorch_itself_is_as_before(device, how):
    model, optimizer = make_trained()
    before = globals_of_torch()

    trace_it(model, optimizer, device, how)

    assert globals_of_torch() == before


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        run(nn.Linear(2, 2), torch.ones(3, 2))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_batch_is_untouched():
    batch = {"x": torch.ones(3, 2), "y": [torch.zeros(3)]}
    tensors = (batch["x"], batch["y"][0])

    def loss(model, batch):
        batch["x"].mul_(2)
        batch["y"].append(1)
        value = model(batch.pop("x")).mean()
        batch["z"] = value
        return value

    run(nn.Linear(2, 2), batch, loss=loss)

    assert list(batch) == ["x", "y"]
    assert batch["x"] is tensors[0]
    assert batch["y"] == [tensors[1]]
    assert torch.equal(tensors[0], torch.ones(3, 2))


def shapes_alive():
    return sum(type(o) in (torch.Tensor, nn.Parameter) and o.is_meta for o in gc.get_objects())


def test_nothing_of_the_trace_is_left_alive():
    model = Careless()
    run(model, TOKENS, loss=token_loss, optimizer=torch.optim.Adam)
    gc.collect()

    left = shapes_alive()
    run(model, TOKENS, loss=token_loss, optimizer=torch.optim.Adam)
    gc.collect()

    assert shapes_alive() <= left


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_trace_differentiates_wherever_it_is_asked_for(mode):
    model, batch = nn.Linear(2, 2), torch.ones(3, 2)
    with mode():
        run(model, batch)
        assert not torch.is_grad_enabled()


def test_a_trace_inside_of_the_users_autocast_leaves_it_on():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run(nn.Linear(2, 2), torch.ones(3, 2))
        assert torch.is_autocast_enabled("cpu")
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16


def test_hooks_on_the_users_objects_stay_where_they_are():
    model = nn.Linear(2, 2)
    calls = []
    handle = model.register_forward_hook(lambda *arguments: calls.append("forward"))
    model.weight.register_hook(lambda gradient: calls.append("gradient"))

    run(model, torch.ones(3, 2))
    calls.clear()
    model(torch.ones(3, 2)).sum().backward()

    assert calls == ["forward", "gradient"]
    handle.remove()
    assert not model._forward_hooks


def test_a_graph_of_the_users_own_survives():
    # GIVEN a loss whose backward pass is still to come
    model, optimizer = make_trained()
    optimizer.zero_grad()
    torch.manual_seed(3)
    pending = token_loss(model, TOKENS)

    # WHEN a trace comes in between
    run(model, TOKENS, loss=token_loss, optimizer=optimizer)

    # THEN it can still go backward
    pending.backward()
    assert all(p.grad is not None and not p.grad.is_meta for p in model.parameters())
