import json

import pytest

from memfit.commands import build_parser, main
from memfit.core.supervised import SupervisedRun


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a script that does what its arguments say."""
    (tmp_path / "train.py").write_text(
        "import sys\nprint('training', *sys.argv[1:])\n"
        "if sys.argv[1:2] == ['greedy']:\n    bytearray(2_000_000_000)\n"
        "sys.exit(int(sys.argv[1]) if sys.argv[1:] else 0)\n"
    )
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("import sys\nprint('module', *sys.argv[1:])\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capfd, *arguments):
    code = main(["run", *arguments])
    return code, capfd.readouterr()


@pytest.mark.parametrize(
    ("line", "script", "given", "module"),
    [
        ("--budget 8GiB train.py --budget 1 --json", "train.py", ["--budget", "1", "--json"], None),
        ("train.py", "train.py", [], None),
        ("--rescue -m package.train --html x", None, [], ["package.train", "--html", "x"]),
    ],
)
def test_what_follows_the_script_is_its_own(line, script, given, module):
    parsed = build_parser().parse_args(["run", *line.split()])

    assert (parsed.script, parsed.arguments, parsed.module) == (script, given, module)


def test_a_script_that_gets_through(folder, capfd):
    code, written = run(capfd, "train.py")

    assert (code, written.out) == (0, "training\n")
    assert written.err.startswith("memfit: train.py: completed after 1 attempt")
    assert len(written.err.splitlines()) == 1


def test_the_scripts_own_exit_code(folder, capfd):
    code, written = run(capfd, "train.py", "42")

    assert code == 42
    assert "failed with exit code 42" in written.err


def test_a_module(folder, capfd):
    code, written = run(capfd, "-m", "package.train", "--x", "--", "y")

    assert (code, written.out) == (0, "module --x -- y\n")


def test_memory_that_runs_out(folder, capfd):
    code, written = run(capfd, "--budget", "300MiB", "--html", "page.html", "train.py", "greedy")

    assert code == 3
    assert "memfit: memory ran out in attempt 1: an allocation failed (MemoryError)" in written.err
    assert "train.py: out of memory after 1 attempt" in written.err
    assert written.err.endswith("memfit: page written to page.html\n")
    assert "memfit run: train.py greedy" in (folder / "page.html").read_text()


def test_json_alone_is_on_standard_output(folder, capfd):
    code, written = run(capfd, "--json", "train.py", "5")

    found = SupervisedRun.from_json(written.out)
    assert (code, found.exit_code, found.script, found.arguments) == (5, 5, "train.py", ("5",))
    assert "training 5" in written.err
    json.loads(written.out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone.py"], "there is no file 'gone.py'"),
        (["--budget", "8 bananas", "train.py"], "'8 bananas' is not a size"),
        (["--retries", "-1", "train.py"], "--retries must be at least 0, but -1 was given"),
        (["--html", "no/folder/page.html", "train.py"], "there is no folder 'no/folder'"),
        (["--checkpoint", "train.py", "train.py"], "'train.py' is not a folder"),
        (["-m"], "-m takes the name of a module"),
        ([], "there is nothing to run"),
    ],
    ids=str,
)
def test_bad_usage(folder, capfd, arguments, message):
    code, written = run(capfd, *arguments)

    assert code == 2
    assert written.err.startswith("memfit: ") and message in written.err
    assert written.out == ""


def test_our_options_go_before_the_script(folder, capsys):
    with pytest.raises(SystemExit) as raised:
        main(["run", "--invented", "train.py"])

    assert raised.value.code == 2
    assert "Options of the script go after the script" in capsys.readouterr().err
