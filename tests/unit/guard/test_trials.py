"""The file of results: added to, read back, and not trusted."""

import pytest

from memfit.core.errors import BadFile, BadInput
from memfit.guard.trials import Outcome, Record, Trials, best_of

HEADER = {"space": {"lr": [1, 2]}, "seed": 0, "maximize": False}


def record(number, score, outcome=Outcome.FINISHED):
    return Record(number, {"lr": number}, outcome, score)


def written(folder, *records):
    trials = Trials(folder, HEADER, resume=True)
    for entry in records:
        trials.add(entry)
    return folder / "results.jsonl"


def test_records_come_back(tmp_path):
    entries = [record(0, 0.5), record(1, None, Outcome.OUT_OF_MEMORY)]
    written(tmp_path / "new", *entries)

    assert Trials(tmp_path / "new", HEADER, resume=True).records == entries


def test_half_a_line_at_the_end_counts_as_not_there(tmp_path):
    path = written(tmp_path, record(0, 0.5), record(1, 0.25))
    whole = path.read_bytes()

    for cut in range(whole.rstrip(b"\n").rfind(b"\n") + 2, len(whole)):
        path.write_bytes(whole[:cut])
        trials = Trials(tmp_path, HEADER, resume=True)
        assert trials.records == [record(0, 0.5)]
        trials.add(record(1, 0.25))
        assert path.read_bytes() == whole


def test_damage_elsewhere_is_named(tmp_path):
    path = written(tmp_path, record(0, 0.5), record(1, 0.25))
    lines = path.read_text().splitlines()

    path.write_text("\n".join([lines[0], lines[1][:-5], lines[2]]) + "\n")
    with pytest.raises(BadFile, match=r"line 2 of .* is damaged"):
        Trials(tmp_path, HEADER, resume=True)

    path.write_text("\n".join([lines[0], '{"number": 1}']) + "\n")
    with pytest.raises(BadFile, match=r"line 2 of .* is no result of a trial"):
        Trials(tmp_path, HEADER, resume=True)


@pytest.mark.parametrize(
    ("name", "value"), [("seed", 1), ("maximize", True), ("space", {"lr": [1, 3]}), ("space", {"rate": [1, 2]})]
)
def test_another_search_is_refused_unless_it_may_be_dropped(tmp_path, name, value):
    written(tmp_path, record(0, 0.5))
    other = {**HEADER, name: value}

    with pytest.raises(BadInput, match=f"holds another search: its {name} is .* resume=False"):
        Trials(tmp_path, other, resume=True)

    assert Trials(tmp_path, other, resume=False).records == []
    assert Trials(tmp_path, other, resume=True).records == []


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "results.jsonl").write_text('{"format": "other"}\n')

    with pytest.raises(BadFile, match="was not written by a search of this version"):
        Trials(tmp_path, HEADER, resume=True)


def test_a_folder_that_is_none_is_refused(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(BadFile, match=r"can't be used: .* Give a folder that can be written to"):
        Trials(tmp_path / "file", HEADER, resume=True)


def test_best():
    records = [record(0, 3.0), record(1, 1.0), record(2, 1.0), record(3, None), record(4, 0.0, Outcome.FAILED)]

    assert best_of(records, maximize=False).number == 1
    assert best_of(records, maximize=True).number == 0
    assert best_of(records[3:], maximize=True) is None


def test_a_file_of_somebody_else_is_not_removed(tmp_path):
    (tmp_path / "results.jsonl").write_text('{"mine": 1}\n')

    for resume in (False, True):
        with pytest.raises(BadFile):
            Trials(tmp_path, {"seed": 1}, resume=resume)
    assert (tmp_path / "results.jsonl").read_text() == '{"mine": 1}\n'
