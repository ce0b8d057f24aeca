import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.frameworks.torch.guard.update import UpdateRoom, is_of_torch, rooms_of_update
from tests.unit.frameworks.torch.guard.faults import differences, faults, from_now_on, state_of

LARGE = 256 * 256 * 4
SMALL = 256 * 4


def make(kind, num_steps=0, **options):
    parameters = [nn.Parameter(torch.ones(256, 256)) for _ in range(3)]
    if kind is not torch.optim.Muon:
        parameters.append(nn.Parameter(torch.ones(256)))
    optimizer = kind(parameters, **options)
    for _ in range(num_steps + 1):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.1)
        if num_steps:
            optimizer.step()
    return optimizer


def total(optimizer):
    return sum(sum(room.pieces_bytes) for room in rooms_of_update(optimizer))


STATE = 3 * LARGE + SMALL


@pytest.mark.parametrize(
    ("kind", "options", "first", "later"),
    [
        (torch.optim.SGD, {"lr": 0.1}, 0, 0),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, STATE, 0),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}, STATE, 0),
        (torch.optim.Adam, {"foreach": True}, 3 * STATE, STATE),
        (torch.optim.AdamW, {"fused": True}, 2 * STATE, 0),
        (torch.optim.AdamW, {"fused": True, "amsgrad": True}, 3 * STATE, 0),
        (torch.optim.Adagrad, {}, 2 * LARGE, 2 * LARGE),
    ],
)
def test_what_an_update_takes(kind, options, first, later):
    assert total(make(kind, **options)) == pytest.approx(first, abs=100)
    assert total(make(kind, 1, **options)) == pytest.approx(later, abs=100)


@pytest.mark.parametrize(
    "name", ["Adadelta", "Adafactor", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"]
)
@pytest.mark.parametrize("num_steps", [0, 1], ids=["first", "later"])
def test_the_real_update_takes_no_more(name, num_steps):
    optimizer = make(getattr(torch.optim, name), num_steps)
    foreseen = total(optimizer)
    assert foreseen
    before = state_of(optimizer)
    assert not differences(before, state_of(optimizer))
    # The allocator's own count, of a single thread.
    with torch.profiler.profile(profile_memory=True) as profile:
        optimizer.step()
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert peak == pytest.approx(foreseen, rel=0.02)


def test_the_optimizer_is_left_alone():
    optimizer = make(torch.optim.Adam, 1)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook was called"))
    before, own = state_of(optimizer), dict(vars(optimizer))
    generator_state = torch.get_rng_state()
    assert rooms_of_update(optimizer)
    assert not differences(before, state_of(optimizer))
    assert vars(optimizer).keys() == own.keys()
    assert torch.equal(torch.get_rng_state(), generator_state)


def test_only_parameters_with_a_gradient_count():
    optimizer = make(torch.optim.Adam)
    for parameter in optimizer.param_groups[0]["params"][:3]:
        parameter.grad = None
    assert total(optimizer) == pytest.approx(4 * SMALL, abs=2 * SMALL)


def test_several_groups_take_turns():
    first, second = nn.Parameter(torch.ones(256, 256)), nn.Parameter(torch.ones(256, 256))
    optimizer = torch.optim.Adam([{"params": [first], "foreach": True}, {"params": [second], "lr": 0.2}])
    first.grad, second.grad = torch.ones(256, 256), torch.ones(256, 256)
    assert 5 * LARGE < total(optimizer) < 8 * LARGE


def test_a_learning_rate_that_is_a_tensor():
    assert total(make(torch.optim.Adam, lr=torch.tensor(0.1))) > 2 * STATE


def test_what_cannot_be_foreseen_is_left_out():
    embedding = nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    assert rooms_of_update(torch.optim.SparseAdam(embedding.parameters())) == ()
    assert rooms_of_update(torch.optim.SGD(embedding.parameters())) == ()

    class Own(torch.optim.SGD):
        def step(self, closure=None):
            pytest.fail("it was run")

    assert rooms_of_update(make(Own)) == ()
    assert rooms_of_update(make(torch.optim.LBFGS)) == ()
    assert is_of_torch(make(torch.optim.Adafactor))


def test_running_out_while_looking_ahead_is_not_hidden():
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise MemoryError

    Failing.__module__ = "torch.optim.failing"

    with pytest.raises(MemoryError):
        rooms_of_update(make(Failing))


def test_room_is_looked_for_in_one_piece_and_then_in_several():
    class Sizes(TorchDispatchMode):
        def __init__(self, largest):
            super().__init__()
            self.largest, self.sizes = largest, []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.sizes.append(args[0][0])
            if args[0][0] > self.largest:
                raise RuntimeError("CUDA out of memory")
            return func(*args, **(kwargs or {}))

    room = UpdateRoom(torch.device("cpu"), (100, 50, 30))
    with Sizes(1000) as one:
        room.probe()
    with Sizes(120) as several:
        room.probe()
    with Sizes(60), pytest.raises(RuntimeError, match="out of memory"):
        room.probe()
    assert one.sizes == [180]
    assert several.sizes == [180, 100, 50, 30]
    with faults(from_now_on(0)), pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        room.probe()


def test_other_errors_of_a_probe_go_on():
    with pytest.raises(RuntimeError, match="negative"):
        UpdateRoom(torch.device("cpu"), (-1,)).probe()
