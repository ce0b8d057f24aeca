"""What optimizers take in a traced step: state, and temporaries of the step itself."""

import pytest
import torch
from torch import nn

from memfit.core.errors import StepFailed
from memfit.core.timeline import Category, Phase
from tests.unit.frameworks.torch.builders import AMPERE, HOST, made_in, parameter_bytes, peak_of_temporaries, run, total

LAYERS, WIDTH = 10, 16
DATA = torch.empty(4, WIDTH)
LAYER = WIDTH * WIDTH * 4
SIZE = LAYERS * LAYER


def make_model():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def train(optimizer, **options):
    return run(make_model(), DATA, optimizer=optimizer, **options)


def state(traced):
    return total(traced.timeline.live_at(traced.timeline.num_ticks - 1), Category.OPTIMIZER_STATE)


def make(name, **options):
    return lambda parameters: getattr(torch.optim, name)(parameters, **options)


@pytest.mark.parametrize(
    ("optimizer", "copies"),
    [
        (make("SGD", lr=0.1), 0),
        (make("SGD", lr=0.1, momentum=0.9), 1),
        (make("Adam"), 2),
        (make("AdamW"), 2),
        (make("Adam", amsgrad=True), 3),
        (make("Adam", foreach=False), 2),
        (make("Adam", fused=True), 2),
        (make("RMSprop"), 1),
        (make("RMSprop", momentum=0.9, centered=True), 3),
        (make("Adagrad"), 1),
        (make("Adadelta"), 2),
        (make("Adamax"), 2),
        (make("NAdam"), 2),
        (make("RAdam"), 2),
    ],
)
@pytest.mark.parametrize("device", [AMPERE, HOST], ids=["cuda", "host"])
def test_the_state_of_each_optimizer(optimizer, copies, device):
    # Counters are single numbers.
    assert state(train(optimizer, device=device)) == pytest.approx(copies * SIZE, abs=3 * 4 * LAYERS)


def test_the_state_of_adafactor_is_a_row_and_a_column():
    assert state(train(make("Adafactor"))) == pytest.approx(LAYERS * 2 * WIDTH * 4, abs=4 * LAYERS)


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize(
    ("optimizer", "least", "most"),
    [
        # All parameters at once: one copy of them.
        (make("Adam"), SIZE, 1.1 * SIZE),
        # One parameter after the other: a few of its size.
        (make("Adam", foreach=False), LAYER, 3 * LAYER),
        # One kernel for all.
        (make("Adam", fused=True), 0, 8 * LAYERS),
        (make("SGD", lr=0.1), 0, 0),
        (make("SGD", lr=0.1, fused=True), 0, 0),
        (make("SGD", lr=0.1, weight_decay=0.1), SIZE, SIZE),
        (make("SGD", lr=0.1, weight_decay=0.1, foreach=False), LAYER, 2 * LAYER),
        (make("AdamW", weight_decay=0.1), SIZE, 1.1 * SIZE),
    ],
)
def test_temporaries_of_the_step(optimizer, least, most, step):
    assert least <= peak_of_temporaries(train(optimizer), Phase.OPTIMIZER, step) <= most


def test_on_the_host_the_default_is_one_parameter_after_the_other():
    assert peak_of_temporaries(train(make("Adam"), device=HOST), Phase.OPTIMIZER) <= 3 * LAYER


def test_an_instance_takes_as_much_as_the_function_that_makes_one():
    model = make_model()
    instance = run(model, DATA, optimizer=torch.optim.Adam(model.parameters()))

    assert [b.size_bytes for b in instance.timeline.blocks] == [
        b.size_bytes for b in train(make("Adam")).timeline.blocks
    ]


def test_an_instance_with_a_scheduler_steps_too():
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    assert state(run(model, DATA, optimizer=optimizer)) == 2 * SIZE
    assert scheduler.last_epoch == 0
    assert optimizer.state == {}


def test_an_optimizer_of_some_parameters_has_state_for_those():
    model = make_model()
    optimizer = torch.optim.Adam(model[:3].parameters())

    traced = run(model, DATA, optimizer=optimizer)

    assert state(traced) == 2 * 3 * LAYER
    # The others have gradients all the same.
    assert total(made_in(traced, Phase.BACKWARD), Category.GRADIENT) == SIZE


def test_a_search_along_a_line_evaluates_the_loss_again():
    calls = []

    def loss(model, batch):
        calls.append(1)
        return model(batch).square().mean()

    traced = run(make_model(), DATA, loss=loss, optimizer=make("LBFGS", max_iter=3))

    # One forward pass of the step itself, and some of each of the two optimizer steps.
    assert len(calls) >= 3
    # The direction and the last gradient, flat.
    assert state(traced) >= 2 * SIZE


def test_a_users_own_optimizer():
    class Signs(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                average.lerp_(parameter.grad, 0.1)
                parameter.sub_(average.sign(), alpha=0.1)

    traced = train(Signs)

    assert state(traced) == SIZE
    assert peak_of_temporaries(traced, Phase.OPTIMIZER) == LAYER


def test_state_in_containers_of_the_optimizers_own_is_found():
    class Nested(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter].setdefault("moments", {"first": [torch.zeros_like(parameter)]})

    assert state(train(lambda p: Nested(p, lr=0.1))) == SIZE


def test_clipping_of_gradients_is_part_of_the_users_step():
    class Clipped(torch.optim.SGD):
        def step(self, closure=None):
            torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 1.0)
            return super().step(closure)

    assert made_in(train(lambda p: Clipped(p, lr=0.1)), Phase.OPTIMIZER)


def test_an_optimizer_that_its_device_does_not_support_fails_as_there():
    with pytest.raises(StepFailed, match="capturable"):
        train(make("Adam", capturable=True), device=HOST)
    assert state(train(make("Adam", capturable=True))) == pytest.approx(2 * SIZE, abs=4 * LAYERS)


def test_parameter_bytes_of_the_builder():
    assert parameter_bytes(make_model()) == SIZE
