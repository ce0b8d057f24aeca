import json
import os
from pathlib import Path

import pytest

from memfit.processes.overlay import LAYERS
from memfit.processes.written_files import collect


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
