"""Scripts that never get to a `fit`: nothing of Keras is loaded. Those that do are integration tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.api.devices import resolve
from memfit.api.keras_script import _ASKS_FOR_GPU as ASKS_FOR_GPU
from memfit.api.keras_script import _NO_STEP as NO_STEP
from memfit.core.dryrun import DryRun, Outcome, Request

ROOT = Path(__file__).parents[3]


@pytest.fixture
def dry(tmp_path):
    """The dry run of a script with this text, until its first fit."""

    def run(text, *arguments, device="cpu"):
        script, place, result = tmp_path / "train.py", tmp_path / "request.json", tmp_path / "result.json"
        script.write_text(text)
        request = Request(str(script), False, arguments, resolve(device), result_path=str(result), until_fit=True)
        place.write_text(json.dumps(request.to_json()))
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        command = [sys.executable, "-m", "memfit.api.dryrun_child", str(place)]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        return done, DryRun.from_json(result.read_text())

    return run


def test_a_script_that_fits_nothing_took_no_step(dry):
    done, found = dry("import sys; print(sys.argv[1:], __name__)", "--lr", "1")

    assert (found.outcome, found.error) == (Outcome.NO_STEP, NO_STEP)
    assert done.stdout == "['--lr', '1'] __main__\n"
    assert (done.returncode, found.exit_code_of_command) == (0, 5)


def test_a_script_that_fails_says_why(dry):
    done, found = dry("raise ValueError('no such file\\nmore \\x1b[1m')")

    assert (found.outcome, found.error) == (Outcome.FAILED, "ValueError: no such file")
    # The script's own frame is the first, and what it says can't steer a terminal.
    head, frame, *_ = done.stderr.splitlines()
    assert (head, frame.endswith('train.py", line 1, in <module>')) == ("Traceback (most recent call last):", True)
    assert done.stderr.endswith("ValueError: no such file\nmore \\x1b[1m\n")


def test_an_exit_code_is_passed_on(dry):
    done, found = dry("import sys; sys.exit(7)")

    assert (found.outcome, found.exit_code, done.returncode) == (Outcome.FAILED, 7, 7)


UPDATES = """
import torch

layer = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
for number in range({}):
    print(number)
    layer(torch.ones(2, 4)).mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("text", "reason", "num_updates"),
    [
        (UPDATES.format(1), "the script updates a PyTorch module, and no Keras model so far", 1),
        # One that goes on isn't trained to its end.
        (UPDATES.format(10**9), "the script updates a PyTorch module, and no Keras model so far", 21),
        ("import torch\nraise AssertionError('Torch not compiled with CUDA enabled')", ASKS_FOR_GPU, 0),
        ("import torch\nassert torch.cuda.device_count() > 99", ASKS_FOR_GPU, 0),
        ("raise AssertionError('CUDA')", "", 0),
        ("import torch\nraise ValueError('no such file')", "", 0),
        ("import torch", "", 0),
    ],
    ids=["an update", "updates", "no GPU", "a check", "no PyTorch", "a failure", "an import"],
)
def test_what_sends_a_script_to_the_simulated_gpu(dry, tmp_path, text, reason, num_updates):
    pytest.importorskip("torch")

    done, _ = dry(text, device="t4")

    assert json.loads((tmp_path / "result.json").read_text())["on_torch"] == reason
    assert len(done.stdout.splitlines()) == num_updates
