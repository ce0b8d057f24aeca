import json
import os

import pytest

from memfit.reports.files import write_json, write_whole


def test_it_is_written_and_the_path_given_back(tmp_path):
    target = tmp_path / "file.txt"

    assert write_whole(lambda: "text\n", str(target)) == target
    assert target.read_bytes() == b"text\n"
    assert os.listdir(tmp_path) == ["file.txt"]


def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch):
    target = tmp_path / "file.txt"
    target.write_text("old")

    def fail():
        raise ValueError("half-way")

    with pytest.raises(ValueError, match="half-way"):
        write_whole(fail, target)
    monkeypatch.setattr(os, "replace", lambda source, destination: fail())
    with pytest.raises(ValueError, match="half-way"):
        write_whole(lambda: "new", target)

    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["file.txt"]


def test_links_are_followed(tmp_path):
    (tmp_path / "real.txt").touch()
    (tmp_path / "link.txt").symlink_to(tmp_path / "real.txt")
    write_whole(lambda: "text", tmp_path / "link.txt")

    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "real.txt").read_text() == "text"


@pytest.mark.parametrize("path", [".", "/dev/null"])
def test_only_files_are_written(path):
    with pytest.raises(OSError, match="it is not a file"):
        write_whole(lambda: "text", path)


def test_json_can_be_compared_line_by_line(tmp_path):
    path = write_json({"a": [1, None], "b": "x"}, tmp_path / "plan.json")
    text = path.read_text(encoding="utf-8")

    assert json.loads(text) == {"a": [1, None], "b": "x"}
    assert text.endswith("}\n")
    assert text.count("\n") > 3
