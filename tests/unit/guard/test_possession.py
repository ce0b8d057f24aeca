"""A folder has one writer at a time, in one process and among several."""

import gc
import os

import pytest

from memfit.guard.possession import Possession, fcntl


class Holder:
    def __init__(self, path, owner=None):
        self.possession = Possession(path, self, owner)
        self.num_waits = 0

    def wait(self):
        self.num_waits += 1

    def close(self):
        self.possession.let_go()


def test_a_second_holder_is_refused_until_the_first_lets_go(tmp_path):
    first, second = Holder(tmp_path / "a"), Holder(tmp_path / "a")
    first.possession.take()
    first.possession.take()
    with pytest.raises(OSError, match="another guard of this process"):
        second.possession.take()
    assert not second.possession.is_held

    first.close()
    second.possession.take()
    assert second.possession.is_held


def test_the_same_folder_by_another_name(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    first, second = Holder(tmp_path / "a"), Holder(tmp_path / "link")
    first.possession.take()
    with pytest.raises(OSError, match="another guard of this process"):
        second.possession.take()


def test_another_holder_for_the_same_owner_takes_over(tmp_path):
    optimizer = object()
    first, second = Holder(tmp_path, optimizer), Holder(tmp_path, optimizer)
    first.possession.take()
    second.possession.take()

    assert first.num_waits
    assert (first.possession.is_held, second.possession.is_held) == (False, True)
    with pytest.raises(OSError, match="another guard"):
        Holder(tmp_path, object()).possession.take()


def test_a_holder_that_is_gone_holds_nothing(tmp_path):
    gc.disable()
    try:
        first = Holder(tmp_path)
        first.itself = first
        first.possession.take()
        del first
        second = Holder(tmp_path)
        second.possession.take()
    finally:
        gc.enable()
    # The lock is the second's now, and wasn't lost with the first.
    assert second.possession.is_locked == (fcntl is not None)
    if hasattr(os, "fork"):
        assert _in_child(lambda: Holder(tmp_path).possession.take()) == (1 if fcntl is not None else 0)


@pytest.mark.skipif(not hasattr(os, "fork") or fcntl is None, reason="no fork or no locks on this system")
def test_a_forked_process_has_nothing_of_its_parent(tmp_path):
    first = Holder(tmp_path)
    first.possession.take()

    assert _in_child(first.possession.take) == 1
    assert _in_child(Holder(tmp_path).possession.take) == 1
    assert _in_child(Holder(tmp_path / "other").possession.take) == 0
    # What the child let go of was not the parent's.
    assert _in_child(first.close) == 0
    assert _in_child(Holder(tmp_path).possession.take) == 1


def _in_child(action):
    """The exit code of a forked process: 0, or 1 where the action failed."""
    process = os.fork()
    if process == 0:
        try:
            action()
        except OSError as error:
            os._exit(1 if "another run that is still alive" in str(error) else 2)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
