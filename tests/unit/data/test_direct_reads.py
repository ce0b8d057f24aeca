import gc
import os

import numpy as np
import pytest

from memfit.catalogue.host import resident_bytes
from memfit.core.units import MIB
from memfit.data import direct_reads
from memfit.data.direct_reads import HUGE_BYTES, pages

DATA = bytes(range(256)) * 4096


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(DATA + b"end")
    return str(path)


def opened(path):
    try:
        return direct_reads.open_direct(path)
    except OSError:
        pytest.skip("the file system of the temporary folder has no reads past the cache")


@pytest.fixture
def descriptor(path):
    number = opened(path)
    yield number
    os.close(number)


@pytest.mark.parametrize(("offset", "length"), [(0, 4096), (1, 1), (4095, 2), (100_003, 77_777), (len(DATA) - 5, 8)])
def test_any_run_is_read_wherever_it_begins_and_ends(descriptor, offset, length):
    buffer = bytearray(length)

    assert direct_reads.read_direct(descriptor, memoryview(buffer), offset)

    assert bytes(buffer) == (DATA + b"end")[offset : offset + length]


def test_what_isnt_there_isnt_read(descriptor):
    assert not direct_reads.read_direct(descriptor, memoryview(bytearray(10)), len(DATA))
    assert not direct_reads.read_direct(descriptor, memoryview(bytearray(10)), 10 * len(DATA))


def test_a_failing_read_is_left_to_the_ordinary_way(path):
    number = os.open(path, os.O_WRONLY)
    try:
        assert not direct_reads.read_direct(number, memoryview(bytearray(10)), 0)
    finally:
        os.close(number)


def test_systems_and_files_without_such_reads_say_so(path, tmp_path, monkeypatch):
    with pytest.raises(OSError, match="No such file"):
        direct_reads.open_direct(str(tmp_path / "missing"))

    def refuse(*arguments):
        raise OSError(22, "no such reads")

    monkeypatch.setattr(os, "preadv", refuse)
    with pytest.raises(OSError):
        direct_reads.open_direct(path)
    monkeypatch.delattr(os, "O_DIRECT")
    with pytest.raises(OSError, match="O_DIRECT"):
        direct_reads.open_direct(path)


def test_blocks_are_worth_it_and_headers_and_long_runs_are_not():
    assert not direct_reads.is_worth_it(4096)
    assert direct_reads.is_worth_it(256 << 10)
    assert not direct_reads.is_worth_it(16 << 20)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_forked_child_does_not_write_into_its_parents_scratch_memory(tmp_path):
    # GIVEN a parent that has something in its scratch memory
    path = tmp_path / "data.bin"
    path.write_bytes(bytes([1]) * 40_000 + bytes([2]) * 60_000)
    descriptor = opened(str(path))
    assert direct_reads.read_direct(descriptor, memoryview(bytearray(30_000)), 0)
    held = direct_reads._scratch._free[-1]

    # WHEN a child reads something else
    child = os.fork()
    if not child:
        buffer = bytearray(30_000)
        done = direct_reads.read_direct(descriptor, memoryview(buffer), 50_000) and set(buffer) == {2}
        os._exit(not done)
    status = os.waitpid(child, 0)[1]
    os.close(descriptor)

    # THEN the parent's is unchanged
    assert status == 0
    assert set(held[:30_000]) == {1}


def test_memory_begins_with_a_huge_page_and_is_zero():
    view = pages(3 * HUGE_BYTES + 5)

    assert len(view) == 3 * HUGE_BYTES + 5
    assert np.frombuffer(view, np.uint8).ctypes.data % HUGE_BYTES == 0
    assert not any(view[::4096])
    view[-1] = 1


def test_what_nobody_uses_goes_back_at_once():
    before = resident_bytes()
    array = np.frombuffer(pages(64 * MIB), np.uint8)
    array[:] = 1
    assert resident_bytes() - before > 60 * MIB

    del array
    gc.collect()

    assert resident_bytes() - before < 16 * MIB
