"""The public module for Keras."""

import subprocess
import sys

import pytest

import memfit.keras


def test_the_callback_is_one_of_keras():
    keras = pytest.importorskip("keras")

    assert issubclass(memfit.keras.Fit, keras.callbacks.Callback)
    assert memfit.keras.Fit.__module__ == "memfit.keras"
    assert "Fit" in dir(memfit.keras)


def test_other_names_are_not_there():
    with pytest.raises(AttributeError, match=r"module 'memfit\.keras' has no attribute 'Fits'"):
        memfit.keras.Fits  # noqa: B018


def test_keras_is_not_loaded_before_it_is_needed():
    code = "import sys, memfit.keras; sys.exit('keras' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
