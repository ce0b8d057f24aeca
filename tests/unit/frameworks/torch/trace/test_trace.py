import collections
import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit.core.errors import BadOptimizer
from memfit.core.timeline import Category, Phase
from memfit.frameworks.torch.shapes.stand_in import ShapeCopies, swapped
from memfit.frameworks.torch.trace.trace import optimizer_for
from tests.unit.frameworks.torch.builders import (
    AMPERE,
    HOST,
    forward_blocks,
    kept_bytes,
    made_in,
    moment,
    parameter_bytes,
    run,
    span,
    total,
)

ROWS, INPUT, HIDDEN, OUTPUT = 3, 4, 8, 2
BATCH = (torch.empty(ROWS, INPUT), torch.empty(ROWS, OUTPUT))


def make_mlp():
    return nn.Sequential(nn.Linear(INPUT, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUTPUT))


def squared_error(model, batch):
    data, target = batch
    return F.mse_loss(model(data), target)


def train(model=None, **options):
    return run(model or make_mlp(), BATCH, loss=squared_error, **({"optimizer": torch.optim.Adam} | options))


PARAMETERS = [INPUT * HIDDEN * 4, HIDDEN * 4, HIDDEN * OUTPUT * 4, OUTPUT * 4]


def rows(blocks):
    return [(b.size_bytes, b.category.value, b.module, b.op.removeprefix("aten.")) for b in blocks]


def test_what_is_there_before_the_step():
    assert rows(made_in(train(), Phase.SETUP, 0)) == [
        (INPUT * HIDDEN * 4, "parameter", "0", "parameter"),
        (HIDDEN * 4, "parameter", "0", "parameter"),
        (HIDDEN * OUTPUT * 4, "parameter", "2", "parameter"),
        (OUTPUT * 4, "parameter", "2", "parameter"),
        (ROWS * INPUT * 4, "input batch", "", "batch"),
        (ROWS * OUTPUT * 4, "input batch", "", "batch"),
    ]


def test_every_block_of_a_forward_pass():
    blocks = [b for b in forward_blocks(train()) if b.category is not Category.WORKSPACE]

    assert rows(blocks) == [
        (ROWS * HIDDEN * 4, "temporary", "0", "addmm"),  # the ReLU needs its own output only
        (ROWS * HIDDEN * 4, "activation", "1", "relu"),
        (ROWS * OUTPUT * 4, "activation", "2", "addmm"),
        (ROWS * OUTPUT * 4, "activation", "", "mse_loss"),  # the mean is written into the memory of the squares
    ]


def test_every_block_of_a_backward_pass():
    blocks = [b for b in made_in(train(), Phase.BACKWARD) if b.category is not Category.WORKSPACE]

    assert rows(blocks) == [
        (4, "temporary", "", "ones_like"),
        (ROWS * OUTPUT * 4, "temporary", "", "mse_loss_backward"),
        (ROWS * HIDDEN * 4, "temporary", "2", "mm"),
        (HIDDEN * OUTPUT * 4, "gradient", "2", "mm"),
        (OUTPUT * 4, "gradient", "2", "sum"),
        (ROWS * HIDDEN * 4, "temporary", "1", "threshold_backward"),
        (INPUT * HIDDEN * 4, "gradient", "0", "mm"),
        (HIDDEN * 4, "gradient", "0", "sum"),
    ]


def test_every_block_of_an_optimizer_step():
    first, second = (made_in(train(), Phase.OPTIMIZER, step) for step in (1, 2))

    states = collections.Counter(b.size_bytes for b in first if b.category is Category.OPTIMIZER_STATE)
    assert states == collections.Counter(PARAMETERS * 2)
    # All square roots at once: as large as the parameters.
    for blocks in (first, second):
        assert [b.size_bytes for b in blocks if b.category is Category.TEMPORARY] == PARAMETERS
    assert total(second, Category.OPTIMIZER_STATE) == 0


def test_what_is_alive_when():
    timeline = train().timeline
    size = sum(PARAMETERS)

    def alive(tick):
        return {k: v for k, v in timeline.breakdown(tick, lambda b: b.category.value).items() if k != "workspace"}

    batch = ROWS * (INPUT + OUTPUT) * 4
    loss = ROWS * OUTPUT * 4
    kept = ROWS * (HIDDEN + OUTPUT) * 4 + loss
    before = {"parameter": size, "input batch": batch}
    assert alive(moment(timeline, Phase.FORWARD) - 1) == before
    assert alive(moment(timeline, Phase.BACKWARD) - 1) == before | {"activation": kept}
    after_backward = alive(moment(timeline, Phase.OPTIMIZER) - 1)
    assert after_backward == before | {"gradient": size, "activation": loss}
    assert alive(moment(timeline, Phase.FORWARD, 2) - 1) == before | {"optimizer state": 2 * size}
    assert alive(moment(timeline, Phase.BACKWARD, 2) - 1) == before | {"optimizer state": 2 * size, "activation": kept}


def test_the_marks_of_two_steps():
    marks = [(m.phase, m.step) for m in train().timeline.marks]

    assert marks == [
        (Phase.SETUP, 0),
        (Phase.FORWARD, 1),
        (Phase.BACKWARD, 1),
        (Phase.OPTIMIZER, 1),
        (Phase.FORWARD, 2),
        (Phase.BACKWARD, 2),
        (Phase.OPTIMIZER, 2),
    ]


def test_a_phase_without_allocations_has_its_mark_too():
    timeline = train(optimizer=lambda p: torch.optim.SGD(p, lr=0.1, foreach=False)).timeline

    assert [m.phase for m in timeline.marks].count(Phase.OPTIMIZER) == 2


def test_ticks_are_dense_and_blocks_in_order():
    timeline = train().timeline

    starts = [b.start for b in timeline.blocks]
    ends = [b.end for b in timeline.blocks if b.end is not None]
    assert starts == sorted(starts)
    assert sorted(starts + ends) == list(range(timeline.num_ticks))


def test_totals_of_a_trace():
    traced = train()

    assert traced.num_parameters == INPUT * HIDDEN + HIDDEN + HIDDEN * OUTPUT + OUTPUT
    assert traced.parameter_bytes == sum(PARAMETERS)
    assert traced.batch_bytes == ROWS * (INPUT + OUTPUT) * 4


@pytest.mark.parametrize("device", [AMPERE, HOST], ids=["cuda", "host"])
def test_the_same_step_twice_is_the_same_trace(device):
    model = nn.Sequential(nn.Linear(INPUT, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Dropout(0.5), nn.Linear(HIDDEN, OUTPUT))

    first, second, third = (train(model, precision="amp-bf16", device=device) for _ in range(3))

    assert first.timeline == second.timeline == third.timeline
    assert first.notes == second.notes


class Residual(nn.Module):
    """Something with branches, a buffer, normalisation and dropout."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(INPUT, HIDDEN)
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.second = nn.Linear(HIDDEN, HIDDEN)
        self.drop = nn.Dropout(0.1)
        self.last = nn.Linear(HIDDEN, OUTPUT)

    def forward(self, data):
        data = self.norm(self.first(data)).relu()
        return self.last(data + self.drop(self.second(data).tanh()))


def relative(traced, start, stop, offset):
    """Blocks allocated in a range of ticks, in ticks since its start; what lives on has no end."""
    return [
        (b.size_bytes, b.op, b.start - offset, b.end - offset if b.end is not None and b.end < stop else None)
        for b in traced.timeline.blocks
        if start <= b.start < stop
    ]


def happenings(traced):
    """(allocated or freed, size, operator) from the first forward pass on, without workspaces and single numbers."""
    first = moment(traced.timeline, Phase.FORWARD)
    found = []
    for index, allocated in traced.timeline.events():
        block = traced.timeline.blocks[index]
        if block.start >= first and block.category is not Category.WORKSPACE and block.size_bytes > 8:
            found.append((allocated, block.size_bytes, block.op))
    return found


OPTIMIZERS = {
    "adam": torch.optim.Adam,
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "for-loop": lambda p: torch.optim.AdamW(p, foreach=False),
    "fused": lambda p: torch.optim.Adam(p, fused=True),
    "adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("device", [AMPERE, HOST], ids=["cuda", "host"])
def test_the_composed_steps_equal_a_loop_that_really_runs(optimizer, device):
    # GIVEN two steps, the second of which is composed from the record of the first
    composed = train(Residual(), optimizer=optimizer, device=device)

    # WHEN a plain training loop of two steps runs on the same device as one pass
    def loop(model, batch):
        chosen = optimizer(list(model.parameters()))
        for _ in range(2):
            with torch.enable_grad():
                loss = squared_error(model, batch)
                loss.backward()
            chosen.step()
            if _ == 0:
                del loss
                chosen.zero_grad()

    traced = run(Residual(), BATCH, loss=loop, training=False, device=device)

    # THEN it allocates and frees the same blocks in the same order
    ours, theirs = happenings(composed), happenings(traced)
    assert len(ours) > 100
    assert ours == theirs[: len(ours)]


def test_the_composed_second_step_equals_one_that_is_traced_in_full():
    # GIVEN a loss that keeps a small tensor of the first step, so that the second can't be composed
    kept = []

    def keeping(model, batch):
        if not kept:
            kept.append(torch.zeros(5, device="cuda"))
        return squared_error(model, batch)

    full = run(Residual(), BATCH, loss=keeping, optimizer=torch.optim.Adam)
    composed = train(Residual())

    # THEN both have the same second step
    def second(traced):
        start = moment(traced.timeline, Phase.FORWARD, 2)
        stop = traced.timeline.num_ticks
        rows = relative(traced, start, stop, start)
        return [row for row in rows if "zeros" not in row[1] or row[0] != 20]

    assert len(kept) == 1
    assert second(full) == second(composed)


def test_what_a_step_keeps_adds_up():
    kept = []

    def loss(model, batch):
        out = model(batch[0])
        kept.append(out.detach())
        return F.mse_loss(out, batch[1])

    traced = run(make_mlp(), BATCH, loss=loss, optimizer=torch.optim.Adam)

    end = traced.timeline.live_at(traced.timeline.num_ticks - 1)
    outputs = [b for b in end if b.module == "2" and b.op == "aten.addmm"]
    assert [b.size_bytes for b in outputs] == [ROWS * OUTPUT * 4] * 2


def test_gradients_are_freed_between_steps():
    timeline = train().timeline

    gradients = [b for b in timeline.blocks if b.category is Category.GRADIENT]
    assert len(gradients) == 2 * len(PARAMETERS)
    first = [b for b in gradients if b.start < moment(timeline, Phase.OPTIMIZER)]
    assert all(moment(timeline, Phase.OPTIMIZER) < b.end < moment(timeline, Phase.FORWARD, 2) for b in first)


def test_zeroed_gradients_stay():
    timeline = train(set_to_none=False).timeline

    gradients = [b for b in timeline.blocks if b.category is Category.GRADIENT]
    assert len(gradients) == len(PARAMETERS)
    assert all(b.end is None for b in gradients)
    # In the second step each contribution is made beside the gradient it is added to.
    second = span(timeline, Phase.BACKWARD, 2)
    contributions = [b.size_bytes for b in timeline.blocks if b.start in second and b.size_bytes == INPUT * HIDDEN * 4]
    assert len(contributions) == 1


def test_tied_weights_are_counted_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(50, 8)
            self.head = nn.Linear(8, 50, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            return self.head(self.embed(tokens))

    traced = run(Tied(), torch.zeros(6, dtype=torch.int64), optimizer=torch.optim.Adam)

    size = 50 * 8 * 4
    end = traced.timeline.live_at(traced.timeline.num_ticks - 1)
    assert total(end, Category.PARAMETER) == size
    assert total(end, Category.GRADIENT) == size
    assert total(end, Category.OPTIMIZER_STATE) == 2 * size
    assert traced.num_parameters == 50 * 8


def test_frozen_parameters_have_neither_gradient_nor_state():
    model = make_mlp()
    model[0].requires_grad_(False)

    traced = train(model)

    end = traced.timeline.live_at(traced.timeline.num_ticks - 1)
    trained = sum(PARAMETERS[2:])
    assert total(end, Category.PARAMETER) == sum(PARAMETERS)
    assert total(end, Category.GRADIENT) == trained
    assert total(end, Category.OPTIMIZER_STATE) == 2 * trained
    # Nothing of the frozen layer is kept but the input of the layer that learns.
    assert kept_bytes(traced) == ROWS * HIDDEN * 4 + 2 * ROWS * OUTPUT * 4


def test_buffers_are_counted_as_buffers():
    model = nn.Sequential(nn.Linear(INPUT, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, OUTPUT))

    blocks = made_in(train(model), Phase.SETUP, 0)

    # Mean, variance and the number of batches.
    assert [(b.size_bytes, b.module) for b in blocks if b.category is Category.BUFFER] == [
        (HIDDEN * 4, "1"),
        (HIDDEN * 4, "1"),
        (8, "1"),
    ]


@pytest.mark.parametrize(("precision", "size"), [("fp32", 4), ("fp16", 2), ("bf16", 2), (None, 4), ("amp-fp16", 4)])
def test_precisions_of_weights_gradients_and_state(precision, size):
    traced = train(precision=precision)

    end = traced.timeline.live_at(traced.timeline.num_ticks - 1)
    count = traced.num_parameters
    assert total(end, Category.PARAMETER) == count * size
    assert total(end, Category.GRADIENT) == count * size
    assert total(end, Category.OPTIMIZER_STATE) == 2 * count * size


def test_inference_keeps_nothing_for_a_backward_pass():
    traced = run(make_mlp(), BATCH[0], loss=lambda m, b: m(b), training=False)

    assert [(m.phase, m.step) for m in traced.timeline.marks] == [
        (Phase.SETUP, 0),
        (Phase.FORWARD, 1),
        (Phase.FORWARD, 2),
    ]
    assert total(traced.timeline.blocks, Category.ACTIVATION) == 0
    hidden = [b for b in forward_blocks(traced) if b.module == "1"]
    assert all(b.end is not None and b.end < moment(traced.timeline, Phase.FORWARD, 2) for b in hidden)


def test_gradients_of_several_backward_passes_in_one_loss():
    # GIVEN a gradient penalty, which differentiates inside of the loss
    def loss(model, batch):
        data = batch[0].requires_grad_()
        out = model(data).tanh().sum()
        (gradient,) = torch.autograd.grad(out, data, create_graph=True)
        return out + gradient.square().sum()

    traced = run(make_mlp(), BATCH, loss=loss, optimizer=torch.optim.Adam)

    end = traced.timeline.live_at(traced.timeline.num_ticks - 1)
    assert total(end, Category.GRADIENT) <= sum(PARAMETERS)
    assert total(made_in(traced, Phase.BACKWARD), Category.GRADIENT) >= PARAMETERS[0] + PARAMETERS[2]


def test_accumulation_inside_of_the_loss():
    # GIVEN micro-batches, all but the last of which go backward inside of the loss
    def loss(model, batch):
        for _ in range(3):
            squared_error(model, batch).backward()
        return squared_error(model, batch)

    traced = run(make_mlp(), BATCH, loss=loss, optimizer=torch.optim.Adam)

    end = traced.timeline.live_at(traced.timeline.num_ticks - 1)
    assert total(end, Category.GRADIENT) == sum(PARAMETERS)


def test_parametrised_weights_and_hooks_of_old_run():
    modern = nn.utils.parametrizations.weight_norm(nn.Linear(INPUT, OUTPUT))
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(INPUT, OUTPUT))

    for model in (modern, spectral):
        before = parameter_bytes(model)
        traced = train(model)
        assert total(made_in(traced, Phase.BACKWARD), Category.GRADIENT) == before
        assert not any(p.is_meta for p in model.parameters())


def test_hooks_of_modules_run():
    shapes = []
    model = make_mlp()
    model[1].register_forward_hook(lambda module, args, out: shapes.append(tuple(out.shape)))
    model[1].register_full_backward_hook(lambda module, before, after: shapes.append(tuple(after[0].shape)))

    train(model)

    assert shapes[:2] == [(ROWS, HIDDEN), (ROWS, HIDDEN)]


def test_a_loss_scaler_adds_its_factor():
    scaler = torch.amp.GradScaler("cuda", enabled=False)

    def loss(model, batch):
        return scaler.scale(squared_error(model, batch))

    assert made_in(run(make_mlp(), BATCH, loss=loss), Phase.BACKWARD)


def test_the_peak_is_no_less_than_what_must_be_there():
    timeline = train().timeline

    assert timeline.peak()[1] >= 4 * sum(PARAMETERS)


def loss(model, batch):
    return model(batch).pow(2).mean()


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


class Lookahead(torch.optim.Optimizer):
    """A wrapper as they are usually written: shares groups and state with the optimizer it wraps."""

    def __init__(self, base):
        self.base = base
        self.defaults = base.defaults
        self.param_groups = base.param_groups
        self.state = base.state
        self.history = []

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)

    def step(self, closure=None):
        self.history.append(1)
        return self.base.step(closure)


STAND_IN_OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p),
    "wrapper": lambda p: Lookahead(torch.optim.Adam(p)),
}


@pytest.mark.parametrize("name", STAND_IN_OPTIMIZERS)
def test_the_users_optimizer_and_weights_do_not_move(name):
    # GIVEN an optimizer over a model with gradients, as in the middle of a training loop
    model = make_model()
    optimizer = STAND_IN_OPTIMIZERS[name](model.parameters())
    loss(model, torch.randn(2, 8)).backward()
    weights = copy.deepcopy(model.state_dict())
    gradients = [p.grad.clone() for p in model.parameters()]

    # WHEN the step is estimated
    memfit.estimate(model, loss, torch.randn(4, 8), optimizer=optimizer, device="t4")

    # THEN nothing of it has happened
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert len(optimizer.state) == 0
    assert getattr(optimizer, "history", []) == []


def test_the_state_of_a_wrapped_optimizer_is_counted():
    model = make_model()
    plain = memfit.estimate(model, loss, torch.randn(4, 8), optimizer=torch.optim.Adam, device="t4")
    wrapper = Lookahead(torch.optim.Adam(model.parameters()))
    wrapped = memfit.estimate(model, loss, torch.randn(4, 8), optimizer=wrapper, device="t4")

    assert wrapped.breakdown.by_category["optimizer state"] == plain.breakdown.by_category["optimizer state"]


def test_existing_state_survives_and_is_not_copied():
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    loss(model, torch.randn(2, 8)).backward()
    optimizer.step()
    before = {id(p): state["exp_avg"].clone() for p, state in optimizer.state.items()}

    memfit.estimate(model, loss, torch.randn(4, 8), optimizer=optimizer, device="t4")

    assert {id(p) for p in optimizer.state} == set(before)
    assert all(torch.equal(state["exp_avg"], before[id(p)]) for p, state in optimizer.state.items())


def test_hooks_and_schedulers_are_not_called():
    # GIVEN a step hook and a scheduler, which replaces `step` on the instance
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    weights = copy.deepcopy(model.state_dict())

    memfit.estimate(model, loss, torch.randn(4, 8), optimizer=optimizer, device="t4")

    assert calls == []
    assert scheduler.last_epoch == 0
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


def test_an_optimizer_that_cannot_be_copied_says_so():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.lock = threading.Lock()

    with pytest.raises(BadOptimizer, match=r"can't be copied.*Give a function that takes parameters"):
        memfit.estimate(model, loss, torch.randn(4, 8), optimizer=optimizer, device="t4")


def test_an_optimizer_of_another_model_is_refused():
    optimizer = torch.optim.SGD(make_model().parameters(), lr=0.1)

    with pytest.raises(BadOptimizer, match="4 of the optimizer's 4 parameters are not the model's"):
        memfit.estimate(make_model(), loss, torch.randn(4, 8), optimizer=optimizer, device="t4")


@pytest.mark.parametrize("bad, text", [(3, "int was given"), (lambda p: 3, "returned int")])
def test_something_else_is_refused(bad, text):
    with pytest.raises(BadOptimizer, match=text):
        memfit.estimate(make_model(), loss, torch.randn(4, 8), optimizer=bad, device="t4")


def optimizer_of(model, optimizer):
    copies = ShapeCopies()
    parameters = list(model.parameters())
    with swapped(model, copies):
        return optimizer_for(optimizer, model, copies, parameters), list(model.parameters())


def test_an_instance_is_cloned_with_its_groups_and_without_its_state():
    # GIVEN an optimizer with two groups that has already stepped
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters(), "weight_decay": 0.5}]
    optimizer = torch.optim.Adam(groups, lr=0.2)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()

    # WHEN it is made for the shapes
    clone, shapes = optimizer_of(model, optimizer)

    # THEN groups and options are the same, the parameters are shapes, and the state is fresh
    assert type(clone) is torch.optim.Adam
    assert [(g["lr"], g["weight_decay"]) for g in clone.param_groups] == [(0.1, 0), (0.2, 0.5)]
    assert [id(p) for g in clone.param_groups for p in g["params"]] == [id(p) for p in shapes]
    assert not clone.state
    assert len(optimizer.state) == 4
    assert not any(p.is_meta for g in optimizer.param_groups for p in g["params"])


def test_a_function_gets_the_parameters_that_learn():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].requires_grad_(False)

    made, shapes = optimizer_of(model, torch.optim.AdamW)

    assert [id(p) for p in made.param_groups[0]["params"]] == [id(p) for p in shapes[2:]]


def test_no_optimizer_is_none():
    assert optimizer_of(torch.nn.Linear(2, 2), None)[0] is None


def test_an_optimizer_may_be_given_by_name():
    by_name = memfit.estimate(make_model(), loss, torch.randn(4, 8), optimizer="adamw", device="t4")
    by_class = memfit.estimate(make_model(), loss, torch.randn(4, 8), optimizer=torch.optim.AdamW, device="t4")

    assert by_name.timeline == by_class.timeline
    with pytest.raises(memfit.BadInput, match="optimizer must be one of none, sgd"):
        memfit.estimate(make_model(), loss, torch.randn(4, 8), optimizer="adamm", device="t4")
