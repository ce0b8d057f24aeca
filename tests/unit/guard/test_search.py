"""The loop of a search, with a framework that only takes notes."""

import json
import warnings

import pytest

from memfit.core.errors import BadFile, BadInput, StepFailed
from memfit.core.guarding import OutOfMemory, Where
from memfit.guard.search import RAISE, SKIP, Loop
from memfit.guard.space import Space
from memfit.guard.trials import Outcome

SPACE = {"x": [3, 1, 2, 0]}


class Notes:
    """A framework whose models are dictionaries."""

    def __init__(self):
        self.seeds, self.written, self.left = [], [], ""

    def recognise(self, error):
        return OutOfMemory(Where.HOST, "python") if isinstance(error, MemoryError) else None

    def clear_frames(self, error):
        error.__traceback__ = None

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


def run(folder, train, *, trials=4, seed=0, resume=True, space=SPACE, maximize=False, on_error=RAISE, framework=None):
    loop = Loop(train, Space(space), folder, framework or Notes(), maximize, on_error)
    return loop.run(trials, seed, resume=resume)


def score_of(parameters, trial):
    trial.keep(parameters)
    return parameters["x"] ** 2 - 2 * parameters["x"]


def test_the_best_trial_and_its_parameters_are_kept(tmp_path):
    notes = Notes()

    found = run(tmp_path, score_of, framework=notes)

    assert (found.best.number, found.best.parameters, found.best.score) == (1, {"x": 1}, -1)
    assert found.load_best({}) == {"x": 1}
    # Trials that were not better than the ones before are not written at all.
    assert notes.written == ["trial-0000.safetensors", "trial-0001.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.jsonl", "trial-0001.safetensors"]


def test_the_greatest_where_that_is_wanted(tmp_path):
    assert run(tmp_path, score_of, maximize=True).best.parameters == {"x": 3}


def test_a_score_per_epoch_keeps_the_best_epoch(tmp_path):
    def train(parameters, trial):
        for epoch, score in enumerate([5, 2 - parameters["x"], 9]):
            trial.keep({"epoch": epoch}, score)

    found = run(tmp_path, train)

    assert (found.best.parameters, found.best.score) == ({"x": 3}, -1)
    assert found.load_best({}) == {"epoch": 1}


def test_a_returned_score_must_be_that_of_the_kept_parameters(tmp_path):
    def train(parameters, trial):
        trial.keep({}, 2.0)
        trial.keep({}, 1.0)
        return parameters["x"]

    found = run(tmp_path, train, space={"x": [1, 2]}, on_error=SKIP)

    assert [record.outcome for record in found.trials] == [Outcome.FINISHED, Outcome.FAILED]
    assert "train returned 2, but the best score given to trial.keep was 1.0" in found.trials[1].error


def test_running_out_of_memory_is_a_result(tmp_path):
    def train(parameters, trial):
        if parameters["x"] == 1:
            raise MemoryError
        return score_of(parameters, trial)

    found = run(tmp_path, train)

    assert [record.outcome.value for record in found.trials] == ["finished", "out of memory", "finished", "finished"]
    assert found.best.parameters == {"x": 2}
    assert "out of memory" in str(found)


def test_a_failure_ends_the_search_and_can_be_gone_on_from(tmp_path):
    calls = []

    def train(parameters, trial):
        calls.append(parameters["x"])
        if parameters["x"] == 2 and len(calls) < 4:
            raise KeyError("missing")
        return score_of(parameters, trial)

    with pytest.raises(StepFailed, match=r"trial 2 of the search failed with {'x': 2}: KeyError: 'missing'.*on_error"):
        run(tmp_path, train)
    found = run(tmp_path, train)

    assert calls == [3, 1, 2, 2, 0]
    assert [record.outcome for record in found.trials] == [Outcome.FINISHED] * 4


def test_failures_can_be_left_out(tmp_path):
    def train(parameters, trial):
        raise ValueError(parameters["x"])

    found = run(tmp_path, train, on_error=SKIP)

    assert found.best is None
    assert [record.error for record in found.trials] == [f"ValueError: {x}" for x in SPACE["x"]]
    assert "no score among them" in str(found)
    with pytest.raises(BadInput, match="no trial has finished"):
        found.load_best({})


def test_an_interrupted_search_goes_on_as_if_it_had_not_been(tmp_path):
    def interrupted(parameters, trial):
        if parameters["x"] == 2:
            raise KeyboardInterrupt
        return score_of(parameters, trial)

    notes, whole = Notes(), Notes()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "a", interrupted, framework=notes)
    resumed = run(tmp_path / "a", score_of, framework=notes)
    expected = run(tmp_path / "b", score_of, framework=whole)

    assert [(r.number, r.parameters, r.score) for r in resumed.trials] == [
        (r.number, r.parameters, r.score) for r in expected.trials
    ]
    # The interrupted trial is run again with the seed it had.
    assert notes.seeds == [*whole.seeds[:3], *whole.seeds[2:]]


def test_what_was_written_by_a_trial_that_never_ended_is_removed(tmp_path):
    def killed(parameters, trial):
        trial.keep({"x": -1}, -100.0)
        raise SystemExit

    with pytest.raises(SystemExit):
        run(tmp_path, killed)
    assert (tmp_path / "trial-0000.safetensors").exists()
    (tmp_path / ".trial-0000.safetensors.123.tmp").write_text("half")

    assert run(tmp_path, score_of).load_best({}) == {"x": 1}
    assert len(list(tmp_path.iterdir())) == 2


def test_more_trials_later_run_only_what_is_new_and_keep_numbers_apart(tmp_path):
    calls = []

    def train(parameters, trial):
        calls.append(parameters["x"])
        return score_of(parameters, trial)

    run(tmp_path, train, trials=2)
    found = run(tmp_path, train, trials=4)

    assert sorted(calls) == [0, 1, 2, 3]
    assert len({record.number for record in found.trials}) == 4
    assert found.load_best({}) == {"x": 1}


def test_scores_that_are_no_finite_numbers_are_never_the_best(tmp_path):
    scores = {3: float("nan"), 1: float("-inf"), 2: 7.0, 0: 8.0}

    found = run(tmp_path, lambda parameters, _: scores[parameters["x"]])

    assert found.best.score == 7
    assert [record.score for record in found.trials] == [None, None, 7, 8]
    with pytest.raises(BadInput, match=r"never called trial\.keep"):
        found.load_best({})


@pytest.mark.parametrize("score", [None, "0.1", True, [1, 2]])
def test_what_is_no_score_is_refused(tmp_path, score):
    with pytest.raises(StepFailed, match="a score must be a number"):
        run(tmp_path, lambda *_: score)


def test_parameters_that_cannot_be_written_end_the_search_with_their_reason(tmp_path):
    def train(parameters, trial):
        trial.keep("full")
        return 1

    with pytest.raises(StepFailed, match="BadFile: the disk is full"):
        run(tmp_path, train)


def test_a_model_that_stays_is_said_and_recorded(tmp_path):
    notes = Notes()
    notes.left = "its model is still in memory"

    with pytest.warns(UserWarning, match="trial 0 of the search has ended, but its model is still in memory"):
        found = run(tmp_path, score_of, framework=notes, trials=1, space={"x": [1]})

    assert found.trials[0].held == notes.left
    assert "model not freed" in str(found)


def test_choices_that_json_lacks_come_back_as_they_are(tmp_path):
    space = {"kind": [list, dict]}
    for _ in range(2):
        found = run(tmp_path, lambda parameters, _: len(parameters["kind"].__name__), space=space, maximize=True)
        # Both names have four letters; the first of equals counts.
        assert found.best.parameters["kind"] is list


def test_the_table_and_its_json(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = run(tmp_path, score_of)

    lines = str(found).splitlines()
    assert lines[0] == "4 trials: 4 finished"
    assert lines[1].split() == ["trial", "x", "score", "seconds", "memory", "after"]
    assert lines[3].split()[:3] == ["1", "1", "-1"]
    assert lines[3].endswith("best")
    assert lines[-1] == f"lowest score -1 in trial 1, its parameters in {tmp_path / 'trial-0001.safetensors'}"
    data = json.loads(json.dumps(found.to_json()))
    assert data["best"]["parameters"] == {"x": 1}
    assert [trial["outcome"] for trial in data["trials"]] == ["finished"] * 4


def test_files_of_others_stay_in_the_folder(tmp_path):
    others = ["trial-of-mine.safetensors", "trial-9999.safetensors", ".trial-notes.tmp"]
    for name in others:
        (tmp_path / name).write_text("mine")
    run(tmp_path, score_of)

    assert all((tmp_path / name).read_text() == "mine" for name in others)
