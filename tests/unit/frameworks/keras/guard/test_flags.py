"""Flags of the backends, as long as they can be set."""

import os
import sys
import types

import pytest

from memfit.frameworks.keras.guard import flags

NAMES = ("TF_ENABLE_ONEDNN_OPTS", "XLA_PYTHON_CLIENT_PREALLOCATE", "TF_FORCE_GPU_ALLOW_GROWTH")


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    monkeypatch.delitem(sys.modules, "jax", raising=False)


def test_flags_are_set_before_the_backend_is_loaded(monkeypatch):
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    said = flags.set_early(is_limited=True)

    assert [os.environ[name] for name in NAMES] == ["0", "false", "true"]
    assert len(said) == 3
    assert any("without oneDNN" in text for text in said)
    assert flags.set_early(is_limited=True) == []


def test_flags_of_tensorflow_are_left_alone_with_another_backend(monkeypatch):
    # As while Keras is being imported.
    monkeypatch.setitem(sys.modules, "keras", types.ModuleType("keras"))
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    assert flags.set_early(is_limited=True) == ["JAX takes GPU memory as it needs it"]
    assert "TF_ENABLE_ONEDNN_OPTS" not in os.environ


def test_without_a_limit_oneDNN_stays():
    flags.set_early(is_limited=False)

    assert "TF_ENABLE_ONEDNN_OPTS" not in os.environ


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "1")
    flags.set_early(is_limited=True)

    assert os.environ["TF_ENABLE_ONEDNN_OPTS"] == "1"


def test_once_tensorflow_is_loaded_growth_is_set_by_its_own_functions(monkeypatch):
    grown = []
    config = types.SimpleNamespace(
        list_physical_devices=lambda kind: ["one"],
        experimental=types.SimpleNamespace(
            get_memory_growth=lambda device: None, set_memory_growth=lambda device, on: grown.append((device, on))
        ),
    )
    monkeypatch.setitem(sys.modules, "tensorflow", types.SimpleNamespace(config=config))
    backend = types.SimpleNamespace(backend=lambda: "tensorflow")
    monkeypatch.setitem(sys.modules, "keras", types.SimpleNamespace(backend=backend))

    said = flags.set_late(is_limited=True)

    assert grown == [("one", True)]
    assert any("set TF_ENABLE_ONEDNN_OPTS=0 before TensorFlow is imported" in text for text in said)
    # AND where Keras computes with something else, its kernels are nobody's concern
    backend.backend = lambda: "jax"
    assert not any("oneDNN" in text for text in flags.set_late(is_limited=True))
