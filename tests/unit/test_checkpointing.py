"""Checkpoints of a loop, written by one process or by several together."""

import logging

import pytest

from memfit._checkpointing import Checkpointing
from memfit.core.errors import BadFile
from memfit.core.guarding import BadCheckpoint


class Loop:
    """What a loop does for its checkpoints, without a framework."""

    def __init__(self, num_ranks=1, is_first=True, fails=lambda directory: False):
        self.num_ranks, self.is_first, self.fails = num_ranks, is_first, fails
        self.loaded = None

    def write_state(self, directory, progress):
        if self.fails(directory):
            raise OSError(28, "No space left on device")
        (directory / "state").write_text(str(progress["update"]))

    def read_state(self, directory, check):
        check({})
        self.loaded = (directory / "state").read_text()
        return {"update": int(self.loaded)}

    def share(self, text):
        return text

    def any(self, value):
        return value


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_newest_checkpoint_is_resumed_from(tmp_path, num_ranks):
    checkpointing = Checkpointing(Loop(num_ranks), tmp_path, keep=2)
    for update in (2, 4, 6):
        checkpointing.save(update, {})
    checkpointing.close()

    loop = Loop(num_ranks)
    later = Checkpointing(loop, tmp_path, keep=2)

    assert later.resume() == {"update": 6}
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000000004", "step-000000006"]
    later.close()


def test_without_a_folder_there_are_none():
    checkpointing = Checkpointing(Loop(), None, keep=1)
    checkpointing.save(1, {})

    assert not checkpointing.is_open
    assert checkpointing.path is None
    assert checkpointing.resume() is None
    checkpointing.close()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_full_disk_is_announced_and_the_last_checkpoint_stays(tmp_path, caplog, num_ranks):
    loop = Loop(num_ranks)
    checkpointing = Checkpointing(loop, tmp_path, keep=1)
    checkpointing.save(1, {})
    loop.fails = lambda directory: True

    with caplog.at_level(logging.WARNING, "memfit"):
        checkpointing.save(2, {})

    assert "The training goes on" in caplog.text
    loop.fails = lambda directory: False
    assert checkpointing.resume() == {"update": 1}
    assert not list(tmp_path.glob(".step-*"))
    checkpointing.close()


def test_a_folder_that_can_not_be_written_to_is_refused_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(BadFile, match="checkpoints can't be written"):
        Checkpointing(Loop(), tmp_path / "file", keep=1)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_full_disk_costs_the_oldest(tmp_path, num_ranks):
    loop = Loop(num_ranks)
    checkpointing = Checkpointing(loop, tmp_path, keep=3)
    for update in (1, 2, 3):
        checkpointing.save(update, {})
    loop.fails = lambda directory: len(list(tmp_path.glob("step-*"))) > 2
    checkpointing.save(4, {})
    checkpointing.close()

    assert [path.name[-1] for path in sorted(tmp_path.glob("step-*"))] == ["2", "3", "4"]


class Other(Loop):
    """A process that hears what the first one says."""

    def __init__(self, said):
        super().__init__(num_ranks=2, is_first=False)
        self.said = said

    def share(self, text):
        return self.said.pop(0)


def test_what_the_first_process_refuses_all_refuse(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(Loop, "share", lambda self, text: said.append(text) or text)
    first = Checkpointing(Loop(num_ranks=2), tmp_path, keep=1)
    first.save(1, {})
    first.close()
    path = tmp_path / "step-000000001" / "manifest.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    del said[:]
    first = Checkpointing(Loop(num_ranks=2), tmp_path, keep=1)
    with pytest.raises(BadCheckpoint, match="another version of memfit"):
        first.resume()
    with pytest.raises(BadCheckpoint, match="another version of memfit"):
        Checkpointing(Other(said), tmp_path, keep=1).resume()
    del said[:]
    with pytest.raises(BadFile, match="another guard of this process"):
        Checkpointing(Loop(num_ranks=2), tmp_path, keep=1)
    with pytest.raises(BadFile, match="another guard of this process"):
        Checkpointing(Other(said), tmp_path, keep=1)
    first.close()
