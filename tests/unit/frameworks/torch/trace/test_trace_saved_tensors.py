"""What a forward pass keeps for the backward pass, and the ways users have to keep less."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from memfit.core.timeline import Category, Phase
from tests.unit.frameworks.torch.builders import HOST, forward_blocks, kept_bytes, made_in, run

ROWS, WIDTH, LAYERS = 8, 16, 6
DATA = torch.empty(ROWS, WIDTH)
ACTIVATION = ROWS * WIDTH * 4
LOSS = 4


class Stack(nn.Module):
    """Layers that each keep their input and their output, under a way to call them."""

    def __init__(self, call=lambda layer, data: layer(data)):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(LAYERS)
        )
        self.call = call

    def forward(self, data):
        for layer in self.layers:
            data = self.call(layer, data)
        return data


def keep(model, **options):
    return run(model, DATA, loss=lambda m, b: m(b).sum(), **options)


def test_each_layer_keeps_what_its_gradient_needs():
    # A tanh keeps its output, which is the next layer's input; the first input is the batch.
    assert kept_bytes(keep(Stack())) == LAYERS * ACTIVATION + LOSS


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_keep_their_inputs_alone(reentrant):
    class Wide(nn.Module):
        """Keeps five times as much as it passes on."""

        def __init__(self):
            super().__init__()
            self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
            self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

        def forward(self, data):
            return self.down(self.up(data).tanh())

    def model(call):
        made = Stack(call)
        made.layers = nn.ModuleList(Wide() for _ in range(LAYERS))
        return made

    def loss(model, batch):
        return model(batch.requires_grad_() if reentrant else batch).sum()

    # So many rows that activations outweigh gradients.
    data, activation = torch.empty(64 * ROWS, WIDTH), 64 * ACTIVATION
    plain = run(model(lambda layer, data: layer(data)), data, loss=loss)
    traced = run(model(lambda layer, data: checkpoint(layer, data, use_reentrant=reentrant)), data, loss=loss)

    # Of six inputs the first is the batch.
    assert kept_bytes(plain) == (4 * LAYERS + LAYERS - 1) * activation + LOSS
    # A generator's state or two may come along.
    assert 0 <= kept_bytes(traced) - ((LAYERS - 1) * activation + LOSS) <= activation
    assert traced.timeline.peak()[1] < plain.timeline.peak()[1] - 10 * activation
    # What is made again is temporary and belongs to its layer.
    again = [b for b in made_in(traced, Phase.BACKWARD) if b.op == "aten.tanh"]
    assert sorted(b.module for b in again) == [f"layers.{i}" for i in range(LAYERS)]
    assert {b.category for b in again} == {Category.TEMPORARY}


def test_the_second_step_of_a_checkpointed_model_is_like_the_first():
    traced = keep(Stack(lambda layer, data: checkpoint(layer, data, use_reentrant=False)))

    first, second = (
        [(b.size_bytes, b.op) for b in made_in(traced, Phase.BACKWARD, step) if b.op != "cuBLAS workspace"]
        for step in (1, 2)
    )
    assert first == second


def test_checkpoints_of_segments():
    class Segments(Stack):
        def forward(self, data):
            return checkpoint_sequential(self.layers, 3, data, use_reentrant=False)

    # Three segments; the last one is not checkpointed and keeps its two layers.
    assert kept_bytes(keep(Segments())) == pytest.approx((2 + 2) * ACTIVATION + LOSS, abs=ACTIVATION)


def test_checkpoints_under_autocast_replay_it():
    def call(layer, data):
        return checkpoint(layer, data, use_reentrant=False)

    traced = keep(Stack(call), precision="amp-fp16")

    again = [b for b in made_in(traced, Phase.BACKWARD) if b.op == "aten.tanh"]
    assert {b.size_bytes for b in again} == {ACTIVATION // 2}


def test_checkpoints_keep_the_random_state():
    def call(layer, data):
        return checkpoint(lambda x: torch.nn.functional.dropout(layer(x), 0.5), data, use_reentrant=False)

    assert made_in(keep(Stack(call)), Phase.BACKWARD)


def test_saving_on_the_host_keeps_nothing_on_the_device():
    def loss(model, batch):
        with save_on_cpu(pin_memory=False):
            return model(batch).sum()

    traced = run(Stack(), DATA, loss=loss)

    assert kept_bytes(traced) == LOSS
    # Each comes back for as long as its layer's gradient takes.
    assert [b for b in made_in(traced, Phase.BACKWARD) if b.size_bytes == ACTIVATION]


def test_hooks_decide_what_is_saved():
    # GIVEN hooks that save halves
    def loss(model, batch):
        with saved_tensors_hooks(lambda tensor: tensor.half(), lambda tensor: tensor.float()):
            return model(batch).sum()

    traced = run(Stack(), DATA, loss=loss)

    # THEN each saved tensor is a half of its own: input and output of each layer, and each weight but the first
    weights = (LAYERS - 1) * WIDTH * WIDTH * 2
    assert kept_bytes(traced) == 2 * LAYERS * ACTIVATION // 2 + weights + LOSS


def test_detached_parts_keep_nothing():
    class Detached(Stack):
        def forward(self, data):
            for layer in self.layers[:-1]:
                data = layer(data)
            return self.layers[-1](data.detach())

    # The last layer's input and its output.
    assert kept_bytes(keep(Detached())) == 2 * ACTIVATION + LOSS


def test_parts_without_gradient_keep_nothing():
    class Frozen(Stack):
        def forward(self, data):
            with torch.no_grad():
                for layer in self.layers[:-1]:
                    data = layer(data)
            return self.layers[-1](data)

    assert kept_bytes(keep(Frozen())) == 2 * ACTIVATION + LOSS


def test_an_activation_is_freed_as_soon_as_its_gradient_is_made():
    traced = keep(Stack())

    kept = [b for b in forward_blocks(traced) if b.op == "aten.tanh"]
    ends = [b.end for b in kept]
    assert ends == sorted(ends, reverse=True)


@pytest.mark.parametrize("device", [None, HOST], ids=["cuda", "host"])
def test_in_place_activations_keep_no_copy(device):
    options = {} if device is None else {"device": device}
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU(inplace=True), nn.Linear(WIDTH, 1, bias=False))

    assert kept_bytes(keep(model, **options)) == ACTIVATION + LOSS


def test_batch_norm_keeps_its_input_and_statistics():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH))

    kept = kept_bytes(keep(model))

    assert 0 <= kept - (ACTIVATION + 2 * WIDTH * 4 + LOSS) <= ACTIVATION


def test_cross_entropy_keeps_probabilities():
    def loss(model, batch):
        data, labels = batch
        return torch.nn.functional.cross_entropy(model(data), labels)

    batch = (DATA, torch.zeros(ROWS, dtype=torch.int64))
    traced = run(nn.Linear(WIDTH, WIDTH, bias=False), batch, loss=loss)

    # The logarithms of the probabilities, the total weight, and the loss; the scores themselves are let go.
    assert kept_bytes(traced) == ACTIVATION + 4 + LOSS
