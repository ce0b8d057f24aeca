"""Findings that last from run to run."""

import pytest

from memfit.guard.ceilings import Ceilings, key_of


def test_what_is_kept_is_found_again(tmp_path):
    key = key_of(("model", (3, 4), "cpu"))
    Ceilings(tmp_path).put(key, {"most": 8.0})

    assert Ceilings(tmp_path).get(key) == {"most": 8.0}
    assert Ceilings(tmp_path).get(key_of(("model", (3, 5), "cpu"))) is None


def test_without_a_folder_nothing_is_kept():
    ceilings = Ceilings(None)
    ceilings.put("key", {"most": 8.0})

    assert Ceilings(None).get("key") is None
    # But for those who share it.
    assert ceilings.get("key", only_own=True) == {"most": 8.0}


def test_findings_of_earlier_runs_can_be_left_out(tmp_path):
    Ceilings(tmp_path).put("key", {"most": 8.0})

    assert Ceilings(tmp_path).get("key", only_own=True) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 99, "entries": {"key": {}}}', '{"version": 1}', "\x00"])
def test_a_damaged_file_counts_as_empty(tmp_path, text):
    (tmp_path / "ceilings.json").write_text(text, encoding="utf-8")

    assert Ceilings(tmp_path).get("key") is None
    Ceilings(tmp_path).put("key", {"most": 1.0})
    assert Ceilings(tmp_path).get("key") == {"most": 1.0}


def test_the_oldest_go_when_there_are_many(tmp_path):
    ceilings = Ceilings(tmp_path)
    for number in range(300):
        ceilings.put(f"key {number}", {"most": number})

    assert Ceilings(tmp_path).get("key 0") is None
    assert Ceilings(tmp_path).get("key 299") == {"most": 299}
    assert [path.name for path in tmp_path.iterdir()] == ["ceilings.json"]


def test_a_folder_that_can_not_be_made_is_no_reason_to_fail(tmp_path):
    (tmp_path / "file").write_text("")

    Ceilings(tmp_path / "file" / "folder").put("key", {"most": 1.0})
