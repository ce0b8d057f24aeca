import pytest

import memfit
from memfit.api import run as _run
from memfit.core.errors import BadFile, BadInput, BadTarget, InvalidSize
from memfit.core.supervised import RunOutcome
from memfit.core.units import GIB


@pytest.fixture
def asked(monkeypatch):
    """What supervisors were asked for; none runs anything."""
    requests = []

    class Fake:
        def __init__(self, request, **options):
            requests.append((request, options["retries"]))

        def run(self):
            return "result"

    monkeypatch.setattr(_run, "Supervisor", Fake)
    return requests


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('hello')")
    return "train.py"


def test_what_is_asked_for(asked, script, tmp_path):
    result = memfit.run(script, ["--lr", 1], budget="1GiB", checkpoint="runs/first", retries=2, rescue=True)

    assert result == "result"
    ((request, retries),) = asked
    assert (request.script, request.arguments, request.budget_bytes) == ("train.py", ("--lr", "1"), GIB)
    assert (retries, request.rescue, request.module) == (2, True, False)
    # The script may have another working folder.
    assert request.checkpoint == str(tmp_path / "runs" / "first")
    assert (tmp_path / "runs" / "first").is_dir()


def test_the_defaults(asked, script):
    memfit.run(script)

    ((request, retries),) = asked
    assert (request.budget_bytes, request.checkpoint, retries, request.rescue) == (None, None, 5, False)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"script": "gone.py"}, BadTarget, "there is no file 'gone.py'"),
        ({"script": "no.such.module", "module": True}, BadTarget, "there is no module 'no.such.module'"),
        ({"budget": "8 bananas"}, InvalidSize, "'8 bananas' is not a size"),
        ({"retries": -1}, BadInput, "retries must be at least 0, but -1 was given"),
        ({"arguments": "--lr 1"}, BadInput, r"must be a list such as \['--lr', '1'\], but the text '--lr 1'"),
        ({"checkpoint": "train.py"}, BadFile, "'train.py' is not a folder"),
        ({"checkpoint": "train.py/inner"}, BadFile, "can't be made: Not a directory"),
    ],
)
def test_bad_input(asked, script, arguments, error, message):
    with pytest.raises(error, match=message):
        memfit.run(**{"script": script, **arguments})

    assert asked == []


def test_a_folder_that_can_not_be_written_to(asked, script, monkeypatch):
    monkeypatch.setattr(_run.os, "access", lambda path, mode: False)

    with pytest.raises(BadFile, match="can't be written to"):
        memfit.run(script, checkpoint="runs")


def test_a_real_run_prints_and_draws_itself(script, tmp_path, capfd):
    run = memfit.run(script)

    assert run.outcome is RunOutcome.COMPLETED
    assert str(run).startswith("train.py: completed after 1 attempt")
    run.report(tmp_path / "page.html")
    assert "memfit run: train.py" in (tmp_path / "page.html").read_text()
    assert capfd.readouterr().out == "hello\n"


def test_restarts_are_announced_on_standard_error(capsys):
    _run.announce("starting it again")

    assert capsys.readouterr() == ("", "memfit: starting it again\n")
