"""A run that is written and read back goes on as if nothing had happened; what doesn't fit changes nothing."""

import copy
import json
import random

import numpy
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from memfit.core.errors import BadInput
from memfit.core.guarding import BadCheckpoint
from memfit.frameworks.torch.guard import state
from memfit.frameworks.torch.guard.state import Parameters


class Small(nn.Module):
    """Convolution, batch norm, dropout, and two layers that share a weight."""

    def __init__(self, width=4):
        super().__init__()
        self.convolution = nn.Conv2d(3, width, 3)
        self.norm = nn.BatchNorm2d(width)
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("nothing", torch.empty(0, 2))

    def forward(self, images):
        values = nn.functional.dropout(self.norm(self.convolution(images)).mean((2, 3)), 0.3, training=self.training)
        return self.second(self.first(values)).square().mean()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adam, fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adam, capturable": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2, history_size=3),
}
SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "multi-step": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "object": lambda o: lr_scheduler.LambdaLR(o, Decay()),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=40),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False, scale_fn=lambda x: 0.5),
    "plateau": lambda o: Plateau(o),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.LambdaLR(o, lambda e: 0.5)], milestones=[3]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


class Decay:
    def __init__(self):
        self.calls = 0

    def __call__(self, epoch):
        self.calls += 1
        return 0.9**self.calls


class Plateau(lr_scheduler.ReduceLROnPlateau):
    """Steps without being told a loss; its best is one of NumPy's numbers, as in many loops."""

    def __init__(self, optimizer):
        super().__init__(optimizer, patience=0)

    def step(self, metrics=None):
        super().step(numpy.float64(1.0))


class Run:
    """All that a loop has."""

    def __init__(self, optimizer="adam", scheduler="step", width=4, seed=0):
        torch.manual_seed(seed)
        # L-BFGS can't take gradients in another layout.
        layout = torch.contiguous_format if optimizer == "lbfgs" else torch.channels_last
        self.model = Small(width).to(memory_format=layout)
        groups = [
            {"params": [self.model.convolution.weight], "lr": 0.02},
            {"params": [p for name, p in self.model.named_parameters() if name != "convolution.weight"]},
        ]
        self.optimizer = OPTIMIZERS[optimizer](list(self.model.parameters()) if optimizer == "lbfgs" else groups)
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)

    @property
    def parts(self):
        names = ("model", "optimizer", "scheduler", "scaler", "ema")
        return {name: getattr(self, name) for name in names}

    def step(self):
        images = torch.randn(4, 3, 6, 6) + random.random() + numpy.random.rand()

        def closure():
            self.optimizer.zero_grad()
            loss = self.model(images)
            loss.backward()
            return loss

        if isinstance(self.optimizer, torch.optim.LBFGS):
            loss = self.optimizer.step(closure)
        else:
            self.optimizer.zero_grad()
            loss = self.model(images)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.scheduler.step()
        self.ema.update_parameters(self.model)
        return loss.item()


def assert_same(ours, theirs, path=""):
    """Equal to the bit, type, and layout in memory."""
    if isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs), path
        assert ours.dtype == theirs.dtype, path
        assert ours.stride() == theirs.stride(), path
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs), path
        for key in ours:
            assert_same(ours[key], theirs[key], f"{path}.{key}")
    elif isinstance(ours, list | tuple):
        assert type(ours) is type(theirs)
        assert len(ours) == len(theirs), path
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(one, other, f"{path}.{index}")
    else:
        assert ours == theirs and type(ours) is type(theirs), path


def assert_same_runs(ours, theirs):
    for name, part in ours.parts.items():
        assert_same(part.state_dict(), theirs.parts[name].state_dict(), name)


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # PyTorch's own sequence of schedulers uses it, up to 2.6
@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [*((name, "step") for name in OPTIMIZERS), *(("momentum", name) for name in SCHEDULERS)],
)
def test_a_run_goes_on_bit_for_bit(tmp_path, optimizer, scheduler):
    # GIVEN a run that is written after some steps and goes on
    run = Run(optimizer, scheduler)
    for _ in range(4):
        run.step()
    state.save(tmp_path, **run.parts, progress={"step": 4, "window": (1, None)})
    losses = [run.step() for _ in range(3)]

    # WHEN another program begins, from other values, and reads that
    fresh = Run(optimizer, scheduler, seed=1)
    progress = state.load(tmp_path, **fresh.parts)

    # THEN it goes the same way
    assert progress == {"step": 4, "window": (1, None)}
    assert [fresh.step() for _ in range(3)] == losses
    assert_same_runs(run, fresh)
    assert fresh.model.first.weight is fresh.model.second.weight


def test_a_live_run_can_be_set_back(tmp_path):
    run = Run("momentum")
    run.step()
    state.save(tmp_path, **run.parts)
    held = copy.deepcopy(run.optimizer.state_dict())
    buffers = [entry["momentum_buffer"] for entry in run.optimizer.state.values()]
    first = run.step()

    state.load(tmp_path, **run.parts)

    assert_same(run.optimizer.state_dict(), held)
    # In place: nothing is made a second time.
    assert all(a["momentum_buffer"] is b for a, b in zip(run.optimizer.state.values(), buffers, strict=True))
    assert run.step() == first


def test_moments_keep_a_type_that_differs_from_the_parameters(tmp_path):
    # PyTorch's own loading would make them what the parameters are.
    model = nn.Linear(3, 3).bfloat16()
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": 3,
            "exp_avg": torch.randn_like(parameter, dtype=torch.float32),
            "exp_avg_sq": torch.randint(0, 255, parameter.shape, dtype=torch.uint8),
            "exp_avg_sq_scales": torch.randn(1),
        }
    state.save(tmp_path, model=model, optimizer=optimizer)
    fresh = torch.optim.Adam(model.parameters())
    state.load(tmp_path, model=model, optimizer=fresh)

    for parameter in model.parameters():
        assert fresh.state[parameter]["exp_avg"].dtype is torch.float32
        assert fresh.state[parameter]["exp_avg_sq"].dtype is torch.uint8
        assert torch.equal(fresh.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_wrappers_leave_no_trace(tmp_path):
    # GIVEN a compiled model with a compiled part
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1] = torch.compile(model[1], backend="eager")
    state.save(tmp_path, model=torch.compile(model, backend="eager"))

    # THEN names are the user's own, and the plain model takes the values, inside DataParallel, too
    assert sorted(safetensors.torch.load_file(tmp_path / "model.safetensors")) == [
        "0.bias",
        "0.weight",
        "1.bias",
        "1.weight",
    ]
    fresh = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    state.load(tmp_path, model=nn.DataParallel(fresh))
    assert torch.equal(fresh[1].weight, model[1].weight)


def test_shared_tensors_are_stored_once(tmp_path):
    run = Run()
    state.save(tmp_path, model=run.model)

    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert "first.weight" in stored
    assert "second.weight" not in stored


def test_modules_with_a_state_of_their_own(tmp_path):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = ["a"]
            self.layer = nn.Linear(2, 2)

        def get_extra_state(self):
            return {"words": self.words, "tensor": torch.ones(2)}

        def set_extra_state(self, given):
            self.words = given["words"]

    odd = Odd()
    odd.words = ["b", "c"]
    state.save(tmp_path, model=nn.Sequential(odd))
    fresh = nn.Sequential(Odd())
    state.load(tmp_path, model=fresh)

    assert fresh[0].words == ["b", "c"]
    assert torch.equal(fresh[0].layer.weight, odd.layer.weight)


class Average:
    """A moving average that is no module."""

    def __init__(self, model):
        self.shadow = [parameter.detach().clone() for parameter in model.parameters()]

    def state_dict(self):
        return {"decay": 0.9, "shadow": self.shadow}

    def load_state_dict(self, given):
        self.shadow = given["shadow"]


def test_an_average_that_is_no_module(tmp_path):
    model = nn.Linear(2, 2)
    average = Average(model)
    state.save(tmp_path, model=model, ema=average)
    fresh = Average(nn.Linear(2, 2))
    state.load(tmp_path, model=nn.Linear(2, 2), ema=fresh)

    assert_same(fresh.shadow, average.shadow)


class Wrapped(torch.optim.SGD):
    """An optimizer with a way of its own to save and load."""

    extra = 0

    def state_dict(self):
        return {**super().state_dict(), "extra": self.extra}

    def load_state_dict(self, given):
        given = dict(given)
        self.extra = given.pop("extra")
        super().load_state_dict(given)


def test_optimizers_with_a_way_of_their_own(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = Wrapped(model.parameters(), lr=0.5, momentum=0.9)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    optimizer.extra = 7
    state.save(tmp_path, model=model, optimizer=optimizer)
    fresh = Wrapped(model.parameters(), lr=0.1, momentum=0.9)
    state.load(tmp_path, model=model, optimizer=fresh)

    assert fresh.extra == 7
    assert_same(fresh.state_dict(), optimizer.state_dict())


def test_state_for_no_parameter_and_learning_rates_in_tensors(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.25), foreach=False)
    optimizer.state["all"] = {"calls": 3}
    state.save(tmp_path, model=model, optimizer=optimizer)
    rate = torch.tensor(0.5)
    fresh = torch.optim.Adam(model.parameters(), lr=rate, foreach=False)
    state.load(tmp_path, model=model, optimizer=fresh)

    assert fresh.state["all"] == {"calls": 3}
    # A captured graph reads from this tensor.
    assert fresh.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25


def test_random_states_come_back(tmp_path):
    random.seed(4)
    random.gauss(0, 1)
    numpy.random.seed(5)
    numpy.random.randn()
    model = nn.Linear(2, 2)
    state.save(tmp_path, model=model)

    def draw():
        return random.gauss(0, 1), random.random(), numpy.random.randn(), torch.randn(3).tolist()

    expected = draw()
    draw()
    state.load(tmp_path, model=model)

    assert draw() == expected


# What doesn't fit.


def snapshot(run):
    return copy.deepcopy({name: part.state_dict() for name, part in run.parts.items()}), torch.get_rng_state()


@pytest.fixture
def saved(tmp_path):
    run = Run()
    run.step()
    state.save(tmp_path, **run.parts)
    return tmp_path


ANOTHER = {
    "width": (
        lambda: Run(width=5),
        r"is of another model: 'convolution\.weight' is float32 \[4, 3, 3, 3\] in it and float32 \[5, 3, 3, 3\] here",
    ),
    "type": (
        lambda: with_model(lambda model: model.first.double()),
        r"'first\.weight' is float32 \[4, 4\] in it and float64 \[4, 4\] here",
    ),
    "more": (
        lambda: with_model(lambda model: model.add_module("head", nn.Linear(4, 2))),
        r"'head\.weight', float32 \[2, 4\] here, isn't in it",
    ),
    "fewer": (
        lambda: with_model(lambda model: delattr(model, "norm")),
        r"'norm\.weight', float32 \[4\] in it, isn't in the model here",
    ),
    "optimizer": (
        lambda: Run("momentum"),
        r"of another optimizer: a torch\.optim\.adam\.Adam, and a torch\.optim\.sgd",
    ),
    "scheduler": (lambda: Run(scheduler="cosine"), r"of another scheduler: a .*StepLR, and a .*CosineAnnealingLR"),
    "groups": (lambda: with_groups(1), "it has 2 parameter groups, and 1 are here"),
    "group sizes": (lambda: with_groups(2), "its parameter group 0 has 1 parameters, and 2 are here"),
}


def with_model(change):
    run = Run()
    change(run.model)
    return run


def with_groups(number):
    run = Run()
    parameters = list(run.model.parameters())
    groups = [parameters] if number == 1 else [parameters[:2], parameters[2:]]
    run.optimizer = torch.optim.Adam([{"params": group} for group in groups], amsgrad=True)
    run.scheduler = lr_scheduler.StepLR(run.optimizer, 2)
    return run


@pytest.mark.parametrize("name", ANOTHER)
def test_another_run_is_refused_and_nothing_changes(saved, name):
    make, message = ANOTHER[name]
    run = make()
    before = snapshot(run)

    with pytest.raises(BadCheckpoint, match=message):
        state.load(saved, **run.parts)

    assert_same(snapshot(run), before)


@pytest.mark.parametrize("part", ["optimizer", "scheduler", "scaler", "ema"])
def test_a_part_too_many_or_too_few_is_refused(saved, tmp_path_factory, part):
    run = Run()
    with pytest.raises(BadCheckpoint, match=r"holds a .*, and none was given"):
        state.load(saved, **{**run.parts, part: None})

    other = tmp_path_factory.mktemp("other")
    state.save(other, **{**run.parts, part: None})
    with pytest.raises(BadCheckpoint, match=r"holds no .* was given"):
        state.load(other, **run.parts)


def test_a_part_without_a_state_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"the scheduler, a builtins\.object, has no state_dict"):
        state.save(tmp_path, model=nn.Linear(1, 1), scheduler=object())


def test_what_is_no_plain_data_is_refused_by_name(tmp_path):
    with pytest.raises(BadCheckpoint, match=r"^progress\.extra\.0 is a builtins\.object"):
        state.save(tmp_path, model=nn.Linear(1, 1), progress={"extra": [object()]})


def test_a_scaler_that_is_switched_off_takes_only_its_own(tmp_path):
    model = nn.Linear(1, 1)
    off = torch.amp.GradScaler("cpu", enabled=False)
    state.save(tmp_path, model=model, scaler=off)
    state.load(tmp_path, model=model, scaler=off)

    with pytest.raises(BadCheckpoint, match="the state of the scaler"):
        state.load(tmp_path, model=model, scaler=torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is no JSON"),
        (b"[]", "isn't the state of a run"),
        (b'{"format": "memfit.state", "model": {}, "version": 9}', "has version 9, and this memfit reads version 2"),
        (b'{"format": "memfit.state", "model": {}, "version": 2}', "is incomplete or malformed"),
        (b'{"format": "memfit.state", "model": {"entries": 3}, "version": 2}', "is incomplete or malformed"),
    ],
)
def test_a_tree_that_was_not_made_here_is_refused(tmp_path, content, message):
    model = nn.Linear(1, 1)
    state.save(tmp_path, model=model)
    (tmp_path / "state.json").write_bytes(content)

    with pytest.raises(BadCheckpoint, match=message):
        state.load(tmp_path, model=model)


def test_files_that_are_gone_are_refused(saved):
    for name in ("optimizer.safetensors", "ema.safetensors", "rest.safetensors", "model.safetensors", "state.json"):
        (saved / name).unlink()
        run = Run()
        with pytest.raises(BadCheckpoint, match="can't be read"):
            state.load(saved, **run.parts)


def test_nothing_is_pickled(saved):
    assert sorted(path.suffix for path in saved.iterdir()) == [".json", *[".safetensors"] * 4]
    json.loads((saved / "state.json").read_text())
    for path in saved.glob("*.safetensors"):
        safetensors.torch.load_file(path)


# The best parameters.


def test_parameters_are_kept_on_disk_and_in_memory(tmp_path):
    run = Run()
    parameters = Parameters(run.model)
    expected = copy.deepcopy(run.model.state_dict())
    parameters.write(tmp_path)
    copies = parameters.copy()
    assert sorted(copies) == sorted(set(expected) - {"second.weight"})
    for put in (lambda: parameters.read(tmp_path), lambda: parameters.put(copies)):
        run.step()
        assert not torch.equal(run.model.first.weight, expected["first.weight"])
        put()
        assert_same(run.model.state_dict(), expected)
    other = Small()
    parameters.put(copies, other)
    assert torch.equal(other.first.weight, expected["first.weight"])


def test_copies_are_made_into_earlier_ones():
    run = Run()
    parameters = Parameters(run.model)
    first = parameters.copy()
    addresses = {name: copy.data_ptr() for name, copy in first.items()}
    run.step()
    second = parameters.copy(first)

    assert {name: copy.data_ptr() for name, copy in second.items()} == addresses
    assert torch.equal(second["first.weight"], run.model.first.weight)


def test_parameters_of_another_model_are_refused(tmp_path):
    parameters = Parameters(Small())
    parameters.write(tmp_path)

    with pytest.raises(BadCheckpoint, match="another model"):
        parameters.read(tmp_path, Small(width=5))
    with pytest.raises(BadCheckpoint, match="kept in memory are of another model"):
        parameters.put(parameters.copy(), Small(width=5))


@pytest.mark.gpu
def test_a_run_moves_between_devices(tmp_path):
    model = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4, device="cuda")).sum().backward()
    optimizer.step()
    state.save(tmp_path, model=model, optimizer=optimizer)
    here = nn.Linear(4, 4)
    fresh = torch.optim.Adam(here.parameters())
    state.load(tmp_path, model=here, optimizer=fresh)

    assert torch.equal(here.weight, model.weight.cpu())
    assert fresh.state[here.weight]["exp_avg"].device.type == "cpu"
