import builtins
import errno
import glob
import io
import os
import pathlib
import shutil
import tempfile
import time

import pytest

from memfit.frameworks.torch.script.redirected_files import KEPT, REDIRECTED, RedirectedFiles
from memfit.frameworks.torch.shapes.patching import replaced


@pytest.fixture
def notes():
    return []


@pytest.fixture
def files(tmp_path, notes):
    return RedirectedFiles(str(tmp_path / "own"), lambda code, text: notes.append((code, text)))


def older(path, text="the user's"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (1, 1))
    return path


def test_a_file_keeps_its_name_in_a_folder_of_its_own(files, tmp_path, notes):
    # WHEN two files of the same name are written
    first, second = files.target(tmp_path / "a" / "model.pt"), files.target(str(tmp_path / "b" / "model.pt"))

    # THEN they have places of their own below the folder, and the report says where
    assert first != second
    assert {os.path.basename(first), os.path.basename(second)} == {"model.pt"}
    assert all(place.startswith(str(tmp_path / "own")) and not os.path.exists(place) for place in (first, second))
    assert files.redirected == {str(tmp_path / "a" / "model.pt"): first, str(tmp_path / "b" / "model.pt"): second}
    assert [code for code, _ in notes] == [REDIRECTED, REDIRECTED]
    assert str(tmp_path / "a" / "model.pt") in notes[0][1]
    assert first in notes[0][1]


def test_a_path_is_reported_once(files, tmp_path, notes):
    assert files.target(tmp_path / "model.pt") == files.target(tmp_path / "model.pt")
    assert len(notes) == 1


def test_a_missing_folder_is_told_and_not_made(files, tmp_path, notes):
    files.target(tmp_path / "missing" / "model.pt")

    assert "folder does not exist" in notes[0][1]
    assert not (tmp_path / "missing").exists()


def test_without_a_folder_a_temporary_one_is_made_on_first_use(tmp_path, monkeypatch, notes):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    files = RedirectedFiles(None, lambda code, text: notes.append(code))
    assert os.listdir(tmp_path) == []

    place = files.target("model.pt")

    assert place.startswith(str(tmp_path / "memfit-dryrun-"))
    assert files.redirected == {os.path.join(os.getcwd(), "model.pt"): place}


def test_files_of_an_earlier_run_in_the_same_folder_stay(tmp_path, files):
    (tmp_path / "own" / "0").mkdir(parents=True)

    assert files.target("model.pt") == str(tmp_path / "own" / "1" / "model.pt")


def test_a_path_is_the_same_by_whatever_way(files, tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "real")

    place = files.target(tmp_path / "link" / "model.pt")

    assert files.existing("model.pt") == place
    assert files.existing(b"model.pt") == place
    assert files.existing("../real/./model.pt") == place


def test_other_paths_are_as_given(files, tmp_path):
    files.target(tmp_path / "model.pt")

    assert files.existing("elsewhere/model.pt") == "elsewhere/model.pt"
    assert files.existing(3) == 3
    assert files.existing("data.csv") == "data.csv"


@pytest.mark.parametrize(
    ("name", "is_checkpoint"),
    [
        ("model.pt", True),
        ("MODEL.PTH", True),
        ("epoch=1.ckpt", True),
        ("pytorch_model.bin", True),
        ("model.safetensors", True),
        ("checkpoint.pth.tar", True),
        ("images.tar", False),
        ("model.pt.tmp", True),
        ("best.weights.h5", True),
        ("model.keras", True),
        (".metadata", True),
        ("__0_0.distcp", True),
        ("checkpoint-10/trainer_state.json", True),
        ("checkpoint_0/scheduler.json", True),
        ("checkpoints/notes.json", False),
        ("train.py", False),
        ("log.txt", False),
        ("data.npy", False),
    ],
)
def test_what_looks_like_a_checkpoint(files, tmp_path, name, is_checkpoint):
    assert files.is_checkpoint(str(tmp_path / name)) is is_checkpoint
    place = files.opened(tmp_path / name, "wb")
    assert (place != tmp_path / name) is is_checkpoint


def test_files_in_a_checkpoint_folder_that_the_script_made_stay_in_it(files, tmp_path):
    files.new_folders.add(str(tmp_path / "checkpoint-10"))

    assert not files.is_checkpoint(str(tmp_path / "checkpoint-10" / "trainer_state.json"))
    assert files.is_checkpoint(str(tmp_path / "checkpoint-10" / "optimizer.pt"))


def test_downloads_into_a_cache_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    files = RedirectedFiles(str(tmp_path / "own"), lambda code, text: None)

    assert (
        files.opened(tmp_path / "cache" / "hub" / "resnet50.pth", "wb") == tmp_path / "cache" / "hub" / "resnet50.pth"
    )


def test_a_temporary_folder_of_the_scripts_own_is_left_alone(tmp_path, monkeypatch):
    # joblib hands arrays to other processes in files there
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    files = RedirectedFiles(str(tmp_path / "own"), lambda code, text: None)
    files.new_folders.update((str(tmp_path / "scratch"), str(tmp_path / "project" / "runs")))

    assert not files.is_checkpoint(str(tmp_path / "scratch" / "deep" / "array.pkl"))
    assert files.is_checkpoint(str(tmp_path / "project" / "runs" / "model.pkl"))
    assert files.is_checkpoint(str(tmp_path / "model.pkl"))


@pytest.mark.parametrize("mode", ["r+b", "ab", "xb", "r+"])
def test_a_file_that_is_changed_in_place_is_opened_where_it_is(files, tmp_path, mode):
    # It may be data: numpy.memmap opens files for reading and writing.
    path = older(tmp_path / "tokens.bin")

    assert files.opened(path, mode) == path


@pytest.mark.parametrize("mode", ["r+b", "ab", "r+"])
def test_a_checkpoint_is_changed_in_a_copy(files, tmp_path, mode):
    path = older(tmp_path / "model.pt")
    place = files.opened(path, mode)

    assert place == files.redirected[str(path)] != str(path)
    with open(place, encoding="utf-8") as copy:
        assert copy.read() == "the user's"


def test_pickles_are_left_to_the_processes_that_read_them(files, tmp_path):
    # GIVEN a model of the user's and one that is on disk since the run began, as tempfile makes it
    before, since = older(tmp_path / "model.pkl"), tmp_path / "since.pt"
    since.touch()
    os.utime(since, (time.time() + 5, time.time() + 5))

    # THEN only the former is protected
    assert files.opened(tmp_path / "arguments.pkl", "wb") == tmp_path / "arguments.pkl"
    assert files.opened(since, "wb") == since
    assert files.opened(before, "wb") == files.redirected[str(before)]


def test_files_that_nobody_else_sees_stay_where_they_are(tmp_path, notes):
    files = RedirectedFiles(str(tmp_path / "own"), lambda code, text: notes.append(code), private=True)
    path = older(tmp_path / "model.pt")

    assert files.opened(path, "wb") == path
    assert files.target(path) == files.existing(path) == str(path)
    assert (files.is_own(path), notes) == (True, [])


@pytest.mark.parametrize("mode", ["wb", "ab", "xb", "w+b"])
def test_a_new_file_is_redirected(files, tmp_path, mode):
    assert files.opened(tmp_path / "model.bin", mode) == files.redirected[str(tmp_path / "model.bin")]


def test_reading_redirects_nothing(files, tmp_path):
    assert files.opened(tmp_path / "model.pt", "rb") == tmp_path / "model.pt"
    assert files.redirected == {}


def test_what_the_script_removed_is_gone_for_it_until_it_writes_it_again(files, tmp_path, notes):
    path = older(tmp_path / "model.pt")
    files._keep(str(path))

    for ask in (files.existing, lambda path: files.opened(path, "rb")):
        with pytest.raises(FileNotFoundError, match=r"model\.pt"):
            ask(path)
    assert [code for code, _ in notes] == [KEPT]
    assert path.read_text() == "the user's"
    assert files.target(path) == files.existing(path)
    assert [code for code, _ in notes] == [KEPT, REDIRECTED]


def test_age_is_counted_from_the_start_of_the_run(files, tmp_path):
    before, after = older(tmp_path / "before.pt"), tmp_path / "after.pt"
    after.write_text("")
    os.utime(after, (time.time() + 5, time.time() + 5))

    assert files.is_older(str(before))
    assert not files.is_older(str(after))
    assert not files.is_older(str(tmp_path / "missing.pt"))


def test_folders_that_hold_checkpoints_of_the_users(files, tmp_path):
    older(tmp_path / "with" / "deep" / "model.pt")
    older(tmp_path / "without" / "notes.txt")
    older(tmp_path / "checkpoint-3" / "notes.txt")
    (tmp_path / "made" / "checkpoint-3").mkdir(parents=True)
    files.new_folders.add(str(tmp_path / "made" / "checkpoint-3"))

    assert files._holds_older(str(tmp_path / "with"))
    assert not files._holds_older(str(tmp_path / "without"))
    assert files._holds_older(str(tmp_path / "checkpoint-3"))
    assert not files._holds_older(str(tmp_path / "made" / "checkpoint-3"))


def test_what_is_not_a_file_is_not_redirected(files, tmp_path):
    assert not files.is_regular(os.devnull)
    assert not files.is_regular(tmp_path)
    assert files.is_regular(tmp_path / "new.pt")
    assert files.is_regular(older(tmp_path / "old.pt"))


def test_the_end_leaves_no_half_checkpoints_behind(files, tmp_path, notes):
    # GIVEN folders that the script made for its checkpoints, and folders of the user's
    for name in ("run/checkpoint-3", "run/empty", "run/logs", "run/checkpoint-1"):
        (tmp_path / name).mkdir(parents=True)
    files.new_folders.update(str(tmp_path / name) for name in ("run", "run/checkpoint-3", "run/empty", "run/logs"))
    (tmp_path / "run" / "checkpoint-3" / "trainer_state.json").write_text("{}")
    for name in ("run/checkpoint-3/model.pt", "run/empty/model.pt", "run/checkpoint-1/model.pt"):
        files.target(tmp_path / name)

    # WHEN the run is over
    files.finish()

    # THEN what would be taken for a checkpoint is with the redirected files, and the rest is where it was
    assert sorted(os.listdir(tmp_path / "run")) == ["checkpoint-1", "logs"]
    assert list((tmp_path / "own").glob("*/checkpoint-3/trainer_state.json"))
    assert "was moved to" in notes[-1][1]


# Functions on files

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
LINKING = [lambda a, b: os.link(a, b), lambda a, b: os.symlink(os.path.basename(a), b)]
REMOVING = [lambda path: os.remove(path), lambda path: os.unlink(path), lambda path: pathlib.Path(path).unlink()]


class Overlay:
    def __init__(self, folder):
        self.notes = []
        self.files = RedirectedFiles(str(folder), lambda code, text: self.notes.append((code, text)))

    @property
    def names(self):
        return sorted(os.path.basename(path) for path in self.files.redirected)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with checkpoints of the user's in it."""
    folder = tmp_path / "here"
    for name in ("model.pt", "old.pt", "checkpoint-1/trainer_state.json", "runs/best.ckpt", "notes.txt"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(THE_USERS)
        os.utime(path, (1, 1))
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def overlay(here, tmp_path):
    overlay = Overlay(tmp_path / "own")
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    with replaced(overlay.files.replacements()):
        yield overlay
    # Whatever a test did: what the user had is there, byte for byte.
    assert {path: path.read_bytes() for path in before} == before


def by_descriptor(flags, **options):
    with open(os.open("model.pt", flags, **options), "wb") as file:
        file.write(b"the run's")


def in_folder(act):
    folder = os.open(".", os.O_RDONLY)
    try:
        act(folder)
    finally:
        os.close(folder)


# Each leaves something else, or nothing, in the place of the user's file; the fixture sees that it is still there.
@pytest.mark.parametrize(
    "act",
    [
        lambda: os.truncate("model.pt", 0),
        lambda: by_descriptor(os.O_WRONLY | os.O_TRUNC),
        lambda: by_descriptor(os.O_RDWR),
        lambda: by_descriptor(os.O_WRONLY | os.O_APPEND),
        lambda: in_folder(lambda folder: by_descriptor(os.O_WRONLY | os.O_TRUNC, dir_fd=folder)),
        lambda: in_folder(lambda folder: os.unlink("model.pt", dir_fd=folder)),
        lambda: in_folder(lambda folder: os.rename("notes.txt", "model.pt", src_dir_fd=folder, dst_dir_fd=folder)),
        lambda: io.FileIO("model.pt", "w").close(),
        lambda: io.FileIO("model.pt", "r+").close(),
        lambda: pathlib.Path("model.pt").open("r+b").close(),
        lambda: pathlib.Path("model.pt").open("ab").close(),
    ],
)
def test_ways_around_open_lead_elsewhere_too(overlay, here, act):
    act()

    assert "model.pt" in overlay.names or str(here / "model.pt") in overlay.files.removed
    with open(os.devnull, "rb", 0) as plain:
        assert isinstance(plain, io.FileIO)


def test_reading_by_descriptor_finds_what_was_written(overlay, here):
    by_descriptor(os.O_WRONLY | os.O_TRUNC)

    with open(os.open("model.pt", os.O_RDONLY), "rb") as file:
        assert file.read() == b"the run's"


def test_a_folder_that_cant_be_renamed_in_an_overlay_is_copied(here, tmp_path, monkeypatch):
    # GIVEN a view in which folders of the layer below can't be renamed
    def refuse(src, dst, **descriptors):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), src, None, dst)

    monkeypatch.setattr(os, "rename", refuse)
    files = RedirectedFiles(None, lambda code, text: None, private=True)

    # WHEN the script renames one, and a file
    with replaced(files.replacements()):
        os.rename("runs", "older")
        with pytest.raises(OSError, match="cross-device"):
            os.rename("notes.txt", "older.txt")

    # THEN it has another name
    assert (here / "older" / "best.ckpt").read_bytes() == THE_USERS
    assert not (here / "runs").exists()


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
    assert overlay.files.redirected == {str(here / "model.pt"): file.name}


def test_other_files_are_written_where_they_are_asked_for(overlay, here):
    pathlib.Path("log.txt").write_text("step 1")

    assert overlay.files.redirected == {}
    assert os.path.isfile(here / "log.txt")
    os.remove("log.txt")


def test_a_temporary_file_with_the_name_of_a_checkpoint_works(overlay):
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        file.write(b"x")
        file.flush()
        assert read(file.name) == b"x"
    assert overlay.files.redirected == {}


def test_asking_for_the_temporary_folder_for_the_first_time(overlay, here, monkeypatch):
    # `tempfile` makes a file, removes it, and holds a lock meanwhile.
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(here))

    assert tempfile.gettempdir() == str(here)
    assert overlay.notes == []


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
    expected = ["checkpoint-1", "model.pt", "new.pt", "notes.txt", "runs"]
    assert sorted(os.listdir()) == expected
    assert sorted(os.listdir(b".")) == [name.encode() for name in expected]
    assert sorted(glob.glob("*")) == expected
    assert sorted(path.name for path in pathlib.Path().glob("*.pt")) == ["model.pt", "new.pt"]
    assert sorted(path.name for path in pathlib.Path().iterdir()) == expected
    with os.scandir() as entries:
        assert {entry.name: entry.is_file() for entry in entries} == {
            name: name not in ("checkpoint-1", "runs") for name in expected
        }
    assert sorted(os.listdir("runs")) == ["best.ckpt"]


def test_copies_of_a_redirected_file_are_redirected_whatever_they_are_called(overlay):
    # As in PyTorch's ImageNet example.
    write("checkpoint.pth.tar")

    for copy, name in ((shutil.copyfile, "model_best.pth.tar"), (shutil.copy, "best"), (shutil.copy2, "last")):
        copy("checkpoint.pth.tar", name)
        assert read(name) == b"the run's"

    assert overlay.names == ["best", "checkpoint.pth.tar", "last", "model_best.pth.tar"]


def test_a_copy_of_the_users_file_over_another_of_the_users(overlay):
    shutil.copy2("notes.txt", "model.pt")

    assert read("model.pt") == THE_USERS
    assert overlay.names == ["model.pt"]


@pytest.mark.parametrize("rename", RENAMING, ids=["rename", "replace", "move", "pathlib"])
def test_a_temporary_name_that_becomes_the_final_one(overlay, rename):
    write("model.pt.tmp")

    rename("model.pt.tmp", "model.pt")

    assert read("model.pt") == b"the run's"
    assert not os.path.exists("model.pt.tmp")
    assert overlay.names == ["model.pt"]


def test_an_ordinary_file_that_becomes_a_checkpoint(overlay, here):
    # fsspec writes to a temporary file and moves it.
    descriptor, temporary = tempfile.mkstemp(dir=here)
    os.write(descriptor, b"the run's")
    os.close(descriptor)
    later = overlay.files._start + 5
    os.utime(temporary, (later, later))

    shutil.move(temporary, "runs/best.ckpt")

    assert read("runs/best.ckpt") == b"the run's"
    assert not os.path.exists(temporary)
    assert overlay.names == ["best.ckpt"]


def test_a_file_moved_to_another_file_system(overlay, monkeypatch):
    write("model.pt.tmp")

    def refuse(source, destination):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(overlay.files, "_plain_replace", refuse)
    os.rename("model.pt.tmp", "model.pt")

    assert read("model.pt") == b"the run's"
    assert not os.path.exists("model.pt.tmp")


def test_an_older_checkpoint_that_is_renamed_stays_and_looks_renamed(overlay):
    os.rename("model.pt", "model.pt.bak")

    assert read("model.pt.bak") == THE_USERS
    assert not os.path.exists("model.pt")
    with pytest.raises(FileNotFoundError):
        os.rename("model.pt", "again.pt")


def test_other_renames_are_made(overlay, here):
    pathlib.Path("a.txt").write_text("x")
    os.rename("a.txt", "b.txt")
    with pytest.raises(FileNotFoundError):
        os.rename("missing.pt", "model.pt")

    assert (here / "b.txt").exists()
    os.remove("b.txt")


def test_a_name_that_was_redirected_once_stays_redirected(overlay, here):
    # torch.save("best") is redirected although nothing in its name says so
    overlay.files.target("best")
    write("best")
    pathlib.Path("other").write_text("x")

    os.replace("other", "best")

    assert read("best") == b"x"
    assert not (here / "best").is_symlink()
    assert overlay.names == ["best"]


def test_a_folder_that_is_renamed(overlay):
    os.makedirs("staging")
    write("staging/model.pt")

    os.rename("staging", "checkpoint-2")

    assert read("checkpoint-2/model.pt") == b"the run's"
    assert not os.path.exists("staging/model.pt")


@pytest.mark.parametrize("link", LINKING, ids=["hard", "symbolic"])
def test_links_to_a_redirected_file(overlay, link):
    write("runs/last.ckpt")

    link("runs/last.ckpt", "runs/copy.ckpt")

    assert read("runs/copy.ckpt") == b"the run's"
    with pytest.raises(FileExistsError):
        link("runs/last.ckpt", "runs/best.ckpt")
    os.remove("runs/last.ckpt")
    assert read("runs/copy.ckpt") == b"the run's"


def test_other_links_are_made(overlay, here):
    os.symlink("notes.txt", "link.txt")
    assert (here / "link.txt").is_symlink()
    os.remove("link.txt")


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
    place = overlay.files.redirected[str(here / "model.pt")]

    os.remove("model.pt")

    assert not os.path.exists(place)
    # The user's own, which it hid, does not come back.
    assert not os.path.exists("model.pt")


def test_other_files_are_removed(overlay, here):
    (here / "log.txt").write_text("x")
    os.remove("log.txt")
    assert not (here / "log.txt").exists()


@pytest.mark.parametrize("folder", ["checkpoint-1", "runs"])
def test_a_folder_with_older_checkpoints_is_not_removed(overlay, folder):
    shutil.rmtree(folder)

    assert not os.path.exists(folder)
    assert [code for code, _ in overlay.notes] == [KEPT]
    shutil.rmtree(folder, ignore_errors=True)
    with pytest.raises(FileNotFoundError):
        shutil.rmtree(folder)
    # A script that begins by clearing its folder goes on.
    os.makedirs(folder)
    assert os.path.isdir(folder)


def test_a_folder_of_this_run_is_removed_with_its_redirected_files(overlay, here):
    os.makedirs("checkpoint-2")
    write("checkpoint-2/model.pt")
    place = overlay.files.redirected[str(here / "checkpoint-2" / "model.pt")]

    shutil.rmtree("checkpoint-2")

    assert not os.path.exists("checkpoint-2")
    assert not os.path.exists(place)
    assert overlay.files.redirected == {}


def test_a_temporary_folder_is_removed(overlay):
    with tempfile.TemporaryDirectory() as folder:
        write(os.path.join(folder, "model.pt"))
        pathlib.Path(folder, "log.txt").write_text("x")

    assert not os.path.exists(folder)


def test_a_whole_tree_is_copied_with_links(overlay, here):
    # shutil asks whether os.stat can leave links alone
    (here / "runs" / "link").symlink_to("best.ckpt")
    write("runs/new.ckpt")

    shutil.copytree("runs", "copy", symlinks=True)

    assert sorted(os.listdir("copy")) == ["best.ckpt", "link", "new.ckpt"]
    assert read("copy/new.ckpt") == b"the run's"


def test_everything_is_restored(here, tmp_path):
    watched = [(module, dict(vars(module))) for module in (builtins, io, os, shutil)]
    overlay = Overlay(tmp_path / "own")

    with replaced(overlay.files.replacements()):
        assert overlay.files.is_active
        # A module imported meanwhile keeps what it found.
        kept_open, kept_remove, kept_rmtree = open, os.remove, shutil.rmtree

    assert not overlay.files.is_active
    assert all(vars(module) == before for module, before in watched)
    with kept_open("new.pt", "wb"):
        pass
    assert (here / "new.pt").exists()
    kept_remove("old.pt")
    kept_rmtree("checkpoint-1")
    assert not (here / "old.pt").exists()
    assert not (here / "checkpoint-1").exists()
