"""Guards of Keras models on the backend of this process; all backends are in integration/test_keras_guard.py."""

import copy
import inspect
import sys

import numpy as np
import pytest

keras = pytest.importorskip("keras")

import memfit  # noqa: E402
from memfit import _fit_checkpoints, _fit_options, _keras_fit  # noqa: E402
from memfit._keras_guard import KerasGuard, trains_by_keras  # noqa: E402
from memfit.adapters.keras.guarding import variables  # noqa: E402
from memfit.core.errors import BadInput, BadModel  # noqa: E402
from memfit.core.settings import Settings  # noqa: E402
from tests.unit.adapters.keras.guarding.models import build, data, dense, difference, fault_setter, values  # noqa: E402


@pytest.fixture(autouse=True)
def apart(monkeypatch, tmp_path):
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(_fit_checkpoints, "_finished", {})


@pytest.fixture
def faults(monkeypatch):
    return fault_setter(monkeypatch)


def is_plain(model):
    function = getattr(model.train_function, "memfit_function", None)
    return function is None and "train_step" not in model.__dict__ and "apply" not in model.optimizer.__dict__


def test_a_batch_that_does_not_fit_is_run_in_parts(faults):
    expected, model = build(dense()), build(dense())
    plain = [expected.train_on_batch(*data()) for _ in range(3)]
    faults(2, 3)
    with memfit.Guard(model, remember=False) as guard:
        found = [guard.train_on_batch(*data()) for _ in range(3)]
        assert guard.settings.micro_batch_size == 3
        assert guard.num_updates == 3

    assert isinstance(guard, KerasGuard)
    np.testing.assert_allclose(found, plain, rtol=1e-5)
    assert type(found[0]) is type(plain[0])
    assert difference(expected, model) < 1e-5
    assert is_plain(model)


def test_a_fit_returns_what_keras_returns(faults):
    model = build(dense())
    faults(2)
    guard = memfit.Guard(model, remember=False)
    history = guard.fit(*data(), batch_size=4, epochs=2, verbose=0)

    assert isinstance(history, keras.callbacks.History)
    assert list(history.history) == ["loss", "mae"]
    assert is_plain(model)


def test_what_a_fit_has_found_out_holds_for_batches(faults):
    faults(1)
    with memfit.Guard(build(dense()), remember=False) as guard:
        guard.fit(*data(), batch_size=12, verbose=0)
        assert guard.settings == Settings()
        guard.train_on_batch(*data())

        assert guard.settings.micro_batch_size == 6


def test_where_nothing_helps_the_model_is_as_it_was(faults):
    model = build()
    guard = memfit.Guard(model, remember=False, plan=None)
    guard.train_on_batch(*data())
    before = values(model)
    faults(*range(1, 100))
    with pytest.raises(memfit.CannotFit, match=r"nothing is left to try[\s\S]*statistics of each batch"):
        guard.train_on_batch(*data())

    assert all(np.array_equal(one, other) for one, other in zip(before, values(model), strict=True))
    assert guard.num_updates == 1


def test_another_compile_and_another_fit_do_not_take_the_guard_off(faults):
    model = build(dense())
    guard = memfit.Guard(model, remember=False)
    guard.train_on_batch(*data())
    model.compile("sgd", "mse")
    model.fit(*data(), verbose=0, callbacks=[memfit.keras.Fit(remember=False)])
    faults(1)
    guard.train_on_batch(*data())

    assert guard.settings.micro_batch_size == 6
    assert int(variables.as_array(model.optimizer.iterations.value)) == 2
    guard.close()
    assert is_plain(model)


def test_a_loop_that_ended_is_not_repeated(tmp_path):
    for expected in (None, 3, 3):
        with memfit.Guard(build(dense()), checkpoint=tmp_path / "kept", checkpoint_every=1000) as guard:
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
        _fit_checkpoints._finished.clear()
        model = build()
        with memfit.Guard(model, checkpoint=tmp_path / "kept", checkpoint_every=9) as guard:
            counts.append((guard.resumed_from, guard.num_updates))
            for _ in range(guard.num_updates, stop):
                guard.train_on_batch(*data())
            guard.save()

    assert counts == [(None, 0), (2, 2)]
    assert difference(expected, model) == 0
    assert model._initial_epoch is None


def test_a_folder_of_a_supervisor_is_for_fits_only(monkeypatch, tmp_path):
    monkeypatch.setattr(_keras_fit.run_events, "current", lambda: _keras_fit.run_events.RunRequest(1, str(tmp_path)))
    with memfit.Guard(build(), remember=False) as guard:
        guard.train_on_batch(*data())

        assert not guard._batches._checkpoints.is_open


def test_a_budget_is_planned_for(monkeypatch):
    asked = {}

    def made(model, **arguments):
        asked.update(arguments)
        return type("Plan", (), {"settings": Settings(micro_batches=3, micro_batch_size=4)})()

    monkeypatch.setattr("memfit._plan.plan", made)
    monkeypatch.setattr(_fit_options, "resident_bytes", lambda: 2**30)
    expected, model = build(dense()), build(dense())
    expected.train_on_batch(*data())
    with memfit.Guard(model, budget="3GiB", remember=False) as guard:
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
        ({"device": "rtx-3090"}, "takes no device: training runs where Keras runs .*budget="),
        ({"checkpoints": "a"}, "has no option checkpoints. It takes budget, plan, checkpoint,"),
        ({"keep": 0}, "keep must be a whole number from 1 up, but 0 was given"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, text):
    with pytest.raises(BadInput, match=text):
        memfit.Guard(build(), **options)


def test_defaults_of_the_other_guard_are_no_offence():
    memfit.Guard(build(), None, accumulate=1, grow_after=100, scheduler=None, remember=False).close()


def test_other_arguments_by_place_are_refused():
    with pytest.raises(BadInput, match="followed by names only, but 2 more arguments were given"):
        memfit.Guard(build(), None, "10GiB")


def test_a_model_that_is_not_compiled_is_refused():
    with pytest.raises(BadModel, match=r"isn't compiled.*Compile it first: model\.compile"):
        memfit.Guard(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))


def test_a_guard_that_was_closed_says_so():
    guard = memfit.Guard(build(), remember=False)
    guard.close()
    for call in (guard.fit, guard.train_on_batch):
        with pytest.raises(BadInput, match="the guard was closed"):
            call(*data())
    # AND one that has been used
    guard = memfit.Guard(build(), remember=False)
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
    with memfit.Guard(model, optimizer, plan=None, remember=False) as guard:
        assert type(guard) is memfit.Guard
        batch = tuple(map(torch.from_numpy, data()))
        result = guard.step(lambda model, batch: (model(batch[0]) - batch[1]).square().mean(), batch)
    assert result.updated


def test_both_guards_have_one_signature():
    names = list(inspect.signature(memfit.Guard).parameters)

    assert names[:2] == ["model", "optimizer"]
    assert set(inspect.signature(KerasGuard).parameters) <= set(names)
