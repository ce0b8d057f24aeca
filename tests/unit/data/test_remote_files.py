import errno
import os
import pickle
import sys
import threading

import pytest

from memfit.core.errors import BadFile, MissingDependency
from memfit.data import remote_files
from memfit.data.files import is_folder, list_folder
from memfit.data.remote_files import RemoteFile, as_file, glob_remote, shown, stat_remote

fsspec = pytest.importorskip("fsspec")

CONTENTS = bytes(range(256)) * 4096  # 1 MiB


class Faulty(fsspec.AbstractFileSystem):
    """Files of 1 MiB that raise what a test has put into `errors`, one at each call."""

    protocol = "faulty"
    cachable = False
    errors = ()
    num_calls = 0
    short_by = 0

    @classmethod
    def _fail(cls):
        cls.num_calls += 1
        if cls.errors:
            raise cls.errors.pop(0)

    def info(self, path, **_):
        self._fail()
        return {"name": path, "size": None if "endless" in path else len(CONTENTS), "type": "file", "ETag": '"1"'}

    def cat_file(self, path, start=None, end=None, **_):
        self._fail()
        return CONTENTS[start : max(start, end - self.short_by)]


@pytest.fixture
def faulty(monkeypatch):
    # `fsspec.registry` is a read-only view of it.
    known = sys.modules["fsspec.registry"]._registry
    for name in ("faulty", "s3"):
        monkeypatch.setitem(known, name, Faulty)
    monkeypatch.setattr(remote_files, "_FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(Faulty, "errors", [])
    monkeypatch.setattr(Faulty, "num_calls", 0)
    yield Faulty


@pytest.fixture
def folder():
    system = fsspec.filesystem("memory")
    system.pipe({"/data/a.bin": CONTENTS, "/data/b.bin": b"123", "/data/more/c.bin": b"1234"})
    yield "memory://data"
    system.rm("/data", recursive=True)


def read(file, offset, length):
    buffer = bytearray(length)
    file.read_into(offset, buffer)
    return bytes(buffer)


# Reading.


@pytest.mark.parametrize(("offset", "length"), [(0, 0), (0, 10), (1000, 5000), (1 << 19, 1 << 19), (0, 1 << 20)])
def test_any_run_of_bytes_can_be_read(folder, offset, length):
    file = RemoteFile(f"{folder}/a.bin")

    assert file.size == len(CONTENTS)
    assert file.name == "memory://data/a.bin"
    assert read(file, offset, length) == CONTENTS[offset : offset + length]


def test_files_of_this_machine_can_be_given_as_addresses(tmp_path):
    (tmp_path / "x.bin").write_bytes(CONTENTS)

    assert read(RemoteFile(f"file://{tmp_path}/x.bin"), 77, 100) == CONTENTS[77:177]


def test_long_reads_are_several_requests(faulty, monkeypatch):
    monkeypatch.setattr(remote_files, "_PIECE_BYTES", 100_000)
    file = RemoteFile("faulty://x")

    assert read(file, 5, 1_000_000) == CONTENTS[5:1_000_005]
    assert faulty.num_calls == 1 + 10


def test_reads_beyond_the_end_name_what_is_missing(folder):
    with pytest.raises(BadFile, match=r"'memory://data/b\.bin' ends too early: of 10 bytes at offset 1 the last 8 are"):
        read(RemoteFile(f"{folder}/b.bin"), 1, 10)


def test_it_can_be_pickled_and_forked(folder):
    file = RemoteFile(f"{folder}/a.bin")

    assert read(pickle.loads(pickle.dumps(file)), 3, 5) == CONTENTS[3:8]
    if hasattr(os, "fork"):
        child = os.fork()
        if child == 0:
            os._exit(0 if read(file, 0, 100) == CONTENTS[:100] else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_several_threads_may_read(folder):
    file = RemoteFile(f"{folder}/a.bin")
    wrong = []

    def check(start):
        for offset in range(start, start + 40_000, 1_000):
            if read(file, offset, 1_000) != CONTENTS[offset : offset + 1_000]:
                wrong.append(offset)

    threads = [threading.Thread(target=check, args=(start,)) for start in (0, 10_000, 300_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []


def test_a_request_that_is_refused_is_told(faulty):
    file = RemoteFile("faulty://x")
    faulty.errors.append(PermissionError("no"))

    with pytest.raises(BadFile, match="the server refused it"):
        read(file, 0, 100)
    assert read(file, 0, 100) == CONTENTS[:100]


# Things that go wrong.


def test_errors_that_pass_are_tried_again(faulty):
    file = RemoteFile("faulty://x")
    faulty.errors[:] = [TimeoutError("slow"), ConnectionResetError("reset"), OSError(errno.EIO, "strange")]

    assert read(file, 0, 10) == CONTENTS[:10]
    assert faulty.num_calls == 1 + 4


def test_there_is_an_end_to_trying(faulty):
    file = RemoteFile("faulty://x")
    faulty.errors[:] = [TimeoutError("slow")] * 10

    with pytest.raises(BadFile, match=r"^'faulty://x' can't be read \(tried 4 times\): slow\.$"):
        read(file, 0, 10)


def test_short_answers_are_noticed(faulty, monkeypatch):
    file = RemoteFile("faulty://x")
    monkeypatch.setattr(faulty, "short_by", 3)

    with pytest.raises(BadFile, match="3 of 10 bytes at offset 0 are missing"):
        read(file, 0, 10)


def test_servers_that_give_whole_files_are_noticed(faulty, monkeypatch):
    file = RemoteFile("faulty://x")
    monkeypatch.setattr(faulty, "short_by", -5)

    with pytest.raises(
        BadFile, match=r"gave 15 bytes at offset 0, and 10 were asked for\. Its server may not support range requests"
    ):
        read(file, 0, 10)


class NoCredentialsError(Exception):
    pass


class EndpointConnectionError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (FileNotFoundError("x"), "'s3://bucket/x.npy' doesn't exist"),
        (FileNotFoundError("The specified bucket does not exist"), "there is no such bucket"),
        (PermissionError("Forbidden"), r"the server refused it. Check the credentials .*s3:GetObject"),
        (NoCredentialsError("Unable to locate"), "no credentials were found. Set AWS_ACCESS_KEY_ID"),
        (EndpointConnectionError("no"), "its server can't be reached. Check the network and AWS_ENDPOINT_URL"),
        (RuntimeError("odd\nand long"), r"can't be read: odd\."),
    ],
)
def test_what_cannot_be_mended_is_said_once(faulty, error, text):
    faulty.errors.append(error)

    with pytest.raises(BadFile, match=text) as caught:
        RemoteFile("s3://bucket/x.npy")

    assert faulty.num_calls == 1
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_no_secret_is_shown(faulty, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")
    faulty.errors.append(ValueError("signed with wJalrXUtnFEMI for https://h/x?X-Amz-Signature=abc and p4ss"))

    with pytest.raises(BadFile) as caught:
        RemoteFile("faulty://ada:p4ss@host/x")

    assert str(caught.value) == (
        "'faulty://ada:***@host/x' can't be read: signed with *** for https://h/x?... and ***."
    )
    assert shown("s3://b/what?.npy") == "s3://b/what?.npy"


def test_files_of_unknown_size_are_refused(faulty):
    with pytest.raises(BadFile, match="can't be read in parts: its server doesn't say how large it is"):
        RemoteFile("faulty://endless")


def test_folders_are_no_files(folder):
    with pytest.raises(BadFile, match="'memory://data/more' is a folder"):
        RemoteFile(f"{folder}/more")


def test_missing_packages_are_named(monkeypatch):
    def fail(path):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", fail)
    with pytest.raises(MissingDependency, match=r"pip install s3fs"):
        RemoteFile("s3://bucket/x.npy")
    with pytest.raises(MissingDependency, match=r"for gs:// addresses that isn't installed. Install s3fs"):
        RemoteFile("gs://bucket/x.npy")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(MissingDependency, match=r"pip install fsspec"):
        RemoteFile("s3://bucket/x.npy")


def test_unknown_protocols_are_refused():
    with pytest.raises(BadFile, match=r"'fax://x' can't be read: Protocol not known: fax\."):
        RemoteFile("fax://x")


# Looking around.


def test_changed_files_are_recognised(folder):
    before = stat_remote(f"{folder}/b.bin")
    assert before == stat_remote(f"{folder}/b.bin")

    fsspec.filesystem("memory").pipe("/data/b.bin", b"321")

    assert stat_remote(f"{folder}/b.bin") != before


@pytest.mark.parametrize(
    ("info", "mark"),
    [({"ETag": "x", "mtime": 1}, 2363233923.0), ({"mtime": 5}, 5.0), ({"updated": "x"}, 2363233923.0), ({}, 0.0)],
)
def test_the_mark_is_of_the_contents_where_the_server_knows_them(info, mark):
    assert remote_files._mark_of(info) == mark


def test_folders_are_listed(folder):
    found = list_folder(folder)

    assert found == [("a.bin", False, 1 << 20), ("b.bin", False, 3), ("more", True, 0)]
    assert list_folder(folder + "/") == found
    assert is_folder(folder)
    assert not is_folder(f"{folder}/a.bin")
    assert not is_folder(f"{folder}/nothing")
    with pytest.raises(BadFile, match="'memory://nothing' doesn't exist"):
        list_folder("memory://nothing")


def test_patterns_find_files(folder, tmp_path):
    (tmp_path / "x.bin").write_bytes(b"1")

    assert glob_remote(f"{folder}/*.bin") == ["memory://data/a.bin", "memory://data/b.bin"]
    assert glob_remote(f"{folder}/**/c.bin") == ["memory://data/more/c.bin"]
    assert glob_remote(f"{folder}/*.npy") == []
    assert glob_remote(f"file://{tmp_path}/*.bin") == [f"file://{tmp_path}/x.bin"]


def test_a_file_object_reads_seeks_and_keeps_little(folder, monkeypatch):
    monkeypatch.setattr(remote_files, "_BLOCK_BYTES", 1_000)
    with as_file(f"{folder}/a.bin") as file:
        assert (file.readable(), file.seekable()) == (True, True)
        assert file.read(10) == CONTENTS[:10]
        assert file.seek(995) == 995
        assert file.read(20) == CONTENTS[995:1_015]
        assert file.seek(5, os.SEEK_CUR) == file.tell() == 1_020
        assert file.read(30_000) == CONTENTS[1_020:31_020]
        assert file.seek(-4, os.SEEK_END)
        assert file.read() == CONTENTS[-4:]
        assert file.read(1) == b""
        for offset in range(0, 100_000, 5_000):
            file.seek(offset)
            file.read(1)
        assert len(file._blocks) <= 8
        with pytest.raises(OSError, match="before the beginning"):
            file.seek(-1)
    assert file._blocks == {}
