import pytest
import torch
from torch import nn

import memfit
from memfit.adapters.torch.look import Look
from memfit.adapters.torch.places import Places
from tests.unit.adapters.torch.builders import HOST, observe, run

DATA = torch.empty(4, 6)


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
    look = Look(Places(torch.device("cuda", 0)))

    assert look.place("cuda:0") == look.place(0) == look.place("cuda") == torch.device("cuda", 0)
    assert look.place("cuda:1") == torch.device("cuda", 1)
    assert look.place("meta") == torch.device("meta")
    assert look.place("cpu") is None
    assert Look(Places(torch.device("cpu"))).place("cpu") == torch.device("cpu")


def test_numbers_stay_real_on_the_host_only_while_asked():
    look = Look(Places(torch.device("cpu")))
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
