"""Checkpoints of a loop, written by one process or by several together."""

import logging

import pytest

from memfit._checkpointing import Checkpointing
from memfit.core.errors import BadFile


class Loop:
    """What a loop does for its checkpoints, without a framework."""

    def __init__(self, num_ranks=1, is_first=True, fails=False):
        self.num_ranks, self.is_first, self.fails = num_ranks, is_first, fails
        self.loaded = None

    def write_state(self, directory, progress):
        if self.fails:
            raise OSError(28, "No space left on device")
        (directory / "state").write_text(str(progress["update"]))

    def read_state(self, directory):
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
    loop.fails = True

    with caplog.at_level(logging.WARNING, "memfit"):
        checkpointing.save(2, {})

    assert "The training goes on" in caplog.text
    loop.fails = False
    assert checkpointing.resume() == {"update": 1}
    assert not list(tmp_path.glob(".step-*"))
    checkpointing.close()


def test_a_folder_that_can_not_be_written_to_is_refused_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(BadFile, match="checkpoints can't be written"):
        Checkpointing(Loop(), tmp_path / "file", keep=1)
