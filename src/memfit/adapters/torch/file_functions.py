"""Python's functions on files, for as long as a dry run's checkpoints are kept apart from the user's.

Opening, looking at, listing, copying, linking, renaming and removing files follow `RedirectedFiles`; paths that it
doesn't know go to the function they were meant for. A library that opens files by itself, in C or Rust, doesn't pass
here and needs its own stand-in.
"""

import builtins
import errno
import functools
import io
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from memfit.adapters.torch.redirected_files import Path, RedirectedFiles
from memfit.adapters.torch.replacement import Replacement

_LOOKING = ("stat", "lstat", "chmod", "utime", "access")
_REMOVING = ("remove", "unlink")
_RENAMING = ("rename", "replace")
_LINKING = ("link", "symlink")
_COPYING = ("copymode", "copystat")
_OF_OS = (*_LOOKING, *_REMOVING, *_RENAMING, *_LINKING, "mkdir", "listdir", "scandir", "truncate")
_OF_SHUTIL = (*_COPYING, "copyfile", "rmtree")
# Who asks whether a function of `os` can do something looks for that function in these.
_CAPABILITIES = ("supports_dir_fd", "supports_fd", "supports_follow_symlinks")


class FileFunctions:
    """Stand-ins for Python's functions on files.

    Args:
        files: says what is where.
    """

    def __init__(self, files: RedirectedFiles) -> None:
        self._files = files
        self._plain = SimpleNamespace(
            open=builtins.open,
            open_descriptor=os.open,
            **{name: getattr(os, name) for name in _OF_OS},
            **{name: getattr(shutil, name) for name in _OF_SHUTIL},
        )
        self.is_active = False
        """Whether the stand-ins are in place."""

    def stand_in(self, plain: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
        """Calls `other` while the stand-ins are in place, and `plain` afterwards: modules keep what they imported."""

        @functools.wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (other if self.is_active else plain)(*args, **kwargs)

        return call

    def replacements(self) -> list[Replacement]:
        """What to put in place; nothing that concerns files where the script's writes are its own anyway."""
        active = Replacement(self, "is_active", True)
        if self._files.are_private:
            renaming = {name: self.stand_in(getattr(os, name), self._renaming_folders(name)) for name in _RENAMING}
            return [active, *(Replacement(os, name, value) for name, value in renaming.items())]
        others: dict[str, Callable[..., Any]] = {
            **{name: self._looking(name) for name in _LOOKING},
            **{name: self._removing(name) for name in _REMOVING},
            **{name: self._renaming(name) for name in _RENAMING},
            **{name: self._linking(name) for name in _LINKING},
            **{name: self._copying(name) for name in _COPYING},
            "mkdir": self._mkdir,
            "listdir": self._listdir,
            "scandir": self._scandir,
            "copyfile": self._copyfile,
            "rmtree": self._rmtree,
            "truncate": self._truncate,
        }
        made = {name: self.stand_in(getattr(self._plain, name), other) for name, other in others.items()}
        opening = self.stand_in(self._plain.open, self._open)
        return [
            active,
            Replacement(builtins, "open", opening),
            Replacement(io, "open", opening),
            Replacement(io, "FileIO", self._file_type()),
            Replacement(os, "open", self.stand_in(os.open, self._open_descriptor)),
            *(Replacement(os, name, made[name]) for name in _OF_OS),
            *(Replacement(shutil, name, made[name]) for name in _OF_SHUTIL),
            *(Replacement(os, name, self._able(getattr(os, name), made)) for name in _CAPABILITIES),
        ]

    def _able(self, able: set[Any], made: dict[str, Callable[..., Any]]) -> set[Any]:
        return able | {made[name] for name in _OF_OS if getattr(self._plain, name) in able}

    def _open(self, file: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        # An opener has its own idea of what the path means.
        has_opener = len(args) > 5 or kwargs.get("opener") is not None
        if not isinstance(file, int) and not has_opener:
            file = self._files.opened(file, mode)
        return self._plain.open(file, mode, *args, **kwargs)

    def _open_descriptor(self, path: Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        whole = _whole(path, dir_fd)
        is_new = not self._files.known(whole) and not self._files.is_older(self._files.key(whole))
        if not flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC) or is_new:
            whole = self._files.existing(whole)
        elif not flags & os.O_EXCL:
            whole = self._files.opened(whole, "wb" if flags & os.O_TRUNC else "ab")
        if whole == _whole(path, dir_fd):
            return int(self._plain.open_descriptor(path, flags, mode, dir_fd=dir_fd))
        return int(self._plain.open_descriptor(whole, flags | (flags & os.O_TRUNC and os.O_CREAT), mode))

    def _file_type(self) -> type:
        functions, plain = self, io.FileIO

        class Meta(type(plain)):  # type: ignore[misc]
            def __instancecheck__(cls, instance: object) -> bool:
                return isinstance(instance, plain)

        class FileIO(plain, metaclass=Meta):  # type: ignore[misc, valid-type]
            """In the place of io.FileIO, for those who make one themselves."""

            def __init__(self, file: Path, mode: str = "r", *args: Any, **kwargs: Any) -> None:
                has_opener = len(args) > 1 or kwargs.get("opener") is not None
                if functions.is_active and not isinstance(file, int) and not has_opener:
                    file = functions._files.opened(file, mode + "b")
                super().__init__(file, mode, *args, **kwargs)

        return FileIO

    def _truncate(self, path: Path, length: int) -> None:
        self._plain.truncate(path if isinstance(path, int) else self._files.opened(path, "r+b"), length)

    def _looking(self, name: str) -> Callable[..., Any]:
        plain = getattr(self._plain, name)
        # Access is denied rather than an error.
        find = self._files.current if name == "access" else self._files.existing

        def look(path: Path, *args: Any, **kwargs: Any) -> Any:
            return plain(path if kwargs.get("dir_fd") is not None else find(path), *args, **kwargs)

        return look

    def _removing(self, name: str) -> Callable[..., None]:
        plain, files = getattr(self._plain, name), self._files

        def remove(path: Path, *, dir_fd: int | None = None) -> None:
            whole = _whole(path, dir_fd)
            key = files.key(whole)
            if files.known(whole) is not None:
                plain(files.existing(whole))
                files.forget(key)
            elif files.is_checkpoint(key) and files.is_older(key):
                files.keep(key)
            else:
                plain(path, dir_fd=dir_fd)

        return remove

    def _renaming(self, name: str) -> Callable[..., None]:
        plain, files = getattr(self._plain, name), self._files

        def rename(src: Path, dst: Path, **descriptors: int | None) -> None:
            src, dst = (_whole(src, descriptors.get("src_dir_fd")), _whole(dst, descriptors.get("dst_dir_fd")))
            source, destination = files.key(src), files.key(dst)
            here = files.existing(src)
            is_redirected = source in files.redirected
            is_kept_apart = destination in files.redirected or any(map(files.is_checkpoint, (source, destination)))
            if is_redirected or (is_kept_apart and os.path.isfile(src)):
                self._move(source, here, files.target(dst), is_redirected=is_redirected)
                return
            is_folder = os.path.isdir(src)
            plain(src, dst)
            if is_folder:
                files.move_folder(source, destination)

        return rename

    def _renaming_folders(self, name: str) -> Callable[..., None]:
        """In an overlay, a folder of the layer below can be renamed by root alone; all others must copy it."""
        plain = getattr(self._plain, name)

        def rename(src: Path, dst: Path, **descriptors: int | None) -> None:
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

        return rename

    def _move(self, source: str, here: Path, place: str, *, is_redirected: bool) -> None:
        if not is_redirected and self._files.is_older(source):
            self._plain.copyfile(here, place)
            self._files.keep(source)
            return
        try:
            self._plain.replace(here, place)
        except OSError:  # on another file system
            self._plain.copyfile(here, place)
            self._plain.remove(here)
        self._files.forget(source)

    def _linking(self, name: str) -> Callable[..., None]:
        plain, files = getattr(self._plain, name), self._files

        def link(src: Path, dst: Path, *args: Any, **kwargs: Any) -> None:
            destination = files.key(dst)
            # A symbolic link says where its target is as seen from itself.
            start = os.path.dirname(destination) if name == "symlink" else ""
            source = os.path.join(start, os.fsdecode(src))
            follows = files.known(source) or (files.is_checkpoint(destination) and os.path.isfile(source))
            if not follows or any(value is not None for key, value in kwargs.items() if key.endswith("dir_fd")):
                plain(src, dst, *args, **kwargs)
                return
            here = files.existing(source)
            if os.path.lexists(dst):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), src, None, dst)
            self._plain.copyfile(here, files.target(dst))

        return link

    def _mkdir(self, path: Path, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        key = self._files.key(path)
        if dir_fd is not None:
            self._plain.mkdir(path, mode, dir_fd=dir_fd)
        elif key in self._files.removed:
            self._files.removed.discard(key)
        else:
            self._plain.mkdir(path, mode)
            self._files.made.add(key)

    def _rmtree(self, path: Path, ignore_errors: bool = False, *args: Any, **kwargs: Any) -> None:
        key = self._files.key(path)
        if kwargs.get("dir_fd") is not None:
            self._plain.rmtree(path, ignore_errors, *args, **kwargs)
            return
        if key in self._files.removed:
            if not ignore_errors:
                self._files.existing(path)
        elif os.path.isdir(path) and not os.path.islink(path) and self._files.holds_older(key):
            self._files.keep(key)
        else:
            self._plain.rmtree(path, ignore_errors, *args, **kwargs)
            self._files.made.discard(key)
        for each in self._files.below(key):
            self._plain.remove(self._files.redirected.pop(each))

    def _copyfile(self, src: Path, dst: Path, *args: Any, **kwargs: Any) -> Any:
        # A name that looks like a checkpoint's is redirected when it is opened.
        if self._files.known(src) is None:
            return self._plain.copyfile(src, dst, *args, **kwargs)
        self._plain.copyfile(self._files.existing(src), self._files.target(dst), *args, **kwargs)
        return dst

    def _copying(self, name: str) -> Callable[..., None]:
        plain = getattr(self._plain, name)

        def copy(src: Path, dst: Path, *args: Any, **kwargs: Any) -> None:
            plain(self._files.existing(src), self._files.existing(dst), *args, **kwargs)

        return copy

    def _listdir(self, path: Path = ".") -> Any:
        names = self._plain.listdir(path)
        added, hidden = self._files.listed(path)
        if not hidden:
            return names
        as_given = os.fsencode if isinstance(path, bytes) else str
        shown = [name for name in names if os.fsdecode(name) not in hidden]
        return shown + [as_given(os.path.basename(place)) for place in added]

    def _scandir(self, path: Path = ".") -> Any:
        entries = self._plain.scandir(path)
        added, hidden = self._files.listed(path)
        if not hidden:
            return entries
        # Each of them is alone in its folder.
        further = (entry for place in added for entry in self._plain.scandir(os.path.dirname(place)))
        return _Listing(entries, further, hidden)


def _whole(path: Path, folder: int | None) -> Path:
    """The path by which a file is known that was given below an open folder."""
    if folder is None or not os.path.isdir("/proc/self/fd"):
        return path
    return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fsdecode(path))


class _Listing:
    """The entries of a folder and of the redirected files that belong there, as os.scandir gives them."""

    def __init__(self, entries: Any, further: Iterator[Any], hidden: set[str]) -> None:
        self._entries = entries
        self._shown = itertools.chain((entry for entry in entries if os.fsdecode(entry.name) not in hidden), further)

    def __iter__(self) -> Iterator[Any]:
        return self._shown

    def __next__(self) -> Any:
        return next(self._shown)

    def __enter__(self) -> "_Listing":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the folder."""
        self._entries.close()
