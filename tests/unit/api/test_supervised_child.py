"""The process of a supervised script, against what Python itself does with the same script."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from memfit.api import supervised_child as _supervised
from memfit.core import env
from memfit.core.guarding import CannotFit
from memfit.core.run_events import RunRequest, read_events
from memfit.processes import limits

ROOT = Path(__file__).parents[3]


def supervised(folder, script, *arguments, module=False, **changes):
    """Runs a script as the supervisor does, without a keeper's report."""
    import json

    request = folder / "request.json"
    given = RunRequest(script=str(script), module=module, arguments=arguments, **changes)
    request.write_text(json.dumps(given.to_json()))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), env.RUN_REQUEST: str(request)}
    command = [sys.executable, "-m", "memfit.api.supervised_child", str(request)]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=60)


def plain(folder, *command):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, *map(str, command)]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=60)


SHOWS = """
import atexit, os, pickle, sys, threading

class Own:
    pass

print(__name__, __file__, __spec__ and __spec__.name, __package__, sys.argv, sys.path[0], __builtins__ is not None)
print(sorted(name for name in globals() if name.startswith("__")))
print(sys.modules["__main__"].Own is Own, "torch" in sys.modules, "numpy" in sys.modules)
atexit.register(lambda: print("end", pickle.loads(pickle.dumps(Own())).__class__ is Own))
threading.Thread(target=lambda: print(pickle.dumps(Own()) is not None)).start()
"""


def test_a_script_sees_what_python_shows_it(tmp_path):
    folder = tmp_path / "inner"
    folder.mkdir()
    (folder / "train.py").write_text(SHOWS)

    ours, theirs = supervised(tmp_path, "inner/train.py", "--lr", "1"), plain(tmp_path, "inner/train.py", "--lr", "1")

    assert theirs.returncode == 0
    assert ours.stdout == theirs.stdout
    assert ours.stderr == ""


def test_a_module_sees_what_python_shows_it(tmp_path):
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "train.py").write_text(SHOWS)

    ours, theirs = (
        supervised(tmp_path, "package.train", "-x", module=True),
        plain(tmp_path, "-m", "package.train", "-x"),
    )

    assert theirs.returncode == 0
    assert ours.stdout == theirs.stdout


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    raise ValueError('no')\nf()",
        "import sys; sys.exit('words')",
        "import sys; sys.exit(7)",
        "x = (",
        "raise KeyboardInterrupt",
        "import sys; sys.excepthook = lambda *details: print('own hook', details[0]); 1 / 0",
    ],
    ids=lambda text: text[:20],
)
def test_a_script_ends_as_with_python(tmp_path, text):
    (tmp_path / "train.py").write_text(text)

    ours, theirs = supervised(tmp_path, "train.py"), plain(tmp_path, "train.py")

    assert theirs.returncode != 0
    assert (ours.stdout, ours.stderr) == (theirs.stdout, theirs.stderr)
    # Without a report the keeper can't say more than that.
    assert ours.returncode == 0


def test_the_text_of_an_exception_cannot_steer_the_terminal(tmp_path):
    (tmp_path / "train.py").write_text("raise ValueError('a\\x1b[31m\\u202eb' + chr(7))")

    ours = supervised(tmp_path, "train.py")

    assert ours.stderr.splitlines()[-1] == r"ValueError: a\x1b[31m\u202eb\x07"


def test_an_interruption_ends_by_its_signal(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("raise KeyboardInterrupt")
    code = "import sys; from memfit.api.supervised_child import run_script; "
    code += "from memfit.core.run_events import RunRequest; "
    code += f"run_script(RunRequest(script={str(script)!r}))"

    assert plain(tmp_path, "-c", code).returncode == -signal.SIGINT


def test_the_exception_is_told(tmp_path):
    (tmp_path / "train.py").write_text("bytearray(2_000_000_000)")

    done = supervised(tmp_path, "train.py", data_limit_bytes=300_000_000)

    (event,) = read_events(tmp_path)
    assert (event["event"], event["type"], event["memory"], event["importing"]) == ("error", "MemoryError", True, "")
    # THEN the supervisor explains it, with the script's own line, and the traceback is in a file
    assert done.stderr == ""
    assert event["at"] == "train.py, line 1: bytearray(2_000_000_000)"
    assert (tmp_path / "traceback.txt").read_text().endswith("\nMemoryError\n")
    assert 0 < event["used_bytes"] <= event["data_bytes"] <= event["data_limit_bytes"] == 300_000_000


def test_the_traceback_is_shown_to_those_who_ask(tmp_path):
    (tmp_path / "train.py").write_text("bytearray(2_000_000_000)")

    done = supervised(tmp_path, "train.py", data_limit_bytes=300_000_000, verbose=True)

    assert done.stderr.startswith("Traceback") and done.stderr.endswith("\nMemoryError\n")


def test_the_place_is_the_last_line_of_the_scripts_own(tmp_path):
    (tmp_path / "train.py").write_text("import helper\nhelper.load()")
    text = "import json\ndef load():\n    json.loads('[]', object_hook=None, cls=Greedy)\n"
    text += "class Greedy(json.JSONDecoder):\n    decode = lambda self, text: self.scan_once(text, None)\n"
    (tmp_path / "helper.py").write_text(text)

    supervised(tmp_path, "train.py")

    (event,) = read_events(tmp_path)
    assert (event["type"], event["at"].split(":")[0]) == ("TypeError", "helper.py, line 5")


@pytest.mark.parametrize(
    ("error", "unused"), [(OSError(12, "no"), True), (MemoryError(), False), (RuntimeError("no"), False)], ids=str
)
def test_what_may_be_asked_for_and_never_used(told, error, unused):
    (event,) = told(error)

    assert event["may_stay_unused"] is unused


def test_an_exception_about_something_else_is_told_too(tmp_path):
    (tmp_path / "train.py").write_text("raise ValueError('no\\nsecond line')")

    supervised(tmp_path, "train.py")

    (event,) = read_events(tmp_path)
    assert (event["type"], event["text"], event["memory"]) == ("ValueError", "no", False)


@pytest.fixture
def told(tmp_path, monkeypatch):
    """What is told of an exception in this process, whose limit stays as it is."""
    monkeypatch.setenv(env.RUN_REQUEST, str(tmp_path / "request.json"))
    monkeypatch.setattr(limits, "set_data_limit", lambda limit: None)

    def tell(error):
        _supervised.tell(error)
        return read_events(tmp_path)

    return tell


def test_a_guard_that_gave_up_is_about_memory(told):
    (event,) = told(CannotFit("one sample needs 9 GiB"))

    assert (event["memory"], event["source"]) == (True, "guard")


def test_errors_of_torch_are_recognised_where_it_is_loaded(told):
    import torch  # noqa: F401 (only that it is loaded matters)

    text = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."
    (event,) = told(RuntimeError(text))

    assert (event["source"], event["requested_bytes"]) == ("torch", 64)


def test_an_interruption_is_nothing_to_tell(told):
    assert told(KeyboardInterrupt()) == []


EQUIPPED = """
import sys
from memfit.core.run_events import read_events
import importlib.util
importlib.util.find_spec("torch")
assert "torch" not in sys.modules
import torch
assert torch.__spec__.loader.__class__.__module__.startswith("_frozen_importlib"), torch.__spec__.loader
print(torch.ones(2).sum().item())
"""


def test_torch_is_equipped_when_the_script_imports_it(tmp_path):
    (tmp_path / "train.py").write_text(EQUIPPED)

    done = supervised(tmp_path, "train.py")

    assert done.stdout == "2.0\n", done.stderr
    assert [event["event"] for event in read_events(tmp_path)] == ["torch"]


@pytest.fixture
def equipped(monkeypatch, tmp_path):
    """Equips a process that isn't this one; gives what was done and told."""
    done = []
    monkeypatch.setenv(env.RUN_REQUEST, str(tmp_path / "request.json"))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr("memfit.frameworks.torch.oom.limit_devices", lambda size: done.append(("budget", size)))
    monkeypatch.setattr("memfit.frameworks.torch.rescue.Rescue", lambda *, eager: done.append(("rescue", eager)))

    def install(request, trainers=()):
        monkeypatch.setattr("memfit.api.integrations.TRAINERS", dict(trainers))
        _supervised._install_torch(request)
        return done, [event["event"] for event in read_events(tmp_path)]

    return install


@pytest.mark.parametrize(
    ("changes", "done", "events"),
    [
        ({}, [], ["torch"]),
        ({"budget_bytes": 5, "rescue": True, "eager": True}, [("budget", 5), ("rescue", True)], ["torch", "rescue"]),
    ],
)
def test_torch_gets_what_was_asked_for(equipped, changes, done, events):
    assert equipped(RunRequest(**changes)) == (done, events)


def test_trainers_are_guarded_when_they_are_imported(equipped, monkeypatch):
    there = ModuleType("imported_before")
    monkeypatch.setitem(sys.modules, "imported_before", there)
    seen = []

    equipped(RunRequest(), {"imported_before": seen.append, "never_imported": seen.append})

    assert seen == [there]


@pytest.mark.parametrize(
    ("backend", "devices", "said"),
    [
        ("tensorflow", False, "memfit: TensorFlow runs without oneDNN\n"),
        ("tensorflow", True, "memfit: TensorFlow grows on the GPU; TensorFlow runs without oneDNN\n"),
        ("jax", False, ""),
        ("torch", True, ""),
    ],
)
def test_what_was_set_for_a_backend_is_said_where_keras_uses_it(monkeypatch, capsys, backend, devices, said):
    package = SimpleNamespace(backend=SimpleNamespace(backend=lambda: backend))
    installed = []
    monkeypatch.setattr("memfit.api.integrations.install_keras", installed.append)
    monkeypatch.setattr(_supervised, "has_devices", lambda: devices)
    texts = ["TensorFlow grows on the GPU", "TensorFlow runs without oneDNN", "JAX grows on the GPU"]

    _supervised._install_keras(package, texts)

    assert (capsys.readouterr().err, installed) == (said, [package])


@pytest.mark.parametrize(
    ("changes", "limit", "is_limited"),
    [({}, None, False), ({"budget_bytes": 5}, None, True), ({"attempt": 2}, None, True), ({}, 5, True)],
)
def test_backends_are_set_up_for_a_lack_of_memory_only_where_one_is_to_be_expected(
    monkeypatch, changes, limit, is_limited
):
    asked = []
    monkeypatch.setattr("memfit.frameworks.keras.guard.flags.set_early", lambda **named: asked.append(named) or ["x"])
    monkeypatch.setattr(_supervised, "cgroup_limit_bytes", lambda: limit)

    assert _supervised._flags(RunRequest(**changes)) == ["x"]
    assert asked == [{"is_limited": is_limited}]
