"""Files of a dry run, kept apart from the user's where there is no overlay (`memfit.processes.overlay`).

What a script saves during a dry run holds shapes, or weights of a training that was cut short. So files that look like
checkpoints are written below a folder of their own, and the script finds them where it put them. The user's older
checkpoints are not removed either; the script sees them gone. Python's functions on files have stand-ins meanwhile;
a library that opens files by itself, in C or Rust, needs its own.
"""

import builtins
import errno
import io
import itertools
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import Any

from memfit.core import env
from memfit.frameworks.torch.shapes.patching import Replacement, around

Report = Callable[[str, str], None]
Plain = Callable[..., Any]  # the function that a stand-in is for, which each of them gets first
Path = Any  # what open() takes: a string, bytes or a path object; a descriptor is left alone

REDIRECTED = "checkpoint-redirected"
KEPT = "deletion-skipped"

# Mostly data, through which processes of the script may talk to each other. But what the user has may be a model:
# data can be made again, a lost model cannot.
_SUFFIXES_OF_DATA = (".pkl", ".pickle", ".joblib")
_SUFFIXES = (
    *_SUFFIXES_OF_DATA,
    *(".bin", ".pt", ".pth", ".ckpt", ".safetensors", ".h5", ".hdf5", ".keras"),
    *(".distcp", ".metadata", ".pt.tar", ".pth.tar", ".ckpt.tar"),
)
_UNFINISHED = (".tmp", ".temp", ".part", ".new")
_FOLDER = re.compile(r"checkpoint-.+|checkpoint_\d+", re.IGNORECASE)
_SHARED_MEMORY = "/dev/shm/"
# Who asks whether a function of `os` can do something looks for that function in these.
_CAPABILITIES = ("supports_dir_fd", "supports_fd", "supports_follow_symlinks")


class RedirectedFiles:
    """Where the checkpoints of a dry run are, and stand-ins for Python's functions on files.

    A path is known by its key: absolute, with the links on the way to it resolved. Without a `folder` a temporary one
    is made on first use and removed at the end. Where files are `private`, nobody but the script sees what it writes,
    and files stay in place.
    """

    def __init__(self, folder: str | None, report: Report, *, private: bool = False) -> None:
        self.are_private = private
        self.redirected: dict[str, str] = {}  # key of the path asked for -> path written
        self.removed: set[str] = set()  # what the user has on disk and the script removed
        self.new_folders: set[str] = set()  # folders that the script made
        self.is_active = False  # whether the stand-ins are in place
        self._folder = None if folder is None else os.path.realpath(folder)
        self._are_kept = folder is not None
        self._report = report
        self._reported: set[tuple[str, str]] = set()
        self._names: set[str] = set()
        self._numbers = itertools.count()
        self._start = time.time()
        self._plain_lstat, self._plain_open, self._plain_copy = os.lstat, open, shutil.copyfile
        self._plain_replace, self._plain_remove = os.replace, os.remove
        # Fetching downloads again on every run would help nobody.
        self._caches = tuple(map(os.path.realpath, env.download_folders()))
        # Asked for now: `tempfile` removes a file to find out, and holds a lock meanwhile.
        self._scratch = (os.path.realpath(tempfile.gettempdir()) + os.sep, _SHARED_MEMORY)

    def key(self, path: Path) -> str:
        """What `path` is known by."""
        folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
        return os.path.join(os.path.realpath(folder), name)

    def known(self, path: Path) -> str | None:
        """The key of a path that the script wrote or removed; None for all others, which is quick to tell."""
        if not self._names or isinstance(path, int) or os.path.basename(os.fsdecode(path)) not in self._names:
            return None
        key = self.key(path)
        return key if key in self.redirected or key in self.removed else None

    def existing(self, path: Path) -> Path:
        """Where the file is that the script finds at `path`; raises FileNotFoundError for what the script removed."""
        key = self.known(path)
        if key in self.removed:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        return path if key is None else self.redirected.get(key, path)

    def target(self, path: Path) -> str:
        """Where the file goes that the script writes to `path`."""
        key = self.key(path)
        name = os.path.basename(key)
        self.removed.discard(key)
        self._names.add(name)
        if self.are_private:
            self.redirected[key] = os.fsdecode(path)
        if key not in self.redirected:
            self.redirected[key] = os.path.join(self._new_folder(), name)
            place = f"is in {self.redirected[key]}" if self._are_kept else "is discarded at the end"
            text = f"{key} was not touched; what was saved there {place}"
            if not os.path.isdir(os.path.dirname(key)):
                text += ". Its folder does not exist: without memfit, saving there would fail"
            self._note(REDIRECTED, key, text)
        return self.redirected[key]

    def opened(self, path: Path, mode: str) -> Path:
        """What to open when the script opens `path`."""
        if self.are_private:
            return path
        known = self.known(path)
        if known in self.redirected or not set(mode) & set("wxa+"):
            return self.existing(path)
        key = self.key(path)
        is_there = self._status(key) is not None and key not in self.removed
        is_users, is_data = self.is_older(key), key.lower().endswith(_SUFFIXES_OF_DATA)
        if "w" not in mode and is_there:
            # Data of any size are changed where they are: numpy's memmap opens files that way unless told otherwise.
            if is_data or key.lower().endswith(".bin") or not is_users or not self.is_checkpoint(key):
                return path
            with self._plain_open(key, "rb") as source, self._plain_open(self.target(path), "wb") as copy:
                shutil.copyfileobj(source, copy)
            return self.redirected[key]
        # Made by this run in a way that isn't seen here, or new data: another process may be meant to read it.
        if (is_there or (is_data and key not in self.removed)) and not is_users:
            return path
        # What the user had before is not overwritten by numbers that stand in for others, whatever its name; text is.
        is_replaced = {"b", "w"} <= set(mode) and is_users and not self._is_apart(key)
        return self.target(path) if is_replaced or self.is_checkpoint(key) else path

    def is_own(self, path: Path) -> bool:
        """Whether this is a file of the dry run's own: all are, or those below the folder of redirected ones."""
        if self.are_private:
            return True
        return self._folder is not None and self.key(path).startswith(self._folder + os.sep)

    def is_regular(self, path: Path) -> bool:
        """Whether a file is or could be at `path`, and not a folder or a device such as /dev/null."""
        return os.path.isfile(path) or self._status(self.key(path)) is None

    def is_older(self, key: str) -> bool:
        """Whether the user had something there before the run."""
        status = self._status(key)
        return status is not None and status.st_mtime < self._start

    def is_checkpoint(self, key: str) -> bool:
        """Whether a file of that name is taken for a checkpoint, or for a part of one."""
        for root in self._scratch:
            # A temporary folder of the script's own, through which it may talk to other processes, holds none.
            if key.startswith(root) and root + key[len(root) :].partition(os.sep)[0] in self.new_folders:
                return False
        if self._is_apart(key):
            return False
        folder, name = os.path.split(key)
        name = name.lower()
        for suffix in _UNFINISHED:
            name = name.removesuffix(suffix)
        return name.endswith(_SUFFIXES) or (_is_checkpoint_folder(folder) and folder not in self.new_folders)

    def _is_apart(self, key: str) -> bool:
        """Whether this is in a folder that is nobody's work: that of redirected files, or a cache."""
        return key.startswith(tuple(root + os.sep for root in (self._folder, *self._caches) if root))

    def finish(self) -> None:
        """Moves folders of checkpoints that the script made to the redirected files: later runs could resume from them.

        Without a folder to keep them in, redirected files are then removed. To be called when Python's functions are
        its own again.
        """
        asked = {os.path.dirname(path) for path in self.redirected}
        for folder in sorted(self.new_folders, key=len, reverse=True):
            if not os.path.isdir(folder):
                continue
            if _is_checkpoint_folder(folder):
                place = shutil.move(folder, self._new_folder())
                done = f"moved to {place}" if self._are_kept else "removed"
                self._note(REDIRECTED, folder, f"{folder}, made by this run, was {done}")
            elif folder in asked and not os.listdir(folder):
                os.rmdir(folder)
        if not self._are_kept and self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def replacement(self, owner: Any, name: str, other: Callable[..., Any]) -> Replacement:
        """A stand-in for `owner.name`, which `other` gets first; modules that keep it have the plain one afterwards."""
        return around(owner, name, other, lambda: self.is_active)

    def replacements(self) -> list[Replacement]:
        """What to put in place; hardly anything where the script's writes are its own anyway."""
        active = Replacement(self, "is_active", True)
        if self.are_private:
            return [active, *(self.replacement(os, name, _rename_folder) for name in ("rename", "replace"))]
        others: dict[Callable[..., Any], tuple[str, ...]] = {
            self._look: (
                *("stat", "lstat", "chmod", "lchmod", "chflags", "lchflags", "utime", "access"),
                *("getxattr", "listxattr", "setxattr", "removexattr"),
            ),
            self._remove: ("remove", "unlink"),
            self._rename: ("rename", "replace"),
            self._link: ("link", "symlink"),
            self._open_descriptor: ("open",),
            self._mkdir: ("mkdir",),
            self._listdir: ("listdir",),
            self._scandir: ("scandir",),
            self._truncate: ("truncate",),
        }
        of_os = [self.replacement(os, name, f) for f, names in others.items() for name in names if hasattr(os, name)]
        able = {name: set(getattr(os, name)) for name in _CAPABILITIES}
        for functions in able.values():
            functions |= {value for _, name, value in of_os if getattr(os, name) in functions}
        opening = self.replacement(builtins, "open", self._open)
        return [
            active,
            opening,
            Replacement(io, "open", opening.value),
            Replacement(io, "FileIO", self._file_type()),
            *of_os,
            self.replacement(shutil, "copyfile", self._copyfile),
            self.replacement(shutil, "rmtree", self._rmtree),
            *(Replacement(os, name, functions) for name, functions in able.items()),
        ]

    def _open(self, plain: Plain, file: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        # An opener has its own idea of what the path means.
        has_opener = len(args) > 5 or kwargs.get("opener") is not None
        if not isinstance(file, int) and not has_opener:
            file = self.opened(file, mode)
        return plain(file, mode, *args, **kwargs)

    def _open_descriptor(
        self, plain: Plain, path: Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> int:
        plain_path = whole = _whole(path, dir_fd)
        is_new = not self.known(whole) and not self.is_older(self.key(whole))
        if not flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC) or is_new:
            whole = self.existing(whole)
        elif not flags & os.O_EXCL:
            whole = self.opened(whole, "wb" if flags & os.O_TRUNC else "ab")
        if whole == plain_path:
            return int(plain(path, flags, mode, dir_fd=dir_fd))
        return int(plain(whole, flags | (flags & os.O_TRUNC and os.O_CREAT), mode))

    def _file_type(self) -> type:
        files, plain = self, io.FileIO

        class Meta(type(plain)):  # type: ignore[misc]
            def __instancecheck__(cls, instance: object) -> bool:
                return isinstance(instance, plain)

        class FileIO(plain, metaclass=Meta):  # type: ignore[misc, valid-type]
            """In the place of io.FileIO, for those who make one themselves."""

            def __init__(self, file: Path, mode: str = "r", *args: Any, **kwargs: Any) -> None:
                has_opener = len(args) > 1 or kwargs.get("opener") is not None
                if files.is_active and not isinstance(file, int) and not has_opener:
                    file = files.opened(file, mode + "b")
                super().__init__(file, mode, *args, **kwargs)

        return FileIO

    def _truncate(self, plain: Plain, path: Path, length: int) -> None:
        plain(path if isinstance(path, int) else self.opened(path, "r+b"), length)

    def _look(self, plain: Plain, path: Path, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dir_fd") is not None:
            return plain(path, *args, **kwargs)
        if plain.__name__ == "access" and self.known(path) in self.removed:
            return False
        return plain(self.existing(path), *args, **kwargs)

    def _remove(self, plain: Plain, path: Path, *, dir_fd: int | None = None) -> None:
        whole = _whole(path, dir_fd)
        key = self.key(whole)
        if self.known(whole) is not None:
            plain(self.existing(whole))
            self._forget(key)
        elif self.is_checkpoint(key) and self.is_older(key):
            self._keep(key)
        else:
            plain(path, dir_fd=dir_fd)

    def _rename(self, plain: Plain, src: Path, dst: Path, **descriptors: int | None) -> None:
        src, dst = _whole(src, descriptors.get("src_dir_fd")), _whole(dst, descriptors.get("dst_dir_fd"))
        source, destination = self.key(src), self.key(dst)
        here = self.existing(src)
        is_redirected = source in self.redirected
        is_kept_apart = destination in self.redirected or any(map(self.is_checkpoint, (source, destination)))
        if not is_redirected and not (is_kept_apart and os.path.isfile(src)):
            is_folder = os.path.isdir(src)
            plain(src, dst)
            if is_folder:
                for key in self._below(source):
                    self.redirected[destination + key[len(source) :]] = self.redirected.pop(key)
                if source in self.new_folders:
                    self.new_folders.discard(source)
                    self.new_folders.add(destination)
            return
        target = self.target(dst)
        if not is_redirected and self.is_older(source):
            self._plain_copy(here, target)
            self._keep(source)
            return
        try:
            self._plain_replace(here, target)
        except OSError:  # on another file system
            self._plain_copy(here, target)
            self._plain_remove(here)
        self._forget(source)

    def _link(self, plain: Plain, src: Path, dst: Path, *args: Any, **kwargs: Any) -> None:
        destination = self.key(dst)
        # A symbolic link says where its target is as seen from itself.
        start = os.path.dirname(destination) if plain.__name__ == "symlink" else ""
        source = os.path.join(start, os.fsdecode(src))
        follows = self.known(source) or (self.is_checkpoint(destination) and os.path.isfile(source))
        if not follows or any(value is not None for key, value in kwargs.items() if key.endswith("dir_fd")):
            plain(src, dst, *args, **kwargs)
            return
        here = self.existing(source)
        if os.path.lexists(dst):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), src, None, dst)
        self._plain_copy(here, self.target(dst))

    def _mkdir(self, plain: Plain, path: Path, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        key = self.key(path)
        if dir_fd is not None:
            plain(path, mode, dir_fd=dir_fd)
        elif key in self.removed:
            self.removed.discard(key)
        else:
            plain(path, mode)
            self.new_folders.add(key)

    def _rmtree(self, plain: Plain, path: Path, ignore_errors: bool = False, *args: Any, **kwargs: Any) -> None:
        key = self.key(path)
        if kwargs.get("dir_fd") is not None:
            plain(path, ignore_errors, *args, **kwargs)
            return
        if key in self.removed:
            if not ignore_errors:
                self.existing(path)
        elif os.path.isdir(path) and not os.path.islink(path) and self._holds_older(key):
            self._keep(key)
        else:
            plain(path, ignore_errors, *args, **kwargs)
            self.new_folders.discard(key)
        for each in self._below(key):
            self._plain_remove(self.redirected.pop(each))

    def _holds_older(self, folder: str) -> bool:
        """Whether checkpoints of the user's are in a folder."""
        if folder in self.new_folders or _is_checkpoint_folder(folder):
            return folder not in self.new_folders
        files = (os.path.join(where, name) for where, _, names in os.walk(folder) for name in names)
        return any(self.is_checkpoint(file) and self.is_older(file) for file in files)

    def _copyfile(self, plain: Plain, src: Path, dst: Path, *args: Any, **kwargs: Any) -> Any:
        # A copy of a redirected file is one, whatever its name; another that looks like one is when it is opened.
        if self.known(src) is not None:
            plain(self.existing(src), self.target(dst), *args, **kwargs)
            return dst
        return plain(src, dst, *args, **kwargs)

    def _listdir(self, plain: Plain, path: Path = ".") -> Any:
        names = plain(path)
        added, hidden = self._listed(path)
        as_given = os.fsencode if isinstance(path, bytes) else str
        shown = [name for name in names if os.fsdecode(name) not in hidden]
        return shown + [as_given(os.path.basename(place)) for place in added]

    def _scandir(self, plain: Plain, path: Path = ".") -> Any:
        entries = plain(path)
        added, hidden = self._listed(path)
        if not hidden:
            return entries
        # Each of them is alone in its folder.
        further = (entry for place in added for entry in plain(os.path.dirname(place)))
        return _Listing((entry for entry in entries if os.fsdecode(entry.name) not in hidden), further)

    def _listed(self, path: Path) -> tuple[list[str], set[str]]:
        """What a listing of a folder is to show in addition, and which names of its own it is to leave out."""
        if not self._names or isinstance(path, int):
            return [], set()
        folder = os.path.realpath("." if path is None else os.fsdecode(path))
        added = [place for key, place in list(self.redirected.items()) if os.path.dirname(key) == folder]
        removed = (os.path.basename(key) for key in list(self.removed) if os.path.dirname(key) == folder)
        return added, {os.path.basename(place) for place in added}.union(removed)

    def _below(self, folder: str) -> list[str]:
        return [key for key in list(self.redirected) if key.startswith(folder + os.sep)]

    def _keep(self, key: str) -> None:
        """The script removes what the user has there: it stays, and the script sees it gone."""
        self._names.add(os.path.basename(key))
        self.removed.add(key)
        self._note(KEPT, key, f"{key} is older than this run and was not removed")

    def _forget(self, key: str) -> None:
        """What the script wrote there is gone, and so is for the script what the user has there."""
        self.redirected.pop(key, None)
        if self._status(key) is not None:
            self.removed.add(key)

    def _status(self, key: str) -> os.stat_result | None:
        try:
            return self._plain_lstat(key)
        except OSError:
            return None

    def _note(self, code: str, key: str, text: str) -> None:
        if (code, key) not in self._reported:
            self._reported.add((code, key))
            self._report(code, text)

    def _new_folder(self) -> str:
        if self._folder is None:
            self._folder = os.path.realpath(tempfile.mkdtemp(prefix="memfit-dryrun-"))
        os.makedirs(self._folder, exist_ok=True)
        while True:
            # One for each file, so that files keep their names.
            folder = os.path.join(self._folder, str(next(self._numbers)))
            if not os.path.exists(folder):
                os.mkdir(folder)
                return folder


def _is_checkpoint_folder(folder: str) -> bool:
    return bool(_FOLDER.fullmatch(os.path.basename(folder)))


def _rename_folder(plain: Plain, src: Path, dst: Path, **descriptors: int | None) -> None:
    """In an overlay, a folder of the layer below can be renamed by root alone; all others must copy it."""
    try:
        plain(src, dst, **descriptors)
    except OSError as error:
        has_moved = error.errno == errno.EXDEV and os.path.isdir(src) and not os.path.islink(src)
        if not has_moved or descriptors or os.stat(src).st_dev != os.stat(os.path.dirname(dst) or ".").st_dev:
            raise
        if os.path.isdir(dst):
            os.rmdir(dst)
        shutil.copytree(src, dst, symlinks=True)
        shutil.rmtree(src)


def _whole(path: Path, folder: int | None) -> Path:
    """The path by which a file is known that was given below an open folder."""
    if folder is None or not os.path.isdir("/proc/self/fd"):
        return path
    return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fsdecode(path))


class _Listing(itertools.chain[Any]):
    """The entries of a folder and of the redirected files that belong there, as os.scandir gives them."""

    def __enter__(self) -> "_Listing":
        return self

    def __exit__(self, *error: object) -> None:
        """What is left is closed with its last entry."""

    close = __exit__
