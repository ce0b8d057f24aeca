import gzip
import os
import pickle

import pytest

from memfit.core.errors import BadFile
from memfit.data.sources.csv_bytes import PackedBytes, PlainBytes, open_bytes

TEXT = bytes(range(32, 127)) * 5000


@pytest.fixture(params=["plain", "packed"])
def text(request, tmp_path):
    path = tmp_path / "x.csv"
    path.write_bytes(gzip.compress(TEXT) if request.param == "packed" else TEXT)
    return open_bytes(path)


def test_which_kind_is_told_by_the_contents(text, tmp_path):
    assert isinstance(text, PackedBytes if text.is_packed else PlainBytes)
    assert text.name == str(tmp_path / "x.csv") == text.path


def test_any_run_of_bytes(text):
    for start, stop in [(0, 10), (100_000, 200_000), (50, 60), (len(TEXT) - 5, len(TEXT)), (7, 7)]:
        assert text.read(start, stop).tobytes() == TEXT[start:stop]
        text.drop(start, stop)


def test_chunks_are_the_whole(text):
    chunks = list(text.chunks(100_000))
    assert b"".join(chunks) == TEXT
    assert {len(chunk) for chunk in chunks[:-1]} == {100_000}


def test_it_is_read_after_a_pickle_and_after_close(text):
    text.read(0, 1000)
    copy = pickle.loads(pickle.dumps(text))
    assert copy.read(500, 600).tobytes() == TEXT[500:600]
    assert copy.path == text.path
    text.close()
    assert text.read(1, 3).tobytes() == TEXT[1:3]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_it_is_read_after_a_fork_with_the_lock_held(text):
    text.read(0, 100)
    lock = getattr(text, "_lock", None)
    if lock is not None:
        lock.acquire()
    child = os.fork()
    if not child:
        code = 1
        try:
            code = int(text.read(300, 400).tobytes() != TEXT[300:400])
            text.close()
        finally:
            os._exit(code)
    if lock is not None:
        lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_truncated_and_damaged_archives_are_named(tmp_path):
    packed = gzip.compress(os.urandom(100_000))
    path = tmp_path / "x.csv.gz"
    # Damage in the middle of what can't be packed shows in the sum at the end only.
    for data, start in ((packed[:50_000], 90_000), (packed[:1000] + b"\0" * 5000 + packed[6000:], None)):
        path.write_bytes(data)
        with pytest.raises(BadFile, match=r"x\.csv\.gz' can't be unpacked: .*truncated or damaged"):
            list(open_bytes(path).chunks(10_000))
        if start is not None:
            with pytest.raises(BadFile, match=r"x\.csv\.gz' can't be unpacked"):
                open_bytes(path).read(start, start + 10)


def test_an_archive_that_became_shorter(tmp_path):
    path = tmp_path / "x.csv.gz"
    path.write_bytes(gzip.compress(b"abc"))
    with pytest.raises(BadFile, match="ends too early"):
        open_bytes(path).read(1, 10)


def test_an_empty_file_and_none(tmp_path):
    (tmp_path / "empty.csv").write_bytes(b"")
    assert list(open_bytes(tmp_path / "empty.csv").chunks(10)) == []
    with pytest.raises(BadFile, match=r"missing\.csv"):
        open_bytes(tmp_path / "missing.csv")
