"""A fit as a guard sees it."""

from types import SimpleNamespace

import pytest

keras = pytest.importorskip("keras")
from memfit.catalogue.host import resident_bytes  # noqa: E402
from memfit.core.errors import BadModel  # noqa: E402
from memfit.core.guarding import BadCheckpoint, BatchSize, CannotFit  # noqa: E402
from memfit.core.settings import Settings  # noqa: E402
from memfit.frameworks.keras.guard.loop import KerasLoop, history_of  # noqa: E402
from tests.unit.frameworks.keras.guard.models import build, data  # noqa: E402


def looped(model, **options):
    model._symbolic_build(data_batch=data())
    model.make_train_function()
    return KerasLoop(model, lambda batch: None, **options)


def test_settings_are_put_on_and_taken_off():
    model = build(keras.layers.Dense(3))
    loop = looped(model)
    loop.put_on(Settings(micro_batches=4, micro_batch_size=3))
    assert "train_step" in model.__dict__
    assert loop.settings.micro_batch_size == 3
    assert loop.why_not_split() == ""
    before = model.train_function
    loop.put_on(Settings(micro_batches=2, micro_batch_size=3))
    assert model.train_function is before
    loop.close()

    assert "train_step" not in model.__dict__


def test_what_a_model_can_not_have_is_said():
    loop = looped(build())

    assert "statistics of each batch" in loop.why_not_split()
    assert loop.fallbacks().whole_first
    with pytest.raises(BadModel, match="statistics of each batch"):
        loop.put_on(Settings(micro_batches=2, micro_batch_size=3))
    assert loop.settings == Settings()


def test_sizes_of_batches():
    loop = looped(build())
    x, y = data()

    assert loop.size_of((x, y)) == BatchSize(12)
    assert loop.size_of((x, y[:5])) == BatchSize(None)


def test_progress_comes_back(tmp_path):
    model = build()
    loop = looped(model)
    loop.watch_callbacks()
    loop.epoch_ends(2, {"loss": 0.5})
    loop.write_state(tmp_path, {"update": 7, "attempts": None, "asked": []})

    checked = []
    assert loop.read_state(tmp_path, checked.append)["epoch"] == 3
    assert checked[0]["update"] == 7
    loop.write_state(tmp_path, {"update": "x", "attempts": None, "asked": []})
    with pytest.raises(BadCheckpoint, match="update is 'x', and int was expected"):
        loop.read_state(tmp_path, checked.append)


@pytest.mark.skipif(resident_bytes() is None, reason="what a process holds isn't known here")
def test_a_budget_is_for_all_that_the_process_holds(monkeypatch):
    loop, held = looped(build()), resident_bytes()

    assert 0 < loop.usable_bytes(held + 2**40, 1.0) <= 2**40 + held
    assert loop.usable_bytes(held + 2**40, 0.5) == pytest.approx(2**39, rel=0.01)
    with pytest.raises(CannotFit, match=r"the process holds .* before the first step, .* is 1\.00 MiB\. Give a larger"):
        loop.usable_bytes(2**20, 1.0)
    # A device's memory is the training's alone.
    monkeypatch.setattr("memfit.frameworks.keras.guard.loop.device_name", lambda: "gpu")
    assert loop.usable_bytes(1000, 0.75) == 750


def test_what_is_no_model_is_refused():
    with pytest.raises(BadModel, match=r"a compiled keras\.Model was expected, but int was given"):
        KerasLoop(3, len)
    plain = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(BadModel, match="isn't compiled"):
        KerasLoop(plain, len)


def test_the_epoch_that_has_just_ended_is_in_the_history():
    model = SimpleNamespace(history=SimpleNamespace(history={"loss": [1.0]}, epoch=[0]))

    assert history_of(model, (1, {"loss": 0.5})) == {"history": {"loss": [1.0, 0.5]}, "epochs": [0, 1]}
    assert history_of(model, (0, {"loss": 1.0})) == {"history": {"loss": [1.0]}, "epochs": [0]}
    assert history_of(None, None) == {"history": {}, "epochs": []}
