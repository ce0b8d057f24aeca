import os
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from memfit.core.errors import BadFile
from memfit.data import direct_reads, files
from memfit.data.files import BlockReader, LocalFile, fingerprint_of, open_file, stat_of

CONTENTS = bytes(range(256)) * 512


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "data.bin"
    path.write_bytes(CONTENTS)
    return path


def read(file, offset, length):
    buffer = bytearray(length)
    file.read_into(offset, buffer)
    return bytes(buffer)


def num_descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_any_run_of_bytes_is_read(path):
    file = open_file(path)

    assert file.size == len(CONTENTS)
    assert file.name == str(path)
    assert read(file, 0, 10) == CONTENTS[:10]
    assert read(file, 70_001, 999) == CONTENTS[70_001:71_000]
    assert read(file, len(CONTENTS), 0) == b""


def test_arrays_are_filled_in_place(path):
    out = np.zeros((4, 8), np.uint8)

    open_file(path).read_into(3, out)

    assert out.tobytes() == CONTENTS[3:35]


def test_reads_longer_than_the_system_gives_at_once_are_put_together(path, monkeypatch):
    monkeypatch.setattr(files, "_MAX_READ_BYTES", 1000)

    assert read(open_file(path), 5, 12_345) == CONTENTS[5:12_350]


def test_systems_without_hints_read_the_same(path, monkeypatch):
    monkeypatch.delattr(os, "posix_fadvise")
    file = open_file(path)

    assert read(file, 100, 70_000) == CONTENTS[100:70_100]
    file.drop(0, 100)


def test_a_file_that_became_shorter_while_open_is_named_with_the_offset(path):
    file = open_file(path)
    read(file, 0, 1)

    os.truncate(path, 1000)

    with pytest.raises(
        BadFile, match=r"data\.bin' ends too early: of 200 bytes at offset 900 the last 100 are missing"
    ):
        read(file, 900, 200)


def test_a_file_that_became_shorter_before_it_was_opened_again_is_named(path):
    file = open_file(path)

    os.truncate(path, 1000)

    with pytest.raises(BadFile, match="has become shorter: it had 131072 bytes and now has 1000"):
        read(file, 0, 1)


def test_failures_of_the_disk_name_file_and_offset(path, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)

    with pytest.raises(BadFile, match=r"data\.bin' can't be read at offset 7: Input/output error"):
        read(open_file(path), 7, 1)


def test_missing_files_and_folders_are_refused(tmp_path):
    with pytest.raises(BadFile, match=r"nothing\.bin' can't be read: No such file"):
        open_file(tmp_path / "nothing.bin")
    with pytest.raises(BadFile, match="is a folder, and a file is needed"):
        open_file(tmp_path)


def test_a_file_that_vanished_is_named(path):
    file = open_file(path)
    path.unlink()

    with pytest.raises(BadFile, match=r"data\.bin' can't be opened: No such file"):
        read(file, 0, 1)


def test_a_relative_path_is_still_found_from_another_folder(path, tmp_path, monkeypatch):
    monkeypatch.chdir(path.parent)
    file = open_file("data.bin")

    monkeypatch.chdir("/")

    assert file.name == "data.bin"
    assert read(file, 1, 2) == CONTENTS[1:3]


def test_a_copy_by_pickle_opens_the_file_itself(path):
    file = open_file(path)
    read(file, 0, 1)

    copy = pickle.loads(pickle.dumps(file))

    assert (copy.name, copy.size) == (file.name, file.size)
    assert read(copy, 9, 9) == CONTENTS[9:18]


def test_threads_read_at_once(path):
    file = open_file(path)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda offset: read(file, offset, 777), range(0, 100_000, 97)))

    assert found == [CONTENTS[offset : offset + 777] for offset in range(0, 100_000, 97)]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")
def test_a_forked_child_has_descriptors_of_its_own(path):
    file = open_file(path)
    read(file, 0, 1)
    before = num_descriptors()
    reading, writing = os.pipe()

    child = os.fork()
    if not child:
        # GIVEN a child: what its parent had open is closed, and opened again when it reads
        closed = num_descriptors()
        answer = read(file, 300, 3) == CONTENTS[300:303] and num_descriptors() == closed + 1
        os.write(writing, bytes([answer, before + 2 - closed]))
        os._exit(0)
    os.waitpid(child, 0)
    answer = os.read(reading, 2)
    os.close(reading)
    os.close(writing)

    assert answer == bytes([True, 1])
    assert num_descriptors() == before
    assert read(file, 300, 3) == CONTENTS[300:303]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")
def test_more_files_than_may_be_open_can_be_read(tmp_path):
    several = []
    for number in range(80):
        (tmp_path / str(number)).write_bytes(bytes([number]) * 10)
        several.append(open_file(tmp_path / str(number)))
    before = num_descriptors()

    for _ in range(2):
        for number, file in enumerate(several):
            assert read(file, 0, 10) == bytes([number]) * 10

    assert num_descriptors() <= before + 64


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")
def test_descriptors_go_with_close_and_with_the_object(path):
    before = num_descriptors()
    file = open_file(path)
    read(file, 0, 1)
    assert num_descriptors() == before + 1

    file.close()
    file.close()
    assert num_descriptors() == before

    read(file, 0, 1)
    del file
    assert num_descriptors() == before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")
def test_a_descriptor_in_use_is_closed_only_when_its_reader_is_done(path):
    file = LocalFile(path)
    before = num_descriptors()

    opened = file._descriptor()
    file.close()
    assert os.pread(opened.number, 3, 0) == CONTENTS[:3]

    del opened
    assert num_descriptors() == before


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="no such call here")
def test_hints_cover_whole_pages(path, monkeypatch):
    said = []
    file = open_file(path)
    read(file, 0, 1)
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *advice: said.append(advice))

    file.drop(5000, 10)
    file.drop(0, 0)

    page = files._PAGE_BYTES
    assert said == [(5000 // page * page, page, os.POSIX_FADV_DONTNEED)]


def test_hints_that_fail_are_no_failure(path, monkeypatch):
    def fail(*_):
        raise OSError("not on this file system")

    monkeypatch.setattr(os, "posix_fadvise", fail, raising=False)
    file = open_file(path)

    file.drop(0, 10)
    assert read(file, 0, 10) == CONTENTS[:10]


def test_a_fingerprint_changes_with_the_file_and_not_with_its_folder(path, tmp_path):
    before = fingerprint_of([str(path)], "x")
    os.mkdir(tmp_path / "elsewhere")
    moved = path.rename(tmp_path / "elsewhere" / path.name)
    assert fingerprint_of([str(moved)], "x") == before
    assert fingerprint_of([str(moved)], "y") != before

    size, changed = stat_of(moved)
    assert size == len(CONTENTS)
    os.utime(moved, (changed + 5, changed + 5))

    assert fingerprint_of([str(moved)], "x") != before


def test_addresses_are_given_to_the_remote_reader(monkeypatch):
    pytest.importorskip("fsspec")
    import fsspec

    with fsspec.open("memory://memfit-files/data.bin", "wb") as file:
        file.write(CONTENTS)

    assert stat_of("memory://memfit-files/data.bin")[0] == len(CONTENTS)
    assert read(open_file("memory://memfit-files/data.bin"), 1000, 77) == CONTENTS[1000:1077]
    assert fingerprint_of(["memory://memfit-files/data.bin"])


def test_a_sequential_reader_is_an_ordinary_file(path):
    with BlockReader(open_file(path), block_bytes=1000) as reader:
        assert reader.readable() and reader.seekable()
        assert reader.readall() == CONTENTS
        assert reader.read(1) == b""
        assert reader.seek(-10, os.SEEK_END) == len(CONTENTS) - 10
        assert reader.read(4) == CONTENTS[-10:-6]
        assert reader.seek(1, os.SEEK_CUR) == len(CONTENTS) - 5 == reader.tell()
        with pytest.raises(OSError, match="before the beginning"):
            reader.seek(-1)


def test_a_sequential_reader_gives_pages_back_behind_itself(path, monkeypatch):
    dropped = []
    monkeypatch.setattr(LocalFile, "drop", lambda _, offset, length: dropped.append((offset, length)))

    BlockReader(open_file(path), block_bytes=60_000).readall()

    assert dropped == [(0, 60_000), (60_000, 60_000), (120_000, len(CONTENTS) - 120_000)]


def test_blocks_are_read_past_the_cache_and_the_same_without(tmp_path, monkeypatch):
    # GIVEN a file and a reader, and another for which there are no such reads
    path = tmp_path / "blocks"
    path.write_bytes(os.urandom(1 << 20))
    first, second = LocalFile(path), LocalFile(path)
    length = direct_reads.LEAST_BYTES + 17
    assert second._read_direct(0, memoryview(bytearray(8))) in (True, False)
    expected = path.read_bytes()[1001 : 1001 + length]

    def read(file):
        buffer = bytearray(length)
        file.read_into(1001, buffer)
        file.drop(1001, length)
        return bytes(buffer)

    assert read(first) == expected
    first.close()

    def refuse(path):
        raise OSError

    monkeypatch.setattr(direct_reads, "open_direct", refuse)
    second.close()

    # THEN both read the same
    assert read(second) == expected
    assert second._lacks_direct


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="this system has no links")
def test_patterns_match_each_file_once(tmp_path, monkeypatch):
    root = tmp_path / "root"
    for name in ("x.csv", "a/x.csv", "a/b/y.csv", ".hidden/z.csv"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("1")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "o.csv").write_text("1")
    # GIVEN links that lead upwards, which together have endless paths, and one to everything
    (root / "a" / "up").symlink_to(root)
    (root / "a" / "b" / "up").symlink_to(root)
    (root / "everything").symlink_to("/")
    (root / "loop").symlink_to(root / "a")

    def found(pattern, **options):
        return [os.path.relpath(path, root) for path in files.matches(pattern, **options)]

    everywhere = ["a/b/y.csv", "a/x.csv", "x.csv"]
    assert found(f"{root}/**/*.csv") == everywhere
    assert found(f"{root}/*/x.csv") == ["a/x.csv"]
    assert found(f"{root}/**/b/**/y.csv") == ["a/b/y.csv"]
    monkeypatch.chdir(root)
    assert files.matches("**/*.csv") == everywhere
    assert files.matches("*.csv") == ["x.csv"]
    (root / "everything").unlink()
    (root / "a" / "out").symlink_to(tmp_path / "outside")
    assert found(f"{root}/**/*.csv", follow_links=True) == ["a/b/y.csv", "a/out/o.csv", "a/x.csv", "x.csv"]
