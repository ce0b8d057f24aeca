"""Files of a dry run, kept apart from the user's where the kernel gives no view of its own (`processes.overlay`).

Python's functions on files get stand-ins, which do what an overlay does: what the program writes goes into a layer, a
folder that mirrors the whole file system, and is read back from there. What the user has is copied there before it is
changed, and hidden where it is removed. All that is known is on disk, so that the processes of a script see the same.
Folders are made where they are asked for and go at the end, so that compiled libraries, which know nothing of the
layer, find them. Left alone are folders that are said to be real, such as caches of downloads; devices; and what is new
in folders for temporary files, through which processes talk.
"""

import builtins
import contextlib
import errno
import functools
import io
import json
import os
import shutil
import stat
import sys
import tempfile
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from memfit.core.folder_listing import LayerEntry, Listing

Plain = Callable[..., Any]  # the function that a stand-in is for, which each of them gets first
AnyPath = Any  # what open() takes: a string, bytes or a path object; a descriptor is left alone

REDIRECTED = "checkpoint-redirected"
KEPT = "deletion-skipped"
LAYER = "redirected"
"""Name of the layer in the dry run's folder."""

# In that folder, too: what is real; the folders that the program made, one to a line; there where it made links.
_REAL, _MADE, _LINKS = "real.json", "made", "links"
# Before the name, in the layer, of what the user has and the program has removed.
_GONE = ".memfit-gone."
# There programs talk to the kernel and to each other.
_LIVE, _SHARED_MEMORY = ("/dev", "/proc", "/sys"), "/dev/shm"
_MOST_LINKS = 40
# Who asks whether a function of `os` can do something looks for that function in these.
_CAPABILITIES = ("supports_dir_fd", "supports_fd", "supports_follow_symlinks")
_TABLE = "_file_openers"
_GET_PATH = 50  # F_GETPATH of macOS

_thread = threading.local()


@contextlib.contextmanager
def unredirected(is_real: bool = True) -> Iterator[None]:
    """In this thread Python's functions on files are its own, for what is memfit's and not the program's."""
    before, _thread.is_real = getattr(_thread, "is_real", False), is_real
    try:
        yield
    finally:
        _thread.is_real = before


def is_within(path: str, folder: str) -> bool:
    """Whether an absolute path is that of a folder or of something in it."""
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def remove_made(folder: str) -> None:
    """Removes the folders that a program made and left empty; `folder` is that of its dry run."""
    for path in reversed(_made(folder)):
        with contextlib.suppress(OSError):
            os.rmdir(path)


def follow(folder: str, *, real: Iterable[str] = ()) -> "RedirectedFiles":
    """Files are kept apart in this process until it ends; as for `RedirectedFiles`."""
    if folder not in _followed:
        _followed[folder] = RedirectedFiles(folder, real=real)
        _until_end.enter_context(_followed[folder].in_place())
    return _followed[folder]


_followed: dict[str, "RedirectedFiles"] = {}
_until_end = contextlib.ExitStack()


def _made(folder: str) -> list[str]:
    with contextlib.suppress(OSError):
        return [str(json.loads(line)) for line in Path(folder, _MADE).read_bytes().splitlines()]
    return []


class RedirectedFiles:
    """What a program writes, and stand-ins for Python's functions on files.

    A file is known by its key: its absolute path, with the links on the way to it resolved as the program sees them.
    """

    def __init__(
        self,
        folder: str,  # of the dry run, which outlives it
        *,
        real: Iterable[str] = (),  # folders in which writing is real
        keeps_new: bool = False,  # whether what the program opens is real as long as the user has nothing there
        report: Callable[[str, str], None] = lambda code, text: None,  # takes (code, text) of each file kept apart
        concerns: Callable[[], bool] = lambda: True,  # whether the thread that runs is one of the program's
    ) -> None:
        self._folder = os.path.realpath(folder)
        self._layer = os.path.join(self._folder, LAYER)
        self._keeps_new = keeps_new
        self._report = report
        self._concerns = concerns
        self._is_active = False
        self._new: set[str] = set()
        self._links = os.path.join(self._folder, _LINKS)
        self._folders: dict[str, str] = {}  # as the system resolves them
        known = Path(folder, _REAL)
        if not known.exists():
            # Asked for now: `tempfile` makes a file and removes it to find out, and holds a lock meanwhile.
            roots = [os.path.realpath(root) for root in (tempfile.gettempdir(), _SHARED_MEMORY) if os.path.isdir(root)]
            os.makedirs(self._layer, exist_ok=True)
            scratch = {root: os.listdir(root) for root in roots}
            known.write_text(json.dumps([[*map(os.path.realpath, real)], scratch]), encoding="utf-8")
        # Folders, and by each folder for temporary files what the user had there.
        self._real, self._scratch = json.loads(known.read_text(encoding="utf-8"))

    def existing(self, path: AnyPath, *, follows: bool = True) -> AnyPath:
        """Where the file is that the program finds at `path`; raises FileNotFoundError for what it has removed."""
        if isinstance(path, int):
            return path
        with unredirected():
            key, is_linked = self._resolved(path, follows)
            place = self._in_layer(key)
            if place is None and self._is_hidden(key):
                raise _missing(path)
            return place or (key if is_linked else path)

    def target(self, path: AnyPath, mode: str = "w", *, is_opened: bool = False) -> AnyPath:
        """Where the file goes that the program writes to `path`, as open() is told to by `mode`.

        What is simulated is kept apart from everything; what the program opens itself may be a new temporary file.
        """
        if isinstance(path, int):
            return path
        with unredirected():
            key, is_linked = self._resolved(path, follows=True)
            place, folder, creates = self._in_layer(key), os.path.dirname(key), set(mode) & set("wax")
            if place is not None:
                return place
            is_hidden = self._is_hidden(key)
            if self._is_hidden(folder) or (is_hidden and not creates):
                raise _missing(path)
            is_there = os.path.lexists(key) and not is_hidden
            fails = not os.path.isdir(folder) or not (is_there or creates) or (is_there and "x" in mode)
            fails = fails or not os.access(key if is_there else folder, os.W_OK)
            if fails or (is_there and not os.path.isfile(key)) or self._is_real(key, is_opened):
                return key if is_linked else path
            place = self._prepared(key)
            if is_there and "w" not in mode:
                shutil.copy2(key, place)
            return place

    def is_own(self, path: str) -> bool:
        """Whether a file is in the layer."""
        return is_within(os.path.realpath(path), self._layer)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The stand-ins are there while it lasts; modules that keep one have the plain function afterwards."""
        others: dict[Callable[..., Any], tuple[str, ...]] = {
            self._look: ("stat", "lstat", "access", "readlink", "chdir", "getxattr", "listxattr"),
            self._change: ("chmod", "lchmod", "chown", "lchown", "utime", "setxattr", "removexattr"),
            self._remove: ("remove", "unlink"),
            self._rename: ("rename", "replace"),
            self._link: ("link",),
            self._symlink: ("symlink",),
            self._open_descriptor: ("open",),
            self._mkdir: ("mkdir",),
            self._rmdir: ("rmdir",),
            self._listdir: ("listdir",),
            self._scandir: ("scandir",),
            self._truncate: ("truncate",),
        }
        values = {
            getattr(os, name): self.stand_in(getattr(os, name), other)
            for other, names in others.items()
            for name in names
            if hasattr(os, name)
        }
        able = [(os, name, {values.get(plain, plain) for plain in getattr(os, name)}) for name in _CAPABILITIES]
        values |= {open: self.stand_in(open, self._open), io.FileIO: self._file_type()}
        with contextlib.suppress(ImportError):
            import sqlite3

            values[sqlite3.connect] = self.stand_in(sqlite3.connect, self._connect)
        with contextlib.ExitStack() as stack:
            for module, name, value in [*held_by_modules(values), *able, (builtins, "open", values[open])]:
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, value)
            # numpy keeps open() in a table, once it has read or written a text file.
            table = vars(getattr(sys.modules.get("numpy.lib._datasource"), "_file_openers", object)).get(_TABLE, {})
            if None in table:
                stack.callback(table.__setitem__, None, table[None])
                table[None] = self.stand_in(table[None], self._open)
            self._is_active = True
            stack.callback(setattr, self, "_is_active", False)
            yield

    def stand_in(self, plain: Plain, other: Callable[..., Any]) -> Callable[..., Any]:
        """Calls `other`, with the function first, or that function itself when the run is over."""

        @functools.wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._applies():
                return plain(*args, **kwargs)
            with unredirected():
                return other(plain, *args, **kwargs)

        return call

    def _applies(self) -> bool:
        return self._is_active and not getattr(_thread, "is_real", False) and self._concerns()

    # What is known of a path

    def _resolved(self, path: AnyPath, follows: bool = False) -> tuple[str, bool]:
        """The key of a path, and whether a link of the program's is on the way; the last one where it `follows`."""
        given = os.fsdecode(path)
        if not given:
            raise _missing(path)
        # Not normalized: after a link, ".." is the folder above what it leads to.
        has_parents = os.pardir in given.split(os.sep)
        whole = os.path.join(os.getcwd(), given) if has_parents else os.path.abspath(given)
        if is_within(whole, self._layer):
            whole = whole[len(self._layer) :]
        elif not has_parents and (_is_live(whole) or is_within(whole, self._folder)):
            return whole, False
        if not has_parents and not os.path.exists(self._links):
            # As the system resolves it, which is quick.
            folder, name = os.path.split(whole)
            if folder not in self._folders:
                self._folders[folder] = os.path.realpath(folder)
            here = os.path.join(self._folders[folder], name)
            is_link = follows and os.path.islink(here) and self._link_at(here)[0]
            return os.path.realpath(here) if is_link else here, False
        names, current, num_links, is_linked = whole.split(os.sep)[::-1], os.sep, 0, False
        while names:
            name = names.pop()
            here = os.path.normpath(os.path.join(current, name))
            if names and self._in_layer(here) is None and self._is_hidden(here):
                raise _missing(path)
            link, is_own = self._link_at(here) if names or follows else ("", False)
            if link:
                names += link.split(os.sep)[::-1]
                num_links += 1
                is_linked |= is_own
            if num_links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
            current = here if not link else os.sep if link.startswith(os.sep) else current
        return current, is_linked

    def _link_at(self, key: str) -> tuple[str, bool]:
        """What a link leads to, "" for all else, and whether it is one of the program's."""
        place = self._in_layer(key)
        if place is None and self._is_hidden(key):
            return "", False
        with contextlib.suppress(OSError):
            return os.readlink(place or key), place is not None
        return "", False

    def _in_layer(self, key: str) -> str | None:
        """Where the program has written this file, or its link; None where it hasn't."""
        place = self._layer + key
        with contextlib.suppress(OSError):
            return None if stat.S_ISDIR(os.lstat(place).st_mode) else place
        return None

    def _gone(self, key: str) -> str:
        folder, name = os.path.split(self._layer + key)
        return os.path.join(folder, _GONE + name)

    def _is_hidden(self, key: str) -> bool:
        return os.path.lexists(self._gone(key))

    def _is_real(self, key: str, is_opened: bool = True) -> bool:
        """Whether writing there is real; what the program opens itself also is where nothing of the user's can be."""
        if _is_live(key) or any(is_within(key, root) for root in (self._folder, *self._real)):
            return True
        if not is_opened:
            return False
        for root, names in self._scratch.items():
            if key.startswith(root + os.sep) and key[len(root) + 1 :].partition(os.sep)[0] not in names:
                return True
        if self._keeps_new and not os.path.lexists(key):
            self._new.add(key)
        return key in self._new

    # What is noted

    def _hide(self, key: str) -> None:
        """The program removes what the user has there: it stays, and the program sees it gone."""
        if os.path.lexists(key) and not self._is_hidden(key):
            os.makedirs(os.path.dirname(self._layer + key), exist_ok=True)
            os.symlink(key, self._gone(key))
            if os.path.islink(key):
                # The system would still follow it.
                Path(self._links).touch()
            self._report(KEPT, f"{key} is yours and was not removed")

    def _prepared(self, key: str) -> str:
        """The place in the layer of a file that is about to be written."""
        folder = os.path.dirname(key)
        if self._is_hidden(folder) or not os.path.isdir(folder):
            raise _missing(key)
        os.makedirs(self._layer + folder, exist_ok=True)
        if _is_folder(self._layer + key):
            # It holds what the program removed there before it removed the folder, which is marked itself.
            shutil.rmtree(self._layer + key)
        self._report(REDIRECTED, f"{key} was not touched; what was saved there is discarded at the end")
        return self._layer + key

    def _note_made(self, key: str) -> None:
        with open(os.path.join(self._folder, _MADE), "ab", buffering=0) as file:
            file.write(json.dumps(key).encode() + b"\n")

    # Stand-ins

    def _open(self, plain: Plain, file: AnyPath, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if len(args) > 5 or kwargs.get("opener") is not None:
            # It has its own idea of what the path means, and opens it by itself.
            with unredirected(False):
                return plain(file, mode, *args, **kwargs)
        return plain(self._opened(file, mode), mode, *args, **kwargs)

    def _opened(self, path: AnyPath, mode: str) -> AnyPath:
        return self.target(path, mode, is_opened=True) if set(mode) & set("wxa+") else self.existing(path)

    def _open_descriptor(
        self, plain: Plain, path: AnyPath, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> int:
        whole = _whole(path, dir_fd)
        mode_of_open = "r"
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_CREAT):
            mode_of_open = "+" if not flags & os.O_CREAT else "x" if flags & os.O_EXCL else "a"
            mode_of_open += "w" if flags & os.O_CREAT and flags & os.O_TRUNC else ""
        place = self._opened(whole, mode_of_open)
        return int(plain(path, flags, mode, dir_fd=dir_fd) if place is whole else plain(place, flags, mode))

    def _file_type(self) -> type:
        files, plain = self, io.FileIO

        class Meta(type(plain)):  # type: ignore[misc]
            def __instancecheck__(cls, instance: object) -> bool:
                return isinstance(instance, plain)

        class FileIO(plain, metaclass=Meta):  # type: ignore[misc, valid-type]
            """In the place of io.FileIO, for those who make one themselves."""

            def __init__(self, file: AnyPath, mode: str = "r", *args: Any, **kwargs: Any) -> None:
                has_opener = len(args) > 1 or kwargs.get("opener") is not None
                if not has_opener and files._applies():
                    file = files._opened(file, mode)
                super().__init__(file, mode, *args, **kwargs)

        return FileIO

    def open_h5py(
        self, plain: Plain, file: Any, name: AnyPath, mode: str | None = "r", *args: Any, **kwargs: Any
    ) -> None:
        """For `h5py.File.__init__`: HDF5 opens files by itself."""
        if isinstance(name, str | bytes | os.PathLike):
            name = self.existing(name) if mode in (None, "r") else self.target(name, str(mode))
        plain(file, name, mode, *args, **kwargs)

    def _connect(self, plain: Plain, database: AnyPath, *args: Any, **kwargs: Any) -> Any:
        """For `sqlite3.connect`."""
        if kwargs.get("uri") and os.fsdecode(database).startswith("file:"):
            return plain(self._database_of(os.fsdecode(database)), *args, **kwargs)
        is_file = database not in ("", b"", ":memory:", b":memory:")
        return plain(self._opened(database, "a") if is_file else database, *args, **kwargs)

    def _database_of(self, uri: str) -> str:
        parts = urllib.parse.urlsplit(uri)
        path, options = urllib.parse.unquote(parts.path), urllib.parse.parse_qs(parts.query)
        if path in ("", ":memory:") or options.get("mode") == ["memory"]:
            return uri
        only_reads = options.get("mode") == ["ro"] or options.get("immutable") == ["1"]
        place = os.path.abspath(self._opened(path, "r" if only_reads else "a"))
        return urllib.parse.urlunsplit(parts._replace(path=urllib.parse.quote(place)))

    def _truncate(self, plain: Plain, path: AnyPath, length: int) -> None:
        plain(self._opened(path, "r+"), length)

    def _look(self, plain: Plain, path: AnyPath, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
        """What asks for something of a file."""
        whole = _whole(path, dir_fd)
        follows = plain.__name__ not in ("lstat", "readlink") and kwargs.get("follow_symlinks", True)
        try:
            return plain(self.existing(whole, follows=follows), *args, **kwargs)
        except FileNotFoundError:
            if plain.__name__ == "access":
                return False
            raise

    def _change(self, plain: Plain, path: AnyPath, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> None:
        """What changes a file's attributes; those of folders of the user's stay."""
        place = self._opened(_whole(path, dir_fd), "r+")
        key, _ = ("", False) if isinstance(place, int) else self._resolved(place, follows=True)
        is_own = self._in_layer(key) is not None or self._is_real(key) or key in _made(self._folder)
        if is_own or not os.path.lexists(key):
            plain(place, *args, **kwargs)

    def _remove(self, plain: Plain, path: AnyPath, *, dir_fd: int | None = None) -> None:
        whole = _whole(path, dir_fd)
        place = self.existing(whole, follows=False)
        key, _ = self._resolved(whole)
        if self._in_layer(key) is not None:
            self._hide(key)
            plain(place)
        elif self._is_real(key) or not os.path.lexists(key) or _is_folder(key):
            plain(path, dir_fd=dir_fd)
        else:
            self._hide(key)

    def _rename(self, plain: Plain, src: AnyPath, dst: AnyPath, **descriptors: int | None) -> None:
        src, dst = _whole(src, descriptors.get("src_dir_fd")), _whole(dst, descriptors.get("dst_dir_fd"))
        here = self.existing(src, follows=False)
        (source, _), (destination, _) = self._resolved(src), self._resolved(dst)
        if _is_folder(here):
            self._rename_folder(plain, source, destination)
            return
        if not os.path.lexists(here) or _is_folder(destination):
            plain(here, destination)  # which fails
        is_own = self._in_layer(source) is not None
        may_go = is_own or self._is_real(source)
        place = self._in_layer(destination)
        if place is None:
            # What may hold shapes, or is the user's, becomes no new file.
            is_real = self._is_real(destination, is_opened=may_go and not is_own)
            place = destination if is_real else self._prepared(destination)
        if os.path.lexists(place) and (os.path.islink(place) or os.path.islink(here)):
            os.remove(place)  # a copy would follow it
        if may_go:
            shutil.move(here, place)
        else:
            shutil.copy2(here, place, follow_symlinks=False)
        if os.path.islink(place):
            Path(self._links).touch()
        self._hide(source)

    def _rename_folder(self, plain: Plain, source: str, destination: str) -> None:
        if source == destination:
            return
        if is_within(destination, source):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), source, None, destination)
        if not os.path.isdir(os.path.dirname(destination)) or self._is_hidden(os.path.dirname(destination)):
            raise _missing(destination)
        made = _made(self._folder)
        is_own = source in made or (self._is_real(source) and self._is_real(destination))
        if not is_own or os.path.lexists(destination):
            with unredirected(False):
                move_folder(source, destination)
            return
        plain(source, destination)
        for key in made:
            if is_within(key, source):
                self._note_made(destination + key[len(source) :])
        if os.path.isdir(self._layer + source):
            os.makedirs(os.path.dirname(self._layer + destination), exist_ok=True)
            os.rename(self._layer + source, self._layer + destination)

    def _link(self, plain: Plain, src: AnyPath, dst: AnyPath, **options: Any) -> None:
        src, dst = _whole(src, options.get("src_dir_fd")), _whole(dst, options.get("dst_dir_fd"))
        here, (source, _), (destination, _) = self.existing(src), self._resolved(src, True), self._resolved(dst)
        self._check_free(destination)
        if self._in_layer(source) is None and self._is_real(source) and self._is_real(destination):
            plain(source, destination)
        else:
            # A name more of the user's file would be a way to change it.
            shutil.copy2(here, self._prepared(destination))

    def _symlink(
        self, plain: Plain, src: AnyPath, dst: AnyPath, *args: Any, dir_fd: int | None = None, **options: Any
    ) -> None:
        key, _ = self._resolved(_whole(dst, dir_fd))
        self._check_free(key)
        if self._is_real(key, is_opened=False):
            plain(src, key, *args, **options)
        else:
            plain(os.fsdecode(src), self._prepared(key), *args, **options)
            Path(self._links).touch()

    def _mkdir(self, plain: Plain, path: AnyPath, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        key, _ = self._resolved(_whole(path, dir_fd))
        self._check_free(key)
        if self._is_hidden(key) and _is_folder(key):
            for name in os.listdir(key):
                self._hide(os.path.join(key, name))
            os.remove(self._gone(key))
            return
        if self._is_hidden(os.path.dirname(key)):
            raise _missing(path)
        plain(key, mode)
        self._note_made(key)

    def _rmdir(self, plain: Plain, path: AnyPath, *, dir_fd: int | None = None) -> None:
        whole = _whole(path, dir_fd)
        self.existing(whole, follows=False)
        key, _ = self._resolved(whole)
        if not _is_folder(key) or self._is_real(key):
            plain(path, dir_fd=dir_fd)
            return
        if self._listdir(os.listdir, key):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        if key in _made(self._folder):
            # Others may have written to it.
            with contextlib.suppress(OSError):
                plain(key)
                shutil.rmtree(self._layer + key, ignore_errors=True)
                return
        self._hide(key)

    def _check_free(self, key: str) -> None:
        if self._in_layer(key) is not None or (os.path.lexists(key) and not self._is_hidden(key)):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), key)

    def _listdir(self, plain: Plain, path: AnyPath = ".") -> Any:
        place, _, added, hidden = self._listed(path)
        as_given = os.fsencode if isinstance(path, bytes) else str
        return [name for name in plain(place) if os.fsdecode(name) not in hidden] + [*map(as_given, added)]

    def _scandir(self, plain: Plain, path: AnyPath = ".") -> Any:
        place, folder, added, hidden = self._listed(path)
        if not hidden:
            return plain(place)
        with plain(place) as entries:
            shown = [entry for entry in entries if os.fsdecode(entry.name) not in hidden]
        given = "" if path is None or isinstance(path, int) else os.fspath(path)
        return Listing(shown, (LayerEntry(folder, given, name) for name in added))

    def _listed(self, path: AnyPath) -> tuple[AnyPath, str, list[str], set[str]]:
        """The folder to list, its key, names that are to be shown in addition, and those of its own that are not."""
        place = self.existing("." if path is None else path)
        folder = _of_descriptor(place) if isinstance(place, int) else self._resolved(place, follows=True)[0]
        added, hidden = [], set[str]()
        with contextlib.suppress(OSError), os.scandir(self._layer + folder) as entries:
            for entry in entries:
                if entry.name.startswith(_GONE):
                    hidden.add(entry.name.removeprefix(_GONE))
                elif not entry.is_dir(follow_symlinks=False):
                    added.append(entry.name)
        return place, folder, added, hidden.union(added)


def held_by_modules(values: Mapping[Any, Any]) -> list[tuple[ModuleType, str, Any]]:
    """(module, name, value) for each module of Python that holds one of the things to be replaced by `values`."""
    others = {id(plain): value for plain, value in values.items()}
    return [
        (module, name, others[id(held)])
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType) and module.__name__ not in sys.builtin_module_names
        for name, held in list(vars(module).items())
        if id(held) in others
    ]


def move_folder(source: AnyPath, destination: AnyPath) -> None:
    """Renames a folder by copying what is in it."""
    if os.path.isdir(destination):
        os.rmdir(destination)
    shutil.copytree(source, destination, symlinks=True)
    shutil.rmtree(source)


def _is_live(path: str) -> bool:
    return any(is_within(path, root) for root in _LIVE) and not is_within(path, _SHARED_MEMORY)


def _is_folder(path: AnyPath) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _missing(path: AnyPath) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))


def _of_descriptor(descriptor: int) -> str:
    """The path of an open folder."""
    if os.path.isdir("/proc/self/fd"):
        return os.readlink(f"/proc/self/fd/{descriptor}")
    import fcntl

    return os.fsdecode(fcntl.fcntl(descriptor, _GET_PATH, bytes(1024)).rstrip(b"\0"))


def _whole(path: AnyPath, folder: int | None) -> AnyPath:
    """The path by which a file is known that was given below an open folder."""
    return path if folder is None else os.path.join(_of_descriptor(folder), os.fsdecode(path))
