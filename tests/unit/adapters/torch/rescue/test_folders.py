import tempfile

import pytest

from memfit.adapters.torch.rescue.folders import choose_folder, file_system
from memfit.core.errors import BadFile


@pytest.fixture
def mounts(tmp_path):
    """Writes a list of mounts of the kernel's form: {path: type}."""

    def write(points):
        path = tmp_path / "mountinfo"
        lines = [f"{n} 1 0:{n} / {point} rw - {kind} none rw" for n, (point, kind) in enumerate(points.items())]
        path.write_text("\n".join(lines))
        return path

    return write


def test_the_longest_mount_counts(tmp_path, mounts):
    inner = tmp_path / "a b"
    inner.mkdir()
    listed = mounts({"/": "ext4", str(tmp_path / "a b").replace(" ", "\\040"): "tmpfs"})
    assert file_system(tmp_path, listed) == "ext4"
    assert file_system(inner, listed) == "tmpfs"
    assert file_system(inner, tmp_path / "missing") is None


def test_memory_is_refused(tmp_path, mounts):
    with pytest.raises(BadFile, match=r"is memory \(tmpfs\).*Give a folder on a disk"):
        choose_folder(str(tmp_path), mounts({"/": "tmpfs"}))


def test_no_folder_is_refused(tmp_path):
    with pytest.raises(BadFile, match="is no folder"):
        choose_folder(str(tmp_path / "missing"))


def test_this_folder_where_temporary_files_are_memory(tmp_path, mounts, monkeypatch):
    here, memory = tmp_path / "here", tmp_path / "memory"
    here.mkdir()
    memory.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(memory))
    assert choose_folder(None, mounts({"/": "ext4"})) == memory
    assert choose_folder(None, mounts({"/": "ext4", str(memory): "tmpfs"})) == here
    with pytest.raises(BadFile, match=r"memory is memory.*; .*here is memory"):
        choose_folder(None, mounts({"/": "ramfs", str(memory): "tmpfs"}))
