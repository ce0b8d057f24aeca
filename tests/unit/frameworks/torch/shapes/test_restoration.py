"""A process goes on after a visit to a simulated device as if nothing had been."""

import builtins
import copy
import functools
import gc
import io
import os
import pathlib
import random
import shutil
import sys
import tempfile
import threading
from types import ModuleType

import numpy as np
import pytest
import torch
import torch._dynamo  # replaces a function of torch when it is imported, as a session does
import torch.distributed
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import memfit
from memfit.core.patching import replaced
from memfit.frameworks.torch.shapes import unsimulated
from memfit.frameworks.torch.shapes.restoration import Restoration, random_states_kept
from memfit.frameworks.torch.simulation import simulation
from tests.unit.frameworks.torch.sessions import really, visiting

# Looked at whole, whether or not anything in them is replaced.
OWNERS = (
    torch,
    torch._C,
    torch.Tensor,
    torch.autograd,
    torch.backends.cudnn,
    torch.cuda,
    torch.distributed,
    torch.nn.Module,
    torch.optim.Optimizer,
    DataLoader,
    builtins,
    io,
    os,
    os.path,
    pathlib.Path,
    shutil,
    threading.Thread,
)


@functools.cache
def owners():
    """`OWNERS`, and every other module and class in which a session replaces something."""
    found = {id(owner): owner for owner in OWNERS}
    with pytest.MonkeyPatch.context() as patch:

        def noting(replacements):
            owned = (replacement.owner for replacement in replacements)
            # What is replaced in a session's own objects goes with them.
            found.update({id(owner): owner for owner in owned if isinstance(owner, type | ModuleType)})
            return replaced(replacements)

        patch.setattr(simulation, "replaced", noting)
        with visiting():
            pass
    assert len(found) > len(OWNERS), "nothing was noted: the tests would look at too little"
    return list(found.values())


def attributes():
    """Every attribute of all that a session may touch, but not what pickling keeps for itself on classes."""
    return {
        (owner.__name__, name): value
        for owner in owners()
        for name, value in vars(owner).items()
        if name != "__slotnames__"
    }


def changes(before, after):
    """What is not the same object as before; submodules that were imported meanwhile are no change."""
    gone = [key for key in before if key not in after]
    other = [key for key, value in after.items() if key in before and before[key] is not value]
    new = [key for key, value in after.items() if key not in before and not isinstance(value, ModuleType)]
    return gone + other + new


class Model(nn.Module):
    """Parameters, tied ones, buffers of two kinds, and dropout."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((), 2.0), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, tokens):
        return self.head(self.drop(self.norm(self.embed(tokens)))) * self.scale


TOKENS = torch.arange(8)


def real_step(model, optimizer):
    optimizer.zero_grad()
    F.cross_entropy(model(TOKENS), TOKENS).backward()
    optimizer.step()


def simulated_step(model, optimizer):
    tokens = TOKENS.cuda()
    optimizer.zero_grad()
    F.cross_entropy(model(tokens), tokens).backward()
    optimizer.step()


def make_trained():
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    real_step(model, optimizer)
    return model, optimizer


def snapshot(model):
    """The values of everything in a model, gradients included."""
    found = {name: tensor.detach().clone() for name, tensor in model.state_dict(keep_vars=True).items()}
    found |= {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found | {"scale": model.scale.clone()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def visit_and_train():
    with visiting():
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.BatchNorm1d(8)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.randn(4, 8).cuda()).float().sum()
        loss.backward()
        optimizer.step()
        torch.cuda.manual_seed_all(3)
        torch.cuda.synchronize()
        torch.cuda.Stream().synchronize()
        assert torch.accelerator.is_available()


def test_every_attribute_is_the_object_it_was():
    before = attributes()
    visit_and_train()

    assert changes(before, attributes()) == []


def test_every_attribute_is_the_object_it_was_after_an_error_too():
    before = attributes()
    with pytest.raises(KeyError), visiting():
        torch.zeros(3).cuda()
        raise KeyError

    assert changes(before, attributes()) == []


def test_the_users_files_are_what_they_were(tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    before = attributes()
    path = tmp_path / "model.pt"
    torch.save({"weight": torch.ones(2)}, path)
    with pytest.raises(KeyError), visiting():
        assert builtins.open is not before["builtins", "open"]
        torch.save(nn.Linear(2, 2).cuda().state_dict(), path)
        assert torch.load(path)["weight"].is_cuda
        assert list(temporary.iterdir())
        raise KeyError

    assert changes(before, attributes()) == []
    assert torch.load(path)["weight"].tolist() == [1, 1]
    assert list(temporary.iterdir()) == []


def test_the_optimizers_of_keras_are_what_they_were(monkeypatch):
    # GIVEN a Keras that has been imported, as far as its optimizers are concerned
    class BaseOptimizer:
        def apply(self, grads, trainable_variables=None):
            return grads

    keras = ModuleType(unsimulated.MODULE)
    keras.BaseOptimizer = BaseOptimizer
    monkeypatch.setitem(sys.modules, unsimulated.MODULE, keras)
    plain = BaseOptimizer.apply

    # WHEN there is a visit
    with visiting():
        assert BaseOptimizer.apply is not plain

    # THEN its updates are no longer watched
    assert BaseOptimizer.apply is plain


def test_a_changed_attribute_would_be_noticed(monkeypatch):
    before = attributes()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(os, "invented", 1, raising=False)
    monkeypatch.delattr(shutil, "copy")

    found = changes(before, attributes())
    assert sorted(found) == [("os", "invented"), ("shutil", "copy"), ("torch.cuda", "is_available")]


def test_what_torch_says_afterwards():
    visit_and_train()

    assert not torch.cuda.is_available()
    assert torch.cuda.device_count() == 0
    assert not torch.accelerator.is_available()
    assert torch.get_default_device() == torch.device("cpu")
    assert not torch.is_autocast_enabled("cuda")
    assert torch._C._len_torch_function_stack() == torch._C._len_torch_dispatch_stack() == 0
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(3).cuda()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.cuda.synchronize()


def test_a_real_step_is_the_same_before_and_after():
    # GIVEN two models alike and a real step of one
    first, first_optimizer = make_trained()
    real_step(first, first_optimizer)
    second, second_optimizer = make_trained()

    # WHEN there is a visit before the step of the other
    state = torch.get_rng_state()
    visit_and_train()
    assert torch.equal(torch.get_rng_state(), state)
    real_step(second, second_optimizer)

    # THEN they are the same to the bit
    assert_same(snapshot(second), snapshot(first))


def test_a_model_that_moved_comes_back_as_it_was():
    model, _ = make_trained()
    before = snapshot(model)
    parameters, buffers = list(model.parameters()), list(model.buffers())
    with visiting():
        model.cuda()
        assert all(parameter.is_cuda for parameter in model.parameters())
        assert model.scale.is_cuda
        simulated_step(model, torch.optim.SGD(model.parameters(), lr=0.1))

    assert_same(snapshot(model), before)
    assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
    assert all(now is then for now, then in zip(model.buffers(), buffers, strict=True))
    assert {really(tensor) for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt, SystemExit])
def test_a_model_comes_back_after_an_error_too(error):
    model, optimizer = make_trained()
    before = snapshot(model)
    with pytest.raises(error), visiting():
        model.to("cuda")
        F.cross_entropy(model(TOKENS.cuda()), TOKENS.cuda()).backward()
        raise error

    assert_same(snapshot(model), before)
    real_step(model, optimizer)


def test_a_model_comes_back_from_a_full_device():
    model, _ = make_trained()
    before = snapshot(model)
    with pytest.raises(torch.OutOfMemoryError), visiting(2**21):
        model.cuda()
        torch.zeros(2**30, device="cuda")

    assert_same(snapshot(model), before)


def test_a_model_that_moved_there_and_back_has_its_values():
    model, _ = make_trained()
    before = snapshot(model)
    with visiting():
        model.cuda()
        model.cpu()

    assert_same(snapshot(model), before)


def test_a_model_that_changed_its_dtype_there_has_its_values():
    model, _ = make_trained()
    before = snapshot(model)
    with visiting():
        model.cuda().half()
        assert model.head.weight.dtype is torch.float16

    assert_same(snapshot(model), before)
    assert model.head.weight.dtype is torch.float32


def test_training_goes_on_with_the_users_own_optimizer():
    # GIVEN a model in training, and what the next step would make of it
    model, _ = make_trained()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected, expected_optimizer = copy.deepcopy((model, optimizer))
    torch.manual_seed(1)
    real_step(expected, expected_optimizer)

    # WHEN a step of it is tried on the simulated device first
    with visiting():
        model.cuda()
        simulated_step(model, optimizer)

    # THEN the real step is the same to the bit
    torch.manual_seed(1)
    real_step(model, optimizer)
    assert_same(snapshot(model), snapshot(expected))


def test_an_optimizer_of_the_users_that_was_first_used_there_has_no_state():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    with visiting():
        model.cuda()
        model(torch.zeros(1, 2).cuda()).sum().backward()
        optimizer.step()

    assert all(parameter.grad is None for parameter in model.parameters())
    assert not optimizer.state
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not any(tensor.is_meta for state in optimizer.state.values() for tensor in state.values())


def test_a_model_made_there_has_the_values_it_was_made_with():
    with visiting():
        model = nn.Linear(4, 4)
        nn.init.constant_(model.weight, 3.0)
        model.cuda()

    assert torch.equal(model.weight, torch.full((4, 4), 3.0))


def test_nothing_is_kept_of_models_that_are_gone():
    restoration = Restoration()
    parameter = nn.Parameter(torch.ones(2))
    restoration.remember(parameter, torch.zeros(2))
    del parameter
    gc.collect()
    other = nn.Parameter(torch.ones(2))
    restoration.restore()

    assert torch.equal(other, torch.ones(2))


def test_only_the_first_move_counts():
    restoration = Restoration()
    moved = torch.empty(2, device="meta")
    first = torch.ones(2)
    restoration.remember(moved, first)
    restoration.remember(moved, torch.zeros(2))
    restoration.restore()

    assert torch.equal(moved, torch.ones(2))


def test_visits_follow_one_another():
    model, _ = make_trained()
    before = snapshot(model)
    for _ in range(2):
        with visiting():
            model.cuda()

    assert_same(snapshot(model), before)


def test_random_states_are_kept():
    def draw():
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    expected = draw()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    with pytest.raises(KeyError), random_states_kept():
        draw()
        torch.manual_seed(5)
        raise KeyError

    assert draw() == expected


def test_a_visit_keeps_them_too():
    state, numbers = torch.get_rng_state(), random.getstate()
    with visiting():
        torch.manual_seed(5)
        random.random()
        nn.Linear(3, 3).cuda()

    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == numbers


def test_the_state_that_is_kept_is_no_memory_of_the_program():
    # GIVEN an optimizer whose state is there before its first step
    class Ready(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter] = {"moment": torch.zeros_like(parameter)}

        @torch.no_grad()
        def step(self):
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["moment"].add_(parameter.grad)

    with memfit.simulate("t4") as device:
        layer = nn.Linear(8, 8).cuda()
        optimizer = Ready(layer.parameters())
        layer(torch.zeros(4, 8).cuda()).sum().backward()
        optimizer.step()

    assert [b.op for b in device.estimate().timeline.blocks if "clone" in b.op] == []
