import os
import sys
import tempfile
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from memfit.core.errors import BadFile  # noqa: E402
from memfit.frameworks.torch.rescue import copies  # noqa: E402
from memfit.frameworks.torch.rescue.copies import choose_folder, file_system  # noqa: E402


def as_tensor(storage):
    return torch.empty(0).set_(storage, 0, (len(storage) // 4,), (1,))


@pytest.mark.parametrize("kind", [copies.MappedFile, copies.ReadFile])
def test_files_hold_the_same_bits_and_leave_no_name(tmp_path, kind):
    # GIVEN values among which are some that don't equal themselves
    values = torch.randn(100_000)
    values[7] = float("nan")
    expected = values.view(torch.int32).clone()

    # WHEN they are copied and the original is overwritten
    copy = kind(values.untyped_storage(), tmp_path)
    values.zero_()

    # THEN they come back, twice, and once the first is gone
    storage = copy.storage()
    assert torch.equal(as_tensor(storage).view(torch.int32), expected)
    assert copy.storage()._cdata == storage._cdata
    del storage
    assert torch.equal(as_tensor(copy.storage()).view(torch.int32), expected)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts open files as Linux lists them")
def test_mapped_files_are_closed(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    kept = [copies.MappedFile(torch.ones(1000).untyped_storage(), tmp_path) for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert as_tensor(kept[19].storage()).sum() == 1000


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_an_error():
    with open("/dev/full", "wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        copies._write(file, torch.ones(1000).untyped_storage())


def test_host_copies():
    values = torch.randn(1000)
    copy = copies.HostCopy(values.untyped_storage())
    expected = values.clone()
    values.zero_()
    assert torch.equal(as_tensor(copy.storage()), expected)


# Folders.


@pytest.fixture
def mounts(monkeypatch):
    """Has the system tell of these mounts: {path: type}."""

    def tell(points):
        told = [SimpleNamespace(mountpoint=str(point), fstype=kind) for point, kind in points.items()]
        monkeypatch.setattr(copies.psutil, "disk_partitions", lambda all: told)

    return tell


def test_the_deepest_mount_counts(tmp_path, mounts):
    inner = tmp_path / "a b"
    inner.mkdir()
    mounts({"/": "ext4", inner: "tmpfs"})
    assert file_system(tmp_path) == "ext4"
    assert file_system(inner) == "tmpfs"
    mounts({})
    assert file_system(inner) is None


def test_memory_is_refused(tmp_path, mounts):
    mounts({"/": "tmpfs"})
    with pytest.raises(BadFile, match=r"is memory \(tmpfs\).*Give a folder on a disk"):
        choose_folder(str(tmp_path))


def test_no_folder_is_refused(tmp_path):
    with pytest.raises(BadFile, match="is no folder"):
        choose_folder(str(tmp_path / "missing"))


def test_this_folder_where_temporary_files_are_memory(tmp_path, mounts, monkeypatch):
    here, memory = tmp_path / "here", tmp_path / "memory"
    here.mkdir()
    memory.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(memory))
    mounts({"/": "ext4"})
    assert choose_folder() == memory
    mounts({"/": "ext4", memory: "tmpfs"})
    assert choose_folder() == here
    mounts({"/": "ramfs", memory: "tmpfs"})
    with pytest.raises(BadFile, match=r"memory is memory.*; .*here is memory"):
        choose_folder()
