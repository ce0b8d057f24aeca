import copy

import numpy as np
import pytest
import torch
from torch import nn

import memfit
from memfit.core.timeline import Category
from memfit.core.units import MIB
from memfit.frameworks.torch.shapes.device_labels import DeviceLabels
from memfit.frameworks.torch.simulation.device_view import DeviceView
from tests.unit.frameworks.torch.builders import HOST, observe, run
from tests.unit.frameworks.torch.sessions import codes, made, really, running

DATA = torch.empty(4, 6)


def unreported(code, text):
    raise AssertionError(f"{code}: {text}")


@pytest.mark.parametrize(
    ("ask", "on_cuda", "on_host"),
    [
        (lambda x: str(x.device), "cuda:0", "cpu"),
        (lambda x: x.device.type, "cuda", "cpu"),
        (lambda x: x.is_cuda, True, False),
        (lambda x: x.is_cpu, False, True),
        (lambda x: x.is_meta, False, False),
        (lambda x: x.get_device(), 0, -1),
        (lambda x: x.sin().device.type, "cuda", "cpu"),
        (lambda x: x.new_zeros(3).device.type, "cuda", "cpu"),
        (lambda x: torch.zeros(3).to(x).device.type, "cuda", "cpu"),
        (lambda x: torch.zeros(3).type_as(x).device.type, "cuda", "cpu"),
        (lambda x: torch.zeros(3, device=x.device).device.type, "cuda", "cpu"),
        (lambda x: torch.tensor([1], device=x.device).device.type, "cuda", "cpu"),
        (lambda x: torch.zeros(3).device.type, "cpu", "cpu"),
        (lambda x: x.cpu().device.type, "cpu", "cpu"),
        (lambda x: x.to("cpu").device.type, "cpu" if torch.cuda.is_available() else "cuda", "cpu"),
        (lambda x: x.to(torch.float16).device.type, "cuda", "cpu"),
        (lambda x: x.to(device="cpu", dtype=torch.float16).dtype, torch.float16, torch.float16),
        (lambda x: x.is_pinned(), False, False),
        (lambda x: x.pin_memory().shape, (4, 6), (4, 6)),
    ],
)
def test_what_the_users_code_sees(ask, on_cuda, on_host):
    assert observe(ask, DATA)[0] == on_cuda
    assert observe(ask, DATA, device=HOST)[0] == on_host


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda"), torch.device("cuda", 0)], ids=str)
def test_every_way_to_name_the_device(device):
    def work(x):
        moved = torch.zeros(3).to(device)
        made = torch.zeros(3, device=device)
        return moved.is_cuda, made.is_cuda, torch.zeros(3).cuda(0).is_cuda

    assert observe(work, DATA)[0] == (True, True, True)


def test_moving_to_where_it_is_copies_nothing():
    assert observe(lambda x: x.to(x.device) is x and x.cuda() is x, DATA)[0]


def test_a_model_made_in_the_loss_is_on_the_device():
    def work(x):
        layer = nn.Linear(6, 2).to(x.device)
        return layer(x).is_cuda, next(layer.parameters()).is_cuda

    assert observe(work, DATA)[0] == (True, True)


def test_a_device_context_makes_tensors_there():
    def work(x):
        with torch.device("cuda"):
            return torch.zeros(3).is_cuda, torch.arange(3).is_cuda

    assert observe(work, DATA)[0] == (True, True)


def test_parameters_show_the_device():
    seen = []

    def loss(model, batch):
        seen.append((model.weight.device.type, model.weight.is_cuda, model.weight.requires_grad))
        return model(batch).sum()

    run(nn.Linear(6, 2), DATA, loss=loss)

    assert seen == [("cuda", True, True)]


@pytest.mark.parametrize(
    ("make", "shape", "dtype"),
    [
        (lambda x: torch.tensor([[1, 2]], device="cuda"), (1, 2), torch.int64),
        (lambda x: torch.tensor(1.5, device="cuda"), (), torch.float32),
        (lambda x: torch.tensor([1], dtype=torch.float16, device="cuda"), (1,), torch.float16),
        (lambda x: torch.as_tensor([1.0, 2.0], device="cuda"), (2,), torch.float32),
        (lambda x: torch.as_tensor(x, dtype=torch.float16), (4, 6), torch.float16),
        (lambda x: x.new_tensor([1, 2, 3]), (3,), torch.float32),
        (lambda x: x.new_tensor([1, 2, 3], dtype=torch.int32), (3,), torch.int32),
    ],
)
def test_tensors_from_data(make, shape, dtype):
    def work(x):
        made = make(x)
        return tuple(made.shape), made.dtype, made.is_cuda

    assert observe(work, DATA)[0] == (shape, dtype, True)


def test_a_tensor_from_data_may_require_a_gradient():
    def work(x):
        made = torch.tensor([1.0], device="cuda", requires_grad=True)
        return made.requires_grad, made.is_leaf

    assert observe(work, DATA)[0] == (True, True)


def test_real_tensors_are_shown_as_they_are():
    real = torch.ones(3)

    def work(x):
        return real.device.type, real.is_cuda, real.is_cpu, real.get_device(), f"{real.sum():.1f}", real.tolist()

    assert observe(work, DATA)[0] == ("cpu", False, True, -1, "3.0", [1.0, 1.0, 1.0])


def test_where_devices_really_are():
    look = DeviceView(DeviceLabels(torch.device("cuda", 0)), unreported)

    assert look.place("cuda:0") == look.place(0) == look.place("cuda") == torch.device("cuda", 0)
    assert look.place("cuda:1") == torch.device("cuda", 1)
    assert look.place("meta") == torch.device("meta")
    assert look.place("cpu") is None
    assert DeviceView(DeviceLabels(torch.device("cpu")), unreported).place("cpu") == torch.device("cpu")


def test_numbers_stay_real_on_the_host_only_while_asked():
    look = DeviceView(DeviceLabels(torch.device("cpu")), unreported)
    with look:
        with look.keeping_scalars():
            kept = torch.tensor(3.0), torch.zeros(()), torch.ones((), device="cpu")
        made = torch.tensor(3.0)

    assert [float(value) for value in kept] == [3.0, 0.0, 1.0]
    assert made.is_meta


@pytest.mark.parametrize("name", ["NAdam", "RAdam", "Adamax", "ASGD", "Rprop", "Adadelta", "RMSprop"])
@pytest.mark.parametrize("device", [None, HOST], ids=["cuda", "host"])
def test_optimizers_that_compute_with_counters(name, device):
    options = {} if device is None else {"device": device}

    traced = run(nn.Linear(6, 2), DATA, optimizer=getattr(torch.optim, name), **options)

    assert traced.notes == ()


def test_to_the_device_of_a_machine_without_a_gpu_stays_on_the_simulated_one():
    # GIVEN a step written for any machine, on one without a GPU
    device = "cuda" if torch.cuda.is_available() else "cpu"
    seen = []

    def loss(model, batch):
        batch = batch.to(device)
        seen.append(batch.is_cuda)
        return model(batch).mean()

    # WHEN it is estimated for a GPU
    estimate = memfit.estimate(torch.nn.Linear(4, 4), loss, torch.randn(2, 4), device="t4")

    # THEN the batch is on that GPU, and a note says what was assumed
    assert all(seen)
    assert [note.code for note in estimate.notes] == ([] if torch.cuda.is_available() else ["kept-on-device"])


@pytest.fixture
def session():
    """A program on two devices."""
    with running(count=2) as session:
        yield session


def held(session):
    return session.memory.allocated_bytes


# Parameters that move


def test_a_parameter_that_moves_stays_the_same_object(session):
    layer = nn.Linear(4, 4)
    weight, bias = layer.weight, layer.bias
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer.to("cuda")

    # What holds the parameter, such as an optimizer made before the move, sees it there.
    assert layer.weight is weight
    assert optimizer.param_groups[0]["params"][0] is weight
    assert (weight.is_cuda, weight.requires_grad, weight.is_leaf, type(weight)) == (True, True, True, nn.Parameter)
    layer(torch.zeros(2, 4).cuda()).sum().backward()
    assert weight.grad.is_cuda
    optimizer.step()
    assert bias.is_cuda


def test_a_parameter_moves_with_its_gradient(session):
    layer = nn.Linear(4, 4)
    layer(torch.ones(2, 4)).sum().backward()
    layer.cuda()

    assert layer.weight.grad.is_cuda
    assert layer.weight.grad.shape == (4, 4)


def test_a_parameter_comes_back_as_the_same_object(session):
    layer = nn.Linear(4, 4)
    weight = layer.weight
    layer.cuda()
    before = held(session)
    layer.cpu()

    assert layer.weight is weight
    assert really(weight) == "cpu"
    assert (before, held(session)) == (1024, 0)


def test_a_parameter_may_get_other_data_on_the_device(session):
    layer = nn.Linear(4, 4).cuda()
    weight = layer.weight
    layer.half()
    assert layer.weight is weight
    assert (weight.dtype, weight.is_cuda) == (torch.float16, True)
    weight.data = torch.zeros(8, 8, device="cuda")
    assert weight.shape == (8, 8)
    weight.data = torch.ones(2, 2)
    assert (weight.shape, really(weight), weight.sum().item()) == ((2, 2), "cpu", 4.0)


def test_plain_tensors_may_get_data_elsewhere(session):
    tensor = torch.zeros(4)
    tensor.data = tensor.data.cuda()

    assert tensor.is_cuda


def test_others_hear_of_parameters_that_move():
    heard = []
    labels = DeviceLabels(torch.device("cuda", 0))
    look = DeviceView(labels, unreported, knows_device=True)
    look.on_parameter = lambda parameter: heard.append(("there", parameter))
    look.on_departure = lambda parameter, before: heard.append(("was", before))
    weight = nn.Parameter(torch.ones(3))
    moved = torch.empty(3, device="meta")
    with look:
        weight.data = moved

    (was, before), (there, parameter) = heard
    assert (was, there) == ("was", "there")
    assert parameter is weight
    assert before.tolist() == [1, 1, 1]
    assert weight.is_meta


# Old names of types


def test_the_name_of_a_type_on_the_device(session):
    assert torch.zeros(2, device="cuda").type() == "torch.cuda.FloatTensor"
    assert torch.zeros(2, dtype=torch.int64, device="cuda").type() == "torch.cuda.LongTensor"
    assert torch.zeros(2).type() == "torch.FloatTensor"


def test_a_type_names_a_device_as_well(session):
    host = torch.ones(2)

    assert host.type("torch.cuda.HalfTensor").dtype is torch.float16
    assert host.type("torch.cuda.HalfTensor").is_cuda
    assert host.type(torch.cuda.FloatTensor).is_cuda
    assert host.type(torch.float64).type() == "torch.DoubleTensor"
    there = host.cuda()
    assert there.type("torch.cuda.FloatTensor") is there
    assert really(there.type("torch.FloatTensor")) == "cpu"
    assert there.type(torch.LongTensor).tolist() == [1, 1]
    assert there.type(dtype=torch.float16).is_cuda


# What is printed


def test_how_tensors_are_printed(session):
    there = torch.zeros(2, 3, device="cuda")
    layer = nn.Linear(3, 1).cuda()
    out = layer(there)

    assert repr(there) == str(there) == "tensor(..., device='cuda:0', size=(2, 3))"
    assert repr(torch.zeros(2, device="cuda:1", dtype=torch.float16)) == (
        "tensor(..., device='cuda:1', size=(2,), dtype=torch.float16)"
    )
    assert repr(out.sum()) == "tensor(1.0, device='cuda:0', grad_fn=<SumBackward0>)"
    assert repr(torch.tensor(3, device="cuda")) == "tensor(3, device='cuda:0')"
    assert repr(there.requires_grad_()).endswith("requires_grad=True)")
    assert repr(layer.bias).startswith("Parameter containing:\ntensor(..., device='cuda:0', size=(1,)")
    assert f"{out.sum():.2f}" == "1.00"
    assert f"{there}" == repr(there)
    assert repr(torch.ones(2)) == "tensor([1., 1.])"
    assert repr(layer) == "Linear(in_features=3, out_features=1, bias=True)"
    assert "cuda:0" in repr(layer.state_dict())


# Values


def test_lists_of_values(session):
    assert torch.tensor([[1, 2], [3, 4]], device="cuda").tolist() == [[1, 2], [3, 4]]
    assert torch.tensor(2.5, device="cuda").tolist() == 2.5
    assert torch.randn(2, 2, device="cuda").tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert torch.randint(9, (2,), device="cuda").tolist() == [0, 0]
    assert torch.ones(2).tolist() == [1, 1]


def test_no_array_of_a_tensor_on_the_device(session):
    there = torch.zeros(3, device="cuda")

    for convert in (lambda: there.numpy(), lambda: np.asarray(there), lambda: np.array([there, there])):
        with pytest.raises(TypeError, match=r"can't convert cuda:0 device type tensor to numpy.*Use Tensor\.cpu\(\)"):
            convert()
    assert there.cpu().numpy().tolist() == [0, 0, 0]
    assert np.asarray(torch.ones(2)).tolist() == [1, 1]


def test_numbers_among_data_are_read(session):
    loss = torch.tensor(2.0, device="cuda")
    made = torch.tensor([loss, 1.0])
    there = torch.tensor([loss, 1.0], device="cuda")

    assert (really(made), made.tolist()) == ("cpu", [2.0, 1.0])
    assert (there.is_cuda, there.tolist()) == (True, [2.0, 1.0])


# Copies


def test_a_deep_copy_is_on_the_device_and_takes_memory(session):
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)).cuda()
    before = held(session)
    twin = copy.deepcopy(model)

    assert held(session) == 2 * before
    assert all(p.is_cuda and p.requires_grad for p in twin.parameters())
    assert all(b.is_cuda for b in twin.buffers())
    assert {p.data_ptr() for p in twin.parameters()}.isdisjoint({p.data_ptr() for p in model.parameters()})
    assert [type(p) for p in twin.parameters()] == [nn.Parameter] * 4


def test_a_deep_copy_keeps_ties_and_elsewhere(session):
    first = torch.zeros(4, device="cuda:1")
    bare = torch.zeros(4, device="meta")
    copied, again, still_bare = copy.deepcopy([first, first, bare])

    assert copied is again
    assert copied.device == torch.device("cuda", 1)
    assert still_bare.is_meta
    assert held(session) == 0


def test_clones_and_copies_of_state_are_on_the_device(session):
    model = nn.Linear(4, 4).cuda()
    state = {name: tensor.clone().detach() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)
    fresh = nn.Linear(4, 4)
    fresh.load_state_dict(state)

    assert all(tensor.is_cuda for tensor in state.values())
    assert really(fresh.weight) == "cpu"


# Devices


def test_a_default_device_makes_tensors_there(session):
    torch.set_default_device("cuda")
    try:
        assert torch.zeros(2).is_cuda
        assert torch.tensor([1.0]).is_cuda
        assert nn.Linear(2, 2).weight.is_cuda
        assert torch.randn(2).device == torch.get_default_device() == torch.device("cuda", 0)
        assert really(torch.zeros(2, device="cpu")) == "cpu"
    finally:
        torch.set_default_device(None)
    assert really(torch.zeros(2)) == "cpu"


def test_the_default_device_ends_with_the_session():
    with running():
        torch.set_default_device("cuda")
    assert torch.zeros(2).device == torch.get_default_device() == torch.device("cpu")


def test_a_device_as_context(session):
    with torch.device("cuda"):
        made = nn.Linear(4, 4)
        assert torch.arange(3).is_cuda
        assert really(torch.zeros(3, device="cpu")) == "cpu"

    assert made.weight.is_cuda
    assert really(torch.zeros(3)) == "cpu"


def test_a_second_device_is_another_place(session):
    second = torch.zeros(4, device="cuda:1")

    assert str(second.device) == "cuda:1"
    assert (second.is_cuda, second.get_device(), second.is_cpu) == (True, 1, False)
    assert (second + 1).device == second[1:].device == torch.empty_like(second).device == second.device
    assert second.new_zeros(3).device == second.device
    assert second.to("cuda:0").device == torch.device("cuda", 0)
    assert second.cuda(0).get_device() == 0
    assert second.to(torch.zeros(1, device="cuda:1")).device == second.device
    assert really(second.cpu()) == "cpu"
    assert torch.zeros(4).to(1).device == second.device


def test_the_memory_is_that_of_the_first_device(session):
    kept = torch.zeros(1000, device="cuda:1")
    more = kept * 2
    assert held(session) == 0
    moved = more.to("cuda:0")

    assert held(session) == 4096
    assert moved.device.index == 0


def test_tensors_are_carried_between_devices_with_their_gradients(session):
    # GIVEN a model whose halves are on two devices
    first = torch.randn(4, 4, device="cuda:0", requires_grad=True)
    second = torch.randn(4, 4, device="cuda:1", requires_grad=True)

    # WHEN what the one makes goes to the other and back
    there = (first * 2).to("cuda:1")
    back = (there * second).to("cuda:0", torch.float16)
    (back * back).sum().backward()

    # THEN each has a gradient where it is
    assert [str(t.device) for t in (there, back, first.grad, second.grad)] == ["cuda:1", "cuda:0", "cuda:0", "cuda:1"]
    assert [t.dtype for t in (back, first.grad, second.grad)] == [torch.float16, torch.float32, torch.float32]
    # Only those of the first device take its memory.
    blocks = [block.size_bytes for block in made(session)]
    assert blocks.count(4 * 4 * 2) >= 2
    assert held(session) < 5 * 512 + 1


def test_a_copy_that_was_carried_needs_no_gradient_where_none_is_asked_for(session):
    there = torch.zeros(4, device="cuda:0").to("cuda:1")

    assert (there.requires_grad, there.grad_fn) == (False, None)


def test_devices_do_not_mix(session):
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cuda:1"):
        torch.zeros(4, device="cuda:0") + torch.zeros(4, device="cuda:1")


def test_a_device_that_is_not_there(session):
    for ask in (
        lambda: torch.zeros(2, device="cuda:2"),
        lambda: torch.zeros(2).to("cuda:2"),
        lambda: torch.ones(1).cuda(5),
    ):
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            ask()


def test_tensors_meant_for_the_meta_device_are_there(session):
    bare = torch.zeros(1000, device="meta")
    model = nn.Linear(10, 10, device="meta")

    assert (bare.is_meta, bare.is_cuda, bare.device.type) == (True, False, "meta")
    assert (bare * 2).is_meta
    assert model(torch.zeros(2, 10, device="meta")).is_meta
    assert held(session) == 0
    assert codes(session) == []


def test_a_model_made_on_the_meta_device_comes_to_the_device_empty(session):
    with torch.device("meta"):
        model = nn.Linear(10, 10)
    assert model.weight.is_meta
    model.to_empty(device="cuda")

    assert model.weight.is_cuda
    assert held(session) == 512 + 512
    model(torch.zeros(2, 10).cuda())
    assert sum(block.size_bytes for block in made(session, category=Category.PARAMETER)) == 440


def test_a_tensor_put_somewhere():
    look = DeviceView(DeviceLabels(torch.device("cuda", 0)), unreported)
    real, bare = torch.ones(2, 3).t(), torch.empty(4, device="meta")

    for tensor in (real, bare):
        put = look.put(tensor, "cuda")
        assert put.is_meta
        assert put is not tensor
        assert (put.shape, put.stride(), put.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)


# Modes inside of PyTorch's own functions


def test_it_can_be_switched_on_again_inside_of_a_function():
    # GIVEN a mode that is off, as inside of functions that it handles
    look = DeviceView(DeviceLabels(torch.device("cuda", 0)), unreported)
    tensor = torch.empty(2, device="meta")
    seen = []
    with look:
        with torch._C.DisableTorchFunction():
            seen.append(tensor.is_cuda)
            with look.again():
                seen.append(tensor.is_cuda)
            seen.append(tensor.is_cuda)
        with look.again():
            seen.append(tensor.is_cuda)
        assert torch._C._len_torch_function_stack() == 1

    # WHEN it was never on, it is on inside alone
    with look.again():
        seen.append(tensor.is_cuda)
    seen.append(tensor.is_cuda)

    assert seen == [False, True, False, True, True, False]


def test_it_is_off_again_after_an_error():
    look = DeviceView(DeviceLabels(torch.device("cuda", 0)), unreported)
    with pytest.raises(KeyError), look.again():
        raise KeyError

    assert torch._C._len_torch_function_stack() == 0


def test_devices_by_number(session):
    assert torch.device(0) == torch.device("cuda", 0)
    assert torch.zeros(2, device=torch.device(1)).get_device() == 1
    assert [str(torch.device(*given)) for given in (("cpu",), ("cuda",), ("cuda", 1), ("cuda:1",))] == [
        "cpu",
        "cuda",
        "cuda:1",
        "cuda:1",
    ]


INDICES = {
    "rows": lambda x: x[[0, 2]],
    "columns": lambda x: x[:, [0, 2]],
    "from the end": lambda x: x[..., [-1]],
    "places": lambda x: x[[0, 1, 2], [1, 1, 0]],
    "nested": lambda x: x[[[0, 1], [2, 3]]],
    "mask": lambda x: x[[True, False, True, False, False]],
    "a tensor among numbers": lambda x: x[[1, torch.tensor(2, device=x.device)]],
    "nothing": lambda x: x[[]],
}


@pytest.mark.parametrize("name", INDICES)
def test_indexing_by_lists(session, name):
    expected = INDICES[name](torch.arange(15).view(5, 3))
    found = INDICES[name](torch.randn(5, 3, device="cuda"))
    known = INDICES[name](torch.arange(15).view(5, 3).cuda())

    assert (found.shape, found.is_cuda) == (expected.shape, True)
    assert known.tolist() == expected.tolist()
    assert codes(session) == []


def test_writing_by_lists(session):
    counts = torch.zeros(5, dtype=torch.int64, device="cuda")
    counts[[0, 2]] = 7
    table = torch.zeros(2, 3, dtype=torch.int64, device="cuda")
    table[:, [0, 2]] = 1

    assert counts.tolist() == [7, 0, 7, 0, 0]
    assert table.tolist() == [[1, 0, 1], [1, 0, 1]]


PINNED = {
    "zeros": lambda: torch.zeros(3, pin_memory=True),
    "empty": lambda: torch.empty(3, pin_memory=True),
    "full": lambda: torch.full((3,), 2.0, pin_memory=True),
    "rand": lambda: torch.rand(3, pin_memory=True),
    "like another": lambda: torch.empty_like(torch.zeros(3), pin_memory=True),
    "new": lambda: torch.zeros(1).new_zeros(3, pin_memory=True),
    "from data": lambda: torch.tensor([1.0, 2.0, 3.0], pin_memory=True),
}


@pytest.mark.parametrize("make", PINNED.values(), ids=PINNED)
def test_pinned_memory_is_the_hosts(session, make):
    found = make()

    assert (really(found), tuple(found.shape), held(session)) == ("cpu", (3,), 0)
    assert found.to("cuda", non_blocking=True).is_cuda


@pytest.fixture
def large(session):
    """A weight too large for the host to hold."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.empty(100, MIB)

    return Model().weight


def test_a_large_weight_on_the_host_is_a_shape(session, large):
    assert really(large) == "meta"
    assert (large.device.type, large.is_cpu, large.is_cuda, large.is_meta) == ("cpu", True, False, False)
    assert (large.shape, large.dtype) == ((100, MIB), torch.float32)
    assert large.cpu() is large
    assert large.to("cpu") is large
    assert held(session) == 0


def test_a_large_weight_is_computed_with_on_the_host(session, large):
    # Among tensors that the host really holds too.
    made_of_it = [large * 2, large[:, :3] + torch.ones(3), large.normal_(), large[0, :2].copy_(torch.ones(2))]

    assert [str(t.device) for t in made_of_it] == ["cpu"] * 4
    assert large[0, :3].tolist() == [0.0, 0.0, 0.0]
    assert large[0, :3].numpy().shape == (3,)
    assert held(session) == 0


def test_a_large_weight_comes_to_the_device(session, large):
    there = large[:1].cuda()

    assert there.is_cuda
    assert held(session) == 4 * MIB


@pytest.mark.parametrize("options", [{"device": "cuda"}, {"device": "meta"}], ids=str)
def test_weights_that_are_made_elsewhere_are_there(session, options):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.empty(100, MIB, **options)

    assert Model().weight.device.type == options["device"]
    assert codes(session) == []


def test_a_large_weight_is_shown_as_one_of_the_host(session, large):
    assert "meta" not in repr(large)
    assert f"{large.mean():.1f}"
