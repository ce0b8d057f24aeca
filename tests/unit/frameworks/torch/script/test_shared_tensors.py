import io
import multiprocessing
import os
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch import nn

from memfit.frameworks.torch.script import shared_tensors
from tests.unit.frameworks.torch.sessions import running


def sent(value):
    """What goes through a pipe."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(value)
    return buffer.getvalue()


@pytest.fixture
def session():
    received = []
    with running() as made, shared_tensors.sharing(made.simulation.labels.is_simulated, received.append):
        made.received = received
        yield made


def received_elsewhere(data, monkeypatch):
    """What another process makes of it."""
    monkeypatch.setattr(shared_tensors, "_storages", type(shared_tensors._storages)())
    monkeypatch.setattr(os, "getpid", lambda: 1)
    return pickle.loads(data)


def test_a_model_arrives_with_its_shapes_and_takes_nothing(session, monkeypatch):
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8)).cuda()
    model[1].weight = nn.Parameter(model[0].weight.t(), requires_grad=False)
    data = sent(model)
    before = session.memory.allocated_bytes
    got = received_elsewhere(data, monkeypatch)

    assert [(p.shape, p.stride(), p.requires_grad) for p in got.parameters()] == [
        (p.shape, p.stride(), p.requires_grad) for p in model.parameters()
    ]
    assert all(type(p) is nn.Parameter and p.is_cuda for p in got.parameters())
    # Two of them share their storage.
    assert len(session.received) == 3
    assert session.memory.allocated_bytes == before
    for storage in session.received:
        session.recorder.add_foreign(storage)
    got[0].weight.data.add_(1)
    assert session.memory.allocated_bytes == before


def test_what_comes_back_is_what_was_sent(session):
    tensor = torch.ones(4, 4, device="cuda")
    got = pickle.loads(sent(tensor[1:]))

    assert (got.shape, got.storage_offset(), session.received) == ((3, 4), 4, [])
    assert got.untyped_storage()._cdata == tensor.untyped_storage()._cdata


def test_an_intermediate_result_is_refused_as_by_pytorch(session):
    with pytest.raises(RuntimeError, match="Cowardly refusing"):
        sent(torch.ones(2, device="cuda", requires_grad=True) * 2)


def test_tensors_of_the_host_go_as_they_do(session):
    queue = multiprocessing.get_context("fork").SimpleQueue()
    queue.put(torch.arange(3))

    assert queue.get().tolist() == [0, 1, 2]


def test_afterwards_pytorch_sends_as_it_did():
    before = dict(ForkingPickler._extra_reducers)
    with shared_tensors.sharing(lambda tensor: True, lambda storage: None):
        assert ForkingPickler._extra_reducers[torch.Tensor] is not before[torch.Tensor]
    assert ForkingPickler._extra_reducers == before
