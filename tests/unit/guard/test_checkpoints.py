"""The newest whole checkpoint is always found, whatever happened to the process, the disk or the files."""

import errno
import json
import logging
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from memfit.core import plain_files
from memfit.core.errors import BadFile
from memfit.core.guarding import BadCheckpoint
from memfit.guard import checkpoints, possession
from memfit.guard.checkpoints import Folder

SOURCE = str(Path(__file__).parents[3] / "src")


def fill(directory, step=0):
    (directory / "model.bin").write_bytes(bytes([step % 256]) * 5000)
    (directory / "sub").mkdir()
    (directory / "sub" / "state.json").write_text(f"{step}")


def write(folder, step, **options):
    return folder.write(step, lambda directory: fill(directory, step), **options)


def names(path):
    return sorted(entry.name for entry in Path(path).iterdir() if entry.name != ".lock")


@contextmanager
def listening():
    """What is logged meanwhile."""
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("memfit").addHandler(handler)
    yield said
    logging.getLogger("memfit").removeHandler(handler)


@pytest.fixture
def said():
    with listening() as said:
        yield said


@pytest.fixture
def folder(tmp_path, said):
    folder = Folder(tmp_path / "run")
    yield folder
    folder.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_is_written_and_found(folder, asynchronous):
    # GIVEN an empty folder
    assert folder.latest() is None

    # WHEN a checkpoint is written
    assert write(folder, 123, info={"note": "ä", "nested": [1]}, asynchronous=asynchronous)

    # THEN it is the latest
    latest = folder.latest()
    assert latest.path == folder.path / "step-000000123"
    assert (latest.step, latest.number, latest.info) == (123, 1, {"note": "ä", "nested": [1]})
    assert (latest.path / "sub" / "state.json").read_text() == "123"
    assert names(folder.path) == ["step-000000123"]


def test_the_last_few_are_kept(tmp_path):
    folder = Folder(tmp_path, keep=2)
    for step in range(0, 50, 10):
        write(folder, step, asynchronous=True)
    folder.wait()

    assert names(tmp_path) == ["step-000000030", "step-000000040"]
    assert folder.latest().step == 40


@pytest.mark.parametrize("keep", [1, 2])
def test_a_step_can_be_written_again(tmp_path, keep):
    # A run that was resumed from an older checkpoint comes by the same step again.
    folder = Folder(tmp_path, keep=keep)
    write(folder, 5, info={"try": 1})
    write(folder, 5, info={"try": 2})

    assert folder.latest().info == {"try": 2}
    assert len(names(tmp_path)) == keep


def test_the_newest_is_the_one_written_last_not_the_highest_step(tmp_path):
    folder = Folder(tmp_path, keep=3)
    write(folder, 140)
    write(folder, 120)

    assert folder.latest().step == 120


# Damage.


@examples(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_noticed_and_the_one_before_is_used(tmp_path_factory, data):
    # GIVEN two checkpoints
    path = tmp_path_factory.mktemp("damage")
    folder = Folder(path)
    write(folder, 1)
    write(folder, 2)

    # WHEN a file of the newer is cut anywhere or any bit of it flips
    name = data.draw(st.sampled_from(["model.bin", "sub/state.json", "manifest.json"]))
    file = path / "step-000000002" / name
    content = bytearray(file.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        del content[position:]
    else:
        content[position] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)

    # THEN the older is used, and the reason is told
    try:
        with listening() as said:
            latest = folder.latest()
    except BadCheckpoint as error:
        # What may be of a later version is not passed over.
        assert "another version" in str(error) and name == "manifest.json"
        return
    assert latest.step == 1
    assert len(folder.skipped) == len(said) == 1
    assert folder.skipped[0].startswith("step-000000002: ")
    assert name in folder.skipped[0]
    folder.close()
    shutil.rmtree(path)


def test_what_was_skipped_is_told_with_reasons(folder, said):
    for step in (20, 30, 40):
        write(folder, step)
    with (folder.path / "step-000000040" / "model.bin").open("r+b") as file:
        file.truncate(3976)
    (folder.path / "step-000000030" / "manifest.json").unlink()

    assert folder.latest().step == 20
    assert folder.skipped == (
        "step-000000030: it has no manifest.json: it was never finished, or memfit didn't write it",
        "step-000000040: model.bin is 1024 bytes shorter than its manifest says",
    )
    assert "step-000000020 is used" in said[0]


def test_nothing_whole_is_none(folder, said):
    write(folder, 1)
    (folder.path / "step-000000001" / "model.bin").unlink()

    assert folder.latest() is None
    assert "there is no other" in said[0]


def test_damaged_ones_go_and_never_count_as_kept(tmp_path, said):
    # GIVEN a folder that keeps one checkpoint, and that one has a bad byte
    folder = Folder(tmp_path, keep=1)
    write(folder, 140)
    (tmp_path / "step-000000140" / "model.bin").write_bytes(b"x" * 5000)
    assert folder.latest() is None

    # WHEN the run has begun again and writes a lower step
    write(folder, 20)

    # THEN that is what stays
    assert names(tmp_path) == ["step-000000020"]
    assert folder.latest().step == 20


def test_files_of_others_stay(folder):
    # GIVEN a folder in which there are things with all kinds of names already
    folder.path.mkdir()
    (folder.path / "notes.txt").write_text("mine")
    others = ["step-latest", "step-1", "step-000000002", "step-000000003-2", "step-77"]
    for name in others:
        (folder.path / name / "sub").mkdir(parents=True)
        (folder.path / name / "sub" / "weights.pt").write_text(name)
    (folder.path / "step-77" / "manifest.json").write_text('{"format": "of something else"}')
    (folder.path / "step-000000004").symlink_to(folder.path / "step-77")

    # WHEN checkpoints are written, removed and looked for
    for step in range(6):
        write(folder, step)
    assert folder.latest().step == 5
    write(folder, 6)

    # THEN all of it is still there
    assert (folder.path / "notes.txt").read_text() == "mine"
    for name in others:
        assert (folder.path / name / "sub" / "weights.pt").read_text() == name
    assert (folder.path / "step-000000004").is_symlink()
    assert len([name for name in names(folder.path) if name not in [*others, "notes.txt", "step-000000004"]]) == 3


def test_files_of_others_in_a_checkpoint_stay(folder, said):
    for step in range(5):
        write(folder, step)
        (folder.path / f"step-{step:09d}" / "notes.txt").write_text("mine")
    folder.wait()

    assert [path.parent.name for path in sorted(folder.path.glob("*/notes.txt"))] == [
        f"step-{step:09d}" for step in range(5)
    ]
    assert not (folder.path / "step-000000000" / "model.bin").exists()
    assert "what memfit didn't write stays in" in said[0] and "notes.txt" in said[0]


def test_checkpoints_of_another_version_are_refused_and_stay(folder):
    # GIVEN a checkpoint that a later memfit has written
    write(folder, 1)
    write(folder, 2)
    path = folder.path / "step-000000002" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2}))

    # THEN nothing begins here
    with pytest.raises(BadCheckpoint, match=r"another version of memfit.*version 2.*give another folder"):
        folder.latest()
    # AND where it does all the same, it stays
    for step in range(3, 9):
        assert write(folder, step)
    assert (folder.path / "step-000000002" / "model.bin").exists()


@pytest.mark.parametrize("what", ["manifest.json", "model.bin", "run"])
def test_what_cannot_be_read_is_neither_passed_over_nor_removed(folder, said, monkeypatch, what):
    # GIVEN checkpoints on a file system that fails from some moment on
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    for step in (1, 2, 3):
        write(folder, step)
    plain, scan, failing = os.open, os.scandir, [True] * 100

    def stale(path):
        if not isinstance(path, int) and Path(path).name == what and failing and failing.pop():
            raise OSError(116, "Stale file handle", str(path))

    monkeypatch.setattr(plain_files.os, "open", lambda path, *a, **k: [stale(path), plain(path, *a, **k)][1])
    monkeypatch.setattr(checkpoints.os, "scandir", lambda path: [stale(path), scan(path)][1])

    # THEN there is no saying which checkpoint is the newest
    with pytest.raises(BadCheckpoint, match=r"can't be read: Stale file handle.*Nothing was removed"):
        folder.latest()
    # AND none is removed by the next
    failing[:] = [True] * 100
    write(folder, 4)
    failing.clear()
    assert set(names(folder.path)) >= {"step-000000001", "step-000000002", "step-000000003"}

    # AND a moment of it is nothing
    failing[:] = [True]
    assert folder.latest().number >= 3
    assert not failing


def test_what_was_just_written_stays_whatever_is_seen_of_it(folder, monkeypatch):
    # GIVEN a file system that doesn't show what has just got its name
    plain = os.lstat

    def late(path, **options):
        if Path(path).name == "model.bin" and Path(path).parent.name == "step-000000002":
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return plain(path, **options)

    write(folder, 1)
    monkeypatch.setattr(plain_files.os, "lstat", late)

    # WHEN it is looked through after the writing
    write(folder, 2)
    monkeypatch.undo()

    # THEN nothing of it was taken for damage
    assert folder.latest().step == 2


# Failures to write.


def test_a_full_disk_is_announced_and_the_last_one_survives(folder, said):
    # GIVEN a checkpoint
    write(folder, 1)

    # WHEN the disk is full from then on
    def full(directory):
        (directory / "half").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    results = [folder.write(step, full) for step in range(2, 10)]

    # THEN training can go on, nothing half-written stays, and it is said more and more seldom
    assert not any(results)
    assert names(folder.path) == ["step-000000001"]
    assert [text.split(" can't")[0] for text in said] == [f"the checkpoint of step {step}" for step in (2, 3, 5, 9)]
    assert "the disk is full" in said[0] and " are free there" in said[0]
    assert "8 in a row have failed" in said[3]

    # AND that all is well again, and when it isn't
    assert write(folder, 10)
    assert not folder.write(11, full) and "in a row" not in said[-1]
    assert "written again: step-000000010 is whole" in said[-3]


def test_a_full_disk_costs_the_oldest_but_never_the_last(folder, said):
    # GIVEN three checkpoints, and a disk that has room for two
    for step in (1, 2, 3):
        write(folder, step)

    def tight(directory):
        fill(directory, 4)
        if len([name for name in names(folder.path) if name.startswith("step-")]) > 1:
            raise OSError(28, "No space left on device")

    # WHEN one more is written
    assert folder.write(4, tight)

    # THEN the oldest two have made room, one at a time, and the newest before it was there all along
    assert names(folder.path) == ["step-000000003", "step-000000004"]
    folder.wait()
    assert ["step-000000001" in said[0], "step-000000002" in said[1], len(said)] == [True, True, 2]

    # AND where the newest is damaged, the one before it is the last
    (folder.path / "step-000000004" / "model.bin").write_bytes(b"x" * 5000)

    def full(directory):
        raise OSError(28, "No space left on device")

    assert not folder.write(5, full)
    assert folder.latest().step == 3


def test_a_disk_that_is_full_of_something_else_costs_nothing(folder, monkeypatch):
    for step in (1, 2):
        write(folder, step)
    manifest = folder.path / "step-000000002"
    with (manifest / "model.bin").open("r+b") as file:
        file.truncate(0)
    shutil.rmtree(manifest)
    folder.write(3, lambda directory: (directory / "large").write_bytes(b"x" * 100_000))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))

    def full(directory):
        raise OSError(28, "No space left on device")

    # What the small one has wouldn't be enough for another large one.
    assert not folder.write(4, full)
    assert names(folder.path) == ["step-000000001", "step-000000003"]


def test_a_failure_in_the_thread_is_announced_at_the_next_call(folder, said, monkeypatch):
    write(folder, 1)
    thread = []

    def broken(path):
        thread.append(threading.current_thread())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints.manifests, "describe", broken)
    assert write(folder, 2, asynchronous=True)
    folder.wait()
    monkeypatch.undo()

    assert thread[0] is not threading.main_thread()
    assert len(said) == 1
    assert folder.latest().step == 1
    assert names(folder.path) == ["step-000000001"]


def test_without_a_thread_the_work_is_done_at_once(folder, monkeypatch):
    def no_thread(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)

    assert write(folder, 2, asynchronous=True)
    assert folder.latest().step == 2


def test_only_one_is_finished_at_a_time(folder, monkeypatch):
    # GIVEN a slow disk
    running, most = [], []
    plain = checkpoints.manifests.describe

    def slow(path):
        running.append(path)
        most.append(len(running))
        time.sleep(0.05)
        running.pop()
        return plain(path)

    monkeypatch.setattr(checkpoints.manifests, "describe", slow)
    write(folder, 1, asynchronous=True)

    # WHEN the next checkpoint is due before the last is on disk
    for step in (2, 3):
        write(folder, step, asynchronous=True)
    folder.wait()

    # THEN it waits
    assert max(most) == 1
    assert len(names(folder.path)) == 3


def test_an_error_of_the_writer_is_its_own(folder):
    def broken(directory):
        (directory / "half").write_bytes(b"half")
        raise KeyError("mine")

    with pytest.raises(KeyError):
        folder.write(1, broken)
    with pytest.raises(TypeError):
        write(folder, 1, info={"bad": object()})
    assert names(folder.path) == []


def test_a_folder_that_is_a_file(tmp_path, said):
    path = tmp_path / "file"
    path.write_text("not a folder")
    folder = Folder(path)

    assert not write(folder, 1)
    assert "it is a file, and a folder is needed" in said[0]
    with pytest.raises(BadFile, match="it is a file, and a folder is needed"):
        folder.claim()
    with pytest.raises(BadFile, match="a part of the path is a file"):
        Folder(path / "below").claim()
    assert folder.latest() is None


def test_by_default_it_is_logged(tmp_path, caplog):
    path = tmp_path / "file"
    path.write_text("not a folder")

    write(Folder(path), 1)
    assert "The training goes on" in caplog.text


def run_in_mount(tmp_path, options, code):
    """Runs code in a process that sees a file system of its own, with `path` in it; skips where that isn't possible."""
    mount = tmp_path / "mount"
    mount.mkdir()
    python = shlex.join([sys.executable, "-c", code, str(mount)])
    script = f"mount -t tmpfs -o {options} none {shlex.quote(str(mount))} || exit 77; {python}"
    if shutil.which("unshare") is None:
        pytest.skip("no unshare, so no file system of its own")
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": SOURCE}
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"no file system of its own: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout


FULL = """
import logging, sys
from memfit.guard.checkpoints import Folder
said = []
logging.getLogger("memfit").warning = said.append
folder = Folder(sys.argv[1] + "/run")
def fill(size):
    def do(directory):
        with (directory / "model.bin").open("wb") as file:
            for _ in range(size):
                file.write(b"x" * 1024)
    return do
for asynchronous in (False, True):
    print(folder.write(1, fill(300), asynchronous=asynchronous), end=" ")
    print(folder.write(2, fill(900), asynchronous=asynchronous), end=" ")
    folder.wait()
    print(folder.latest().step, end=" ")
print(len(said), "the disk is full" in said[0], sorted(p.name for p in folder.path.iterdir()))
print(folder.write(3, fill(10)), folder.latest().step)
"""


def test_a_disk_that_is_really_full(tmp_path):
    output = run_in_mount(tmp_path, "size=1m", FULL)

    first, second = output.splitlines()
    assert first == "True False 1 True False 1 4 True ['.lock', 'step-000000001-2']"
    assert second == "True 3"


READ_ONLY = """
import logging, subprocess, sys
from memfit.core.errors import BadFile
from memfit.guard.checkpoints import Folder
said = []
first = Folder(sys.argv[1])
first.write(1, lambda directory: (directory / "a").write_text("a"))
first.close()
subprocess.run(["mount", "-o", "remount,ro", sys.argv[1]], check=True)
logging.getLogger("memfit").warning = said.append
folder = Folder(sys.argv[1])
print(folder.latest().step, folder.write(2, lambda directory: None), "the file system is read-only" in said[0])
try:
    folder.claim()
except BadFile as error:
    print("refused")
"""


def test_a_file_system_that_is_really_read_only(tmp_path):
    assert run_in_mount(tmp_path, "size=1m", READ_ONLY) == "1 False True\nrefused\n"


# Other processes.

HOLD = """
import sys
from memfit.guard.checkpoints import Folder
folder = Folder(sys.argv[1])
folder.claim()
print("ready", flush=True)
sys.stdin.read()
"""


def child(code, *arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCE},
        **options,
    )


@pytest.mark.skipif(possession.fcntl is None, reason="no locks on this system")
def test_the_folder_of_a_living_run_is_refused_and_of_a_dead_one_taken_over(tmp_path, said):
    # GIVEN another run that writes to the folder
    folder = Folder(tmp_path)
    with child(HOLD, tmp_path, stdin=subprocess.PIPE) as other:
        assert other.stdout.readline() == "ready\n"

        # THEN this one doesn't
        with pytest.raises(BadFile, match="in use by another run that is still alive"):
            folder.claim()
        assert not write(folder, 1)
        assert "in use by another run" in said[0]

        # AND does once the other has been killed
        other.kill()
    folder.claim()
    assert write(folder, 1)


def test_two_in_one_process_are_kept_apart(tmp_path):
    # GIVEN a folder in use
    first, second = Folder(tmp_path), Folder(tmp_path / "." / ".." / tmp_path.name)
    first.claim()

    # THEN another user of it is told what to do
    with pytest.raises(BadFile, match=r"another guard of this process\. Give each guard a folder of its own"):
        second.claim()
    assert write(first, 1)
    # AND can have it afterwards, or when nobody knows the first any more
    first.close()
    second.claim()
    second.cycle = second
    del second
    first.claim()
    first.close()


def test_what_dead_writers_left_goes(folder):
    # GIVEN what writers leave that are killed while they write, between two steps of the end, or while they remove
    dead = Folder(folder.path)
    fill(dead.begin(9))
    write(dead, 8)
    dead.close()
    (folder.path / "step-000000008").rename(folder.path / ".step-000000008.old-1-00ff")
    write(dead, 7)
    dead.close()
    (folder.path / "step-000000007").rename(folder.path / ".step-000000007.tmp-1-00ff")
    (folder.path / ".step-000000003.old-1-00ff").mkdir()
    # AND what only looks like it
    (folder.path / ".step-000000003.tmp-1-00ee").mkdir()
    (folder.path / ".step-000000003.tmp-1-00ee" / "mine").write_text("mine")

    write(folder, 10)

    assert names(folder.path) == [".step-000000003.tmp-1-00ee", "step-000000010"]


def test_a_temporary_that_is_in_use_stays(folder):
    directory = folder.begin(1)
    write(folder, 2)
    assert directory.is_dir()
    folder.abandon(directory)
    assert names(folder.path) == ["step-000000002"]


def test_without_locks_only_the_dead_are_cleaned_up(folder, monkeypatch):
    monkeypatch.setattr(possession, "fcntl", None)
    folder.path.mkdir()
    alive = f".step-000000001.tmp-{os.getppid()}-abcd1234"
    (folder.path / alive).mkdir()
    (folder.path / ".step-000000001.tmp-999999999-abcd1234").mkdir()

    write(folder, 2)

    assert names(folder.path) == [alive, "step-000000002"]


LEAVE = """
import sys
from memfit.guard.checkpoints import Folder
folder = Folder(sys.argv[1])
folder.write(7, lambda directory: (directory / "a").write_bytes(b"a" * 30_000_000), asynchronous=True)
"""


def test_the_end_of_the_process_waits_for_the_last_checkpoint(tmp_path):
    with child(LEAVE, tmp_path) as process:
        assert process.wait() == 0

    assert Folder(tmp_path).latest().step == 7


FAIL_LATE = """
import logging, sys
from memfit.guard import checkpoints
logging.basicConfig(stream=sys.stdout)
def broken(path):
    raise OSError(28, "No space left on device")
checkpoints.manifests.describe = broken
folder = checkpoints.Folder(sys.argv[1])
folder.write(7, lambda directory: None, asynchronous=True)
"""


def test_a_failure_after_the_last_line_of_the_program_is_announced(tmp_path):
    with child(FAIL_LATE, tmp_path) as process:
        assert "the checkpoint of step 7 can't be written" in process.stdout.read()


WRITE_FOREVER = """
import itertools, sys
from memfit.guard.checkpoints import Folder
folder = Folder(sys.argv[1], keep=int(sys.argv[2]))
latest = folder.latest()
for step in itertools.count(1 if latest is None else latest.step + 1):
    def fill(directory):
        (directory / "a.bin").write_bytes(bytes([step % 256]) * 300_000)
        (directory / "b.bin").write_bytes(str(step).encode())
    folder.write(step, fill, asynchronous=step % 2 == 0)
    if step % 2:
        print(step, flush=True)
"""


def check_killed_writers(path, num_kills, keep):
    """Kills writers at random moments; after each, what was reported as written is there and whole."""
    generator = random.Random(num_kills)
    for _ in range(num_kills):
        with child(WRITE_FOREVER, path, keep) as process:
            first = process.stdout.readline()
            time.sleep(generator.random() * 0.1)
            os.kill(process.pid, signal.SIGKILL)
            reported = int((first + process.stdout.read()).split()[-1])
        with listening() as said:
            latest = Folder(path).latest()
        assert said == []
        assert latest.step >= reported
        assert (latest.path / "b.bin").read_text() == str(latest.step)
        assert (latest.path / "a.bin").read_bytes() == bytes([latest.step % 256]) * 300_000
    visible = [name for name in names(path) if not name.startswith(".")]
    assert len(visible) <= keep + 1, "one more than is kept, where the kill came before the oldest was removed"
    assert len(names(path)) <= keep + 4, "what the killed ones left doesn't pile up"


@pytest.mark.parametrize("keep", [1, 3])
def test_killed_at_random_moments(tmp_path, keep):
    check_killed_writers(tmp_path, 10, keep)


@pytest.mark.slow
@pytest.mark.parametrize("keep", [1, 3])
def test_killed_at_many_random_moments(tmp_path, keep):
    check_killed_writers(tmp_path, 100, keep)


def test_a_system_without_directories_that_can_be_opened(folder, monkeypatch):
    plain = os.open

    def refusing(path, flags, *arguments):
        if os.path.isdir(path):
            raise PermissionError(13, "Permission denied")
        return plain(path, flags, *arguments)

    monkeypatch.setattr(os, "open", refusing)

    assert write(folder, 1)
    assert folder.latest().step == 1


def test_a_copy_of_the_folder_does_not_let_another_run_in(folder, tmp_path):
    # GIVEN a run whose lock is undone by whoever closes another descriptor of its file
    write(folder, 1)
    shutil.copytree(folder.path, tmp_path / "backup")

    # WHEN it has written once more
    write(folder, 2)

    # THEN another process is kept out
    code = f"from memfit.guard.checkpoints import Folder; Folder({str(folder.path)!r}).claim()"
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "in use by another run" in done.stderr


def test_without_locks_the_files_of_a_living_process_stay(folder, tmp_path, monkeypatch):
    # GIVEN a file system without locks, and a checkpoint that another living process is writing
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(possession.fcntl, "lockf", refuse)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        theirs = folder.path / f".step-000000009.tmp-{other.pid}-0123abcd"
        theirs.mkdir(parents=True)
        (theirs / checkpoints.UNFINISHED).touch()

        write(folder, 1)

        assert theirs.is_dir()
        other.stdin.close()


def test_a_file_that_is_held_open_on_a_network_does_not_keep_a_full_disk_busy(folder, said):
    # GIVEN a checkpoint that can't go as long as somebody has a file of it open
    folder.keep = 1
    write(folder, 1)
    (folder.path / "step-000000001" / ".nfs0001").touch()
    write(folder, 2)

    def full(directory):
        raise OSError(errno.ENOSPC, "No space left on device")

    # THEN a full disk is said, and not tried for ever
    assert not folder.write(3, full)
    assert "the disk is full" in said[-1]


def test_memory_that_runs_out_while_a_checkpoint_is_written_stops_nothing(folder, said):
    def hungry(directory):
        raise MemoryError("no room for a copy")

    assert not folder.write(1, hungry)
    assert "memory ran out" in said[-1]
    assert write(folder, 2)


def test_what_could_not_be_removed_is_removed_later(folder, said, monkeypatch):
    # GIVEN an error that passes while the oldest checkpoint is removed
    folder.keep = 1
    write(folder, 1)
    plain, failed = Path.unlink, []

    def unlink(path, *arguments, **options):
        if path.name == "model.bin" and not failed:
            failed.append(path)
            raise OSError(errno.EIO, "Input/output error")
        return plain(path, *arguments, **options)

    monkeypatch.setattr(Path, "unlink", unlink)
    write(folder, 2)
    assert names(folder.path) == ["step-000000001", "step-000000002"]

    # THEN it goes with the next one, and nobody is told that it is somebody else's
    write(folder, 3)
    assert names(folder.path) == ["step-000000003"]
    assert not any("didn't write" in text for text in said)


def test_a_kill_while_old_ones_are_removed_hides_no_file_of_the_users(folder, said):
    # GIVEN a checkpoint with a file of the user's, which a run that is dead had begun to remove
    write(folder, 1)
    (folder.path / "step-000000001" / "notes.txt").write_text("mine")
    write(folder, 2)
    os.rename(folder.path / "step-000000001", folder.path / ".step-000000001.old-1-0123abcd")

    write(folder, 3)

    assert (folder.path / "step-000000001" / "notes.txt").read_text() == "mine"
    assert not (folder.path / "step-000000001" / "model.bin").exists()
    folder.wait()
    assert any("notes.txt" in text for text in said)


def test_a_folder_that_is_full_is_left_without_a_trace(folder, monkeypatch):
    def write_bytes(path, data):
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    with pytest.raises(BadFile, match="the disk is full"):
        folder.claim()
    assert names(folder.path) == []
