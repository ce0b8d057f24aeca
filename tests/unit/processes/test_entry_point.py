import json
import os
import sys

import pytest

from memfit import api  # noqa: F401  (names what runs a supervised script)
from memfit.core.errors import BadInput, BadTarget
from memfit.core.units import GIB, MIB
from memfit.processes import entry_point as target
from memfit.processes.entry_point import checked_arguments, find_target, keras_backend


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "mistake.py").write_text("def (:\n")
    (tmp_path / "train").write_text("#!/usr/bin/env python\nprint(1)\n")
    (tmp_path / "train.sh").write_text("set -e; python train.py\n")
    (tmp_path / "weights.bin").write_bytes(b"\x80\x02\xff\x00")
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nname = '\xe9'\n")
    (tmp_path / "package" / "inner").mkdir(parents=True)
    (tmp_path / "package" / "__init__.py").write_text("raise RuntimeError('nobody asked for me')\n")
    (tmp_path / "package" / "train.py").write_text("")
    (tmp_path / "package" / "inner" / "__init__.py").write_text("")
    (tmp_path / "package" / "inner" / "__main__.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["train.py", "./train.py", "train", "mistake.py", "latin.py"])
def test_scripts_pass(folder, name):
    find_target(name, module=False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone.py", "there is no file 'gone.py' in {folder!r}. Give the path of a Python script."),
        ("package", "'package' is a folder. Give the path of a Python script, or -m with the name of a module."),
        ("train.sh", "'train.sh' is not a Python script. Give the file that `python` itself would be given."),
        ("weights.bin", "'weights.bin' is not a Python script. Give the file that `python` itself would be given."),
    ],
)
def test_other_paths_are_refused(folder, name, message):
    with pytest.raises(BadTarget) as refused:
        find_target(name, module=False)

    assert str(refused.value) == message.format(folder=str(folder))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_script_that_cannot_be_read_is_refused(folder):
    (folder / "train.py").chmod(0)

    with pytest.raises(BadTarget, match=r"'train.py' can't be read: Permission denied. Give a file that can."):
        find_target("train.py", module=False)


@pytest.mark.parametrize("name", ["train", "package.train", "package.inner", "timeit", "pytest"])
def test_modules_pass_and_are_not_imported(folder, name):
    find_target(name, module=True)

    assert "package" not in sys.modules


@pytest.mark.parametrize("name", ["gone", "package.gone", "package.train.gone", "train.gone", "", ".train", "a..b"])
def test_other_names_are_refused(folder, name):
    with pytest.raises(BadTarget) as refused:
        find_target(name, module=True)

    assert str(refused.value) == (
        f"there is no module {name!r} in {str(folder)!r} or among the installed ones. "
        "Give -m a name that `python -m` knows, or the path of a script without -m."
    )


def test_a_package_needs_something_to_run(folder):
    with pytest.raises(BadTarget, match=r"'package' is a package without a __main__ module. Name the module in it"):
        find_target("package", module=True)


def test_a_loaded_module_without_a_spec_is_no_problem(folder, monkeypatch):
    import types

    monkeypatch.setitem(sys.modules, "made_up", types.ModuleType("made_up"))
    with pytest.raises(BadTarget, match="there is no module 'made_up'"):
        find_target("made_up", module=True)


def test_a_budget_that_python_itself_exceeds(monkeypatch):
    monkeypatch.setattr(target, "has_devices", lambda: False)

    with pytest.raises(BadInput, match=r"a budget of 1.00 KiB is less than \d+\.\d MiB, what Python itself takes"):
        target.check_budget(1024)
    target.check_budget(200 * MIB)
    target.check_budget(100 * GIB)


def test_a_budget_of_a_device_below_one_segment(monkeypatch):
    monkeypatch.setattr(target, "has_devices", lambda: True)

    with pytest.raises(BadInput, match=r"less than 2.00 MiB, the smallest piece of device memory"):
        target.check_budget(1024)
    target.check_budget(3 * MIB)


def test_where_it_can_not_be_measured_no_budget_is_refused(monkeypatch):
    monkeypatch.setattr(target, "has_devices", lambda: False)
    monkeypatch.setattr(target.sys, "executable", "/no/such/python")

    target.check_budget(1024)


def test_a_bare_name_may_be_that_of_an_installed_program(folder, monkeypatch):
    # GIVEN a program of Python that pip has put on the path
    programs = folder / "bin"
    programs.mkdir()
    (programs / "launch").write_text("#!/usr/bin/env python\nprint(1)\n")
    (programs / "launch").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))

    assert find_target("launch", module=False) == str(programs / "launch")
    # A file of that name that is here comes first, and a path is nothing else.
    assert find_target("train", module=False) == "train"
    with pytest.raises(BadTarget, match=r"there is no file '\./launch'"):
        find_target("./launch", module=False)
    assert find_target("package.train", module=True) == "package.train"


@pytest.mark.parametrize("module", [True, False])
def test_a_target_that_is_not_there(folder, module):
    with pytest.raises(BadTarget, match="there is no"):
        find_target("made_up", module=module)


# Scripts of Keras


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


TRAINS = "import torch\nloss.backward()\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"from tensorflow.keras.preprocessing.sequence import pad_sequences\n{TRAINS}", ""),
        (f"import tensorflow as tf\n{TRAINS}model = torch.compile(model)\nx = re.compile('a')", ""),
        (f"import tensorflow as tf\n{TRAINS}model.compile(optimizer='adam')", "tensorflow"),
        (f"import tensorflow as tf\n{TRAINS}with tf.GradientTape() as tape: pass", "tensorflow"),
        (f"import os, keras\nos.environ['KERAS_BACKEND'] = 'torch'\n{TRAINS}", "torch"),
        ("import tensorflow as tf\nimport torch", "tensorflow"),
        ("import keras\nimport torch\nmodel.fit()\nx.backward()", "tensorflow"),
        ("import keras\nimport torch\nmodel.fit(x, y)\n# not loss.backward()", "tensorflow"),
        ("import keras\nimport torch\nmodel.train(x)  # not loss.backward()", "tensorflow"),
        ("import keras\n# os.environ['KERAS_BACKEND'] = 'torch'", "tensorflow"),
        ("import keras\n# os.environ['KERAS_BACKEND'] = 'torch'\nx = (", "tensorflow"),
        (f"import keras\n{TRAINS}# model.fit(x, y)\nx = '# model.train()'", ""),
    ],
)
def test_a_script_that_trains_with_pytorch_may_import_keras(backend, text, expected):
    assert backend(text) == expected


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


@pytest.mark.parametrize(
    ("steps", "message"), [(0, "at least 1, but 0"), (10**30, f"at most 2,147,483,647, but {10**30}")]
)
def test_numbers_of_steps_are_within_bounds(steps, message):
    with pytest.raises(BadInput, match=f"steps must be {message} was given"):
        checked_arguments([], steps=(steps, 1))
