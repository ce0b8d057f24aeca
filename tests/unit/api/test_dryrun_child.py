"""The child process as the parent starts it."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from memfit.api import dryrun_child as child
from memfit.api.dryrun_child import main
from memfit.catalogue import find_device
from memfit.core.dryrun import DryRun, Outcome, Request
from memfit.core.settings import Settings
from memfit.frameworks.torch.shapes.restoration import random_states_kept
from memfit.processes.overlay import collect

ROOT = Path(__file__).parents[3]

TRAIN = """
import sys
import torch
from torch import nn

model = nn.Linear(1000, 1000).cuda()
optimizer = torch.optim.Adam(model.parameters())
print(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory, sys.argv[1:])
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(4, 1000).cuda()).sum().backward()
    optimizer.step()
"""


def request_for(tmp_path, script, *arguments, **options):
    """The path of a request for a script given as its text."""
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    options.setdefault("result_path", str(tmp_path / "result.json"))
    request = Request(str(tmp_path / "train.py"), False, arguments, find_device("t4"), **options)
    (tmp_path / "request.json").write_text(json.dumps(request.to_json()), encoding="utf-8")
    return str(tmp_path / "request.json")


def test_a_request_becomes_a_result(tmp_path):
    # GIVEN settings of the allocator as they are given to a real GPU
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}

    # WHEN a script is run as the parent runs it
    request = request_for(tmp_path, TRAIN, "--fast", steps=2)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **settings}
    command = [sys.executable, "-m", "memfit.api.dryrun_child", request]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)

    # THEN its output is its own, and the result is a dry run whose memory obeys the settings
    assert done.stderr == ""
    assert done.stdout == f"NVIDIA Tesla T4 {find_device('t4').usable_bytes} ['--fast']\n"
    assert done.returncode == 0
    data = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    run = DryRun.from_json(data)
    assert (run.outcome, run.num_steps, run.arguments) == (Outcome.COMPLETED, 2, ("--fast",))
    assert data["loader_ordinal"] is None
    # Expandable segments grow by pages of 2 MiB; without them large blocks are cut from segments of 20 MiB.
    assert run.estimate.replay.reserved_peak_bytes < run.estimate.replay.allocated_peak_bytes + 8 * 2**20
    # It is written whole or not at all.
    left = {"device", "hook", "request.json", "result.json", "train.py"}
    assert {file.name for file in tmp_path.iterdir()} == left


SAVES = """
import os, shutil, subprocess, sys
import torch
from torch import nn

model = nn.Linear(1000, 1000).cuda()
optimizer = torch.optim.Adam(model.parameters())
model(torch.randn(4, 1000).cuda()).sum().backward()
optimizer.step()
torch.save(model.state_dict(), "model.pt")
model.load_state_dict(torch.load("model.pt"))
print(os.path.getsize("model.pt") < 10000, os.listdir("."))
writer = torch._C.PyTorchFileWriter("older.pt")
writer.write_record("a", b"b", 1)
writer.write_end_of_file()
open("data/fetched.txt", "w").write("fetched")
shutil.rmtree("logs")
os.makedirs("logs")
open("logs/train.log", "a").write("begun")
subprocess.run([sys.executable, "-c", "open('notes.txt', 'a').write(open('logs/train.log').read())"], check=True)
print(open("notes.txt").read())
subprocess.run("rm -rf runs; echo gone > data.txt", shell=True, check=True)
"""


WITHOUT_VIEW = """
import sys
from memfit.processes import overlay
overlay.enter = lambda *args, **options: ("refused", [])
from memfit.api.dryrun_child import main
main(sys.argv[1])
"""


@pytest.mark.parametrize("has_view", [True, False])
def test_the_users_files_stay_what_they_are(tmp_path, monkeypatch, has_view):
    # GIVEN files of the user's, and a system that gives a view of files, or none
    folder, layers = tmp_path / "users", tmp_path / "layers"
    written = ("model.pt", "older.pt", "logs/train.log", "notes.txt")
    for name in (*written, *(("runs/a.pt", "data.txt") if has_view else ())):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("the user's")
        os.utime(folder / name, (1, 1))
    for each in (layers, folder / "data"):
        each.mkdir()
    result = layers / "result.json"
    options = {"layers": (str(layers),), "writable": (str(folder / "data"),), "result_path": str(result)}
    request = request_for(tmp_path, SAVES, steps=9, **options)
    command = [sys.executable, "-m", "memfit.api.dryrun_child", request]
    if not has_view:
        command[1:] = ["-c", WITHOUT_VIEW, request]
    cache = tmp_path / "cache"
    cache.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HOME": str(cache)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)

    # THEN the script finds what it saved, as shapes
    run = DryRun.from_json(result.read_text(encoding="utf-8"))
    assert run.outcome is Outcome.ENDED, done.stderr
    assert done.stdout.startswith("True ['")
    if has_view and done.stderr.startswith("memfit: no view"):
        pytest.skip(done.stderr)

    # AND so does a process that it starts
    assert done.stdout.endswith("the user'sbegun\n")

    # AND the user's files are what they were, but for what a command did where there is no view, which was said
    assert ("What commands and compiled libraries write" in done.stderr) is not has_view
    assert f"except below {cache}" in done.stderr
    by_command = {} if has_view else {"data.txt": "gone\n"}
    expected = dict.fromkeys([*written, *(["runs/a.pt", "data.txt"] if has_view else [])], "the user's")
    found = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert found == {**expected, **by_command, "data/fetched.txt": "fetched"}
    told = collect(layers)
    assert {str(folder / name) for name in written} <= set(told)


WRITES_WITH_H5PY = """
import h5py, os
os.remove("old.txt")
with h5py.File("weights.h5", "w") as file:
    file["kernel"] = [1, 2, 3]
with h5py.File("weights.h5") as file:
    print(file["kernel"][:].tolist(), os.listdir("."))
"""


def test_scripts_of_keras_keep_the_users_files_too(tmp_path):
    pytest.importorskip("h5py")
    folder, layers = tmp_path / "users", tmp_path / "layers"
    folder.mkdir()
    layers.mkdir()
    for name in ("old.txt", "weights.h5"):
        (folder / name).write_text("the user's")
    options = {"layers": (str(layers),), "result_path": str(layers / "result.json"), "until_fit": True}
    command = [sys.executable, "-c", WITHOUT_VIEW, request_for(tmp_path, WRITES_WITH_H5PY, **options)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)

    assert done.stdout == "[1, 2, 3] ['weights.h5']\n", done.stderr
    assert {path.name: path.read_text() for path in folder.iterdir()} == dict.fromkeys(
        ("old.txt", "weights.h5"), "the user's"
    )


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_is_the_scripts_own(tmp_path, monkeypatch, code):
    # In this process, whose arguments, paths and environment are put back afterwards.
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTORCH_JIT", "0")
    request = request_for(tmp_path, f"import sys\nsys.exit({code})\n")

    with random_states_kept():
        assert main(request) == code
    run = DryRun.from_json((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert (run.exit_code, run.outcome) == (code, Outcome.FAILED if code else Outcome.NO_STEP)


def test_a_script_that_ends_at_once_leaves_what_was_seen(tmp_path):
    # GIVEN a script that ends, with a process forked off it, without Python's own end
    ends = "\nif os.fork() == 0:\n    os._exit(5)\nos.wait()\nos._exit(3)\n"
    request = request_for(tmp_path, f"import os\n{TRAIN}{ends}", steps=9)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-m", "memfit.api.dryrun_child", request], env=environment, stdout=2)

    run = DryRun.from_json((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert (run.outcome, run.num_steps, run.exit_code) == (Outcome.FAILED, 5, 3)
    assert run.estimate.timeline.blocks


def test_a_result_that_one_disk_has_no_room_for_is_on_another(tmp_path):
    layers = (str(tmp_path / "full"), str(tmp_path))
    request = Request("train.py", False, (), find_device("t4"), result_path=f"{layers[0]}/result.json", layers=layers)

    child._write_result(request, {"answer": 1})

    assert json.loads((tmp_path / "result.json").read_text(encoding="utf-8")) == {"answer": 1}
    with pytest.raises(FileNotFoundError):
        child._write_result(Request("train.py", False, (), find_device("t4"), result_path="/missing/result.json"), {})


def test_settings_are_put_into_practice(tmp_path, monkeypatch):
    # GIVEN settings for the model, the optimizer, the batches and the allocator
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    settings = Settings(checkpoint=("0", "1"), micro_batches=2, expandable_segments=True)
    script = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

part = lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
model = nn.Sequential(part(), part()).cuda()
optimizer = torch.optim.Adam(model.parameters())
for x, in DataLoader(TensorDataset(torch.zeros(64, 64)), batch_size=8):
    optimizer.zero_grad()
    model(x.cuda()).sum().backward()
    optimizer.step()
"""
    request = request_for(tmp_path, script, settings=settings, loader_ordinal=0, unlimited=True, steps=2)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-m", "memfit.api.dryrun_child", request], text=True, env=environment)

    # THEN the script runs with them
    run = DryRun.from_json((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert done.returncode == 0
    assert run.allocator.expandable_segments
    assert run.seen.recomputed == ("0", "1")
    assert run.seen.batch_size == 8
    assert run.num_steps == 2
    phases = [str(mark.phase) for mark in run.estimate.timeline.marks]
    assert phases.count("backward") == 4
    assert phases.count("optimizer") == 2


JAX_AND_LOGS = """
import logging
import sys
import types

sys.modules["jax"] = types.ModuleType("jax")
for text in ("bitsandbytes library load error: libcublas.so.13", "something else"):
    logging.getLogger("bitsandbytes.cextension").error(text)
"""


def test_a_script_of_jax_is_told_what_to_do_and_no_library_is_missed(tmp_path):
    request = request_for(tmp_path, JAX_AND_LOGS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "memfit.api.dryrun_child", request]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    result = DryRun.from_json(json.loads((tmp_path / "result.json").read_text(encoding="utf-8")))
    assert result.outcome is Outcome.NO_STEP
    (note,) = (note for note in result.estimate.notes if note.code == "nothing-on-device")
    assert "computes with JAX" in note.text and "memfit.estimate(step" in note.text
    assert "something else" in done.stderr
    assert "load error" not in done.stderr


JAX_LOADED_BY_OTHERS = """
import sys
import types

for name in ("jax", "tensorflow", "keras"):
    sys.modules[name] = types.ModuleType(name)
"""


def test_keras_and_tensorflow_load_jax_which_then_need_not_be_what_a_script_computes_with(tmp_path):
    request = request_for(tmp_path, JAX_LOADED_BY_OTHERS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "memfit.api.dryrun_child", request]
    subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    result = DryRun.from_json(json.loads((tmp_path / "result.json").read_text(encoding="utf-8")))
    (note,) = (note for note in result.estimate.notes if note.code == "nothing-on-device")
    assert "TensorFlow and Keras and JAX are loaded" in note.text
    assert "the script computes with JAX" not in note.text


@pytest.mark.parametrize(("user", "is_said"), [(0, False), (1000, True)])
def test_what_others_own_can_not_be_written_and_that_is_said(user, is_said, tmp_path, monkeypatch, capsys):
    # GIVEN a view of the files, which only root's own mapping of users lets write what others own
    monkeypatch.setattr(child.overlay, "enter", lambda *_, **__: ("", []))
    monkeypatch.setattr(child.os, "geteuid", lambda: user)
    request = Request("train.py", False, (), find_device("t4"), result_path="", layers=(str(tmp_path),))

    child._keep_files_apart(request)

    said = capsys.readouterr().err
    assert "files that the script writes are discarded when it ends" in said
    assert ("it can't write to files of other users (EOVERFLOW)" in said) is is_said


def test_a_script_that_fills_the_disk_with_what_is_discarded_is_ended(tmp_path, monkeypatch, capsys):
    free = [100 * 2**20]
    monkeypatch.setattr(child, "_ROOM_SECONDS", 0.0)
    monkeypatch.setattr(child, "_reasons", [])
    monkeypatch.setattr(child.shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=free[0]))
    seen = []

    def size(folder):
        # First the disk is filled by somebody else.
        seen.append(free[0])
        return 2**20 if len(seen) < 3 else 60 * 2**20

    monkeypatch.setattr(child.overlay, "written_bytes", size)
    monkeypatch.setattr(child.time, "sleep", lambda seconds: free.__setitem__(0, 40 * 2**20))

    with pytest.raises(KeyboardInterrupt):
        child._watch_room(str(tmp_path / "layers"), str(tmp_path))

    said = f"has written 60.0 MiB, half of the room in {tmp_path}, and is ended"
    assert said in capsys.readouterr().err
    assert len(seen) == 3
    # What became of the script, whatever it has made of the interruption, is said with that reason.
    common = {"script": "train.py", "arguments": (), "estimate": None, "num_steps": 0, "steps_wanted": 3}
    for outcome in (Outcome.FAILED, Outcome.NO_STEP, Outcome.ENDED):
        ended = child._ended(DryRun(**common, outcome=outcome, error="KeyboardInterrupt: no message", exit_code=1))
        assert ended.outcome is Outcome.INTERRUPTED
        assert said in ended.error
    whole = DryRun(**common, outcome=Outcome.COMPLETED)
    assert child._ended(whole) is whole
