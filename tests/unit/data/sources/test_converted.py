import json

import numpy as np
import pytest

from memfit.data.source import Field
from memfit.data.sources.converted import Member, as_classes, can_have_classes, read_classes, read_members

FIELDS = [
    {"file": "y.npy", "name": "kind", "is_label": True},
    {"file": "x.npy", "name": "features", "is_label": False},
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(content, data=("x.npy", "y.npy")):
    with open("memfit-fields.json", "w") as file:
        file.write(content if isinstance(content, str) else json.dumps({"format": "memfit fields", "fields": content}))
    return read_members(["memfit-fields.json", *data], data)


def test_members_are_given_features_first(folder):
    assert said(FIELDS) == [Member("x.npy", "features", False), Member("y.npy", "kind", True)]
    assert read_members(["x.npy", "y.npy"], ["x.npy", "y.npy"]) == []


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[" * 100_000,
        "[1]",
        "{}",
        json.dumps({"format": "another", "fields": FIELDS}),
        "\udcff".encode("utf-8", "surrogatepass").decode("latin-1"),
        [1, 2],
        [{"file": 1, "name": "a", "is_label": False}],
        [*FIELDS, {"file": "../z.npy", "name": "z", "is_label": False}],
        [FIELDS[1], FIELDS[1]],
        FIELDS[:1],
        [FIELDS[0], {**FIELDS[1], "is_label": True}],
        [FIELDS[0], {**FIELDS[1], "name": "kind"}],
    ],
)
def test_what_is_damaged_or_of_other_files_is_ignored(folder, content):
    assert said(content) == []


def test_classes(folder):
    (folder / "classes.json").write_text('["cat", "h\u00fctte"]', encoding="utf-8")

    assert read_classes(["classes.json"]) == ("cat", "h\u00fctte")
    assert read_classes(["x.npy"]) == ()


@pytest.mark.parametrize("content", [b"", b"[1, 2]", b'{"cat": 0}', b'["a", "a"]', b"\xff\xfe", b"[" * 100_000])
def test_damaged_classes_are_ignored(folder, content):
    (folder / "classes.json").write_bytes(content)

    assert read_classes(["classes.json"]) == ()


def test_too_many_classes_are_ignored(folder):
    assert len(as_classes([str(number) for number in range(100_000)])) == 100_000
    assert as_classes([str(number) for number in range(100_001)]) == ()
    (folder / "classes.json").write_text(json.dumps(["a" * (17 << 20)]))
    assert read_classes(["classes.json"]) == ()


def test_only_single_whole_numbers_are_classes():
    assert can_have_classes(Field("y", np.dtype("u1"), ()))
    assert not can_have_classes(Field("y", np.dtype("f4"), ()))
    assert not can_have_classes(Field("y", np.dtype("i8"), (2,)))
