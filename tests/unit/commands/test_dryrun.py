import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import memfit
from memfit.commands import build_parser, main
from memfit.core.dryrun import DryRun, DryRunOptions
from tests.unit.processes import fake_child

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a script and a package; the child is a fake one, which does what its arguments say."""
    (tmp_path / "train.py").write_text("raise AssertionError('only the child runs this')\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("")
    monkeypatch.setattr("memfit.processes.process_tree.DRYRUN", (sys.executable, fake_child.__file__))
    monkeypatch.setenv(fake_child.LOG, str(tmp_path / "children.log"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capfd, *arguments):
    code = main(["dryrun", *arguments])
    return code, capfd.readouterr()


def asked(folder):
    return [json.loads(line) for line in (folder / "children.log").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("line", "script", "given", "module"),
    [
        ("-d t4 train.py --device cuda --steps 9", "train.py", ["--device", "cuda", "--steps", "9"], None),
        ("-d t4 train.py", "train.py", [], None),
        (
            "--steps 2 train.py --s 1 -h --version -- -d x",
            "train.py",
            ["--s", "1", "-h", "--version", "--", "-d", "x"],
            None,
        ),
        ("-d t4 -- train.py --json", "train.py", ["--json"], None),
        ("-d t4 -m package.train --steps 9 a", None, [], ["package.train", "--steps", "9", "a"]),
        ("train.py -m x", "train.py", ["-m", "x"], None),
    ],
)
def test_what_follows_the_script_is_its_own(line, script, given, module):
    parsed = build_parser().parse_args(["dryrun", *line.split()])

    assert (parsed.script, parsed.arguments, parsed.module) == (script, given, module)


def test_the_script_gets_its_arguments(folder, capfd):
    code, _ = run(capfd, "-d", "t4", "--count", "2", "train.py", "complete", "--steps", "9", "--", "-d")

    (request,) = asked(folder)
    assert code == 0
    assert request["arguments"] == ["complete", "--steps", "9", "--", "-d"]
    assert (request["script"], request["module"], request["device"]) == ("train.py", False, "t4")
    assert (request["count"], request["steps"], request["scan"], request["checkpoint_folder"]) == (2, 3, 0, "")


def test_a_module_gets_its_arguments(folder, capfd):
    run(capfd, "-d", "24GiB", "--steps", "2", "-m", "package.train", "complete", "--json", "--", "x")

    (request,) = asked(folder)
    assert (request["script"], request["module"]) == ("package.train", True)
    assert request["arguments"] == ["complete", "--json", "--", "x"]
    assert (request["device"], request["steps"]) == ("24GiB", 2)


def test_the_report_stands_below_the_output_of_the_script(folder, capfd):
    _, written = run(capfd, "-d", "t4", "train.py")

    assert written.out.startswith("script says hello\n\u2500")
    assert "train.py on NVIDIA Tesla T4: ran 3 steps, peak " in written.out


def test_json_is_alone_on_standard_output(folder, capfd):
    code, written = run(capfd, "-d", "t4", "--json", "train.py", "oom")

    result = DryRun.from_json(written.out)
    assert code == result.exit_code_of_command == 3
    assert "script says hello" in written.err
    assert result.advice


def test_json_equals_what_the_api_says(folder, capfd):
    _, written = run(capfd, "-d", "t4", "--json", "train.py", "complete")
    expected = memfit.dryrun("train.py", ["complete"], device="t4", options=DryRunOptions(quiet_output=True))

    found = DryRun.from_json(written.out)
    assert (found.estimate, found.outcome, found.arguments) == (expected.estimate, expected.outcome, ("complete",))


@pytest.mark.parametrize(
    ("behaviour", "code", "text"),
    [
        ("complete", 0, ": fits"),
        ("oom", 3, "train.py would run out of memory on NVIDIA Tesla T4 at train.py:88, in step 1, forward"),
        ("failure", 4, "failed for a reason of its own: ValueError: no (train.py:3)"),
        ("SIGSEGV", 4, "train.py crashed: the process was ended by SIGSEGV"),
        ("no step", 5, "ended without an optimizer step, peak 1.13 GiB"),
    ],
)
def test_exit_codes(folder, capfd, behaviour, code, text):
    found, written = run(capfd, "-d", "t4", "train.py", behaviour)

    assert found == code
    assert text in written.out


def test_a_death_names_the_line_what_was_asked_and_what_would_help(folder, capfd):
    _, written = run(capfd, "-d", "t4", "train.py", "oom")

    assert "train.py:88  logits = model(tokens)" in written.out
    assert "aten.convolution in layer2.3.conv asked for 64.0 MiB" in written.out
    changes = written.out.partition("Changes that would save most, each alone\n")[2].partition("\n\n")[0]
    # Half a batch is there twice: with an update for each half, and for both.
    named = re.findall(r"^  (\d)\. (\w+) .*: saves .* leaves .*", changes, re.MULTILINE)
    assert [number for number, _ in named] == ["1", "2", "3", "4"]
    assert [word for _, word in named].count("halve") == 2
    assert "memfit: running the script once more on a device without a limit" in written.err


def test_a_scan_that_finds_a_batch_too_long(folder, capfd):
    code, written = run(capfd, "-d", "t4", "--scan", "500", "train.py", "long batch")

    assert code == 3
    assert ": fits at step 1; the longest batch, 4,812 tokens at index 311, does not" in written.out
    assert asked(folder)[1]["scan"] == 500


def test_a_page_is_written(folder, capfd):
    code, written = run(capfd, "-d", "t4", "--html", "memory.html", "train.py", "oom")

    assert code == 3
    assert written.out.endswith("page written to memory.html\n")
    assert "would run out of memory" in (folder / "memory.html").read_text(encoding="utf-8")


def test_a_crash_leaves_no_page(folder, capfd):
    _, written = run(capfd, "-d", "t4", "--html", "memory.html", "train.py", "SIGKILL")

    assert written.out.endswith("no page was written to memory.html: the run recorded nothing to draw\n")
    assert not (folder / "memory.html").exists()


def test_checkpoints_can_be_kept(folder, capfd):
    run(capfd, "-d", "t4", "--keep-checkpoints", "kept", "train.py")

    assert asked(folder)[0]["checkpoint_folder"] == str(folder / "kept")


def test_folders_can_be_written(folder, capfd):
    run(capfd, "-d", "t4", "--allow-writes", "data", "--allow-writes", "package", "train.py")

    assert asked(folder)[0]["writable"] == [str(folder / "data"), str(folder / "package")]
    assert (folder / "data").is_dir()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-d t4", "there is nothing to run: give the path of a script, or -m and the name of a module."),
        ("-d t4 -m", "-m takes the name of a module, such as -m my_package.train, but none was given."),
        ("-d t4 --count 0 train.py", "--count must be at least 1, but 0 was given."),
        ("-d t4 --steps 0 train.py", "--steps must be at least 1, but 0 was given."),
        ("-d t4 --scan -1 train.py", "--scan must be at least 1, but -1 was given."),
        ("-d t4 gone.py", "there is no file 'gone.py' in "),
        ("-d t4 package", "'package' is a folder."),
        ("-d t4 -m package.gone", "there is no module 'package.gone' in "),
        ("-d t4 -m package", "'package' is a package without a __main__ module."),
        ("-d cpu train.py", "only CUDA devices can be simulated for a script, but 'cpu' was given. Name one, such as"),
        ("-d t5 train.py", "no device is called 't5'."),
        ("-d t4 --html missing/page.html train.py", "there is no folder 'missing' to write"),
        ("-d t4 --keep-checkpoints train.py train.py", "'train.py' is not a folder."),
    ],
)
def test_bad_input_is_one_message_and_starts_nothing(folder, capfd, line, message):
    code, written = run(capfd, *line.split())

    assert code == 2
    assert written.out == ""
    assert written.err.startswith(f"memfit: {message}")
    assert written.err.count("\n") == 1
    assert not (folder / "children.log").exists()


def test_the_command_as_users_type_it(folder):
    """The real program, its arguments and its exit code; the device is unknown, so that no child is started."""
    done = subprocess.run(
        [sys.executable, "-m", "memfit", "dryrun", "-d", "t5", "train.py", "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )

    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("memfit: ")


INTERRUPTED = """
import sys

import memfit.api  # which says what runs a script
from memfit.commands import main
from memfit.processes import process_tree

process_tree.DRYRUN = (sys.executable, sys.argv[1])
sys.exit(main(["dryrun", "-d", "t4", *sys.argv[2:]]))
"""


@pytest.mark.parametrize(
    ("arguments", "verdict"),
    [
        (
            ["train.py", "tells"],
            "train.py on NVIDIA Tesla T4: interrupted after 3 steps, so whether",
        ),
        (["--scan", "5", "train.py", "waits for more"], "train.py on NVIDIA Tesla T4: ran 3 steps, peak "),
    ],
)
def test_an_interrupted_run_tells_what_is_known(folder, arguments, verdict):
    # GIVEN a script that never ends, or a further run of it
    ready = folder / "ready"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", INTERRUPTED, fake_child.__file__, *arguments, str(ready)]
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not (ready.exists() and ready.read_text()):
        assert process.poll() is None
        time.sleep(0.02)

    # WHEN it is interrupted
    process.send_signal(signal.SIGINT)
    written, complaints = process.communicate(timeout=60)

    # THEN what is known is told, and the exit code is that of an interruption
    assert process.returncode == 130
    assert verdict in written
    assert complaints.endswith("memfit: interrupted\n")
