"""Every `fit` goes through the guard; told with a package that looks like Keras, so that any process can."""

from types import SimpleNamespace

import pytest

from memfit.core import env
from memfit.core.run_events import read_events
from memfit.frameworks.keras import supervised


@pytest.fixture
def package():
    class Trainer:
        def fit(self, x=None, *, epochs=1):
            """Trains."""
            return ("trained", x, epochs)

    class Model(Trainer):
        pass

    return SimpleNamespace(Model=Model, Trainer=Trainer, backend=SimpleNamespace(backend=lambda: "jax"))


def guarded(plain, model, arguments, named):
    return ("guarded", plain(model, *arguments, **named))


def test_a_fit_of_any_model_is_guarded(package):
    supervised.install(package, guarded)

    class Own(package.Model):
        def fit(self, x=None):
            return ("own", super().fit(x, epochs=3))

    assert package.Model().fit(1, epochs=2) == ("guarded", ("trained", 1, 2))
    assert Own().fit(5) == ("own", ("guarded", ("trained", 5, 3)))
    assert package.Trainer.fit.__doc__ == "Trains."


def test_a_fit_is_guarded_once(package):
    supervised.install(package, guarded)
    supervised.install(package, guarded)

    assert package.Model().fit() == ("guarded", ("trained", None, 1))


def test_the_supervisor_learns_of_keras_and_its_backend(package, tmp_path, monkeypatch):
    monkeypatch.setenv(env.RUN_REQUEST, str(tmp_path / "request.json"))

    supervised.install(package, guarded)

    (event,) = read_events(tmp_path)
    assert (event["event"], event["backend"]) == ("keras", "jax")
