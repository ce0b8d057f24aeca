"""No bit of a checkpoint changes without being noticed."""

import errno
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.core import plain_files
from memfit.guard.checkpoint_manifest import (
    MAX_BYTES,
    NAME,
    Damaged,
    FileEntry,
    Manifest,
    NotOurs,
    OtherVersion,
    check,
    describe,
    discard,
    read,
)

MANIFEST = Manifest(
    3, 40, "2026-01-02T03:04:05+00:00", {"a/b.bin": FileEntry(5, "0" * 64)}, {"score": 0.5, "x": [1, None]}
)


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

    with pytest.raises((NotOurs, OtherVersion)):
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
        (b"[]", "is not the manifest of a checkpoint"),
        (b'{"format": "else"}', "is not the manifest of a checkpoint"),
        (changed(step=-1), "is incomplete or malformed"),
        (changed(step="40"), "is incomplete or malformed"),
        (changed(files={"../../x": {"bytes": 1, "sha256": ""}}), "is incomplete or malformed"),
        (changed(files={"/etc/passwd": {"bytes": 1, "sha256": ""}}), "is incomplete or malformed"),
        (changed(files=[]), "is incomplete or malformed"),
        (changed(info=None), "is incomplete or malformed"),
        (changed(step=41), "has changed since it was written"),
    ],
)
def test_what_is_no_manifest_is_refused(content, reason):
    with pytest.raises(NotOurs, match=reason):
        Manifest.from_bytes(content)


@pytest.mark.parametrize("version", [2, 0, "1", None, 1.0, True, 10**30])
def test_another_version_is_not_taken_for_damage(version):
    with pytest.raises(OtherVersion, match="and this memfit reads version 1"):
        Manifest.from_bytes(changed(version=version))


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


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs on this system")
def test_a_fifo_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / NAME)
    with pytest.raises(NotOurs, match="it is a FIFO"):
        read(tmp_path)
    os.mkfifo(tmp_path / "a")
    with pytest.raises(Damaged, match="it is a FIFO"):
        check(tmp_path, Manifest(1, 1, "", {"a": FileEntry(0, "")}), checksums=True)


def test_links_are_not_followed(tmp_path):
    # GIVEN a checkpoint whose files are elsewhere
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    inside.mkdir()
    (outside / "a").write_bytes(b"hello")
    manifest = Manifest(1, 1, "", describe(outside))
    below = Manifest(1, 1, "", {f"sub/{name}": entry for name, entry in manifest.files.items()})
    (inside / "a").symlink_to(outside / "a")
    (inside / "sub").symlink_to(outside)

    # THEN it is none
    for one in (manifest, below):
        with pytest.raises(Damaged, match="it is a symbolic link"):
            check(inside, one, checksums=True)
    (outside / NAME).write_bytes(manifest.to_bytes())
    (inside / NAME).symlink_to(outside / NAME)
    with pytest.raises(NotOurs, match="it is a symbolic link"):
        read(inside)
    (tmp_path / "link").symlink_to(outside)
    with pytest.raises(NotOurs, match="it is a symbolic link"):
        read(tmp_path / "link")

    # AND nothing is removed through a link
    discard(inside, below)
    assert (outside / "a").read_bytes() == b"hello"


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_what_cannot_be_read_is_not_damaged(tmp_path, monkeypatch, number):
    (tmp_path / "a").write_bytes(b"hello")
    manifest = Manifest(1, 1, "", describe(tmp_path))
    (tmp_path / NAME).write_bytes(manifest.to_bytes())

    def failing(path, *arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(plain_files.os, "open", failing)
    with pytest.raises(OSError, match=os.strerror(number)):
        read(tmp_path)
    with pytest.raises(OSError, match=os.strerror(number)):
        check(tmp_path, manifest, checksums=True)


def test_only_what_the_manifest_claims_is_removed(tmp_path):
    # GIVEN a checkpoint into which someone has put files of their own
    for name in ("a", "sub/b", "sub/deep/c", "sub/mine", "notes"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(name)
    files = {name: entry for name, entry in describe(tmp_path).items() if name not in ("sub/mine", "notes")}
    (tmp_path / NAME).write_bytes(Manifest(1, 1, "", files).to_bytes())

    assert discard(tmp_path, Manifest(1, 1, "", files)) == ["notes", "sub"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["mine", "notes", "sub"]
