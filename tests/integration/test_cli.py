"""The command line as users meet it: help, exit codes, pipes; what each command prints is tested beside its module."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import memfit
from memfit import commands
from memfit.core.errors import BadInput

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "help"

# Adding a flag is a deliberate edit of this list.
JOB_FLAGS = [
    "--device -d",
    "--stack",
    "--batch-size -b",
    "--precision -p",
    "--optimizer -o",
    "--inference",
    "--sequence-length",
    "--image-size",
    "--keep-outputs",
    "--compile",
    "--ddp",
    "--workers",
    "--json",
]
FLAGS = {
    "estimate": ["TARGET", *JOB_FLAGS, "--html"],
    "diff": [
        "SNAPSHOT",
        "--device -d",
        "--stack",
        "--steps",
        "--history",
        "--json",
        "--html",
        "--job",
        "--script",
    ],
    "dryrun": [
        "--device -d",
        "--stack",
        "--count",
        "--steps",
        "--scan",
        "--keep-checkpoints",
        "--allow-writes",
        "--json",
        "--html",
        "-m",
        "SCRIPT",
        "ARGS",
    ],
    "plan": [
        "TARGET",
        "--device -d",
        "--stack",
        "--batch-size -b --effective-batch",
        "--precision -p",
        "--optimizer -o",
        "--sequence-length",
        "--image-size",
        "--keep-outputs",
        "--compile",
        "--json",
        "--budget",
        "--allow",
        "--count",
        "--no-measure",
        "--seconds",
        "--save",
        "--html",
        "--code",
        "--script",
    ],
    "run": [
        "--budget",
        "--checkpoint",
        "--retries",
        "--rescue",
        "--verbose",
        "--json",
        "--html",
        "-m",
        "SCRIPT",
        "ARGS",
    ],
    "max-batch": ["TARGET", *(f for f in JOB_FLAGS if f[:6] not in ("--batc", "--work")), "--candidates"],
    "compare": ["TARGET", *JOB_FLAGS],
    "data": ["ACTION"],
    "data inspect": [
        "PATH",
        "--columns",
        "--labels",
        "--follow-links",
        "--memory",
        "--batch-size -b",
        "--on-error",
        "--json",
    ],
    "data convert": [
        "SRC",
        "DST",
        "--dtype",
        "--chunk",
        "--image-size",
        "--columns",
        "--labels",
        "--follow-links",
        "--compress",
        "--allow-overflow",
        "--overwrite",
        "--json",
        "--quiet -q",
    ],
    "data bench": [
        "PATH",
        "--columns",
        "--labels",
        "--follow-links",
        "--memory",
        "--batch-size -b",
        "--on-error",
        "--num-workers",
        "--seconds",
        "--json",
    ],
    "devices": ["NAME", "--stack", "--json"],
    "verify": ["--device -d", "--seconds", "--json", "--rehearse"],
    "calibrate": ["--device -d", "--seconds", "--json", "--output -O"],
    "completion": ["SHELL"],
}

SCRIPT = """
import torch

import memfit


def loss(model, batch):
    return model(batch).mean()


def job():
    return memfit.Job(lambda: torch.nn.Linear(64, 64), loss, torch.empty(4, 64), torch.optim.Adam)
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def memfit_process(*arguments, cwd, **environment):
    """Runs the program in a process of its own."""
    plain = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "FORCE_COLOR", "NO_COLOR", "TERM")}
    return subprocess.run(
        [sys.executable, "-m", "memfit", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**plain, "PYTHONPATH": str(ROOT / "src"), **environment},
        timeout=120,
    )


def subparsers(parser=None, prefix=""):
    """All commands, and the actions of those that have some, by what a user writes."""
    found = {}
    for action in (parser or commands.build_parser())._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                found |= {prefix + name: child, **subparsers(child, f"{prefix}{name} ")}
    return found


def flags_of(parser):
    shown = [a for a in parser._actions if not isinstance(a, argparse._HelpAction) and a.help != argparse.SUPPRESS]
    return [" ".join(a.option_strings) or a.metavar for a in shown]


def test_the_flags_are_those_listed():
    assert {name: flags_of(parser) for name, parser in subparsers().items()} == FLAGS


def test_a_new_flag_would_be_seen():
    parser = argparse.ArgumentParser()
    parser.add_argument("--new", "-n")

    assert flags_of(parser) == ["--new -n"]


@pytest.mark.parametrize("command", ["memfit", *FLAGS])
@pytest.mark.skipif(sys.version_info >= (3, 13), reason="argparse lays help out otherwise from Python 3.13 on")
def test_help_is_as_agreed(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")

    with pytest.raises(SystemExit) as left:
        commands.main([*command.split(), "--help"] if command != "memfit" else ["--help"])

    assert left.value.code == 0
    assert capsys.readouterr().out == (GOLDEN / f"{command.replace(' ', '-')}.txt").read_text(encoding="utf-8")


def test_no_help_is_left_over():
    assert {path.stem for path in GOLDEN.iterdir()} == {"memfit", *(command.replace(" ", "-") for command in FLAGS)}


def test_every_help_has_examples_and_exit_codes():
    for name, parser in subparsers().items():
        assert f"  memfit {name}" in parser.epilog
        assert "Exit codes: 0 " in parser.epilog


def test_version(capsys):
    with pytest.raises(SystemExit) as left:
        commands.main(["--version"])

    assert left.value.code == 0
    assert capsys.readouterr().out == f"memfit {memfit.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["estimat"],
        ["estimate"],
        ["estimate", "a", "b"],
        ["estimate", "a.py:b", "--batch-size", "many"],
        ["estimate", "a.py:b", "--precision", "fp7"],
        ["estimate", "a.py:b", "--optimizer", "adagard"],
        ["max-batch", "a.py:b", "--batch-size", "4"],
        ["devices", "--colour"],
    ],
)
def test_bad_usage_is_2_and_explained(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        commands.main(arguments)

    written = capsys.readouterr()
    assert left.value.code == 2
    assert written.out == ""
    assert "usage: memfit" in written.err
    assert "error: " in written.err


def test_errors_on_purpose_are_one_line(monkeypatch, capsys):
    def fail(arguments):
        raise BadInput("this can't be. Try that.")

    monkeypatch.setattr("memfit.commands.devices.run", fail)

    assert commands.main(["devices"]) == 2
    assert capsys.readouterr() == ("", "memfit: this can't be. Try that.\n")


def test_an_interruption_is_130(monkeypatch, capsys):
    def interrupt(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("memfit.commands.devices.run", interrupt)

    assert commands.main(["devices"]) == 130
    assert capsys.readouterr().err == "memfit: interrupted\n"


@pytest.mark.parametrize(("device", "code"), [("rtx-3090", 0), ("64MiB", 3), ("rtx-390", 2)])
def test_the_program_says_by_its_exit_code(script, device, code):
    done = memfit_process("estimate", "train.py:job", "--device", device, cwd=script, TERM="xterm-256color")

    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert bool(done.stdout) == (code != 2)
    assert bool(done.stderr) == (code == 2)
    # A pipe gets no colour codes.
    assert "\x1b" not in done.stdout + done.stderr
    # Neither the console script nor the interpreter's own files are taken for the user's code.
    assert not any(word in done.stdout for word in ("memfit:", "__main__.py", "runpy"))


def test_the_program_writes_json_and_a_page(script):
    done = memfit_process("estimate", "train.py:job", "-d", "rtx-3090", "--json", "--html", "memory.html", cwd=script)

    data = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert data["num_parameters"] == 64 * 64 + 64
    assert data["peak_bytes"] == memfit.Estimate.from_json(data).peak_bytes
    assert any(source.startswith("train.py:") for source in data["breakdown"]["by_source"])
    assert (script / "memory.html").stat().st_size > 10_000


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_may_leave_early(script, options):
    # GIVEN a reader that closes the pipe before anything is written to it
    read_end, write_end = os.pipe()
    os.close(read_end)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}

    # WHEN the catalogue is listed into it
    done = subprocess.run(
        [sys.executable, "-m", "memfit", "devices", *options],
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        timeout=60,
    )
    os.close(write_end)

    # THEN the program ends quietly
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not str(ROOT).isascii(), reason="Python itself can't start there")
def test_output_survives_a_terminal_of_another_encoding(script):
    done = memfit_process("devices", "t4", cwd=script, PYTHONIOENCODING="ascii", LC_ALL="C", PYTHONUTF8="0")

    assert (done.returncode, done.stderr) == (0, "")
    assert "NVIDIA Tesla T4" in done.stdout
