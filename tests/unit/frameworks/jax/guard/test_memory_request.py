"""What a step asks for; that processes survive by it is in integration/test_plan_jax.py."""

import resource
import sys
import types

import jax
import numpy as np
import pytest

from memfit.core.errors import StepFailed
from memfit.frameworks.jax.guard import memory_request as room
from memfit.frameworks.jax.guard.memory_request import Host, MemoryRequest, NoRoom, beside_arguments, form_of

WIDTH = 512
PACKED_BYTES = 2 * WIDTH * WIDTH * 4
ARGUMENTS = (np.zeros((WIDTH, WIDTH), np.float32),)


@jax.jit
def step(x):
    # A product that is made by Eigen, not by the fused library.
    return jax.lax.dot_general(x, x, (((0,), (0,)), ((), ())))


def need():
    return room._Need(step.lower(*ARGUMENTS), jax.local_devices()[:1], Host())


class PlayedHost(Host):
    """Memory of a machine that is played; the compiler finds its own. What is free may come back after some pauses."""

    can_refuse = True

    def __init__(self, free_bytes, *, given_back_after=0, given_back_bytes=0):
        self.asked = []
        self.num_looks = 0
        self.free_bytes = free_bytes
        self._late = (given_back_after, given_back_bytes)

    def has(self, size_bytes):
        self.asked.append(size_bytes)
        if size_bytes == room._COMPILER_BYTES:
            return True
        self.num_looks += 1
        after, given_back = self._late
        return size_bytes <= self.free_bytes + (given_back if after and self.num_looks > after + 1 else 0)


@pytest.fixture(autouse=True)
def slept(monkeypatch):
    """Seconds of the pauses, which nobody waits for."""
    pauses = []
    monkeypatch.setattr(room.time, "sleep", pauses.append)
    return pauses


def test_what_kernels_take_for_themselves_is_asked_for_and_what_the_c_library_keeps_of_it():
    values = WIDTH * WIDTH * 4
    assert need().value_bytes == values
    wanted = need().value_bytes + need().scratch_bytes()
    # Both operands are packed.
    assert wanted - values - room._RUNTIME_BYTES == 2 * PACKED_BYTES
    MemoryRequest(step, PlayedHost(wanted)).ask(ARGUMENTS)
    with pytest.raises(NoRoom, match=f"allocate {wanted} bytes finds") as raised:
        MemoryRequest(step, PlayedHost(wanted - 1)).ask(ARGUMENTS)
    assert 0.99 * wanted < raised.value.free_bytes < wanted == raised.value.wanted_bytes


def test_where_nothing_would_be_refused_no_program_is_read(monkeypatch):
    host = PlayedHost(2**40)
    host.can_refuse = False
    monkeypatch.setattr(room, "read", None)
    MemoryRequest(step, host).ask(ARGUMENTS)
    assert host.asked == [WIDTH * WIDTH * 4]


def test_memory_of_the_last_step_is_waited_for(slept):
    settled = []
    wanted = need().value_bytes + need().scratch_bytes()
    host = PlayedHost(0, given_back_after=2, given_back_bytes=wanted)
    MemoryRequest(step, host).ask(ARGUMENTS, lambda: settled.append("last step"))
    assert settled == ["last step"] and slept == list(room._PAUSES[:2])


def test_what_the_process_kept_of_the_first_run_is_not_asked_for_again():
    # GIVEN a run after which the process has 6 MiB more, 4 MiB of which nobody uses
    class Kept(PlayedHost):
        sizes = iter((100 << 20, 106 << 20, 500 << 20))
        data_bytes = property(lambda self: next(self.sizes))
        heap_free_bytes = 4 << 20

    host = Kept(2**40)
    one = MemoryRequest(step, host)
    for _ in range(3):
        one.ask(ARGUMENTS)
    compiler, first, second, third = host.asked
    assert compiler == room._COMPILER_BYTES and second == third == first - (4 << 20)


def test_a_form_is_looked_at_once():
    lowered = []

    def lower(*arguments):
        lowered.append(arguments)
        return step.lower(*arguments)

    one = MemoryRequest(types.SimpleNamespace(lower=lower), PlayedHost(2**40))
    one.ask(ARGUMENTS)
    one.ask((ARGUMENTS[0] + 1,))
    assert len(lowered) == 1
    one.ask((ARGUMENTS[0][:256, :256],))
    assert len(lowered) == 2


@pytest.mark.parametrize("error", [StepFailed("no"), KeyError("fusion"), AssertionError()])
def test_a_program_that_is_not_understood_takes_its_arguments_and_results_again(monkeypatch, error):
    def fail(lowered):
        raise error

    monkeypatch.setattr(room, "read", fail)
    copies = 2 * WIDTH * WIDTH * 4
    assert need().scratch_bytes() == 2 * copies + room._RUNTIME_BYTES


def test_nothing_is_compiled_where_the_compiler_would_find_no_memory():
    host = PlayedHost(0)
    host.has = lambda size_bytes: size_bytes < room._COMPILER_BYTES
    with pytest.raises(NoRoom):
        MemoryRequest(types.SimpleNamespace(lower=pytest.fail), host).ask(ARGUMENTS)


def test_memory_that_no_machine_has_is_not_there():
    host = Host()
    assert host.has(1 << 20) and not host.has(1 << 60) and not host.has(1 << 80)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of data segments are Linux's")
def test_what_refuses_memory(monkeypatch, tmp_path):
    overcommit = {name: tmp_path / name for name in "02"}
    for name, path in overcommit.items():
        path.write_text(f"{name}\n")
    monkeypatch.setattr(room, "_OVERCOMMIT", overcommit["0"])
    limits = {resource.RLIMIT_AS: resource.RLIM_INFINITY, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], resource.RLIM_INFINITY))
    assert not Host().can_refuse
    limits[resource.RLIMIT_DATA] = 1 << 30
    assert Host().can_refuse
    limits[resource.RLIMIT_DATA] = resource.RLIM_INFINITY
    monkeypatch.setattr(room, "_OVERCOMMIT", overcommit["2"])
    assert Host().can_refuse


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux and its C library say it")
def test_what_the_process_holds():
    host = Host()
    before = host.data_bytes
    block = np.ones(64 << 20, np.uint8)
    assert host.data_bytes - before >= block.nbytes
    assert 0 <= host.heap_free_bytes <= host.data_bytes


class Device:
    """An accelerator that is played."""

    platform = "gpu"

    def __init__(self, statistics):
        self.statistics = statistics

    def memory_stats(self):
        return self.statistics


def test_on_accelerators_the_fullest_ones_allocator_is_believed():
    devices = [Device({"bytes_limit": 100, "bytes_in_use": 40}), Device({"bytes_limit": 100}), Device(None)]
    room._ask_devices(devices, 60, lambda: None)
    with pytest.raises(NoRoom, match="allocate 61 bytes finds 60 bytes free"):
        room._ask_devices(devices, 61, lambda: None)
    room._ask_devices(devices[2:], 1 << 60, lambda: None)


def test_on_accelerators_the_last_step_is_waited_for():
    device = Device({"bytes_limit": 100, "bytes_in_use": 90})
    room._ask_devices([device], 60, lambda: device.statistics.update(bytes_in_use=10))


def test_forms_are_what_a_function_is_compiled_for():
    x = np.zeros((2, 3), np.float32)
    assert form_of((x, {"a": x})) == form_of((x + 1, {"a": x}))
    assert form_of(x) != form_of(x.astype(np.float64))
    assert form_of((x, None)) != form_of((None, x))
    assert form_of((x, 3)) == form_of((x, 4)) != form_of((x, 4.0))
    assert form_of((x, "tanh")) != form_of((x, "relu"))
    assert hash(form_of((x, jax.numpy.asarray(x)))) is not None


def test_results_in_the_place_of_arguments_take_nothing():
    value = jax.ShapeDtypeStruct((100,), np.float32)
    plain = jax.jit(lambda x: x + 1).lower(value).compile().memory_analysis()
    donating = jax.jit(lambda x: x + 1, donate_argnums=0).lower(value).compile().memory_analysis()
    assert (beside_arguments(plain), beside_arguments(donating)) == (400, 0)
