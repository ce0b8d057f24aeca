"""A process that enters a view of files and does in it what scripts do: `python view_script.py FOLDER REPORT [WEAK]`.

It runs in a folder of the user's, writes in every way there is, and tells how it went on standard output, as JSON.
"""

import ctypes
import io
import json
import mmap
import multiprocessing
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "src"))

from memfit.processes import overlay

_SYS_ADMIN = 1 << 21


def give_up_mounting() -> None:
    """Root becomes somebody who may mount nothing, as in most containers."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    for index in (0, 1, 2):
        sets[index] &= ~_SYS_ADMIN
    assert libc.capset(header, sets) == 0


def by_child(path: str) -> None:
    Path(path).write_bytes(b"a child's")


def change(name: str) -> None:
    with open(name, "r+b") as file:
        file.write(b"changed")


def extend(name: str) -> None:
    with open(name, "ab") as file:
        file.write(b"extended")


def map_and_change(name: str) -> None:
    with open(name, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[:4] = b"MMAP"


def in_folder(name: str) -> None:
    folder = os.open(".", os.O_RDONLY)
    os.close(os.open(name, os.O_WRONLY | os.O_TRUNC, dir_fd=folder))
    os.unlink(name, dir_fd=folder)


def fork(name: str) -> None:
    if os.fork() == 0:
        by_child(name)
        os._exit(0)
    os.wait()


def start(method: str, name: str) -> None:
    process = multiprocessing.get_context(method).Process(target=by_child, args=(name,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert Path(name).read_bytes() == b"a child's"


def shell(command: str) -> None:
    subprocess.run(command, shell=True, check=True)


def insert(name: str) -> None:
    connection = sqlite3.connect(name)
    connection.execute("insert into numbers values (2)")
    connection.commit()
    connection.close()


def talk() -> None:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.join(folder, "socket"))
        server.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(os.path.join(folder, "socket"))


def hear(address: str) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)
        assert client.recv(5) == b"hello"


def rename_folder(name: str) -> None:
    os.rename(name, "renamed")
    assert os.listdir("renamed") == ["a.pt"]


WAYS = {
    "truncate": lambda: os.truncate("a0.pt", 0),
    "open and truncate": lambda: os.close(os.open("a1.pt", os.O_WRONLY | os.O_TRUNC)),
    "change": lambda: change("a2.pt"),
    "extend": lambda: extend("a3.pt"),
    "FileIO": lambda: io.FileIO("a4.pt", "w").close(),
    "in an open folder": lambda: in_folder("a5.pt"),
    "map": lambda: map_and_change("a6.pt"),
    "redirect": lambda: shell("echo shell > a7.pt"),
    "remove by command": lambda: shell("rm -rf runs"),
    "copy by command": lambda: os.system("cp a2.pt a8.pt"),
    "rename over": lambda: os.rename("a9.pt", "a10.pt"),
    "replace": lambda: os.replace("a11.pt", "a12.pt"),
    "remove a tree": lambda: shutil.rmtree("older"),
    "sqlite": lambda: insert("numbers.db"),
    "fork": lambda: fork("a13.pt"),
    "spawn": lambda: start("spawn", "a14.pt"),
    "mode": lambda: os.chmod("a15.pt", 0o600),
    "rename a folder": lambda: rename_folder("folder"),
    "new": lambda: Path("new.pt").write_bytes(b"new"),
    "null": lambda: Path(os.devnull).write_text("x", encoding="utf-8"),
    "shared memory": lambda: tempfile.TemporaryFile(dir="/dev/shm").close(),
    "own socket": talk,
    "somebody's socket": lambda: hear(sys.argv[2]),
}


def main() -> None:
    if "weak" in sys.argv:
        give_up_mounting()
    shared = [os.path.abspath("cache")]
    reason, read_only = overlay.enter([sys.argv[1]], shared=shared, written=[os.getcwd()])
    overlay.copy_renamed_folders()
    told = {"reason": reason, "read only": read_only, "failed": {}}
    if not reason:
        Path("cache", "fetched").write_text("fetched", encoding="utf-8")
        for name, act in WAYS.items():
            try:
                act()
            except Exception as error:
                told["failed"][name] = repr(error)
        told["seen"] = sorted(os.listdir("."))
        told["truncated"] = os.path.getsize("a0.pt")
    print(json.dumps(told))


if __name__ == "__main__":
    main()
