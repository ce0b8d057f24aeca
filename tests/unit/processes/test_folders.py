import os
import shutil
import signal
import subprocess
import sys

import pytest

from memfit.processes.folders import temporary_folder

HOLDS = """
import sys, time
from memfit.processes.folders import temporary_folder
with temporary_folder(sys.argv[1]) as folder:
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    process.folder = process.stdout.readline().strip()
    yield process
    process.kill()
    process.communicate()


def test_a_folder_goes_with_its_block(tmp_path):
    with temporary_folder(str(tmp_path)) as folder:
        assert os.path.isdir(folder)
        assert os.path.dirname(folder) == str(tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_removed_by_the_next(holder, tmp_path):
    # GIVEN a folder with what the kernel and the user's links put there
    kept = tmp_path / "users"
    kept.mkdir(mode=0o750)
    os.symlink(kept, os.path.join(holder.folder, "link"))
    os.makedirs(os.path.join(holder.folder, "work", "work"))
    os.chmod(os.path.join(holder.folder, "work", "work"), 0)

    # WHEN its owner is alive, THEN it stays
    with temporary_folder(str(tmp_path)):
        assert os.path.isdir(holder.folder)

    # WHEN it was killed, THEN it goes, and nothing else does
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with temporary_folder(str(tmp_path)):
        assert not os.path.exists(holder.folder)
    assert kept.stat().st_mode & 0o777 == 0o750


def test_folders_that_memfit_did_not_make_stay(tmp_path):
    (tmp_path / "memfit-notes").mkdir()
    (tmp_path / "memfit-other").mkdir()
    os.symlink("/dev/null", tmp_path / "memfit-other" / ".memfit-owner")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / ".memfit-owner").touch()

    with temporary_folder(str(tmp_path)):
        pass

    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "memfit-notes", "memfit-other"]


def test_what_another_machine_holds_stays(tmp_path):
    # GIVEN a folder whose owner's lock can't be seen here
    theirs = tmp_path / "memfit-theirs"
    theirs.mkdir()
    (theirs / ".memfit-owner").write_text("another machine")

    with temporary_folder(str(tmp_path)):
        pass

    assert theirs.is_dir()


def test_a_copy_of_a_folder_is_the_users(tmp_path):
    with temporary_folder(str(tmp_path)) as folder:
        shutil.copytree(folder, tmp_path / "memfit-copy")
        with temporary_folder(str(tmp_path)):
            pass

    assert (tmp_path / "memfit-copy").is_dir()
