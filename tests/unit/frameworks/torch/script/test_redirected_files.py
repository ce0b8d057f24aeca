import os
import time

import pytest

from memfit.frameworks.torch.script.redirected_files import KEPT, REDIRECTED, RedirectedFiles


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

    assert files.current("model.pt") == place
    assert files.current(b"model.pt") == place
    assert files.current("../real/./model.pt") == place


def test_other_paths_are_as_given(files, tmp_path):
    files.target(tmp_path / "model.pt")

    assert files.current("elsewhere/model.pt") == "elsewhere/model.pt"
    assert files.existing(3) == 3
    assert files.current("data.csv") == "data.csv"


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
    files.made.add(str(tmp_path / "checkpoint-10"))

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
    files.made.update((str(tmp_path / "scratch"), str(tmp_path / "project" / "runs")))

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
    files.keep(str(path))

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
    files.made.add(str(tmp_path / "made" / "checkpoint-3"))

    assert files.holds_older(str(tmp_path / "with"))
    assert not files.holds_older(str(tmp_path / "without"))
    assert files.holds_older(str(tmp_path / "checkpoint-3"))
    assert not files.holds_older(str(tmp_path / "made" / "checkpoint-3"))


def test_what_is_not_a_file_is_not_redirected(files, tmp_path):
    assert not files.is_regular(os.devnull)
    assert not files.is_regular(tmp_path)
    assert files.is_regular(tmp_path / "new.pt")
    assert files.is_regular(older(tmp_path / "old.pt"))


def test_a_renamed_folder_takes_its_files_along(files, tmp_path):
    place = files.target(tmp_path / "staging" / "model.pt")
    files.made.add(str(tmp_path / "staging"))

    files.move_folder(str(tmp_path / "staging"), str(tmp_path / "checkpoint-1"))

    assert files.redirected == {str(tmp_path / "checkpoint-1" / "model.pt"): place}
    assert files.made == {str(tmp_path / "checkpoint-1")}


def test_the_end_leaves_no_half_checkpoints_behind(files, tmp_path, notes):
    # GIVEN folders that the script made for its checkpoints, and folders of the user's
    for name in ("run/checkpoint-3", "run/empty", "run/logs", "run/checkpoint-1"):
        (tmp_path / name).mkdir(parents=True)
    files.made.update(str(tmp_path / name) for name in ("run", "run/checkpoint-3", "run/empty", "run/logs"))
    (tmp_path / "run" / "checkpoint-3" / "trainer_state.json").write_text("{}")
    for name in ("run/checkpoint-3/model.pt", "run/empty/model.pt", "run/checkpoint-1/model.pt"):
        files.target(tmp_path / name)

    # WHEN the run is over
    files.finish()

    # THEN what would be taken for a checkpoint is with the redirected files, and the rest is where it was
    assert sorted(os.listdir(tmp_path / "run")) == ["checkpoint-1", "logs"]
    assert list((tmp_path / "own").glob("*/checkpoint-3/trainer_state.json"))
    assert "was moved to" in notes[-1][1]
