"""The guarded step of JAX, driven as other guards are; what it is made of is in frameworks/jax/guard/test_loop.py."""

import logging

import jax
import numpy as np
import optax
import pytest

from memfit.api.guarded_step import GuardedStep
from memfit.core.guarding import BrokenUpdate, CannotFit
from memfit.core.settings import Settings
from memfit.frameworks.jax.apply.training import TrainStep
from memfit.frameworks.jax.guard import loop as loops
from memfit.frameworks.jax.guard.memory_request import NoRoom

FULL = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 3200000000 bytes.")
BATCH = (np.arange(12, dtype="float32").reshape(6, 2), np.ones(6, "float32"))


def loss(params, batch):
    x, y = batch
    return jax.numpy.mean((x @ params["w"] - y) ** 2)


def start():
    return {"w": jax.numpy.asarray([0.1, -0.2])}


def limited(room, settings=None):
    """Memory holds so many samples, and no more."""
    step = GuardedStep(loss, optax.sgd(0.01), settings or Settings())
    step.tried, made = [], step._loop._program

    def program_of(part):
        program, asked = made(part)

        def run(*arguments):
            step.tried.append(part)
            if part > room:
                raise FULL
            return program(*arguments)

        return run, asked

    step._loop._program = program_of
    return step


def test_a_step_that_runs_out_is_run_again_in_more_parts_and_gives_the_same():
    plain = TrainStep(loss, optax.sgd(0.01), Settings())
    expected, _, value = plain(start(), plain.init(start()), BATCH)
    step = limited(2)
    params, state, found = step(start(), step.init(start()), BATCH)
    assert np.allclose(params["w"], expected["w"], rtol=1e-6) and float(found) == pytest.approx(float(value))
    assert step.tried == [6, 3, 2] and step.num_retries == 2
    # What was found out holds for the next batch.
    step(params, state, BATCH)
    assert step.tried == [6, 3, 2, 2]
    assert (step.settings.micro_batches, step.settings.micro_batch_size) == (3, 2)


def test_where_there_is_no_room_hopeless_sizes_are_not_compiled(monkeypatch):
    step, asked = limited(6), []

    def ask(self, arguments):
        asked.append(arguments)
        if len(asked) == 1:
            raise NoRoom(wanted_bytes=100, free_bytes=30)

    monkeypatch.setattr(loops.MemoryRequest, "ask", ask)
    step(start(), step.init(start()), BATCH)
    assert step.tried == [2] and step.num_retries == 1 and set(step._loop._programs) == {6, 2}


def test_memory_is_asked_for_where_an_update_is_not_made_in_place(monkeypatch):
    monkeypatch.setattr(loops, "_NEXT_TO_NOTHING", -1)
    params = start()
    step = limited(6)
    state = step.init(params)

    def ask(self, arguments):
        if len(arguments) == 3:
            raise NoRoom(wanted_bytes=100, free_bytes=30)

    monkeypatch.setattr(loops.MemoryRequest, "ask", ask)
    with pytest.raises(CannotFit, match="memory ran out in the update: a step that has to allocate 100 bytes"):
        step(params, state, BATCH)
    assert not params["w"].is_deleted()


def test_where_not_even_one_sample_fits_everything_is_as_it_was():
    params = start()
    step = limited(0)
    with pytest.raises(CannotFit, match=r"a single sample at a time: RESOURCE_EXHAUSTED.* as they were"):
        step(params, step.init(params), BATCH)
    assert not params["w"].is_deleted()


def test_other_errors_stay_what_they_are():
    step = limited(6)
    with pytest.raises(TypeError):
        step(start(), step.init(start()), (BATCH[0][:, :1], BATCH[1]))


def test_the_update_is_made_in_place():
    params = start()
    step = limited(6)
    step(params, step.init(params), BATCH)
    assert params["w"].is_deleted()


def test_an_update_that_asks_for_more_does_not_delete_what_it_is_given(monkeypatch):
    monkeypatch.setattr(loops, "_NEXT_TO_NOTHING", -1)
    params = start()
    step = limited(6)
    step(params, step.init(params), BATCH)
    assert not params["w"].is_deleted()


@pytest.mark.parametrize(("deleted", "error"), [(True, BrokenUpdate), (False, CannotFit)])
def test_an_update_that_runs_out_says_what_is_left(deleted, error):
    params = start()
    step = limited(6)
    state = step.init(params)

    def fail(trained, *rest):
        if deleted:
            trained["w"].delete()
        raise FULL

    class Failing(dict):
        def __contains__(self, key):
            return True

        def __getitem__(self, key):
            return fail, None

    step._loop._updates = Failing()
    with pytest.raises(error, match="memory ran out in the update"):
        step(params, state, BATCH)


def test_what_is_done_about_it_is_said(caplog):
    step = limited(2)
    with caplog.at_level(logging.WARNING, "memfit"):
        step(start(), step.init(start()), BATCH)
    assert caplog.messages == ["memory ran out; going on with micro-batches of 2"]


def test_parts_of_which_only_the_number_is_given_are_halved():
    step = limited(2, Settings(micro_batches=2))
    step(start(), step.init(start()), BATCH)
    assert step.tried == [3, 2]
