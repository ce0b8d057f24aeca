import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from memfit.core.guarding import Where
from memfit.frameworks.torch import internals, oom


def test_release_collects_cycles():
    class Node:
        pass

    node = Node()
    node.itself, node.tensor = node, torch.ones(1000)
    reference = weakref.ref(node.tensor)
    del node
    oom.release()
    assert reference() is None


def test_release_works_in_any_thread():
    errors = []

    def run():
        try:
            oom.release()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not errors


def test_whose_memory_a_model_takes():
    assert oom.where_of(nn.Linear(2, 2)) is Where.HOST
    assert oom.where_of(nn.Linear(2, 2, device="meta")) is Where.DEVICE
    assert oom.where_of(nn.Identity()) is Where.HOST


@pytest.fixture
def devices(monkeypatch):
    """Two devices that aren't there; gives the calls that wait for CUDA, and the fractions that were set."""
    waiting, fractions = [], {}
    totals = [1000, 100]
    monkeypatch.setattr(internals, "lazy_cuda_call", waiting.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=totals[index]))
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda fraction, index: fractions.__setitem__(index, fraction),
    )
    return waiting, fractions


def test_devices_are_limited_when_cuda_starts(devices):
    waiting, fractions = devices
    oom.limit_devices(250)
    assert fractions == {}

    for call in waiting:
        call()

    assert fractions == {0: 0.25, 1: 1.0}


def test_an_allocator_without_a_limit_is_left_alone(devices, monkeypatch):
    def refuse(fraction, index):
        raise RuntimeError("not supported")

    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", refuse)
    oom.limit_devices(250)
    devices[0][0]()


def test_cuda_is_not_started_for_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "_queued_calls", [])
    oom.limit_devices(250)

    assert not torch.cuda.is_initialized()
