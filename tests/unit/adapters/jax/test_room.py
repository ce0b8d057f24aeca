import jax
import numpy as np
import pytest

from memfit.adapters.jax import room
from memfit.adapters.jax.room import Room, beside_arguments, shapes_of

WIDTH = 256


@jax.jit
def step(x):
    return jax.numpy.sum((x @ x.T) @ x)


def lowered():
    return step.lower(jax.ShapeDtypeStruct((WIDTH, WIDTH), np.float32))


class Host:
    """Memory of a machine that is played."""

    def __init__(self, monkeypatch, free_bytes, *, given_back_after=0, given_back_bytes=0):
        self.asked = []
        self.slept = []
        self._free_bytes = free_bytes
        self._late = (given_back_after, given_back_bytes)
        monkeypatch.setattr(room, "_has", self.has)
        monkeypatch.setattr(room.time, "sleep", self.slept.append)

    def has(self, size_bytes):
        self.asked.append(size_bytes)
        after, given_back = self._late
        return size_bytes <= self._free_bytes + (given_back if after and len(self.slept) >= after else 0)


def needed():
    """What values take, and what kernels do."""
    need = room._Need(lowered())
    return need.value_bytes, need.scratch_bytes()


def test_where_there_is_plenty_nothing_is_simulated(monkeypatch):
    host = Host(monkeypatch, 2**40)
    monkeypatch.setattr(room, "read", None)
    Room().ask("a", lowered)
    assert len(host.asked) == 1


def test_what_kernels_take_for_themselves_is_asked_for(monkeypatch):
    values, scratch = needed()
    # A product of matrices packs parts of them.
    assert scratch > 0
    Host(monkeypatch, values + scratch)
    Room().ask("a", lowered)
    Host(monkeypatch, values + scratch - 1)
    with pytest.raises(MemoryError, match=f"allocates {values + scratch} bytes"):
        Room().ask("a", lowered)


def test_memory_of_the_last_step_is_waited_for(monkeypatch):
    settled = []
    values, scratch = needed()
    host = Host(monkeypatch, values, given_back_after=2, given_back_bytes=scratch)
    Room().ask("a", lowered, lambda: settled.append("last step"))
    assert settled == ["last step"] and host.slept == list(room.PAUSES[:2])


def test_a_form_is_looked_at_once(monkeypatch):
    host = Host(monkeypatch, 2**40)
    one = Room()
    one.ask("a", lowered)
    one.ask("a", lambda: pytest.fail("lowered again"))
    assert len(set(host.asked)) == 1


def test_memory_that_no_machine_has_is_not_there():
    assert room._has(1 << 20) and not room._has(1 << 60) and not room._has(1 << 80)


def test_on_an_accelerator_its_allocator_is_believed(monkeypatch):
    class Device:
        def __init__(self, statistics):
            self.statistics = statistics

        def memory_stats(self):
            return self.statistics

    device = Device({"bytes_limit": 100, "bytes_in_use": 40})
    monkeypatch.setattr(room.jax, "local_devices", lambda: [device])
    room._ask_device(60)
    with pytest.raises(MemoryError, match="61 bytes on the device, and 60 bytes are free"):
        room._ask_device(61)
    device.statistics = None
    room._ask_device(1 << 60)


def test_shapes_tell_compiled_forms_apart():
    x = np.zeros((2, 3), np.float32)
    assert shapes_of((x, {"a": x})) == shapes_of((x + 1, {"a": x}))
    assert shapes_of(x) != shapes_of(x.astype(np.float64))
    assert shapes_of((x, 3)) != shapes_of((x, 4))


def test_results_in_the_place_of_arguments_take_nothing():
    value = jax.ShapeDtypeStruct((100,), np.float32)
    plain = jax.jit(lambda x: x + 1).lower(value).compile().memory_analysis()
    donating = jax.jit(lambda x: x + 1, donate_argnums=0).lower(value).compile().memory_analysis()
    assert (beside_arguments(plain), beside_arguments(donating)) == (400, 0)


def test_what_kernels_ask_for_counts_and_what_the_c_library_keeps_of_it():
    values, scratch = needed()
    run = room.read(lowered()).run
    assert values == beside_arguments(lowered().compile().memory_analysis())
    assert scratch == 2 * run.asked_bytes + room._RUNTIME_BYTES
