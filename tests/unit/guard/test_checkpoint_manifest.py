"""No bit of a checkpoint changes without being noticed."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.guard.checkpoint_manifest import MAX_BYTES, NAME, Damaged, Entry, Manifest, check, describe, read

MANIFEST = Manifest(3, 40, "2026-01-02T03:04:05+00:00", {"a/b.bin": Entry(5, "0" * 64)}, {"score": 0.5, "x": [1, None]})


def changed(**entries):
    return json.dumps({**json.loads(MANIFEST.to_bytes()), **entries}).encode()


def test_what_is_written_is_read_back():
    assert Manifest.from_bytes(MANIFEST.to_bytes()) == MANIFEST


def test_the_format_is_documented():
    content = json.loads(MANIFEST.to_bytes())

    assert content["format"] == "memfit.checkpoint"
    assert content["version"] == 1
    assert content["files"] == {"a/b.bin": {"bytes": 5, "sha256": "0" * 64}}
    assert list(content) == ["format", "version", "number", "step", "created", "files", "info", "checksum"]


@given(st.data())
def test_every_flipped_bit_is_noticed(data):
    content = bytearray(MANIFEST.to_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= 1 << data.draw(st.integers(0, 7))

    with pytest.raises(Damaged):
        Manifest.from_bytes(bytes(content))


def test_every_truncation_is_noticed():
    content = MANIFEST.to_bytes()
    for length in range(len(content)):
        with pytest.raises(Damaged):
            Manifest.from_bytes(content[:length])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xff\xfe", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b"[]", "is no manifest"),
        (b'{"format": "else"}', "is no manifest"),
        (changed(version=2), "has version 2, and this memfit reads version 1"),
        (changed(step=-1), "lacks something"),
        (changed(step="40"), "lacks something"),
        (changed(files={"../../x": {"bytes": 1, "sha256": ""}}), "lacks something"),
        (changed(files={"/etc/passwd": {"bytes": 1, "sha256": ""}}), "lacks something"),
        (changed(files=[]), "lacks something"),
        (changed(info=None), "lacks something"),
        (changed(step=41), "has changed since it was written"),
    ],
)
def test_what_is_no_manifest_is_refused(content, reason):
    with pytest.raises(Damaged, match=reason):
        Manifest.from_bytes(content)


def test_files_are_described_and_checked(tmp_path):
    # GIVEN a directory with files
    (tmp_path / "sub").mkdir()
    (tmp_path / "a").write_bytes(b"hello")
    (tmp_path / "sub" / "b").write_bytes(b"")
    (tmp_path / NAME).write_bytes(b"not part of what it lists")
    files = describe(tmp_path)
    manifest = Manifest(1, 1, "", files)

    # THEN the files are listed as they are
    assert list(files) == ["a", "sub/b"]
    assert files["a"].size_bytes == 5
    check(tmp_path, manifest, checksums=True)

    # AND every kind of damage has its own words
    (tmp_path / "a").write_bytes(b"hallo")
    check(tmp_path, manifest, checksums=False)
    with pytest.raises(Damaged, match=r"^a has changed since it was written"):
        check(tmp_path, manifest, checksums=True)
    (tmp_path / "a").write_bytes(b"hell")
    with pytest.raises(Damaged, match=r"^a is 1 byte shorter than its manifest says$"):
        check(tmp_path, manifest, checksums=False)
    (tmp_path / "a").write_bytes(b"hello, you")
    with pytest.raises(Damaged, match=r"^a is 5 bytes longer than its manifest says$"):
        check(tmp_path, manifest, checksums=False)
    (tmp_path / "a").unlink()
    with pytest.raises(Damaged, match=r"^a can't be read: No such file"):
        check(tmp_path, manifest, checksums=False)
    (tmp_path / "a").mkdir()
    with pytest.raises(Damaged, match=r"^a "):
        check(tmp_path, manifest, checksums=True)


def test_a_missing_unreadable_or_endless_manifest_is_refused(tmp_path):
    with pytest.raises(Damaged, match=r"it has no manifest\.json: it was never finished"):
        read(tmp_path)
    with (tmp_path / NAME).open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(Damaged, match="longer than any manifest"):
        read(tmp_path)
    (tmp_path / NAME).unlink()
    (tmp_path / NAME).mkdir()
    with pytest.raises(Damaged, match="can't be read"):
        read(tmp_path)
