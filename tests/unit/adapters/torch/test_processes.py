import multiprocessing
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from memfit.adapters.torch.processes import NOT_SIMULATED, Processes
from memfit.adapters.torch.replacement import replaced


@pytest.fixture
def notes():
    return []


@pytest.fixture
def processes(notes):
    made = Processes(lambda code, text: notes.append((code, text)))
    with replaced(made.replacements()):
        yield made


def work():
    pass


def test_a_process_of_the_scripts_is_noted(processes, notes):
    process = multiprocessing.get_context("fork").Process(target=work, name="collector")
    process.start()
    process.join()

    assert process.exitcode == 0
    assert processes.num_started == 1
    ((code, text),) = notes
    assert (code, "'collector'" in text) == (NOT_SIMULATED, True)


def test_the_workers_of_a_loader_are_not(processes, notes):
    assert [batch.tolist() for batch in DataLoader(torch.arange(4), num_workers=2)] == [[0], [1], [2], [3]]
    assert (processes.num_started, notes) == (0, [])


@pytest.mark.parametrize(
    "command", [[sys.executable, "-c", "pass"], f"{sys.executable} -c pass"], ids=["list", "shell"]
)
def test_a_python_of_the_scripts_is_noted(processes, notes, command):
    assert subprocess.run(command, shell=isinstance(command, str)).returncode == 0
    assert processes.num_started == 1
    assert notes[0][1].startswith("command ")


def test_other_commands_are_not(processes, notes):
    assert subprocess.run(["true"]).returncode == 0
    assert (processes.num_started, notes) == (0, [])


def test_what_a_library_starts_is_not():
    # GIVEN a function whose file lies where libraries are installed
    library = Path(sysconfig.get_path("purelib"), "some_library.py")
    names = {}
    exec(compile("import subprocess\ndef ask(command): subprocess.run(command, check=True)", library, "exec"), names)

    made = Processes(pytest.fail)
    with replaced(made.replacements()):
        names["ask"]([sys.executable, "-c", "pass"])

    assert made.num_started == 0
