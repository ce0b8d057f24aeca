import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from memfit.processes import overlay
from memfit.processes.overlay import LAYERS, collect
from tests.unit.processes import view_script

SCRIPT = Path(view_script.__file__)
only_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="views are Linux's")


@pytest.fixture
def users(tmp_path, request):
    """A folder of the user's with models, data and folders in it, on a disk or in shared memory."""
    in_memory = tempfile.mkdtemp(dir="/dev/shm") if getattr(request, "param", "disk") == "memory" else None
    folder = Path(in_memory or tmp_path) / "the user's, with: odd\\ name"
    for name in (*(f"a{n}.pt" for n in range(16)), "runs/a.pt", "older/a.pt", "folder/a.pt", "cache/old"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"the user's {name}")
    connection = sqlite3.connect(folder / "numbers.db")
    connection.execute("create table numbers (number)")
    connection.commit()
    connection.close()
    yield folder
    if in_memory:
        shutil.rmtree(in_memory)


@pytest.fixture
def listening():
    """A socket of somebody else, who says hello to whoever connects."""
    # Paths of sockets are short.
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.join(folder, "socket"))
        server.listen()
        server.settimeout(60)

        def greet():
            with server.accept()[0] as client:
                client.sendall(b"hello")

        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        yield os.path.join(folder, "socket")


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@only_linux
@pytest.mark.parametrize("users", ["disk", "memory"], indirect=True)
@pytest.mark.parametrize("rights", ["own", "weak"])
def test_nothing_that_is_written_in_a_view_reaches_the_users_files(users, tmp_path, listening, rights):
    # GIVEN files of the user's, for root and for somebody who may mount nothing
    before, layers = contents(users), tmp_path / "layers"
    layers.mkdir()

    # WHEN a process enters a view and writes, changes and removes them in every way, itself and by others
    command = [sys.executable, str(SCRIPT), str(layers), listening, rights]
    done = subprocess.run(command, cwd=users, capture_output=True, text=True, check=True, timeout=120)
    told = json.loads(done.stdout.splitlines()[-1])
    if told["reason"]:
        pytest.skip(f"this system gives no view: {told['reason']}")

    # THEN it saw its own changes
    assert (told["failed"], told["read only"], told["truncated"]) == ({}, [], 0)
    assert {"new.pt", "renamed"} <= set(told["seen"])
    assert not {"a5.pt", "a9.pt", "a11.pt", "runs", "older", "folder"} & set(told["seen"])

    # AND of the user's files all are what they were; only what is shared has got another
    assert contents(users) == {**before, Path("cache/fetched"): b"fetched"}

    # AND what it wrote is known
    written = {os.path.relpath(path, users) for path in collect(layers) if path.startswith(str(users))}
    changed = {f"a{n}.pt" for n in (0, 1, 2, 3, 4, 6, 7, 8, 10, 12, 13, 14)}
    assert changed | {"new.pt", "numbers.db"} <= written
    assert not {"a15.pt", "cache/fetched"} & written


REFUSES = """
import ctypes, errno, os, sys
sys.path.insert(0, sys.argv[3])
from memfit.processes import overlay
plain = overlay._View._overlay
def refuse(view, path, option):
    if path == sys.argv[2]:
        raise OSError(errno.EINVAL, "filesystem not supported", path)
    plain(view, path, option)
overlay._View._overlay = refuse
libc = ctypes.CDLL(None)
assert libc.unshare(0x20000) == 0
assert libc.mount(b"none", b"/", None, ctypes.c_ulong(16384 | 1 << 18), None) == 0
assert libc.mount(b"none", sys.argv[2].encode(), b"tmpfs", ctypes.c_ulong(0), None) == 0
open(sys.argv[2] + "/data", "w").write("data")
if len(sys.argv) > 4:
    os.chdir(sys.argv[2])
print(*overlay.enter([sys.argv[1]], written=[os.getcwd()]))
try:
    open(sys.argv[2] + "/data", "r+")
except OSError as error:
    print(errno.errorcode[error.errno], open(sys.argv[2] + "/data").read())
"""


def refused(tmp_path, *options):
    for name in ("layers", "mounted"):
        (tmp_path / name).mkdir()
    source = Path(overlay.__file__).parents[2]
    words = [str(tmp_path / "layers"), str(tmp_path / "mounted"), str(source), *options]
    done = subprocess.run([sys.executable, "-c", REFUSES, *words], cwd="/", capture_output=True, text=True, timeout=60)
    if "AssertionError" in done.stderr:
        pytest.skip("mounting is root's")
    return done.stdout.splitlines()


@only_linux
def test_where_no_layer_can_be_laid_over_nothing_is_written(tmp_path):
    entered, written = refused(tmp_path)

    if not entered.startswith(" ["):
        pytest.skip(f"this system gives no view: {entered}")
    assert entered == f" [{str(tmp_path / 'mounted')!r}]"
    assert written == "EROFS data"


@only_linux
def test_without_a_layer_for_the_working_folder_there_is_no_view(tmp_path):
    assert refused(tmp_path, "in it") == [f"[Errno 22] filesystem not supported: {str(tmp_path / 'mounted')!r} []"]


DISK_AMONG_LIVE_FOLDERS = """
import ctypes, os, sys
folder = sys.argv[1]
sys.path.insert(0, sys.argv[2])
from memfit.processes import overlay
overlay._LIVE = (*overlay._LIVE, folder + "/live")
libc = ctypes.CDLL(None)
assert libc.unshare(0x20000) == 0
assert libc.mount(b"none", b"/", None, ctypes.c_ulong(16384 | 1 << 18), None) == 0
source, place = (f"{folder}/{name}".encode() for name in ("disk", "live/disk"))
assert libc.mount(source, place, None, ctypes.c_ulong(4096), None) == 0
print(*overlay.enter([folder + "/layers"], written=["/"]))
for name in ("live/note", "live/disk/model"):
    with open(f"{folder}/{name}", "w") as file:
        file.write("script's")
"""


@only_linux
def test_disks_that_are_mounted_among_live_folders_are_the_users(tmp_path):
    # GIVEN a disk in a folder such as /run, as desktops mount them
    for name in ("layers", "live/disk", "disk"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "disk/model").write_text("user's")
    around = [mount for mount in overlay._mounts() if overlay.is_within(str(tmp_path), mount.path)]
    if max(around, key=lambda mount: len(mount.path)).kind in ("tmpfs", "ramfs"):
        pytest.skip("there is no disk here")

    # WHEN a script in a view writes to both
    words = [str(tmp_path), str(Path(overlay.__file__).parents[2])]
    command = [sys.executable, "-c", DISK_AMONG_LIVE_FOLDERS, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "AssertionError" in done.stderr or not done.stdout.startswith(" ["):
        pytest.skip(f"this system gives no view: {done.stdout}{done.stderr}")

    # THEN the folder is real and the disk is what it was
    assert (done.returncode, (tmp_path / "live/note").read_text()) == (0, "script's")
    assert (tmp_path / "disk/model").read_text() == "user's"


READ_ONLY_MOUNT = """
import ctypes, sys
folder = sys.argv[1]
sys.path[:0] = sys.argv[2:]
from memfit.processes import overlay
from tests.unit.processes.view_script import give_up_mounting
libc = ctypes.CDLL(None)
assert libc.unshare(0x20000) == 0
assert libc.mount(b"none", b"/", None, ctypes.c_ulong(16384 | 1 << 18), None) == 0
source, place = (f"{folder}/{name}".encode() for name in ("library", "mounted"))
for flags in (4096, 4096 | 32 | 1):
    assert libc.mount(source, place, None, ctypes.c_ulong(flags), None) == 0
give_up_mounting()
print(*overlay.enter([folder + "/layers"], written=[folder]))
print(open(folder + "/mounted/module").read())
"""


@only_linux
def test_read_only_mounts_of_the_disk_that_holds_the_layers_are_shown(tmp_path):
    # GIVEN a folder that is mounted at a second place, read-only, as sandboxes do with libraries
    for name in ("layers", "library", "mounted"):
        (tmp_path / name).mkdir()
    (tmp_path / "library/module").write_text("a module")

    # WHEN somebody who isn't root enters a view with its layers on the same disk
    source = Path(overlay.__file__).parents[2]
    command = [sys.executable, "-c", READ_ONLY_MOUNT, str(tmp_path), str(source), str(source.parent)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    if "AssertionError" in done.stderr or not done.stdout.startswith(" ["):
        pytest.skip(f"this system gives no view: {done.stdout}{done.stderr}")

    # THEN the files are there as well
    assert done.stdout.splitlines()[1:] == ["a module"], done.stderr


def test_other_systems_have_no_views(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "darwin")

    assert overlay.enter([str(tmp_path)]) == ("only Linux has mount namespaces", [])


@only_linux
def test_a_view_that_fails_is_tried_by_another_process(monkeypatch, tmp_path):
    def fail(view, place):
        raise OSError(1, "Operation not permitted", "unshare")

    monkeypatch.setattr(overlay._View, "enter", fail)

    reason, read_only = overlay.enter([str(tmp_path)])
    assert (reason, read_only) == ("[Errno 1] Operation not permitted: 'unshare'", [])


@only_linux
def test_a_view_that_fails_at_its_last_step_leaves_nothing_that_says_files_are_kept_apart(monkeypatch, tmp_path):
    plain = overlay._View._call

    def fail(view, function, *arguments, **options):
        if function == "pivot_root":
            raise OSError(22, "Invalid argument", function)
        plain(view, function, *arguments, **options)

    monkeypatch.setattr(overlay._View, "_call", fail)

    reason, _ = overlay.enter([str(tmp_path)])
    assert reason
    assert not (tmp_path / overlay.LAYERS).exists()


def test_disks_below_run_are_kept_apart_and_talk_among_programs_is_not(monkeypatch, tmp_path):
    monkeypatch.setattr(os.path, "isdir", lambda path: True)
    view = overlay._View(str(tmp_path), (), ["/dev/shm/work", "/dev/shm", "/run/media/me/disk/project", "/srv/project"])
    rows = [
        ("/run/media/me/disk", "ext4", False),
        ("/run/media/me/camera", "vfat", True),
        ("/run/user/1000/doc", "fuse.portal", False),
        ("/run", "tmpfs", False),
        ("/dev/shm", "tmpfs", False),
        ("/srv", "ext4", False),
    ]
    view._mounts = {path: overlay._MountPoint(path, kind, is_read_only) for path, kind, is_read_only in rows}

    assert sorted(view._kept_among_live()) == ["/dev/shm/work", "/run/media/me/disk"]


@only_linux
def test_mounts_are_told_by_their_real_paths(monkeypatch):
    lines = (
        "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard\n"
        "29 27 0:26 / /mnt/my\\040data\\134x ro,relatime shared:1 - nfs4 host:/a rw\n"
    )
    monkeypatch.setattr(Path, "read_text", lambda path, **options: lines)

    root, data = overlay._mounts()
    assert (root.path, root.kind, root.is_read_only) == ("/", "ext4", False)
    assert (data.path, data.kind, data.is_read_only) == ("/mnt/my data\\x", "nfs4", True)


# What a script wrote


@pytest.fixture
def layers(tmp_path, monkeypatch):
    """What a view leaves: a layer above a folder of the user's, in which the script ran, and one above another."""
    work, other = tmp_path / "work", tmp_path / "other"
    for path in (work / "old.pt", work / "mode.pt", other / "data.bin"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("the user's")
        os.utime(path, (1, 1))
    made = tmp_path / "made"
    written = ("1/old.pt", "1/runs/new.pt", "1/mode.pt", "1/__pycache__/model.pyc", "2/data.bin")
    for name in written:
        path = made / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("the script's")
    os.utime(made / "1" / "mode.pt", (1, 1))
    os.mkfifo(made / "1" / "removed.pt")  # as good as the device file that stands for a removed one
    (made / LAYERS).write_text(json.dumps([[str(work), str(made / "1")], [str(other), str(made / "2")]]))
    monkeypatch.chdir(work)
    return made


def test_what_was_written_is_known_by_the_paths_of_the_script(layers, tmp_path):
    # THEN files that only have another mode, caches of Python and what was removed are none of them
    written = [tmp_path / "other/data.bin", tmp_path / "work/old.pt", tmp_path / "work/runs/new.pt"]
    assert collect(layers) == {str(path): "" for path in written}


def test_it_can_be_kept(layers, tmp_path):
    kept = tmp_path / "kept"
    places = collect(layers, str(kept))

    assert places[str(tmp_path / "work/runs/new.pt")] == str(kept / "runs/new.pt")
    assert places[str(tmp_path / "other/data.bin")] == f"{kept}{tmp_path}/other/data.bin"
    assert {Path(place).read_text() for place in places.values()} == {"the script's"}
    assert (tmp_path / "work" / "old.pt").read_text() == "the user's"


def test_what_was_kept_before_stays(layers, tmp_path):
    for name in ("old.pt", "1/old.pt"):
        (tmp_path / "kept" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "kept" / name).write_text("kept before")
    places = collect(layers, str(tmp_path / "kept"))

    assert places[str(tmp_path / "work/old.pt")] == str(tmp_path / "kept/2/old.pt")
    assert (tmp_path / "kept" / "old.pt").read_text() == "kept before"


def test_what_was_written_is_counted(layers):
    before = overlay.written_bytes(layers)
    (Path(json.loads((layers / LAYERS).read_text())[0][1]) / "large").write_bytes(bytes(2**20))

    assert overlay.written_bytes(layers) - before == 2**20
    assert overlay.written_bytes(layers / "none") == 0


def test_what_cant_be_kept_is_said(layers, tmp_path, capsys):
    full = Path(os.devnull) / "folder"

    assert set(collect(layers, str(full)).values()) == {""}
    assert f"work/old.pt can't be kept as {full}/old.pt: Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize("text", [None, "", "[[1"])
def test_without_a_view_nothing_is_known(tmp_path, text):
    if text is not None:
        (tmp_path / LAYERS).write_text(text)

    assert collect(tmp_path, str(tmp_path / "kept")) == {}
    assert not (tmp_path / "kept").exists()


def test_a_file_that_others_remove_meanwhile_is_no_reason_to_fail(tmp_path, monkeypatch):
    # GIVEN a folder that is shown entry by entry, of which one goes when it is about to be shown
    for name in ("gone", "there"):
        (tmp_path / "shared" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "shared" / name).write_text(name)
    view = overlay._View(str(tmp_path), (), ())
    view._root = str(tmp_path / "root")
    (tmp_path / f"root{tmp_path}" / "shared").mkdir(parents=True)
    plain = overlay._View._show

    def show(self, entry, place):
        if entry.name == "gone":
            os.remove(entry.path)
        plain(self, entry, place)

    monkeypatch.setattr(overlay._View, "_show", show)

    # THEN the others are shown
    view._split(str(tmp_path / "shared"))
    assert os.listdir(tmp_path / f"root{tmp_path}" / "shared") == ["there"]
