"""Guarded fits on the backend of this process; all backends, real kills and faults are in integration."""

import copy
import gc
import json
import logging
import shutil
import sys
from collections import Counter

import numpy as np
import pytest

keras = pytest.importorskip("keras")

import memfit  # noqa: E402
from memfit.api.fit import GuardedFit, fit, guarded_fit  # noqa: E402
from memfit.api.guard import trains_by_keras  # noqa: E402
from memfit.core import env, run_events  # noqa: E402
from memfit.core.errors import BadInput, BadModel  # noqa: E402
from memfit.core.guarding import GuardOptions  # noqa: E402
from memfit.core.plan import PlanNotFound  # noqa: E402
from memfit.core.settings import Settings  # noqa: E402
from memfit.frameworks.keras.guard.steps import make_steps  # noqa: E402
from memfit.guard import checkpointing  # noqa: E402
from memfit.guard.driver import Terms  # noqa: E402
from tests.unit.frameworks.forged_checkpoints import changed, forge, nodes  # noqa: E402
from tests.unit.frameworks.keras.guard.models import as_array, build, data, dense, difference, fault_setter, values  # noqa: E402


@pytest.fixture(autouse=True)
def apart(monkeypatch, tmp_path):
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(checkpointing, "_finished", Counter())


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
    loop_class = __import__("memfit.frameworks.keras.guard.loop", fromlist=["KerasLoop"]).KerasLoop
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
    fit(model, *data(), batch_size=4, verbose=0, shuffle=False, options=GuardOptions(remember=False))

    assert difference(expected, model) < 1e-6


def test_where_nothing_helps_the_model_is_as_it_was(faults):
    model = build()
    faults(*range(2, 100))
    with pytest.raises(memfit.CannotFit, match=r"nothing is left to try[\s\S]*statistics of each batch") as caught:
        fit(model, *data(), batch_size=4, verbose=0, shuffle=False, options=GuardOptions(remember=False))

    assert caught.value.failure.source == "python"
    assert int(as_array(model.optimizer.iterations.value)) == 1
    # AND it can be trained again without a guard
    model.fit(*data(), verbose=0)


def test_other_errors_stay_what_they_are(monkeypatch):
    model = build()
    monkeypatch.setattr(type(make_steps(build(), len)), "run", lambda self, batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fit(model, *data(), verbose=0)


def test_a_fit_that_is_interrupted_in_an_update_leaves_no_checkpoint_of_it(tmp_path, monkeypatch):
    # GIVEN a fit whose optimizer is interrupted in the middle of the third update
    model, updates = build(dense()), []
    plain_apply = type(model.optimizer).apply

    def apply(self, *arguments, **options):
        plain_apply(self, *arguments, **options)
        updates.append(1)
        if len(updates) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(type(model.optimizer), "apply", apply)
    with pytest.raises(KeyboardInterrupt):
        fit(
            model,
            *data(),
            batch_size=2,
            verbose=0,
            checkpoint=tmp_path / "a",
            options=GuardOptions(checkpoint_every=99),
        )

    # WHEN everything of it is gone
    del model
    gc.collect()

    # THEN no checkpoint claims to be that of the second update
    assert list((tmp_path / "a").glob("step-*")) == []


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
            callbacks=[stop, *callbacks],
            options=GuardOptions(checkpoint_every=1),
        )
        return model, history, stop

    expected, history, stop = train("a")
    with pytest.raises(KeyboardInterrupt):
        train("b", Ends())
    keras.utils.set_random_seed(99)
    checkpointing._finished.clear()
    model, again, stopped = train("b")

    assert difference(expected, model) == 0
    assert again.history == history.history
    assert again.epoch == [0, 1, 2]
    assert (stopped.wait, stopped.best) == (stop.wait, stop.best)
    # AND a fit that is over is not begun again
    checkpointing._finished.clear()
    model, again, _ = train("b")
    assert difference(expected, model) == 0
    assert again.history == history.history


def test_a_budget_is_planned_for(monkeypatch, caplog):
    asked = {}

    def made(model, **arguments):
        asked.update(arguments)
        return type("Plan", (), {"settings": Settings(micro_batches=2, micro_batch_size=2)})()

    monkeypatch.setattr("memfit.api.plan.plan", made)
    monkeypatch.setattr("memfit.frameworks.keras.guard.loop.resident_bytes", lambda: 2**30)
    model = build(dense())
    fit(
        model,
        *data(),
        batch_size=4,
        verbose=0,
        shuffle=False,
        budget="3GiB",
        options=GuardOptions(remember=False),
    )

    assert asked["budget"] == 2 * 2**30
    assert asked["device"] == "cpu"
    assert "memfit is planning for 2.00 GiB before the first step, which takes longer for it" in caplog.messages
    assert difference(plain(dense(), shuffle=False), model) < 1e-5


def test_a_script_whose_model_no_guard_can_have_trains_as_without_one(caplog):
    model = build(dense())
    model.second_optimizer = keras.optimizers.Adam()
    with pytest.raises(BadModel, match="aren't built yet"):
        fit(model, *data(), batch_size=4, verbose=0)

    history = guarded_fit(type(model).fit, model, (*data(),), {"batch_size": 4, "verbose": 0, "shuffle": False})

    assert "this fit has no guard: the model" in caplog.text
    assert list(history.history) == ["loss", "mae"]
    assert difference(plain(dense(), shuffle=False), model) < 1e-5


def test_a_budget_that_nothing_fits_into_is_said_before_the_first_step(monkeypatch):
    def made(model, **arguments):
        raise PlanNotFound("no plan fits")

    monkeypatch.setattr("memfit.api.plan.plan", made)
    with pytest.raises(memfit.CannotFit, match="no plan fits"):
        fit(build(), *data(), verbose=0, budget="100GiB")


def test_a_supervisor_is_told_and_asked(monkeypatch, tmp_path, faults):
    folder = tmp_path / "attempt-1"
    folder.mkdir()
    request = {"attempt": 1, "checkpoint": str(tmp_path / "kept"), "micro_batch_size": 2}
    (folder / "request.json").write_text(json.dumps(run_events.RunRequest(**request).to_json()))
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


def test_bad_terms_are_refused():
    with pytest.raises(BadInput, match="plan must be 'auto', a Plan or None, but 'fast' was given"):
        fit(build(), plan="fast")
    with pytest.raises(BadInput, match=r"options must be memfit.GuardOptions\(...\), but \{'keep': 1\} was given"):
        memfit.keras.Fit(options={"keep": 1})


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
            callbacks=[patience, Stop()],
            options=GuardOptions(checkpoint_every=1),
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
        before = [as_array(value.value).copy() for value in model.variables]
        keeper = GuardedFit(Terms(checkpoint=tmp_path / "run"))
        callbacks = [keras.callbacks.EarlyStopping(monitor="loss", patience=5)]
        try:
            keeper.train_begins(model, None, callbacks, {"epochs": 2})
            num_taken += 1
        except memfit.MemfitError:
            num_refused += 1
            # THEN it is refused, and nothing has changed
            after = [as_array(value.value) for value in model.variables]
            assert all((one == other).all() for one, other in zip(before, after, strict=True)), path
        finally:
            keeper.close()
    assert num_refused > 20


# Guards of a model, whose batches a loop of the user's own may hand over.


def is_plain(model):
    function = getattr(model.train_function, "memfit_function", None)
    return function is None and "train_step" not in model.__dict__ and "apply" not in model.optimizer.__dict__


def test_a_batch_of_a_loop_that_does_not_fit_is_run_in_parts(faults):
    expected, model = build(dense()), build(dense())
    plain = [expected.train_on_batch(*data()) for _ in range(3)]
    faults(2, 3)
    with memfit.Guard(model, options=GuardOptions(remember=False)) as guard:
        found = [guard.train_on_batch(*data()) for _ in range(3)]
        assert guard.settings.micro_batch_size == 3
        assert guard.num_updates == 3

    np.testing.assert_allclose(found, plain, rtol=1e-5)
    assert type(found[0]) is type(plain[0])
    assert difference(expected, model) < 1e-5
    assert is_plain(model)


def test_a_fit_returns_what_keras_returns(faults):
    model = build(dense())
    faults(2)
    guard = memfit.Guard(model, options=GuardOptions(remember=False))
    history = guard.fit(*data(), batch_size=4, epochs=2, verbose=0)

    assert isinstance(history, keras.callbacks.History)
    assert list(history.history) == ["loss", "mae"]
    assert is_plain(model)


def test_what_a_fit_has_found_out_holds_for_batches(faults):
    faults(1)
    with memfit.Guard(build(dense()), options=GuardOptions(remember=False)) as guard:
        guard.fit(*data(), batch_size=12, verbose=0)
        assert guard.settings == Settings()
        guard.train_on_batch(*data())

        assert guard.settings.micro_batch_size == 6


def test_where_nothing_helps_a_batch_the_model_is_as_it_was(faults):
    model = build()
    guard = memfit.Guard(model, plan=None, options=GuardOptions(remember=False))
    guard.train_on_batch(*data())
    before = values(model)
    faults(*range(1, 100))
    with pytest.raises(memfit.CannotFit, match=r"nothing is left to try[\s\S]*statistics of each batch"):
        guard.train_on_batch(*data())

    assert all(np.array_equal(one, other) for one, other in zip(before, values(model), strict=True))
    assert guard.num_updates == 1


def test_another_compile_and_another_fit_do_not_take_the_guard_off(faults):
    model = build(dense())
    guard = memfit.Guard(model, options=GuardOptions(remember=False))
    guard.train_on_batch(*data())
    model.compile("sgd", "mse")
    model.fit(*data(), verbose=0, callbacks=[memfit.keras.Fit(options=GuardOptions(remember=False))])
    faults(1)
    guard.train_on_batch(*data())

    assert guard.settings.micro_batch_size == 6
    assert int(as_array(model.optimizer.iterations.value)) == 2
    guard.close()
    assert is_plain(model)


def test_a_loop_that_ended_is_not_repeated(tmp_path):
    for expected in (None, 3, 3):
        with memfit.Guard(
            build(dense()), checkpoint=tmp_path / "kept", options=GuardOptions(checkpoint_every=1000)
        ) as guard:
            assert guard.resumed_from == expected
            x, y = data()
            for _ in range(3 - guard.num_updates):
                guard.train_on_batch(x[:4], y[:4])


def test_a_loop_goes_on_from_its_checkpoint(tmp_path):
    expected = build()
    for _ in range(4):
        expected.train_on_batch(*data())
    counts = []
    for stop in (2, 4):
        checkpointing._finished.clear()
        model = build()
        with memfit.Guard(model, checkpoint=tmp_path / "kept", options=GuardOptions(checkpoint_every=9)) as guard:
            counts.append((guard.resumed_from, guard.num_updates))
            for _ in range(guard.num_updates, stop):
                guard.train_on_batch(*data())
            guard.save()

    assert counts == [(None, 0), (2, 2)]
    assert difference(expected, model) == 0
    assert model._initial_epoch is None


def test_a_folder_of_a_supervisor_is_for_fits_only(monkeypatch, tmp_path):
    monkeypatch.setattr(run_events, "current", lambda: run_events.RunRequest(1, str(tmp_path)))
    with memfit.Guard(build(), options=GuardOptions(remember=False)) as guard:
        guard.train_on_batch(*data())

        assert not guard._driver.checkpointing.is_open


def test_a_budget_of_batches_is_planned_for(monkeypatch):
    asked = {}

    def made(model, **arguments):
        asked.update(arguments)
        return type("Plan", (), {"settings": Settings(micro_batches=3, micro_batch_size=4)})()

    monkeypatch.setattr("memfit.api.plan.plan", made)
    monkeypatch.setattr("memfit.frameworks.keras.guard.loop.resident_bytes", lambda: 2**30)
    expected, model = build(dense()), build(dense())
    expected.train_on_batch(*data())
    with memfit.Guard(model, budget="3GiB", options=GuardOptions(remember=False)) as guard:
        guard.train_on_batch(*data())
        assert guard.settings.micro_batch_size == 4

    assert asked["budget"] == 2 * 2**30
    assert difference(expected, model) < 1e-5


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"optimizer": "adam"}, r"takes no optimizer: .*compiled with: memfit\.Guard\(model\)\.$"),
        ({"scheduler": 1}, "takes no scheduler: give the optimizer a schedule as its learning_rate"),
        ({"scaler": 1}, "takes no scaler: under the policy mixed_float16"),
        ({"ema": 1}, "takes no ema: .*use_ema=True"),
        ({"accumulate": 2}, "takes no accumulate: give batches of the size of one update"),
        ({"clip_norm": 1.0}, "takes no clip_norm: .*global_clipnorm="),
        ({"clip_value": 1.0}, "takes no clip_value: .*clipvalue="),
        ({"clip": len}, "takes no clip: .*clipnorm="),
        ({"grow_after": 5}, "takes no grow_after: "),
        ({"state": {}}, "takes no state: checkpoints hold"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, text):
    rare = {name: value for name, value in options.items() if name in GuardOptions.__slots__}
    common = {name: value for name, value in options.items() if name not in rare}
    with pytest.raises(BadInput, match=text):
        memfit.Guard(build(), options=GuardOptions(**rare), **common)
    if rare:
        with pytest.raises(BadInput, match=text):
            fit(build(), options=GuardOptions(**rare))


def test_defaults_of_the_other_guard_are_no_offence():
    memfit.Guard(
        build(), None, accumulate=1, scheduler=None, options=GuardOptions(grow_after=100, remember=False)
    ).close()


def test_a_model_that_is_not_compiled_is_refused():
    with pytest.raises(BadModel, match=r"isn't compiled.*Compile it first: model\.compile"):
        memfit.Guard(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))


def test_a_guard_that_was_closed_says_so():
    guard = memfit.Guard(build(), options=GuardOptions(remember=False))
    guard.close()
    for call in (guard.fit, guard.train_on_batch):
        with pytest.raises(BadInput, match="the guard was closed"):
            call(*data())
    # AND one that has been used
    guard = memfit.Guard(build(), options=GuardOptions(remember=False))
    guard.train_on_batch(*data())
    guard.close()
    with pytest.raises(BadInput, match="the guard was closed"):
        guard.train_on_batch(*data())


def test_without_a_folder_nothing_is_saved():
    with pytest.raises(BadInput, match=r"no folder for checkpoints: memfit\.Guard\(model, checkpoint=\.\.\.\)"):
        memfit.Guard(build()).save()


def test_a_guard_is_not_copied():
    with pytest.raises(TypeError, match="can't be copied or pickled"):
        copy.deepcopy(memfit.Guard(build()))


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="needs Keras on PyTorch")
def test_a_loop_of_pytorch_may_train_a_model_of_keras():
    torch = sys.modules["torch"]
    model = build()
    model.build((None, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    assert not trains_by_keras(model, optimizer)
    assert trains_by_keras(model, None)
    with memfit.Guard(model, optimizer, plan=None, options=GuardOptions(remember=False)) as guard:
        assert type(guard) is memfit.Guard
        batch = tuple(map(torch.from_numpy, data()))
        result = guard.step(lambda model, batch: (model(batch[0]) - batch[1]).square().mean(), batch)
    assert result.updated


def test_each_framework_has_its_own_way_to_train():
    with memfit.Guard(build()) as guard, pytest.raises(BadInput, match=r"Keras trains this model: use guard\.fit"):
        guard.step(None, data())
