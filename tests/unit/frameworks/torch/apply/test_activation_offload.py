import pytest
import torch
from torch import nn

from memfit.core.errors import BadInput
from memfit.frameworks.torch.apply import activation_offload
from memfit.frameworks.torch.apply.activation_offload import Offload
from memfit.frameworks.torch.apply.recomputation import recompute
from tests.unit.frameworks.torch.apply import architectures
from tests.unit.frameworks.torch.apply.architectures import make

ROWS, WIDTH = 256, 64
STEP_BYTES = ROWS * WIDTH * 4


@pytest.fixture
def nothing_is_small(monkeypatch):
    monkeypatch.setattr(activation_offload, "_LEAST_BYTES", 1)


def gradients(model, loss, batch):
    model.zero_grad()
    torch.manual_seed(7)
    value = loss(model, batch)
    value.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("also_recomputed", [False, True])
@pytest.mark.parametrize("build", architectures.ALL)
def test_an_offloaded_step_gives_the_same_bits(nothing_is_small, build, also_recomputed):
    subject = make(build, 0)
    plain, model = subject.copied(), subject.copied()

    undo = recompute(model, subject.blocks) if also_recomputed else (lambda: None)
    offloaded = Offload(model, subject.blocks)
    found = gradients(model, subject.loss, subject.batch)
    offloaded()
    undo()

    assert same(found, gradients(plain, subject.loss, subject.batch))
    assert same(dict(model.named_buffers()), dict(plain.named_buffers()))
    assert offloaded.host_bytes > 0
    assert all("forward" not in module.__dict__ for module in model.modules())


def chain():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()))


def total(model, batch):
    return model(batch).sum()


def test_a_tensor_that_is_saved_twice_moves_once_and_parameters_stay():
    model = chain()
    offloaded = Offload(model, ["1"])

    gradients(model, total, torch.randn(ROWS, WIDTH))

    # THEN what waits are the outputs of the two tanh; the first is the linear layer's input as well
    assert offloaded.host_bytes == 2 * STEP_BYTES


def test_recomputed_modules_have_only_their_inputs_wait():
    model = chain()
    recompute(model, ["1"])
    offloaded = Offload(model, ["1"])

    gradients(model, total, torch.randn(ROWS, WIDTH))

    assert offloaded.host_bytes == STEP_BYTES


def test_views_of_one_storage_move_once(nothing_is_small):
    class Halves(nn.Module):
        def forward(self, data):
            one, other = data.chunk(2, dim=1)
            return one * other

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Halves())
    plain = nn.Sequential(model[0], Halves())
    offloaded = Offload(model, ["1"])
    data = torch.randn(ROWS, WIDTH)

    found = gradients(model, total, data)

    assert offloaded.host_bytes == STEP_BYTES
    assert same(found, gradients(plain, total, data))


def test_a_storage_that_was_written_to_moves_again(nothing_is_small):
    class Writes(nn.Module):
        def forward(self, data):
            scratch = torch.ones_like(data)
            first = data * scratch
            # Legal only because the hooks have copied what was saved before.
            scratch.mul_(3)
            return first + data * scratch

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Writes())
    Offload(model, ["1"])
    bias = gradients(model, total, torch.randn(ROWS, WIDTH))["0.bias"]

    assert torch.equal(bias, torch.full((WIDTH,), 4.0 * ROWS))


def test_repeated_elements_wait_once(nothing_is_small):
    class Scaled(nn.Module):
        def forward(self, data):
            return data * data[:1].exp().expand(ROWS, WIDTH)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Scaled())
    plain = nn.Sequential(model[0], Scaled())
    offloaded = Offload(model, ["1"])
    data = torch.randn(ROWS, WIDTH)

    found = gradients(model, total, data)

    assert offloaded.host_bytes == STEP_BYTES + WIDTH * 4
    assert same(found, gradients(plain, total, data))


def test_overlapping_windows_stay(nothing_is_small):
    class Windows(nn.Module):
        def forward(self, data):
            return data.flatten().unfold(0, 3, 1).sin()

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Windows())
    offloaded = Offload(model, ["1"])

    gradients(model, total, torch.randn(ROWS, WIDTH))

    assert offloaded.host_bytes == 0


def test_small_tensors_stay():
    model = chain()
    offloaded = Offload(model, ["1"])

    gradients(model, total, torch.randn(4, WIDTH))

    assert offloaded.host_bytes == 0


def test_without_gradients_nothing_moves():
    model = chain()
    offloaded = Offload(model, ["1"])

    with torch.no_grad():
        model(torch.randn(ROWS, WIDTH))

    assert offloaded.host_bytes == 0


def test_paths_are_checked():
    with pytest.raises(BadInput, match="offload names '9', but Sequential has no such module"):
        Offload(chain(), ["9"])
