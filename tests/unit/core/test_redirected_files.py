import builtins
import glob
import io
import multiprocessing
import os
import pathlib
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import tempfile

import numpy
import pytest

from memfit.core import redirected_files
from memfit.core.redirected_files import KEPT, LAYER, REDIRECTED, RedirectedFiles, remove_made, unredirected

THE_USERS = b"the user's"


# Looked up when they are called: the stand-ins come later.
OPENING = [
    lambda: open("model.pt", "wb"),  # noqa: SIM115
    lambda: open("model.pt", mode="wb", buffering=0),  # noqa: SIM115
    lambda: io.open("model.pt", "wb"),  # noqa: SIM115, UP020
    lambda: pathlib.Path("model.pt").open("wb"),  # noqa: SIM115
    lambda: open(b"model.pt", "wb"),  # noqa: SIM115
    lambda: open(os.path.abspath("model.pt"), "wb"),  # noqa: SIM115
]
RENAMING = [
    lambda a, b: os.rename(a, b),
    lambda a, b: os.replace(a, b),
    lambda a, b: shutil.move(a, b),
    lambda a, b: pathlib.Path(a).replace(b),
]
REMOVING = [lambda path: os.remove(path), lambda path: os.unlink(path), lambda path: pathlib.Path(path).unlink()]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder of the user's, with files, folders and links in it."""
    folder = tmp_path / "here"
    for name in ("model.pt", "old.pt", "checkpoint-1/trainer_state.json", "runs/best.ckpt", "notes.txt", "data/a.bin"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(THE_USERS)
    (folder / "last.pt").symlink_to("model.pt")
    (folder / "last").symlink_to("runs")
    with sqlite3.connect(folder / "numbers.db") as connection:
        connection.execute("create table numbers (number)")
    connection.close()
    monkeypatch.chdir(folder)
    return folder


def state(folder):
    """All that can be told of a folder of the user's: names, kinds, contents, rights, times."""
    told = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else ""
        # A folder's time tells of the folders that were made in it.
        told[path] = status.st_mode, status.st_uid, status.st_nlink * path.is_file(), content
    return told


class Overlay:
    def __init__(self, folder, **options):
        self.notes = []
        folder.mkdir()
        self.folder = folder
        self.files = RedirectedFiles(str(folder), report=lambda code, text: self.notes.append((code, text)), **options)

    @property
    def written(self):
        """Paths of the files that were written, and where they are."""
        with unredirected():
            layer = self.folder / LAYER
            paths = [path for path in layer.rglob("*") if path.is_file() and not path.name.startswith(".memfit-gone")]
            return {f"/{path.relative_to(layer)}": str(path) for path in paths}

    @property
    def names(self):
        return sorted(map(os.path.basename, self.written))


@pytest.fixture
def overlay(here, tmp_path):
    overlay = Overlay(tmp_path / "own")
    before = state(here)
    with overlay.files.in_place():
        yield overlay
    remove_made(overlay.folder)
    # Whatever a test did: what the user had is there, and nothing else.
    assert state(here) == before


def by_descriptor(flags, **options):
    with open(os.open("model.pt", flags, **options), "wb") as file:
        file.write(b"the run's")


def in_folder(act):
    folder = os.open(".", os.O_RDONLY)
    try:
        act(folder)
    finally:
        os.close(folder)


def by_file(path, mode, text="the run's"):
    with open(path, mode) as file:
        file.write(text.encode() if "b" in mode else text)


def into_archive():
    with tarfile.open("model.pt", "w") as archive:
        archive.add("notes.txt")


def in_database():
    with sqlite3.connect("numbers.db") as connection:
        connection.execute("insert into numbers values (1)")
    connection.close()
    with sqlite3.connect("numbers.db") as connection:
        assert connection.execute("select number from numbers").fetchall() == [(1,)]
    connection.close()


def in_process(act, *args):
    process = multiprocessing.get_context("fork").Process(target=act, args=args)
    process.start()
    process.join()
    assert process.exitcode == 0


# Each changes, replaces or removes a file of the user's; the fixture sees that it is what it was.
WAYS = {
    "truncate": lambda: os.truncate("model.pt", 0),
    "w": lambda: by_file("model.pt", "wb"),
    "text": lambda: by_file("notes.txt", "w"),
    "append": lambda: by_file("notes.txt", "a"),
    "r+": lambda: by_file("data/a.bin", "r+b"),
    "w+": lambda: by_file("data/a.bin", "w+b"),
    "through a link": lambda: by_file("last.pt", "wb"),
    "in a linked folder": lambda: by_file("last/best.ckpt", "ab"),
    "by another way": lambda: by_file("runs/../data/./a.bin", "wb"),
    "truncating descriptor": lambda: by_descriptor(os.O_WRONLY | os.O_TRUNC),
    "creating descriptor": lambda: by_descriptor(os.O_WRONLY | os.O_TRUNC | os.O_CREAT),
    "reading and writing descriptor": lambda: by_descriptor(os.O_RDWR),
    "appending descriptor": lambda: by_descriptor(os.O_WRONLY | os.O_APPEND),
    "open folder": lambda: in_folder(lambda folder: by_descriptor(os.O_WRONLY | os.O_TRUNC, dir_fd=folder)),
    "unlink in an open folder": lambda: in_folder(lambda folder: os.unlink("model.pt", dir_fd=folder)),
    "rename in an open folder": lambda: in_folder(
        lambda folder: os.rename("notes.txt", "model.pt", src_dir_fd=folder, dst_dir_fd=folder)
    ),
    "rmdir in an open folder": lambda: (os.remove("data/a.bin"), in_folder(lambda d: os.rmdir("data", dir_fd=d))),
    "FileIO": lambda: io.FileIO("model.pt", "w").close(),
    "FileIO r+": lambda: io.FileIO("model.pt", "r+").close(),
    "pathlib": lambda: pathlib.Path("model.pt").write_bytes(b"the run's"),
    "opener": lambda: open("model.pt", "w", opener=os.open).close(),
    "copy": lambda: shutil.copy2("notes.txt", "model.pt"),
    "move": lambda: shutil.move("notes.txt", "model.pt"),
    "move into a folder": lambda: shutil.move("notes.txt", "runs"),
    "replace": lambda: os.replace("model.pt", "old.pt"),
    "replace a link": lambda: os.replace("model.pt", "last.pt"),
    "remove": lambda: os.remove("notes.txt"),
    "remove a link": lambda: os.remove("last.pt"),
    "remove a tree": lambda: shutil.rmtree("runs"),
    "remove an emptied folder": lambda: (os.remove("runs/best.ckpt"), os.rmdir("runs")),
    "rename a folder": lambda: os.rename("runs", "older"),
    "rename a folder over another": lambda: (os.remove("data/a.bin"), os.rename("runs", "data")),
    "replace a link to a folder": lambda: (os.symlink("data", "tmp"), os.replace("tmp", "last")),
    "mode": lambda: os.chmod("model.pt", 0o600),
    "mode of a folder": lambda: os.chmod("runs", 0o700),
    "mode through a link": lambda: os.chmod("last.pt", 0o600),
    "times": lambda: os.utime("model.pt", (5, 5)),
    "hard link": lambda: (os.link("model.pt", "same.pt"), by_file("same.pt", "r+b")),
    "symbolic link": lambda: (os.symlink("model.pt", "same.pt"), by_file("same.pt", "r+b")),
    "link of a folder": lambda: (os.symlink("runs", "now"), by_file("now/best.ckpt", "wb")),
    "archive": into_archive,
    "database": in_database,
    "forked process": lambda: in_process(by_file, "model.pt", "wb"),
    "folder made anew": lambda: (shutil.rmtree("runs"), os.makedirs("runs"), by_file("runs/best.ckpt", "w")),
    "new files": lambda: (os.makedirs("new/deep"), by_file("new/deep/log.txt", "w"), by_file("new.txt", "x")),
}


@pytest.mark.parametrize("act", WAYS.values(), ids=WAYS)
def test_whatever_is_done_the_users_files_stay(overlay, act):
    act()

    with open(os.devnull, "wb", 0) as plain:
        assert isinstance(plain, io.FileIO)
        plain.write(b"gone")


def test_what_is_written_is_read_back(overlay):
    for name, mode in (("a.txt", "w"), ("model.pt", "wb"), ("runs/new.csv", "x"), ("last/other.txt", "w")):
        by_file(name, mode)
        assert read(name) == b"the run's"
    by_file("notes.txt", "a", ", changed")
    assert read("notes.txt") == THE_USERS + b", changed"
    assert read("last.pt") == b"the run's"
    os.symlink("model.pt", "own.pt")
    os.symlink("runs", "own")
    assert (read("own.pt"), read("own/new.csv"), os.readlink("own.pt")) == (b"the run's", b"the run's", "model.pt")
    assert os.path.islink("own") and os.path.isdir("own") and os.path.islink("last.pt")
    os.chdir("own")
    assert (sorted(os.listdir()), read("new.csv")) == (["best.ckpt", "new.csv", "other.txt"], b"the run's")


def opened(path, mode="r"):
    with open(path, mode):
        pass


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (lambda: opened("missing.txt", "r+"), FileNotFoundError),
        (lambda: opened("missing/new.txt", "w"), FileNotFoundError),
        (lambda: opened("model.pt", "x"), FileExistsError),
        (lambda: opened("runs", "w"), IsADirectoryError),
        (lambda: os.mkdir("runs"), FileExistsError),
        (lambda: os.mkdir("missing/new"), FileNotFoundError),
        (lambda: os.rmdir("runs"), OSError),
        (lambda: os.rmdir("model.pt"), NotADirectoryError),
        (lambda: os.remove("missing.txt"), FileNotFoundError),
        (lambda: os.remove("runs"), (IsADirectoryError, PermissionError)),
        (lambda: os.rename("missing.txt", "model.pt"), FileNotFoundError),
        (lambda: os.rename("model.pt", "runs"), IsADirectoryError),
        (lambda: os.rename("runs", "data"), OSError),
        (lambda: os.link("missing.txt", "new.txt"), FileNotFoundError),
        (lambda: os.symlink("a", "model.pt"), FileExistsError),
        (lambda: os.chmod("missing.txt", 0o600), FileNotFoundError),
        (lambda: (os.remove("model.pt"), opened("model.pt", "r+")), FileNotFoundError),
        (lambda: (shutil.rmtree("runs"), opened("runs/a", "w")), FileNotFoundError),
        (lambda: (shutil.rmtree("runs"), os.mkdir("runs/a")), FileNotFoundError),
        (lambda: (shutil.rmtree("runs"), os.listdir("runs")), FileNotFoundError),
        (lambda: (os.symlink("b", "a"), os.symlink("a", "b"), opened("a")), OSError),
    ],
)
def test_what_would_fail_fails(overlay, act, error):
    with pytest.raises(error):
        act()


def test_other_processes_see_the_same(overlay, here):
    # GIVEN a file written, and one removed
    by_file("new.txt", "w")
    os.remove("model.pt")
    source = pathlib.Path(redirected_files.__file__).parents[2]
    program = f"""
import os, sys
sys.path.insert(0, {str(source)!r})
from memfit.core import redirected_files
redirected_files.follow({str(overlay.folder)!r})
print(open("new.txt").read(), os.path.exists("model.pt"))
open("answer.txt", "w").write("heard")
"""

    # WHEN a process that is started follows
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    # THEN each reads what the other wrote
    assert done.stdout == "the run's False\n"
    assert read("answer.txt") == b"heard"


def test_folders_that_are_real_and_temporary_files_are_left_alone(here, tmp_path, monkeypatch):
    # GIVEN a folder for temporary files with a folder of the user's in it
    scratch, real = tmp_path / "scratch", tmp_path / "real"
    for folder in (scratch / "project", real):
        folder.mkdir(parents=True)
        (folder / "model.pt").write_bytes(THE_USERS)
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    overlay = Overlay(tmp_path / "own", real=[str(real)])

    # WHEN a program writes there
    with overlay.files.in_place():
        with tempfile.TemporaryDirectory() as folder:
            by_file(os.path.join(folder, "arguments.pkl"), "wb")
            assert overlay.written == {}
        for path in (scratch / "new.txt", scratch / "project" / "model.pt", real / "model.pt", real / "new.txt"):
            by_file(path, "wb")
        assert overlay.files.target(scratch / "saved.pt") != scratch / "saved.pt"
        os.rename(real / "new.txt", real / "newer.txt")
        os.rename("notes.txt", real / "notes.txt")
        os.makedirs(real / "deep" / "er")

    # THEN what the user has in the one is kept apart, and in the other nothing
    assert (scratch / "project" / "model.pt").read_bytes() == THE_USERS
    assert (scratch / "new.txt").exists()
    assert (real / "model.pt").read_bytes() == b"the run's"
    assert {"newer.txt", "notes.txt"} <= set(os.listdir(real))
    assert (here / "notes.txt").read_bytes() == THE_USERS
    assert not os.path.exists(folder)


def test_where_new_files_are_real_the_users_are_not_touched(here, tmp_path):
    overlay, before = Overlay(tmp_path / "own", keeps_new=True), state(here)

    with overlay.files.in_place():
        by_file("model.pt", "wb")
        by_file("figure.png", "wb")
        by_file("figure.png", "r+b")
        os.replace("figure.png", "better.png")
        os.makedirs("out")
        by_file("out/a.txt", "w")
        os.remove("old.pt")
        place = overlay.files.target("new.pt")
        with unredirected(), open(place, "wb") as file:
            file.write(b"shapes")
        os.rename("new.pt", "newer.pt")
        assert read("newer.pt") == b"shapes"

    made = {here / name for name in ("better.png", "out", "out/a.txt")}
    after = state(here)
    assert set(after) - set(before) == made
    assert {path: after[path] for path in before} == before
    assert {code for code, _ in overlay.notes} == {REDIRECTED, KEPT}


def test_memfits_own_files_are_real(overlay, here):
    with unredirected():
        by_file("report.html", "w")
    assert os.listdir() == [*os.listdir()]
    assert (here / "report.html").exists()
    with unredirected():
        os.remove("report.html")


def test_reading_by_descriptor_finds_what_was_written(overlay, here):
    by_descriptor(os.O_WRONLY | os.O_TRUNC)

    with open(os.open("model.pt", os.O_RDONLY), "rb") as file:
        assert file.read() == b"the run's"


def write(path, content=b"the run's"):
    with open(path, "wb") as file:
        file.write(content)


def read(path):
    with open(path, "rb") as file:
        return file.read()


@pytest.mark.parametrize(
    "opened",
    OPENING,
    ids=["open", "keywords", "io", "pathlib", "bytes", "absolute"],
)
def test_a_checkpoint_opened_for_writing_goes_elsewhere_and_is_found_again(overlay, here, opened):
    # WHEN
    with opened() as file:
        file.write(b"the run's")

    # THEN the script reads what it wrote
    assert read("model.pt") == b"the run's"
    assert pathlib.Path("model.pt").read_bytes() == b"the run's"
    assert overlay.written == {str(here / "model.pt"): file.name}


def test_a_descriptor_is_opened_as_it_is(overlay):
    descriptor, path = tempfile.mkstemp()
    with open(descriptor, "wb") as file:
        file.write(b"x")
    assert read(path) == b"x"
    os.remove(path)


def test_looking_at_a_redirected_file(overlay):
    write("new.pt", b"12345")

    assert os.path.exists("new.pt")
    assert os.path.isfile("new.pt")
    assert os.path.lexists("new.pt")
    assert os.access("new.pt", os.R_OK)
    assert pathlib.Path("new.pt").exists()
    assert os.path.getsize("new.pt") == 5
    os.chmod("new.pt", 0o600)
    assert os.stat("new.pt").st_mode & 0o777 == 0o600


def test_looking_at_others(overlay):
    write("new.pt")

    assert os.path.getsize("model.pt") == len(THE_USERS)
    assert not os.path.exists("other.pt")
    assert os.stat(0)
    with pytest.raises(FileNotFoundError):
        os.stat("other.pt")


def test_listing_shows_what_the_script_believes_to_be_there(overlay):
    # GIVEN a new file, one written over the user's, and one of the user's removed
    write("new.pt")
    write("model.pt")
    os.remove("old.pt")

    # THEN
    folders = ["checkpoint-1", "data", "last", "runs"]
    expected = sorted([*folders, "last.pt", "model.pt", "new.pt", "notes.txt", "numbers.db"])
    assert sorted(os.listdir()) == expected
    assert sorted(os.listdir(b".")) == [name.encode() for name in expected]
    assert sorted(glob.glob("*")) == expected
    assert sorted(path.name for path in pathlib.Path().glob("*.pt")) == ["last.pt", "model.pt", "new.pt"]
    assert sorted(path.name for path in pathlib.Path().iterdir()) == expected
    with os.scandir() as entries:
        assert {entry.name: entry.is_file() for entry in entries} == {name: name not in folders for name in expected}
    assert next(os.scandir()).name in expected
    assert next(sorted(names) for _, _, names in os.walk(".")) == [name for name in expected if name not in folders]
    assert sorted(os.listdir("runs")) == ["best.ckpt"]


@pytest.mark.parametrize("rename", RENAMING, ids=["rename", "replace", "move", "pathlib"])
def test_a_temporary_name_that_becomes_the_final_one(overlay, rename):
    write("model.pt.tmp")

    rename("model.pt.tmp", "model.pt")

    assert read("model.pt") == b"the run's"
    assert not os.path.exists("model.pt.tmp")
    assert overlay.names == ["model.pt"]


def test_an_older_checkpoint_that_is_renamed_stays_and_looks_renamed(overlay):
    os.rename("model.pt", "model.pt.bak")

    assert read("model.pt.bak") == THE_USERS
    assert not os.path.exists("model.pt")
    with pytest.raises(FileNotFoundError):
        os.rename("model.pt", "again.pt")


@pytest.mark.parametrize("rename", RENAMING[:2])
def test_a_folder_that_is_renamed_to_itself_or_into_itself_stays(overlay, rename):
    os.mkdir("empty")
    shown = sorted(os.listdir("checkpoint-1"))

    rename("checkpoint-1", "checkpoint-1")
    rename("empty", "empty")
    with pytest.raises(OSError, match="Invalid argument"):
        rename("checkpoint-1", "checkpoint-1/inner")

    assert sorted(os.listdir("checkpoint-1")) == shown == ["trainer_state.json"]
    assert os.listdir("empty") == []


def test_a_folder_that_is_renamed(overlay):
    os.makedirs("staging")
    write("staging/model.pt")

    os.rename("staging", "checkpoint-2")

    assert read("checkpoint-2/model.pt") == b"the run's"
    assert not os.path.exists("staging/model.pt")


def test_a_further_name_of_a_redirected_file(overlay):
    write("runs/last.ckpt")

    os.link("runs/last.ckpt", "runs/copy.ckpt")

    with pytest.raises(FileExistsError):
        os.link("runs/last.ckpt", "runs/best.ckpt")
    os.remove("runs/last.ckpt")
    assert read("runs/copy.ckpt") == b"the run's"


@pytest.mark.parametrize("remove", REMOVING, ids=["remove", "unlink", "pathlib"])
def test_an_older_checkpoint_is_not_removed(overlay, here, remove):
    remove("old.pt")

    assert (here / "old.pt").name not in os.listdir()
    with pytest.raises(FileNotFoundError):
        remove("old.pt")
    with pytest.raises(FileNotFoundError):
        read("old.pt")
    assert [(code, "old.pt" in text) for code, text in overlay.notes] == [(KEPT, True)]


def test_a_checkpoint_of_this_run_is_removed(overlay, here):
    write("model.pt")
    place = overlay.written[str(here / "model.pt")]

    os.remove("model.pt")

    assert not os.path.exists(place)
    # The user's own, which it hid, does not come back.
    assert not os.path.exists("model.pt")


@pytest.mark.parametrize("folder", ["checkpoint-1", "runs"])
def test_a_folder_with_older_checkpoints_is_not_removed(overlay, folder):
    shutil.rmtree(folder)

    assert not os.path.exists(folder)
    assert {code for code, _ in overlay.notes} == {KEPT}
    shutil.rmtree(folder, ignore_errors=True)
    with pytest.raises(FileNotFoundError):
        shutil.rmtree(folder)
    # A script that begins by clearing its folder goes on.
    os.makedirs(folder)
    assert os.path.isdir(folder)


def test_a_folder_of_this_run_is_removed_with_its_redirected_files(overlay, here):
    os.makedirs("checkpoint-2")
    write("checkpoint-2/model.pt")
    place = overlay.written[str(here / "checkpoint-2" / "model.pt")]

    shutil.rmtree("checkpoint-2")

    assert not os.path.exists("checkpoint-2")
    assert not os.path.exists(place)
    assert overlay.written == {}


def test_a_whole_tree_is_copied_with_links(overlay, here):
    # shutil asks whether os.stat can leave links alone
    (here / "runs" / "link").symlink_to("best.ckpt")
    write("runs/new.ckpt")

    shutil.copytree("runs", "copy", symlinks=True)

    assert sorted(os.listdir("copy")) == ["best.ckpt", "link", "new.ckpt"]
    assert read("copy/new.ckpt") == b"the run's"


def test_everything_is_restored(here, tmp_path):
    watched = [(module, dict(vars(module))) for module in (builtins, io, os, shutil, sqlite3, tarfile)]
    overlay = Overlay(tmp_path / "own")

    with overlay.files.in_place():
        assert tarfile.bltn_open is open is not dict(watched[0][1])["open"]
        # A module imported meanwhile keeps what it found.
        kept_open, kept_remove = open, os.remove

    assert all(vars(module) == before for module, before in watched)
    with kept_open("new.pt", "wb"):
        pass
    assert (here / "new.pt").exists()
    kept_remove("old.pt")
    assert not (here / "old.pt").exists()


@pytest.mark.parametrize(
    "use",
    [
        lambda path: pathlib.Path(path).write_bytes(b"new"),
        lambda path: os.remove(path),
        lambda path: os.truncate(path, 1),
        lambda path: os.rename(path, "renamed"),
        lambda path: os.utime(path, (5, 5)),
        lambda path: shutil.rmtree(os.path.dirname(path)),
    ],
    ids=["write", "remove", "truncate", "rename", "utime", "rmtree"],
)
def test_a_folder_above_is_that_of_what_a_link_leads_to(use, here, overlay):
    elsewhere = here.parent / "elsewhere"
    with unredirected():
        (elsewhere / "run").mkdir(parents=True)
        (elsewhere / "out").mkdir()
        (elsewhere / "out" / "model.pt").write_bytes(THE_USERS)
        (here / "latest").symlink_to(elsewhere / "run")
        before = state(elsewhere)
    use("latest/../out/model.pt")
    with unredirected():
        assert state(elsewhere) == before
        os.remove(here / "latest")


@pytest.mark.parametrize("uri", ["file:numbers.db", "file://{here}/numbers.db?mode=rwc", "file:{here}/numbers.db"])
def test_databases_named_by_uri_are_kept_apart(uri, here, overlay):
    connection = sqlite3.connect(uri.format(here=here), uri=True)
    with connection:
        connection.execute("insert into numbers values (5)")
    connection.close()
    connection = sqlite3.connect("file:numbers.db?mode=ro", uri=True)
    assert connection.execute("select number from numbers").fetchall() == [(5,)]
    connection.close()
    sqlite3.connect("file:shared?mode=memory&cache=shared", uri=True).close()


def test_a_removed_folder_gives_way_to_a_file_or_a_link(here, overlay):
    shutil.rmtree("data")
    os.symlink("runs", "data")
    assert os.listdir("data") == ["best.ckpt"]
    os.remove("data")
    pathlib.Path("data").write_text("a file")
    assert pathlib.Path("data").read_text() == "a file"
    os.remove("data")
    os.mkdir("data")
    assert os.listdir("data") == []


def test_a_removed_link_leads_nowhere(here, overlay):
    assert os.path.exists("last/best.ckpt")
    os.remove("last")
    assert not os.path.exists("last/best.ckpt")


def test_a_link_of_the_users_replaces_a_file(here, overlay):
    pathlib.Path("notes.txt").write_text("new")
    os.replace("last.pt", "notes.txt")
    assert os.readlink("notes.txt") == "model.pt"


def test_a_folder_is_renamed_where_the_system_renames_it(here, overlay):
    os.rename("data", "data")
    with pytest.raises(OSError, match="Invalid argument"):
        os.rename("data", "data/inside")
    with pytest.raises(FileNotFoundError):
        os.rename("data", "missing/data")
    assert os.listdir("data") == ["a.bin"]


def test_a_link_of_the_programs_to_a_file_of_the_users_is_replaced_not_followed(here, overlay):
    os.symlink(here / "model.pt", "latest.pt")
    os.replace("notes.txt", "latest.pt")
    assert not os.path.islink("latest.pt")
    assert pathlib.Path("latest.pt").read_bytes() == THE_USERS


def test_numpy_that_has_read_text_before_writes_apart(here, tmp_path):
    (here / "table.txt").write_text("1 2 3\n")
    numpy.loadtxt(here / "table.txt")
    with Overlay(tmp_path / "own").files.in_place():
        numpy.savetxt(here / "table.txt", [4, 5])
        assert numpy.loadtxt(here / "table.txt").tolist() == [4, 5]
    assert (here / "table.txt").read_text() == "1 2 3\n"
    numpy.savetxt(here / "table.txt", [6])
    assert numpy.loadtxt(here / "table.txt") == 6
