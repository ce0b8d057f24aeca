import json
import threading

import pytest

from memfit.core import env
from memfit.core.run_events import EVENTS, RunRequest, current, last_checkpoint, note, read_events


@pytest.fixture
def supervised(tmp_path, monkeypatch):
    """A supervised run's folder, with its request named in the environment."""
    path = tmp_path / "request.json"
    path.write_text(json.dumps(RunRequest(attempt=2, micro_batch_size=4, script="train.py").to_json()))
    monkeypatch.setenv(env.RUN_REQUEST, str(path))
    return tmp_path


def test_a_request_survives_its_json():
    request = RunRequest(3, "runs/first", 8, 2**30, 0.75, True, True, "train.py", True, ("--lr", "1"), 2**31)

    assert RunRequest.from_json(json.dumps(request.to_json())) == request


def test_a_request_of_a_newer_supervisor_can_be_read():
    assert RunRequest.from_json({**RunRequest(2).to_json(), "invented": 1}) == RunRequest(attempt=2)


def test_the_request_is_found_through_the_environment(supervised):
    assert current() == RunRequest(attempt=2, micro_batch_size=4, script="train.py")


@pytest.mark.parametrize("text", ["", "[]", '{"attempt": '])
def test_a_broken_request_is_none(supervised, text):
    (supervised / "request.json").write_text(text)

    assert current() is None


def test_outside_of_a_supervised_run_nothing_is_read_or_written(tmp_path, monkeypatch):
    monkeypatch.delenv(env.RUN_REQUEST, raising=False)
    monkeypatch.chdir(tmp_path)

    note("step", step=1)

    assert current() is None
    assert list(tmp_path.iterdir()) == []


def test_a_leftover_variable_does_no_harm(tmp_path, monkeypatch):
    monkeypatch.setenv(env.RUN_REQUEST, str(tmp_path / "gone" / "request.json"))

    note("step", step=1)

    assert current() is None


def test_events_come_back_in_order(supervised):
    note("guard", model="Net")
    note("step", step=3, micro_batch_size=8)

    first, second = read_events(supervised)
    assert (first["event"], first["model"]) == ("guard", "Net")
    assert (second["step"], second["micro_batch_size"]) == (3, 8)
    assert second["time"] >= first["time"] > 0


def test_what_json_has_no_word_for_is_written_as_text(supervised):
    note("guard", model=Ellipsis)

    assert read_events(supervised)[0]["model"] == "Ellipsis"


def test_a_half_written_line_is_left_out(supervised):
    note("step", step=1)
    with open(supervised / EVENTS, "a", encoding="utf-8") as file:
        file.write('{"event": "step", "st')

    assert [event["step"] for event in read_events(supervised)] == [1]


def test_several_writers_leave_whole_lines(supervised):
    def write(name):
        for step in range(200):
            note("step", step=step, name=name * 50)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(read_events(supervised)) == 800


def test_no_file_has_no_events(tmp_path):
    assert read_events(tmp_path) == []


def attempts(tmp_path, monkeypatch, number):
    """The folders of attempts 1 to `number`, of which the last is this process's."""
    for attempt in range(1, number + 1):
        folder = tmp_path / f"attempt-{attempt}"
        folder.mkdir()
        (folder / "request.json").write_text(json.dumps(RunRequest(attempt=attempt).to_json()))
        monkeypatch.setenv(env.RUN_REQUEST, str(folder / "request.json"))
        yield folder


def test_the_last_checkpoint_that_is_still_there_is_found_in_earlier_attempts(tmp_path, monkeypatch):
    # GIVEN checkpoints of two attempts, of which one was deleted, and one of this attempt
    assert last_checkpoint() is None
    kept, gone = tmp_path / "kept", tmp_path / "gone"
    kept.touch()
    for folder in attempts(tmp_path, monkeypatch, 3):
        note("checkpoint", path=str({"1": kept, "2": gone, "3": tmp_path}[folder.name[-1]]))

    # THEN the newest of earlier attempts that exists counts
    assert last_checkpoint() == str(kept)


def test_a_first_attempt_has_no_checkpoint_to_go_on_from(tmp_path, monkeypatch):
    for _ in attempts(tmp_path, monkeypatch, 1):
        note("checkpoint", path=str(tmp_path))

    assert last_checkpoint() is None
