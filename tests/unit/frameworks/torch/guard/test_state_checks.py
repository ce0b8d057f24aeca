"""Whatever a tampered checkpoint holds is refused before anything changes, or harmless."""

import copy
import json
import random

import numpy
import pytest
import torch
from torch import nn

import memfit
from memfit.core.errors import MemfitError
from memfit.core.guarding import BadCheckpoint
from memfit.core.tensor_file import TensorFile
from memfit.frameworks.torch.guard import state_checks
from memfit.frameworks.torch.guard.snapshot import RandomState
from tests.unit.frameworks.forged_checkpoints import changed, forge, nodes

DEEP = json.loads("[" * 900 + "]" * 900)
WRONG = ["x", None, -1, 10**30, 10**400, 1.5, True, [], {}, DEEP, ["x"], {"x": 1}]
WRONG += [{"__float__": "nan"}, {"__tensor__": "nope", "dtype": "float32"}, {"__tuple__": [1]}]


class Counter:
    """Something else that a checkpoint holds."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = int(state["count"])


def make(folder):
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    objects = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "scaler": torch.amp.GradScaler("cpu"),
        "counter": Counter(),
    }
    loader = torch.utils.data.DataLoader(
        torch.ones(8, 3), 2, shuffle=True, generator=torch.Generator().manual_seed(1), num_workers=0
    )

    def guard():
        return memfit.Guard(
            model,
            optimizer,
            scheduler=objects["scheduler"],
            checkpoint=folder,
            plan=None,
            options=memfit.GuardOptions(
                scaler=objects["scaler"], state={"counter": objects["counter"]}, checkpoint_every=1000, remember=False
            ),
        )

    return objects, loader, guard


def loss(model, batch):
    return model(batch).square().mean()


def snapshot(objects):
    states = {name: copy.deepcopy(value.state_dict()) for name, value in objects.items()}
    return json.dumps([states, random.getstate()], default=lambda tensor: tensor.tolist()) + str(
        [torch.get_rng_state().sum(), numpy.random.get_state()[1].sum()]
    )


@pytest.fixture
def checkpoint(tmp_path):
    """Of a run in the middle of an epoch."""
    objects, loader, guard = make(tmp_path)
    with guard() as one:
        for number, batch in enumerate(one.batches(loader)):
            one.step(loss, batch)
            if number == 1:
                break
    assert objects["optimizer"].state
    (path,) = tmp_path.glob("step-*")
    return path


def with_header(plain, change):
    """The bytes of a file of tensors whose header is what `change` makes of it."""
    length = int.from_bytes(plain[:8], "little")
    text = json.dumps(change(json.loads(plain[8 : 8 + length]))).encode()
    return len(text).to_bytes(8, "little") + text + plain[8 + length :]


def fuzz(checkpoint, wrongs_of, *, goes_on=True, name="state.json"):
    """How many wrong values were refused, and how many taken, in the tree of a file."""
    plain = (checkpoint / name).read_bytes()
    if name == "state.json":
        tree = json.loads(plain)
    else:
        tree = json.loads(TensorFile(checkpoint / name).metadata["memfit.tree"])

    def forged(wrong_tree):
        text = json.dumps(wrong_tree)
        if name == "state.json":
            return text.encode()
        return with_header(plain, lambda header: {**header, "__metadata__": {"memfit.tree": text}})

    num_refused = num_taken = 0
    for number, path in enumerate(nodes(tree)):
        for wrong in wrongs_of(number):
            forge(checkpoint, name, forged(changed(tree, path, wrong)))
            objects, loader, guard = make(checkpoint.parent)
            before = snapshot(objects)
            try:
                one = guard()
            except MemfitError:
                num_refused += 1
                assert snapshot(objects) == before, (path, wrong)
                continue
            # What is taken can be gone on with; what the data is like is seen when it comes.
            num_taken += 1
            try:
                for batch in one.batches(loader) if goes_on else ():
                    one.step(loss, batch)
            except MemfitError:
                pass
            one._driver._mark = None
            one.close()
    return num_refused, num_taken


def test_one_wrong_value_in_each_place(checkpoint):
    num_refused, num_taken = fuzz(checkpoint, lambda number: [WRONG[number % len(WRONG)]])
    assert num_refused > 2 * num_taken


def test_one_wrong_value_in_each_place_of_a_model_s_tree(checkpoint):
    wrongs = [*WRONG, {"__tensor__": "1.weight", "dtype": "float32"}, {"__dtype__": "x"}]

    def some(number):
        return [wrongs[number * step % len(wrongs)] for step in (1, 3, 5)]

    num_refused, num_taken = fuzz(checkpoint, some, goes_on=False, name="model.safetensors")

    assert num_refused > 2 * num_taken


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (("scheduler", "state", "step_size"), 0),
        (("scaler", "state", "scale"), 1e300),
        (("progress", "state", "attempts", "base", "step_in_backward"), True),
    ],
    ids=["step_size", "scale", "step_in_backward"],
)
def test_values_of_the_right_kind_that_no_step_can_be_taken_with(checkpoint, path, wrong):
    tree = json.loads((checkpoint / "state.json").read_bytes())
    forge(checkpoint, "state.json", json.dumps(changed(tree, path, wrong)).encode())
    objects, _, guard = make(checkpoint.parent)
    before = snapshot(objects)

    with pytest.raises(BadCheckpoint):
        guard()
    assert snapshot(objects) == before


def schedulers():
    kinds = torch.optim.lr_scheduler
    return {
        "step": lambda optimizer: kinds.StepLR(optimizer, 2),
        "one cycle": lambda optimizer: kinds.OneCycleLR(optimizer, 0.1, total_steps=2),
        "lambda": lambda optimizer: kinds.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
        "cyclic": lambda optimizer: kinds.CyclicLR(optimizer, 0.1, 0.2, cycle_momentum=False),
        "cosine": lambda optimizer: kinds.CosineAnnealingLR(optimizer, 2),
        "plateau": kinds.ReduceLROnPlateau,
        "sequence": lambda optimizer: kinds.SequentialLR(
            optimizer, [kinds.ConstantLR(optimizer), kinds.ExponentialLR(optimizer, 0.9)], [1]
        ),
    }


@pytest.mark.parametrize("name", schedulers())
def test_states_of_schedulers_are_tried_out_on_copies(name):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    scheduler = schedulers()[name](optimizer)
    for _ in range(2):
        optimizer.step()
        scheduler.step(*([1.0] if name == "plateau" else []))
    saved = copy.deepcopy(scheduler.state_dict())

    # Also the last state that a schedule has, and without a trace.
    state_checks.check_scheduler(saved, scheduler, "the state")

    assert scheduler.state_dict() == saved
    assert scheduler.optimizer is optimizer


@pytest.mark.slow
def test_every_wrong_value(checkpoint):
    fuzz(checkpoint, lambda number: WRONG, goes_on=False)
    fuzz(checkpoint, lambda number: WRONG, name="model.safetensors")


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "rest.safetensors"])
def test_files_of_tensors_that_are_none(checkpoint, name):
    plain = (checkpoint / name).read_bytes()
    length = int.from_bytes(plain[:8], "little")
    header = json.loads(plain[8 : 8 + length])
    first = next(key for key in header if key != "__metadata__")
    for path in nodes({first: header[first]}):
        for wrong in ["x", None, -1, 10**30, 1.5, [], {}]:
            if changed(header, path, wrong) == header:
                continue
            forge(checkpoint, name, with_header(plain, lambda header: changed(header, path, wrong)))  # noqa: B023
            objects, _, guard = make(checkpoint.parent)
            before = snapshot(objects)
            with pytest.raises(BadCheckpoint):
                guard()
            assert snapshot(objects) == before, (path, wrong)


def test_random_states_are_tried_out():
    good = RandomState.now()
    state_checks.check_random(good)
    for changes in ({"python": (3, (1, 2), None)}, {"torch_cpu": torch.zeros(3)}, {"numpy": ("x",)}, {"numpy": 3}):
        with pytest.raises(BadCheckpoint, match="random numbers is invalid"):
            state_checks.check_random(RandomState(good.states | changes))


def test_states_of_generators_are_tried_out():
    good = {
        "torch": torch.Generator().get_state(),
        "python": random.Random(1).getstate(),
        "numpy": numpy.random.default_rng(1).bit_generator.state,
        "sampler.epoch": 3,
    }
    state_checks.check_generators(good)
    for name, wrong in (("torch", torch.zeros(2)), ("python", (1,)), ("numpy", {}), ("sampler.epoch", -1)):
        with pytest.raises(BadCheckpoint, match=name):
            state_checks.check_generators({**good, name: wrong})
    with pytest.raises(BadCheckpoint, match="generators are malformed"):
        state_checks.check_generators([])


@pytest.mark.parametrize(
    ("saved", "live", "is_like"),
    [
        (1, 0.5, True),
        (torch.tensor(0.1), 0.1, True),
        (True, 0.1, False),
        ([0.1, 0.2], [0.1], False),
        ([1, 2], [], True),
        ([0.1], (0.2,), True),
        (None, True, True),
        (None, 0.1, False),
        ("x", None, True),
        ({"a": "x", "new": 1}, {"a": 1}, False),
        ({"new": 1}, {"a": 1}, True),
        ([{"a": []}], [{"a": "x"}], False),
        (torch.zeros(2), torch.zeros(2), True),
        (torch.zeros(3), torch.zeros(2), False),
    ],
)
def test_states_are_compared_with_the_live_ones(saved, live, is_like):
    if is_like:
        state_checks.check_like(saved, live, "it")
    else:
        with pytest.raises(BadCheckpoint, match=r"^it"):
            state_checks.check_like(saved, live, "it")
