"""How much memory a step has, and what a finding depends on."""

import resource

import pytest
import torch
from torch import nn

from memfit.frameworks.torch.guard import available_memory as room


@pytest.mark.parametrize(
    ("batch", "samples", "elements"),
    [
        (torch.zeros(4, 3), 4, 3.0),
        ((torch.zeros(4, 3), torch.zeros(4)), 4, 4.0),
        ({"a": torch.zeros(2, 5), "b": torch.zeros(())}, 2, 5.5),
        ((torch.zeros(4, 3), torch.zeros(5)), None, 17.0),
        ([], None, 1.0),
    ],
)
def test_size_of_a_batch(batch, samples, elements):
    size = room.size_of(batch)

    assert (size.num_samples, size.elements_per_sample) == (samples, elements)


def test_what_is_held_counts_shared_storage_once():
    model = nn.Linear(10, 10, bias=False)
    model.other = model.weight
    optimizer = torch.optim.Adam(model.parameters())
    assert room.held_bytes(model, optimizer) == 400

    model(torch.zeros(1, 10)).sum().backward()
    optimizer.step()

    # Weight, gradient, two moments, and a count of steps.
    assert room.held_bytes(model, optimizer) == 1604


def test_the_room_is_what_the_limit_leaves_and_what_is_held():
    model = nn.Linear(1000, 1000, bias=False)
    wide, narrow = (room.room_bytes(model, None, size) for size in (2**45, 2**44))

    assert wide - narrow == pytest.approx(2**44, abs=2**28)
    assert room.room_bytes(model, None, 1) == 0


def test_limits_of_this_process_count():
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    assert room.data_limit_bytes() is None
    resource.setrlimit(resource.RLIMIT_DATA, (2**46, hard))
    try:
        assert room.data_limit_bytes() == 2**46
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def test_a_finding_depends_on_model_optimizer_shapes_and_memory():
    model = nn.Linear(4, 4)
    sgd, adam = torch.optim.SGD(model.parameters()), torch.optim.Adam(model.parameters())
    first = room.identity(model, sgd, torch.zeros(8, 4), 100)

    assert first == room.identity(nn.Linear(4, 4), sgd, torch.zeros(2, 4), 100)
    assert first != room.identity(nn.Linear(4, 5), sgd, torch.zeros(8, 4), 100)
    assert first != room.identity(model, adam, torch.zeros(8, 4), 100)
    assert first != room.identity(model, sgd, torch.zeros(8, 5), 100)
    assert first != room.identity(model, sgd, torch.zeros(8, 4), 200)
