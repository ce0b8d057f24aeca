"""The loop of a search, with a framework that only takes notes."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import optuna
import pytest

from memfit.core.errors import BadFile, BadInput, StepFailed
from memfit.guard.search import Loop, open_study

SOURCE = Path(__file__).parents[3] / "src"
# All of these values are tried, in this order.
VALUES = [3, 1, 2, 0]


class Notes:
    """A framework whose models are dictionaries."""

    def __init__(self):
        self.seeds, self.written, self.left = [], [], ""

    def seed(self, value):
        self.seeds.append(value)

    def watch(self):
        return lambda: self.left

    def write(self, model, path):
        if model == "full":
            raise BadFile("the disk is full")
        self.written.append(path.name)
        path.write_text(json.dumps(model))

    def read(self, model, path):
        model.update(json.loads(path.read_text()))


class InOrder(optuna.samplers.BaseSampler):
    """Gives the values of the first parameter one after another."""

    def infer_relative_search_space(self, study, trial):
        return {}

    def sample_relative(self, study, trial, search_space):
        return {}

    def sample_independent(self, study, trial, name, distribution):
        return VALUES[len({t.user_attrs.get("position") for t in study.trials}) - 1]


@pytest.fixture(autouse=True)
def quiet():
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def run(folder, score, *, trials=4, seed=0, direction="minimize", on_error="raise", framework=None, sampler=None):
    study = open_study(folder, direction, None)
    objective = lambda trial: score(trial.suggest_int("x", 0, 3), trial)  # noqa: E731
    return Loop(objective, study, folder, framework or Notes(), seed, sampler or InOrder(), on_error).run(trials)


def score_of(x, trial):
    trial.keep({"x": x})
    return x**2 - 2 * x


def outcomes(search):
    return [trial.user_attrs["outcome"] for trial in search.trials]


def test_the_best_trial_and_its_parameters_are_kept(tmp_path):
    notes = Notes()

    search = run(tmp_path, score_of, framework=notes)

    assert (search.best.number, search.best.params, search.best.value) == (1, {"x": 1}, -1)
    assert search.study.best_params == {"x": 1}
    assert search.load_best({}) == {"x": 1}
    # Trials that were not better than the ones before are not written at all.
    assert notes.written == ["trial-0000.safetensors", "trial-0001.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal.log", "trial-0001.safetensors"]


def test_the_greatest_where_that_is_wanted(tmp_path):
    assert run(tmp_path, score_of, direction="maximize").best.params == {"x": 3}
    with pytest.raises(BadInput, match="holds another search: its direction is 'maximize'"):
        run(tmp_path, score_of)


def test_a_score_per_epoch_keeps_the_best_epoch(tmp_path):
    def train(x, trial):
        for epoch, score in enumerate([5, 2 - x, 9]):
            trial.keep({"epoch": epoch}, score)

    search = run(tmp_path, train)

    assert (search.best.params, search.best.value) == ({"x": 3}, -1)
    assert search.load_best({}) == {"epoch": 1}


def test_a_returned_score_must_be_that_of_the_kept_parameters(tmp_path):
    def train(x, trial):
        trial.keep({}, 2.0)
        trial.keep({}, 1.0)
        return x

    search = run(tmp_path, train, on_error="skip")

    assert outcomes(search) == ["failed", "finished", "failed", "failed"]
    assert "returned 2, but the best score given to trial.keep was 1.0" in search.trials[2].user_attrs["error"]


def test_an_oom_is_a_failed_trial_with_its_reason(tmp_path):
    calls = []

    def train(x, trial):
        calls.append(x)
        if x == 1:
            raise MemoryError("no 3 GiB")
        return score_of(x, trial)

    for _ in range(2):
        search = run(tmp_path, train)

    assert outcomes(search) == ["finished", "out of memory", "finished", "finished"]
    assert search.trials[1].state is optuna.trial.TrialState.FAIL
    assert search.trials[1].user_attrs["error"] == "MemoryError: no 3 GiB"
    assert search.best.params == {"x": 2}
    assert "out of memory" in str(search)
    assert calls == VALUES, "what was too large once is too large"


def test_a_pruned_trial_has_ended(tmp_path):
    def train(x, trial):
        trial.report(x, 0)
        if x == 2:
            raise optuna.TrialPruned
        return score_of(x, trial)

    search = run(tmp_path, train)

    assert outcomes(search) == ["finished", "finished", "pruned", "finished"]
    assert search.trials[2].state is optuna.trial.TrialState.PRUNED


def test_a_failure_ends_the_search_and_is_tried_again(tmp_path):
    calls = []

    def train(x, trial):
        calls.append(x)
        if x == 2 and len(calls) < 4:
            raise KeyError("missing")
        return score_of(x, trial)

    with pytest.raises(StepFailed, match=r"trial 2 of the search failed with {'x': 2}: KeyError: 'missing'.*on_error"):
        run(tmp_path, train)
    search = run(tmp_path, train)

    assert calls == [3, 1, 2, 2, 0]
    assert outcomes(search) == ["finished"] * 4


def test_failures_can_be_left_out(tmp_path):
    def train(x, trial):
        raise ValueError(x)

    search = run(tmp_path, train, on_error="skip")

    assert search.best is None
    assert [trial.user_attrs["error"] for trial in search.trials] == [f"ValueError: {x}" for x in VALUES]
    assert "no score among them" in str(search)
    with pytest.raises(BadInput, match="no trial has finished"):
        search.load_best({})


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_search_goes_on_as_if_it_had_not_been(tmp_path, interruption):
    def objective(trial):
        x, y = trial.suggest_float("x", 0, 1), trial.suggest_categorical("y", ["a", "b"])
        if trial.number == 2 and trial.study.user_attrs.get("interrupt"):
            raise interruption
        return x + (y == "a")

    def search(folder, framework, *, interrupt=False):
        study = open_study(folder, "minimize", None)
        study.set_user_attr("interrupt", interrupt)
        return Loop(objective, study, folder, framework, 5, None).run(5)

    notes, whole = Notes(), Notes()
    with pytest.raises(interruption):
        search(tmp_path / "a", notes, interrupt=True)
    resumed = search(tmp_path / "a", notes)
    expected = search(tmp_path / "b", whole)

    assert [(t.params, t.value) for t in resumed.trials] == [(t.params, t.value) for t in expected.trials]
    # The interrupted trial is run again with the seed it had.
    assert notes.seeds == [*whole.seeds[:3], *whole.seeds[2:]]


def test_a_killed_search_goes_on_at_the_trial_it_was_killed_in(tmp_path):
    code = """
        import os, signal, sys
        from pathlib import Path
        from memfit.guard.search import open_study, Loop
        from tests.unit.guard.test_search import Notes, InOrder
        folder = Path(sys.argv[1])
        def objective(trial):
            x = trial.suggest_int("x", 0, 3)
            if x == 2:
                trial.keep({"x": -1}, -100.0)
                os.kill(os.getpid(), signal.SIGKILL)
            trial.keep({"x": x})
            return x**2 - 2 * x
        Loop(objective, open_study(folder, "minimize", None), folder, Notes(), 0, InOrder()).run(4)
    """
    environment = {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{SOURCE.parent}"}
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (tmp_path / "trial-0002.safetensors").exists()
    (tmp_path / ".trial-0002.safetensors.123.tmp").write_text("half")
    with open(tmp_path / "journal.log", "ab") as journal:
        journal.write(b'{"op_code": 4, "half a li')

    calls = []

    def train(x, trial):
        calls.append(x)
        return score_of(x, trial)

    search = run(tmp_path, train)

    assert calls == [2, 0]
    assert search.load_best({}) == {"x": 1}
    assert [trial.params["x"] for trial in search.trials] == VALUES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal.log", "trial-0001.safetensors"]
    assert len(run(tmp_path, train).trials) == 4 and calls == [2, 0]


def test_more_trials_later_run_only_what_is_new(tmp_path):
    calls = []

    def train(x, trial):
        calls.append(x)
        return score_of(x, trial)

    run(tmp_path, train, trials=2)
    search = run(tmp_path, train, trials=4)

    assert calls == VALUES
    assert search.load_best({}) == {"x": 1}


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("kind", ["brute force", "grid"])
def test_an_exhaustive_search_ends_when_everything_was_tried(tmp_path, kind):
    samplers = optuna.samplers
    calls = []

    def train(x, trial):
        calls.append(x)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return score_of(x, trial)

    def resume(trials):
        sampler = samplers.GridSampler({"x": VALUES}) if kind == "grid" else samplers.BruteForceSampler()
        return run(tmp_path, train, trials=trials, sampler=sampler)

    resume(2)
    with pytest.raises(KeyboardInterrupt):
        resume(20)
    search = resume(20)

    assert sorted(trial.params["x"] for trial in search.trials) == [0, 1, 2, 3]


def test_scores_that_are_no_finite_numbers_are_never_the_best(tmp_path):
    scores = {3: float("nan"), 1: float("-inf"), 2: 7.0, 0: 8.0}

    search = run(tmp_path, lambda x, _: scores[x])

    assert search.best.value == 7
    assert [trial.value for trial in search.trials] == [None, None, 7, 8]
    assert outcomes(search) == ["no finite score"] * 2 + ["finished"] * 2
    with pytest.raises(BadInput, match=r"never called trial\.keep"):
        search.load_best({})


@pytest.mark.parametrize("score", [None, "0.1", True, [1, 2]])
def test_what_is_no_score_is_refused(tmp_path, score):
    with pytest.raises(StepFailed, match="a score must be a number"):
        run(tmp_path, lambda *_: score)


def test_parameters_that_cannot_be_written_end_the_search_with_their_reason(tmp_path):
    def train(x, trial):
        trial.keep("full")
        return 1

    with pytest.raises(StepFailed, match="BadFile: the disk is full"):
        run(tmp_path, train)


def test_a_model_that_stays_is_said_and_recorded(tmp_path):
    notes = Notes()
    notes.left = "its model is still in memory"

    with pytest.warns(UserWarning, match="trial 0 of the search has ended, but its model is still in memory"):
        search = run(tmp_path, score_of, framework=notes, trials=1)

    assert search.trials[0].user_attrs["held"] == notes.left
    assert "model not freed" in str(search)


def test_the_table_and_its_json(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        search = run(tmp_path, score_of)

    lines = str(search).splitlines()
    assert repr(search) == "<Search of 4 trials: best -1 in trial 1>"
    assert lines[0] == "4 trials: 4 finished"
    assert lines[1].split() == ["trial", "x", "score", "seconds", "memory", "after"]
    assert lines[3].split()[:3] == ["1", "1", "-1"]
    assert lines[3].endswith("best")
    assert lines[-1] == f"lowest score -1 in trial 1, its parameters in {tmp_path / 'trial-0001.safetensors'}"
    data = json.loads(json.dumps(search.to_json()))
    assert data["best"] == {"number": 1, "path": str(tmp_path / "trial-0001.safetensors")}
    assert [(trial["outcome"], trial["parameters"]) for trial in data["trials"]] == [
        ("finished", {"x": x}) for x in VALUES
    ]


def test_files_of_others_stay_in_the_folder(tmp_path):
    others = ["trial-of-mine.safetensors", "trial-9999.safetensors", ".trial-notes.tmp"]
    for name in others:
        (tmp_path / name).write_text("mine")
    run(tmp_path, score_of)

    assert all((tmp_path / name).read_text() == "mine" for name in others)


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadFile, match=r"the folder of the search, .*file.*, can't be used"):
        open_study(tmp_path / "file", "minimize", None)
    (tmp_path / "journal.log").write_text("{}\nno journal\n\n")
    with pytest.raises(BadFile, match="damaged or no journal of a search"):
        open_study(tmp_path, "minimize", None)
