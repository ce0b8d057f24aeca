from types import SimpleNamespace

import pytest
import torch

from memfit.frameworks.torch import budget, internals


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
    budget.limit_devices(250)
    assert fractions == {}

    for call in waiting:
        call()

    assert fractions == {0: 0.25, 1: 1.0}


def test_an_allocator_without_a_limit_is_left_alone(devices, monkeypatch):
    def refuse(fraction, index):
        raise RuntimeError("not supported")

    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", refuse)
    budget.limit_devices(250)
    devices[0][0]()


def test_cuda_is_not_started_for_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "_queued_calls", [])
    budget.limit_devices(250)

    assert not torch.cuda.is_initialized()
