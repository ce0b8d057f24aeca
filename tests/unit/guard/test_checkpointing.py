"""Checkpoints of a run, written by one process or by several together, and when they are due."""

import logging
import subprocess
import sys

import pytest

from memfit.core.errors import BadFile
from memfit.core.guarding import BadCheckpoint
from memfit.guard import checkpointing as module
from memfit.guard.checkpointing import Checkpointing, call_ended, folder_of_call


class Ranks:
    """Processes that train together."""

    def __init__(self, num_ranks=1, is_first=True):
        self.num_ranks, self.is_first = num_ranks, is_first

    def share(self, text):
        return text

    def any(self, value):
        return value

    agreed = any


class State:
    """What is written, without a framework."""

    def __init__(self):
        self.fails = lambda directory: False

    def __call__(self, directory):
        if self.fails(directory):
            raise OSError(28, "No space left on device")
        (directory / "state").write_text("state")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_newest_checkpoint_is_resumed_from(tmp_path, num_ranks):
    checkpointing = Checkpointing(tmp_path, 2, ranks=Ranks(num_ranks))
    for update in (2, 4, 6):
        checkpointing.save(update, State())
    checkpointing.close()

    later = Checkpointing(tmp_path, 2, ranks=Ranks(num_ranks))

    assert later.latest() == tmp_path / "step-000000006"
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000000004", "step-000000006"]
    later.close()


def test_without_a_folder_there_are_none():
    checkpointing = Checkpointing(None, every=1)
    checkpointing.save(1, State())

    assert not checkpointing.is_open
    assert checkpointing.path is None
    assert checkpointing.latest() is None
    assert not checkpointing.is_due(1)
    checkpointing.close()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_full_disk_is_announced_and_the_last_checkpoint_stays(tmp_path, caplog, num_ranks):
    state = State()
    checkpointing = Checkpointing(tmp_path, 1, ranks=Ranks(num_ranks))
    checkpointing.save(1, state)
    state.fails = lambda directory: True

    with caplog.at_level(logging.WARNING, "memfit"):
        checkpointing.save(2, state)

    assert "The training goes on" in caplog.text
    assert checkpointing.latest() == tmp_path / "step-000000001"
    assert not list(tmp_path.glob(".step-*"))
    checkpointing.close()


def test_a_folder_that_can_not_be_written_to_is_refused_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(BadFile, match="checkpoints can't be written"):
        Checkpointing(tmp_path / "file")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_full_disk_costs_the_oldest(tmp_path, num_ranks):
    state = State()
    checkpointing = Checkpointing(tmp_path, 3, ranks=Ranks(num_ranks))
    for update in (1, 2, 3):
        checkpointing.save(update, state)
    state.fails = lambda directory: len(list(tmp_path.glob("step-*"))) > 2
    checkpointing.save(4, state)
    checkpointing.close()

    assert [path.name[-1] for path in sorted(tmp_path.glob("step-*"))] == ["2", "3", "4"]


class Other(Ranks):
    """A process that hears what the first one says."""

    def __init__(self, said):
        super().__init__(num_ranks=2, is_first=False)
        self.said = said

    def share(self, text):
        return self.said.pop(0)


def test_what_the_first_process_refuses_all_refuse(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(Ranks, "share", lambda self, text: said.append(text) or text)
    first = Checkpointing(tmp_path, 1, ranks=Ranks(2))
    first.save(1, State())
    first.close()
    path = tmp_path / "step-000000001" / "manifest.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    del said[:]
    first = Checkpointing(tmp_path, 1, ranks=Ranks(2))
    with pytest.raises(BadCheckpoint, match="another version of memfit"):
        first.latest()
    with pytest.raises(BadCheckpoint, match="another version of memfit"):
        Checkpointing(tmp_path, 1, ranks=Other(said)).latest()
    del said[:]
    with pytest.raises(BadFile, match="another guard of this process"):
        Checkpointing(tmp_path, 1, ranks=Ranks(2))
    with pytest.raises(BadFile, match="another guard of this process"):
        Checkpointing(tmp_path, 1, ranks=Other(said))
    first.close()


def test_each_fit_of_a_process_has_its_own_folder(tmp_path):
    for expected in (tmp_path, tmp_path / "fit-2", tmp_path / "fit-3"):
        assert folder_of_call(tmp_path) == expected
        call_ended(str(tmp_path))
    assert folder_of_call(tmp_path / "other") == tmp_path / "other"


def test_a_fit_that_was_broken_off_goes_on_in_its_folder(tmp_path):
    broken = Checkpointing(folder_of_call(tmp_path), 1, 1)
    broken.save(4, State())
    broken.close()

    again = Checkpointing(folder_of_call(tmp_path), 1, 1)

    assert again.latest().name == "step-000000004"
    again.close()


def test_a_number_of_batches_between_two(tmp_path):
    checkpoints = Checkpointing(tmp_path, 1, 3)

    assert [update for update in range(1, 8) if checkpoints.is_due(update)] == [3, 6]
    for update in (3, 6):
        checkpoints.save(update, State())
    assert checkpoints.latest().name == "step-000000006"
    checkpoints.close()
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000000006"]


def test_by_time_sooner_at_first(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: 0.0)
    checkpoints = Checkpointing(tmp_path, 1, None)
    gaps = []
    for update in range(5):
        started = now[0]
        while not checkpoints.is_due(update):
            now[0] += 1
        gaps.append(now[0] - started)
        checkpoints.save(update, State())
    checkpoints.close()

    assert gaps == [5, 10, 20, 40, 60]


def test_what_takes_long_is_seldom(tmp_path, monkeypatch):
    clock = iter([0.0, 2.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    checkpoints = Checkpointing(tmp_path, 1, None)
    checkpoints.save(1, State())
    checkpoints._last -= 199

    assert not checkpoints.is_due(2)
    checkpoints._last -= 2
    assert checkpoints.is_due(2)
    checkpoints.close()


AT_EXIT = """
import gc
from memfit.guard.checkpointing import save_at_exit

class Guard:
    def __init__(self, name):
        self.name = name

    def save(self):
        print(self.name)
        raise OSError

guards = [Guard("a"), Guard("b"), Guard("c")]
for guard in guards:
    save_at_exit(guard.save)
del guard, guards[1]
gc.collect()
"""


def test_guards_save_at_exit_as_long_as_they_are_there():
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, check=True)

    assert sorted(done.stdout.split()) == ["a", "c"]
    assert not done.stderr
