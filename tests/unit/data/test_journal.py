import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.core.errors import BadFile
from memfit.data import journal as journals
from memfit.data.journal import Journal, remove, write_whole

SOURCE = str(Path(__file__).parents[3] / "src")


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "x.npy")


def test_what_is_written_is_read(journal):
    journal.write({"num_durable": 3})

    assert journal.read() == {"num_durable": 3}
    assert [path.name for path in journal.path.parent.iterdir()] == [".x.npy.memfit-part.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"3"])
def test_a_damaged_journal_is_none(journal, content):
    journal.path.write_bytes(content)

    assert journal.read() is None


def test_a_failed_write_leaves_the_last_one(journal, monkeypatch):
    journal.write({"num_durable": 1})

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journals.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(journal.path, b"{}")

    monkeypatch.undo()
    assert journal.read() == {"num_durable": 1}
    assert len(list(journal.path.parent.iterdir())) == 1


def test_a_finished_file_takes_its_place(journal):
    journal.part.write_text("new")
    journal.destination.write_text("old")
    journal.write({})

    journal.finish()

    assert journal.destination.read_text() == "new"
    assert [path.name for path in journal.destination.parent.iterdir()] == ["x.npy"]


def test_a_finished_folder_replaces_a_folder(tmp_path):
    journal = Journal(tmp_path / "folder")
    for folder, text in ((journal.part, "new"), (journal.destination, "old")):
        folder.mkdir()
        (folder / "x.npy").write_text(text)

    journal.finish()

    assert (journal.destination / "x.npy").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_discarding_removes_both(journal):
    journal.part.mkdir()
    (journal.part / "x.npy").touch()
    journal.write({})
    # What a kill leaves while the journal is replaced.
    journal.path.with_name(f"{journal.path.name}.tmp").touch()

    journal.discard()
    journal.discard()

    assert list(journal.destination.parent.iterdir()) == []


def test_a_second_writer_is_refused(journal):
    with (
        journal.locked(wait=False),
        pytest.raises(BadFile, match=r"another process is writing .*x\.npy"),
        Journal(journal.destination).locked(wait=False),
    ):
        pass

    with Journal(journal.destination).locked(wait=False):
        pass
    assert list(journal.destination.parent.iterdir()) == []


HOLD = """
import sys, time
from pathlib import Path
from memfit.data.journal import Journal
with Journal(Path(sys.argv[1])).locked(wait=False):
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_lock_of_a_dead_process_is_taken_over(journal):
    # GIVEN a process that holds the lock
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    command = [sys.executable, "-c", HOLD, str(journal.destination)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    assert process.stdout.readline() == "held\n"
    with pytest.raises(BadFile), journal.locked(wait=False):
        pass

    # WHEN it is killed
    process.kill()
    process.communicate()

    # THEN its lock is there for others
    with journal.locked(wait=True):
        pass


def test_a_lock_that_was_removed_meanwhile_is_made_again(journal, monkeypatch):
    # GIVEN a lock whose file is replaced between opening and locking it, as when its last holder ended
    real = journals.fcntl.flock
    calls = []

    def flock(descriptor, operation):
        if not calls:
            os.unlink(journal._lock)
        calls.append(descriptor)
        real(descriptor, operation)

    monkeypatch.setattr(journals.fcntl, "flock", flock)

    # THEN it is opened again, so that two can't both hold it
    with journal.locked(wait=False):
        assert len(calls) == 2
        assert journal._lock.exists()


def test_file_systems_without_locks_go_without(journal, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(journals.fcntl, "flock", flock)
    with journal.locked(wait=False):
        pass


def test_removing_nothing_is_fine(tmp_path):
    remove(tmp_path / "nothing")


REPLACING = """
import os, signal, sys
from pathlib import Path
from memfit.data import journal

left = int(sys.argv[2])
if sys.argv[3] == "apart":
    journal._exchange = lambda *paths: False

def counted(real):
    def call(*arguments):
        global left
        result = real(*arguments)
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return call

for name in ("replace", "rename"):
    setattr(os, name, counted(getattr(os, name)))
journal._exchange = counted(journal._exchange)
journal.Journal(Path(sys.argv[1])).finish()
"""


@pytest.mark.parametrize("way", ["at once", "apart"])
def test_a_kill_while_a_folder_is_replaced_loses_neither(tmp_path, way):
    for num_calls in range(1, 7):
        # GIVEN a folder and the one to replace it
        journal = Journal(tmp_path / f"{num_calls} ü")
        for folder in (journal.destination, journal.part):
            folder.mkdir()
        (journal.destination / "old").touch()
        (journal.part / "new").touch()

        # WHEN the process is killed at any moment
        command = [sys.executable, "-c", REPLACING, str(journal.destination), str(num_calls), way]
        code = subprocess.run(command, env={**os.environ, "PYTHONPATH": SOURCE}).returncode
        was_gone = not journal.destination.exists()
        journal.recover()

        # THEN one of them is there, without a gap where the system can do that
        assert code in (-9, 0)
        assert not (was_gone and way == "at once")
        assert [path.name for path in journal.destination.iterdir()] in (["old"], ["new"])
        assert not code or num_calls < 6


def test_nothing_is_recovered_while_another_process_replaces(journal):
    journal._aside.mkdir()

    with journal.locked(wait=False), pytest.raises(BadFile, match="another process"):
        journal.recover()

    journal.recover()
    assert journal.destination.is_dir()
