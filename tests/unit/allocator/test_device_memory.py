from dataclasses import replace

import pytest

from memfit.allocator import memory_of
from memfit.core.device import Device, Kind, Origin
from memfit.core.errors import BadInput
from memfit.core.units import MIB

DEVICE = Device("x", "X", Kind.CUDA, 1000 * MIB, 900 * MIB, Origin.MEASURED, context_bytes=100 * MIB)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)


@pytest.mark.parametrize(
    ("changes", "capacity_bytes"),
    [
        ({}, 800 * MIB),
        ({"context_bytes": None}, 900 * MIB),
        ({"usable_bytes": None}, None),
        # A device that the context alone fills still has an end.
        ({"usable_bytes": 50 * MIB}, 1),
    ],
    ids=str,
)
def test_what_the_context_leaves_can_be_allocated(changes, capacity_bytes):
    memory, _ = memory_of(replace(DEVICE, **changes))

    assert memory.capacity_bytes == capacity_bytes


def test_the_last_byte_can_be_had_and_no_more():
    memory, _ = memory_of(DEVICE)

    assert memory.malloc(800 * MIB) is not None
    assert memory.malloc(1) is None


def test_a_memory_without_an_end():
    memory, _ = memory_of(DEVICE, unlimited=True)

    assert memory.capacity_bytes is None
    assert memory.malloc(5000 * MIB) is not None


def reserved_for(memory, size_bytes):
    memory.malloc(size_bytes)
    return memory.reserved_bytes


def test_the_settings_of_the_environment_count(monkeypatch):
    # GIVEN segments that grow by pages of 20 MiB, where others are rounded up to 2 MiB
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

    assert reserved_for(memory_of(DEVICE)[0], 25 * MIB) == 40 * MIB
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    assert reserved_for(memory_of(DEVICE)[0], 25 * MIB) == 26 * MIB


def test_settings_made_by_the_program_count_until_the_first_allocation(monkeypatch):
    memory, configure = memory_of(DEVICE)
    said = []

    # WHEN the program sets the allocator before it allocates
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    configure(said.append)
    assert reserved_for(memory, 25 * MIB) == 40 * MIB

    # THEN it is too late afterwards: the segment goes on growing
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    configure(said.append)
    assert reserved_for(memory, 25 * MIB) == 60 * MIB
    assert said == []


def test_settings_that_are_not_simulated_are_told_of(monkeypatch):
    _, configure = memory_of(DEVICE)
    said = []
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync")
    configure(said.append)

    assert len(said) == 1
    assert "backend:cudaMallocAsync" in said[0]


def test_settings_that_make_no_sense_are_refused(monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:many")

    with pytest.raises(BadInput, match="max_split_size_mb"):
        memory_of(DEVICE)
