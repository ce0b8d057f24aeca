"""Only plain files are read as such, and nothing is waited for."""

import os
import socket

import pytest

from memfit.core.plain_files import NotPlain, open_plain, plain_size, read_plain


def test_a_plain_file_is_read(tmp_path):
    (tmp_path / "file").write_bytes(b"hello")

    assert plain_size(tmp_path / "file") == 5
    assert read_plain(tmp_path / "file") == b"hello"
    assert read_plain(tmp_path / "file", 2) == b"he"
    with pytest.raises(FileNotFoundError):
        open_plain(tmp_path / "missing")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs on this system")
def test_anything_else_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"hello")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.chdir(tmp_path)  # a path of a socket has to be short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        names = {"link": "a symbolic link", "dangling": "a symbolic link", "fifo": "a FIFO", "socket": "a socket"}
        for name, kind in {**names, ".": "a directory", "/dev/zero": "a device"}.items():
            for read in (plain_size, open_plain, read_plain):
                with pytest.raises(NotPlain, match=f"it is {kind}, and a plain file was expected"):
                    read(tmp_path / name)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs on this system")
@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_what_takes_the_place_of_a_file_at_the_last_moment_is_refused(tmp_path, monkeypatch, kind):
    (tmp_path / "file").write_bytes(b"hello")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "fifo")
    plain = os.lstat
    monkeypatch.setattr(os, "lstat", lambda path: plain(tmp_path / "file"))

    with pytest.raises(NotPlain):
        open_plain(tmp_path / kind)
