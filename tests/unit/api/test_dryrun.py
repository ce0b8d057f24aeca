"""`memfit.dryrun` and what it adds to a run; the child is a fake one, started as a real process."""

import json
import sys
from pathlib import Path

import pytest

import memfit
from memfit.core.device import Origin
from memfit.core.dryrun import DryRunOptions, Outcome
from memfit.core.errors import BadFile, BadTarget, MissingDependency
from memfit.core.units import GIB
from tests.unit.processes import fake_child

QUIET = DryRunOptions(quiet_output=True)


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setattr("memfit.processes.process_tree.DRYRUN", (sys.executable, fake_child.__file__))
    path = tmp_path / "train.py"
    path.write_text("")
    return path


def test_a_path_and_arguments_are_all_it_takes(script, capfd):
    result = memfit.dryrun(script, ["complete"], device="t4")

    assert isinstance(result, memfit.DryRun)
    assert result.outcome is Outcome.COMPLETED
    assert result.fits is True
    assert result.advice == ()
    assert result.script == str(script)
    assert capfd.readouterr().out == "script says hello\n"


def test_what_does_not_fit_gets_advice_with_the_context_counted(script, capfd):
    result = memfit.dryrun(script, ["oom"], device="1GiB", options=QUIET)

    estimate = result.estimate
    assert result.fits is False
    assert 1 <= len({advice.title.split()[0] for advice in result.advice}) <= 3
    for advice in result.advice:
        assert advice.saves_bytes + advice.peak_bytes == estimate.peak_bytes
    assert capfd.readouterr().out == ""


def test_where_no_change_is_enough_the_command_that_finds_a_combination_is_shown(script, capfd):
    result = memfit.dryrun(script, ["oom", "--name", "a b"], device="450MiB", options=QUIET)

    assert result.advice
    assert all(advice.peak_bytes > result.estimate.capacity_bytes for advice in result.advice)
    command = f"memfit plan --device {result.estimate.device.name} --script {script} oom --name 'a b'"
    assert command in str(result)
    # Where one of the changes may be enough, but was not tried, that is said.
    perhaps = memfit.dryrun(script, ["oom"], device="1GiB", options=QUIET)
    assert "none of these is sure to be enough alone" in str(perhaps)


def test_suggestions_are_tried_on_the_script(script, monkeypatch, tmp_path, capfd):
    monkeypatch.setenv(fake_child.LOG, str(tmp_path / "log"))
    result = memfit.dryrun(script, ["oom"], device="1GiB", options=QUIET)

    asked = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    tried = [request["settings"] for request in asked if request["settings"]]
    assert tried
    assert all(request["unlimited"] for request in asked[1:])
    assert "running the script with a change that may help" in capfd.readouterr().err
    # The fake child needs as much as before whatever is asked of it: such a change is not named.
    assert all(advice.origin is not Origin.SIMULATED or advice.saves_bytes for advice in result.advice)


def test_advice_starts_from_the_settings_in_the_environment(script, monkeypatch, capfd):
    titles = []
    for value in ("", "expandable_segments:True"):
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", value)
        monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
        monkeypatch.setattr("memfit.planner.advice.MIN_SHARE", 0.0)
        result = memfit.dryrun(script, ["oom"], device="1GiB")
        titles.append({advice.title for advice in result.advice})

    assert "let the allocator expand its segments" not in titles[1]


def test_advice_is_about_the_batch_that_does_not_fit(script, capfd):
    result = memfit.dryrun(script, ["long batch"], device="t4", options=DryRunOptions(scan=5))

    assert result.scan.fits is False
    assert result.advice[0].saves_bytes + result.advice[0].peak_bytes == result.scan.peak_bytes


def test_checkpoints_go_where_they_are_wanted(script, monkeypatch, tmp_path, capfd):
    monkeypatch.setenv(fake_child.LOG, str(tmp_path / "log"))
    memfit.dryrun(script, device="t4", options=DryRunOptions(checkpoint_folder=Path("kept")))

    assert json.dumps(str(Path.cwd() / "kept")) in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 0}, "count must be at least 1, but 0 was given"),
        ({"steps": 0}, "steps must be at least 1, but 0 was given"),
        ({"options": DryRunOptions(scan=-1)}, "scan must be at least 0, but -1 was given"),
        ({"device": "cpu"}, "only CUDA devices can be simulated for a script, but 'cpu' was given"),
        ({"device": 7}, "device must be a name such as 'rtx-3090'"),
    ],
)
def test_bad_input(script, options, message):
    with pytest.raises(memfit.BadInput, match=message):
        memfit.dryrun(script, **{"device": "t4", **options})


def test_modules_are_looked_for(script):
    with pytest.raises(BadTarget, match=r"there is no module 'gone.module' in"):
        memfit.dryrun("gone.module", module=True, device="t4")


def test_pytorch_must_be_installed(script, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match="PyTorch is not installed"):
        memfit.dryrun(script, device="t4")


def test_a_device_of_our_own_making_will_do(script, capfd):
    device = memfit.find_device("16GiB")

    assert memfit.dryrun(script, device=device).estimate.capacity_bytes == 16 * GIB


def test_a_writable_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "train.py").write_text("")
    (tmp_path / "file").write_text("mine")
    options = DryRunOptions(writable=(str(tmp_path / "file" / "inner"),))
    with pytest.raises(BadFile, match=r"which the script may write to, can't be made: Not a directory"):
        memfit.dryrun(str(tmp_path / "train.py"), device="t4", options=options)
