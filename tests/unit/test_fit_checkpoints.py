"""When a checkpoint of a fit is due, and where it goes."""

import pytest

from memfit import _fit_checkpoints
from memfit._fit_checkpoints import FitCheckpoints, own_folder, plain_history


class Loop:
    def write(self, directory, progress):
        (directory / "progress").write_text(str(progress))


@pytest.fixture(autouse=True)
def no_folder_was_used(monkeypatch):
    monkeypatch.setattr(_fit_checkpoints, "_finished", {})


def test_each_fit_of_a_process_has_its_own_folder(tmp_path):
    for expected in (tmp_path, tmp_path / "fit-2", tmp_path / "fit-3"):
        checkpoints = FitCheckpoints(tmp_path, 1, 1)
        assert own_folder(tmp_path) == expected
        checkpoints.finish()
        checkpoints.close()
    assert own_folder(tmp_path / "other") == tmp_path / "other"


def test_a_fit_that_was_broken_off_goes_on_in_its_folder(tmp_path):
    broken = FitCheckpoints(tmp_path, 1, 1)
    broken.save(Loop(), {"update": 4})
    broken.close()

    again = FitCheckpoints(str(tmp_path), 1, 1)

    assert again.latest().step == 4
    again.close()


def test_without_a_folder_nothing_is_due():
    checkpoints = FitCheckpoints(None, 3, 1)
    checkpoints.save(Loop(), {"update": 1})

    assert not checkpoints.is_open
    assert not checkpoints.is_due(1)
    assert checkpoints.latest() is None
    checkpoints.close()


def test_a_number_of_batches_between_two(tmp_path):
    checkpoints = FitCheckpoints(tmp_path, 1, 3)

    assert [update for update in range(1, 8) if checkpoints.is_due(update)] == [3, 6]
    for update in (3, 6):
        checkpoints.save(Loop(), {"update": update})
    assert checkpoints.latest().step == 6
    checkpoints.close()
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000000006"]


def test_by_time_sooner_at_first(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(_fit_checkpoints.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(_fit_checkpoints.time, "perf_counter", lambda: 0.0)
    checkpoints = FitCheckpoints(tmp_path, 1, None)
    gaps = []
    for update in range(5):
        started = now[0]
        while not checkpoints.is_due(update):
            now[0] += 1
        gaps.append(now[0] - started)
        checkpoints.save(Loop(), {"update": update})
    checkpoints.close()

    assert gaps == [5, 10, 20, 40, 60]


def test_what_takes_long_is_seldom(tmp_path, monkeypatch):
    clock = iter([0.0, 2.0])
    monkeypatch.setattr(_fit_checkpoints.time, "perf_counter", lambda: next(clock))
    checkpoints = FitCheckpoints(tmp_path, 1, None)
    checkpoints.save(Loop(), {"update": 1})
    checkpoints._last -= 199

    assert not checkpoints.is_due(2)
    checkpoints._last -= 2
    assert checkpoints.is_due(2)
    checkpoints.close()


def test_the_epoch_that_has_just_ended_is_in_the_history():
    history = type("History", (), {"history": {"loss": [1.0]}, "epoch": [0]})()

    assert plain_history(history, (1, {"loss": 0.5})) == {"history": {"loss": [1.0, 0.5]}, "epochs": [0, 1]}
    assert plain_history(history, (0, {"loss": 1.0})) == {"history": {"loss": [1.0]}, "epochs": [0]}
    assert plain_history(None, None) == {"history": {}, "epochs": []}
