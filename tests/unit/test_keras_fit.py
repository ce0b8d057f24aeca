"""Guarded fits on the backend of this process; all backends, real kills and faults are in integration."""

import json
import logging
import shutil

import pytest

keras = pytest.importorskip("keras")

import memfit  # noqa: E402
from memfit import _fit_checkpoints, _fit_options  # noqa: E402
from memfit._keras_fit import FitOptions, KerasFit, fit, guarded_fit  # noqa: E402
from memfit.adapters.keras.guarding import variables  # noqa: E402
from memfit.adapters.keras.guarding.steps import make_steps  # noqa: E402
from memfit.core import env  # noqa: E402
from memfit.core.errors import BadInput  # noqa: E402
from memfit.core.plan import PlanNotFound  # noqa: E402
from memfit.core.settings import Settings  # noqa: E402
from tests.unit.adapters.forged_checkpoints import changed, forge, nodes  # noqa: E402
from tests.unit.adapters.keras.guarding.models import build, data, dense, difference, fault_setter  # noqa: E402


@pytest.fixture(autouse=True)
def apart(monkeypatch, tmp_path):
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(_fit_checkpoints, "_finished", {})


@pytest.fixture
def faults(monkeypatch):
    return fault_setter(monkeypatch)


def plain(*layers, **arguments):
    model = build(*layers)
    model.fit(*data(), batch_size=4, verbose=0, **arguments)
    return model


def test_a_batch_that_does_not_fit_is_run_in_parts(faults, caplog):
    expected = plain(dense(), shuffle=False)
    model = build(dense())
    faults(2, 3)
    with caplog.at_level(logging.WARNING, "memfit"):
        history = fit(model, *data(), batch_size=4, verbose=0, shuffle=False)

    assert difference(expected, model) < 1e-5
    assert list(history.history) == ["loss", "mae"]
    assert "memory ran out; going on with micro-batches of 1" in caplog.text
    assert "train_step" not in model.__dict__
    assert not hasattr(model.train_function, "memfit_function")


def test_what_was_found_out_is_remembered(faults, tmp_path):
    faults(1)
    fit(build(dense()), *data(), batch_size=4, verbose=0)
    (entry,) = json.loads((tmp_path / "cache" / "ceilings.json").read_text())["entries"].values()

    assert entry["most"] == 2
    again = memfit.keras.Fit()
    seen = []
    loop_class = __import__("memfit.adapters.keras.guarding.loop", fromlist=["KerasLoop"]).KerasLoop
    put_on = loop_class.put_on
    loop_class.put_on = lambda self, settings: (seen.append(settings.micro_batch_size), put_on(self, settings))[1]
    try:
        build(dense()).fit(*data(), batch_size=4, verbose=0, callbacks=[again])
    finally:
        loop_class.put_on = put_on
    assert set(seen) == {2}


def test_norms_are_recomputed_before_anything_else(faults):
    expected = plain(shuffle=False)
    model = build()
    faults(2)
    fit(model, *data(), batch_size=4, verbose=0, shuffle=False, remember=False)

    assert difference(expected, model) < 1e-6


def test_where_nothing_helps_the_model_is_as_it_was(faults):
    model = build()
    faults(*range(2, 100))
    with pytest.raises(memfit.CannotFit, match=r"nothing is left to try[\s\S]*statistics of each batch") as caught:
        fit(model, *data(), batch_size=4, verbose=0, shuffle=False, remember=False)

    assert caught.value.failure.source == "python"
    assert int(variables.as_array(model.optimizer.iterations.value)) == 1
    # AND it can be trained again without a guard
    model.fit(*data(), verbose=0)


def test_other_errors_stay_what_they_are(monkeypatch):
    model = build()
    monkeypatch.setattr(type(make_steps(build(), len)), "run", lambda self, batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fit(model, *data(), verbose=0)


def test_a_fit_that_was_stopped_goes_on(tmp_path):
    class Ends(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 2 and self.model.history.epoch == [0]:
                raise KeyboardInterrupt

    def train(folder, *callbacks):
        stop = keras.callbacks.EarlyStopping("loss", patience=9)
        model = build(keras.layers.Dropout(0.5))
        history = fit(
            model,
            *data(),
            batch_size=3,
            epochs=3,
            verbose=0,
            checkpoint=tmp_path / folder,
            checkpoint_every=1,
            callbacks=[stop, *callbacks],
        )
        return model, history, stop

    expected, history, stop = train("a")
    with pytest.raises(KeyboardInterrupt):
        train("b", Ends())
    keras.utils.set_random_seed(99)
    _fit_checkpoints._finished.clear()
    model, again, stopped = train("b")

    assert difference(expected, model) == 0
    assert again.history == history.history
    assert again.epoch == [0, 1, 2]
    assert (stopped.wait, stopped.best) == (stop.wait, stop.best)
    # AND a fit that is over is not begun again
    _fit_checkpoints._finished.clear()
    model, again, _ = train("b")
    assert difference(expected, model) == 0
    assert again.history == history.history


def test_a_budget_is_planned_for(monkeypatch):
    asked = {}

    def made(model, **arguments):
        asked.update(arguments)
        return type("Plan", (), {"settings": Settings(micro_batches=2, micro_batch_size=2)})()

    monkeypatch.setattr("memfit._plan.plan", made)
    monkeypatch.setattr(_fit_options, "resident_bytes", lambda: 2**30)
    model = build(dense())
    fit(model, *data(), batch_size=4, verbose=0, shuffle=False, budget="3GiB", remember=False)

    assert asked["budget"] == 2 * 2**30
    assert asked["device"] == "cpu"
    assert difference(plain(dense(), shuffle=False), model) < 1e-5


def test_a_budget_that_nothing_fits_into_is_said_before_the_first_step(monkeypatch):
    def made(model, **arguments):
        raise PlanNotFound("no plan fits")

    monkeypatch.setattr("memfit._plan.plan", made)
    with pytest.raises(memfit.CannotFit, match="no plan fits"):
        fit(build(), *data(), verbose=0, budget="100GiB")


def test_a_supervisor_is_told_and_asked(monkeypatch, tmp_path, faults):
    folder = tmp_path / "attempt-1"
    folder.mkdir()
    request = {"attempt": 1, "checkpoint": str(tmp_path / "kept"), "micro_batch_size": 2}
    (folder / "request.json").write_text(json.dumps(request))
    monkeypatch.setenv(env.RUN_REQUEST, str(folder / "request.json"))
    faults(2)
    model = build(dense())
    guarded_fit(type(model).fit, model, (*data(),), {"batch_size": 4, "verbose": 0})

    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    # A slow machine has time for more checkpoints than the last.
    names = [event["event"] for event in events if event["event"] != "checkpoint"]
    assert names == ["guard", "step", "oom", "step", "settings"]
    assert events[-1]["event"] == "checkpoint"
    assert [event["micro_batch_size"] for event in events if event["event"] == "step"] == [2, 1]
    assert list((tmp_path / "kept").glob("step-*"))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"keep": 0}, "keep must be a whole number from 1 up, but 0 was given."),
        ({"micro_batch_size": 1.5}, "micro_batch_size must be a whole number from 1 up, but 1.5 was given."),
        ({"plan": "fast"}, "plan must be 'auto', a Plan or None, but 'fast' was given."),
    ],
)
def test_bad_options_are_refused(options, text):
    with pytest.raises(BadInput) as caught:
        FitOptions(**options)
    assert str(caught.value) == text


def test_the_callback_names_its_options():
    with pytest.raises(BadInput, match=r"Fit has no option check\. It takes budget, plan, checkpoint"):
        memfit.keras.Fit(check="a")


DEEP = json.loads("[" * 900 + "]" * 900)
WRONG = ["x", None, -1, 10**400, 1.5, True, [], {}, DEEP, {"__float__": "nan"}, {"__array__": "nope"}]


def test_a_tampered_checkpoint_is_refused_before_anything_changes(tmp_path):
    # GIVEN the checkpoint of a fit that was broken off
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                raise KeyboardInterrupt

    patience = keras.callbacks.EarlyStopping(monitor="loss", patience=5)
    with pytest.raises(KeyboardInterrupt):
        fit(
            build(dense()),
            *data(),
            batch_size=4,
            verbose=0,
            checkpoint=tmp_path / "run",
            checkpoint_every=1,
            callbacks=[patience, Stop()],
        )
    checkpoint = max((tmp_path / "run").glob("step-*"))
    tree = json.loads((checkpoint / "progress.json").read_bytes())
    for path in (tmp_path / "run").glob("step-*"):
        if path != checkpoint:
            shutil.rmtree(path)

    # WHEN one value of it is another, and the hashes say that all is well
    model, num_refused, num_taken = build(dense()), 0, 0
    for number, path in enumerate(nodes(tree)):
        forge(checkpoint, "progress.json", json.dumps(changed(tree, path, WRONG[number % len(WRONG)])).encode())
        before = [variables.as_array(value.value).copy() for value in model.variables]
        keeper = KerasFit(FitOptions(checkpoint=tmp_path / "run"))
        callbacks = [keras.callbacks.EarlyStopping(monitor="loss", patience=5)]
        try:
            keeper.train_begins(model, None, callbacks, {"epochs": 2})
            num_taken += 1
        except memfit.MemfitError:
            num_refused += 1
            # THEN it is refused, and nothing has changed
            after = [variables.as_array(value.value) for value in model.variables]
            assert all((one == other).all() for one, other in zip(before, after, strict=True)), path
        finally:
            keeper.close()
    assert num_refused > 20
