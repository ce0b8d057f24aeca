import json

import pytest

from memfit.processes.keras_scripts import keras_backend


@pytest.fixture
def backend(tmp_path, monkeypatch):
    """The backend told of a script with this text."""
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "home"))

    def told(text):
        path = tmp_path / "train.py"
        path.write_text(text)
        return keras_backend(str(path))

    return told


@pytest.mark.parametrize(
    "text",
    [
        "import keras",
        "from keras import layers",
        "import numpy\nimport tensorflow as tf",
        "def main():\n    from tensorflow import keras",
        "import keras.layers",
        "import jax, numpy as np, keras, optax",
    ],
)
def test_scripts_of_keras_are_known_by_what_they_import(backend, text):
    assert backend(text) == "tensorflow"


@pytest.mark.parametrize("text", ["import torch", "# import keras", "import keras_hub_of_mine", "x = 'import'", "("])
def test_other_scripts_are_not(backend, text):
    assert backend(text) == ""


def test_a_script_may_choose_its_backend(backend, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")

    assert backend("import os\nos.environ['KERAS_BACKEND'] = 'jax'\nimport keras") == "jax"
    assert backend('import os\nos.environ.setdefault("KERAS_BACKEND", "torch")\nimport keras') == "torch"


def test_the_environment_goes_before_the_file_of_keras(backend, tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "keras.json").write_text(json.dumps({"backend": "jax"}))
    assert backend("import keras") == "jax"

    monkeypatch.setenv("KERAS_BACKEND", "torch")
    assert backend("import keras") == "torch"


@pytest.mark.parametrize("text", ["{", "[]", '{"backend": 1}'])
def test_a_file_of_keras_that_says_nothing_is_passed_over(backend, tmp_path, text):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "keras.json").write_text(text)

    assert backend("import keras") == "tensorflow"


def test_modules_are_read_too(tmp_path, monkeypatch):
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "trains_with_keras.py").write_text("import keras")

    assert keras_backend("trains_with_keras", module=True) == "tensorflow"
    assert keras_backend("no_such_module_here", module=True) == ""
