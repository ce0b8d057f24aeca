import json
import threading

import pytest

from memfit.core import env
from memfit.core.run_events import EVENTS, RunRequest, current, note, read_events


@pytest.fixture
def supervised(tmp_path, monkeypatch):
    """A supervised run's folder, with its request named in the environment."""
    path = tmp_path / "request.json"
    path.write_text(json.dumps(RunRequest(attempt=2, micro_batch_size=4, script="train.py").to_json()))
    monkeypatch.setenv(env.RUN_REQUEST, str(path))
    return tmp_path


def test_a_request_survives_its_json():
    request = RunRequest(3, "runs/first", 8, 2**30, True, True, "train.py", True, ("--lr", "1"), 2**31)

    assert RunRequest.from_json(json.dumps(request.to_json())) == request


def test_a_request_of_a_newer_supervisor_can_be_read():
    assert RunRequest.from_json({"attempt": 2, "invented": 1}) == RunRequest(attempt=2)


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
