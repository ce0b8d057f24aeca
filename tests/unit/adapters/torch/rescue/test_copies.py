import os
import sys

import pytest

torch = pytest.importorskip("torch")

from memfit.adapters.torch.rescue import copies  # noqa: E402


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


def test_named_files_where_open_ones_have_no_path(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    copy = copies.MappedFile(torch.ones(1000).untyped_storage(), tmp_path)
    assert as_tensor(copy.storage()).sum() == 1000
    assert list(tmp_path.iterdir()) == []


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


def test_freed_memory_goes_back_to_the_system():
    copies.map_large_blocks(True)
    copies.give_back()
    copies.map_large_blocks(False)
