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
from typing import Any

from memfit.frameworks.torch.script.redirected_files import Path, RedirectedFiles
from memfit.frameworks.torch.shapes.patching import Replacement

Plain = Callable[..., Any]
"""The function that a stand-in is for, which each of them gets first."""

# Who asks whether a function of `os` can do something looks for that function in these.
_CAPABILITIES = ("supports_dir_fd", "supports_fd", "supports_follow_symlinks")


class FileFunctions:
    """Stand-ins for Python's functions on files."""

    def __init__(self, files: RedirectedFiles) -> None:
        self._files = files
        self._replace, self._remove_plain, self._copy_plain = os.replace, os.remove, shutil.copyfile
        self.is_active = False
        """Whether the stand-ins are in place."""

    def stand_in(self, plain: Plain, other: Callable[..., Any]) -> Callable[..., Any]:
        """Calls `other` while the stand-ins are in place, and `plain` afterwards: modules keep what they imported."""

        @functools.wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (other if self.is_active else plain)(*args, **kwargs)

        return call

    def replacements(self) -> list[Replacement]:
        """What to put in place; hardly anything where the script's writes are its own anyway."""
        of_os: dict[str, Callable[..., Any]] = dict.fromkeys(("rename", "replace"), self._rename_folder)
        if self._files.are_private:
            return [Replacement(self, "is_active", True), *self._made(os, of_os)]
        of_os = {
            **dict.fromkeys(("stat", "lstat", "chmod", "utime", "access"), self._look),
            **dict.fromkeys(("remove", "unlink"), self._remove),
            **dict.fromkeys(("rename", "replace"), self._rename),
            **dict.fromkeys(("link", "symlink"), self._link),
            "open": self._open_descriptor,
            "mkdir": self._mkdir,
            "listdir": self._listdir,
            "scandir": self._scandir,
            "truncate": self._truncate,
        }
        of_shutil = dict.fromkeys(("copymode", "copystat"), self._copy_status)
        made = self._made(os, of_os)
        able = {name: set(getattr(os, name)) for name in _CAPABILITIES}
        for _, name, value in made:
            for functions in able.values():
                functions |= {value} if getattr(os, name) in functions else set()
        opening = self.stand_in(open, functools.partial(self._open, open))
        return [
            Replacement(self, "is_active", True),
            *(Replacement(module, "open", opening) for module in (builtins, io)),
            Replacement(io, "FileIO", self._file_type()),
            *made,
            *self._made(shutil, {**of_shutil, "copyfile": self._copyfile, "rmtree": self._rmtree}),
            *(Replacement(os, name, functions) for name, functions in able.items()),
        ]

    def _made(self, module: Any, others: dict[str, Callable[..., Any]]) -> list[Replacement]:
        plain = {name: getattr(module, name) for name in others}
        return [
            Replacement(module, name, self.stand_in(plain[name], functools.partial(other, plain[name])))
            for name, other in others.items()
        ]

    def _open(self, plain: Plain, file: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        # An opener has its own idea of what the path means.
        has_opener = len(args) > 5 or kwargs.get("opener") is not None
        if not isinstance(file, int) and not has_opener:
            file = self._files.opened(file, mode)
        return plain(file, mode, *args, **kwargs)

    def _open_descriptor(
        self, plain: Plain, path: Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> int:
        given = whole = _whole(path, dir_fd)
        is_new = not self._files.known(whole) and not self._files.is_older(self._files.key(whole))
        if not flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC) or is_new:
            whole = self._files.existing(whole)
        elif not flags & os.O_EXCL:
            whole = self._files.opened(whole, "wb" if flags & os.O_TRUNC else "ab")
        if whole == given:
            return int(plain(path, flags, mode, dir_fd=dir_fd))
        return int(plain(whole, flags | (flags & os.O_TRUNC and os.O_CREAT), mode))

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

    def _truncate(self, plain: Plain, path: Path, length: int) -> None:
        plain(path if isinstance(path, int) else self._files.opened(path, "r+b"), length)

    def _look(self, plain: Plain, path: Path, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dir_fd") is None:
            # Access is denied rather than an error.
            path = (self._files.current if plain.__name__ == "access" else self._files.existing)(path)
        return plain(path, *args, **kwargs)

    def _remove(self, plain: Plain, path: Path, *, dir_fd: int | None = None) -> None:
        whole, files = _whole(path, dir_fd), self._files
        key = files.key(whole)
        if files.known(whole) is not None:
            plain(files.existing(whole))
            files.forget(key)
        elif files.is_checkpoint(key) and files.is_older(key):
            files.keep(key)
        else:
            plain(path, dir_fd=dir_fd)

    def _rename(self, plain: Plain, src: Path, dst: Path, **descriptors: int | None) -> None:
        src, dst = _whole(src, descriptors.get("src_dir_fd")), _whole(dst, descriptors.get("dst_dir_fd"))
        files, source, destination = self._files, self._files.key(src), self._files.key(dst)
        here = files.existing(src)
        is_redirected = source in files.redirected
        is_kept_apart = destination in files.redirected or any(map(files.is_checkpoint, (source, destination)))
        if not is_redirected and not (is_kept_apart and os.path.isfile(src)):
            is_folder = os.path.isdir(src)
            plain(src, dst)
            if is_folder:
                files.move_folder(source, destination)
            return
        target = files.target(dst)
        if not is_redirected and files.is_older(source):
            self._copy_plain(here, target)
            files.keep(source)
            return
        try:
            self._replace(here, target)
        except OSError:  # on another file system
            self._copy_plain(here, target)
            self._remove_plain(here)
        files.forget(source)

    def _rename_folder(self, plain: Plain, src: Path, dst: Path, **descriptors: int | None) -> None:
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

    def _link(self, plain: Plain, src: Path, dst: Path, *args: Any, **kwargs: Any) -> None:
        files, destination = self._files, self._files.key(dst)
        # A symbolic link says where its target is as seen from itself.
        start = os.path.dirname(destination) if plain.__name__ == "symlink" else ""
        source = os.path.join(start, os.fsdecode(src))
        follows = files.known(source) or (files.is_checkpoint(destination) and os.path.isfile(source))
        if not follows or any(value is not None for key, value in kwargs.items() if key.endswith("dir_fd")):
            plain(src, dst, *args, **kwargs)
            return
        here = files.existing(source)
        if os.path.lexists(dst):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), src, None, dst)
        self._copy_plain(here, files.target(dst))

    def _mkdir(self, plain: Plain, path: Path, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        key = self._files.key(path)
        if dir_fd is not None:
            plain(path, mode, dir_fd=dir_fd)
        elif key in self._files.removed:
            self._files.removed.discard(key)
        else:
            plain(path, mode)
            self._files.made.add(key)

    def _rmtree(self, plain: Plain, path: Path, ignore_errors: bool = False, *args: Any, **kwargs: Any) -> None:
        key, files = self._files.key(path), self._files
        if kwargs.get("dir_fd") is not None:
            plain(path, ignore_errors, *args, **kwargs)
            return
        if key in files.removed:
            if not ignore_errors:
                files.existing(path)
        elif os.path.isdir(path) and not os.path.islink(path) and files.holds_older(key):
            files.keep(key)
        else:
            plain(path, ignore_errors, *args, **kwargs)
            files.made.discard(key)
        for each in files.below(key):
            self._remove_plain(files.redirected.pop(each))

    def _copyfile(self, plain: Plain, src: Path, dst: Path, *args: Any, **kwargs: Any) -> Any:
        # A name that looks like a checkpoint's is redirected when it is opened.
        if self._files.known(src) is None:
            return plain(src, dst, *args, **kwargs)
        plain(self._files.existing(src), self._files.target(dst), *args, **kwargs)
        return dst

    def _copy_status(self, plain: Plain, src: Path, dst: Path, *args: Any, **kwargs: Any) -> None:
        plain(self._files.existing(src), self._files.existing(dst), *args, **kwargs)

    def _listdir(self, plain: Plain, path: Path = ".") -> Any:
        names = plain(path)
        added, hidden = self._files.listed(path)
        if not hidden:
            return names
        as_given = os.fsencode if isinstance(path, bytes) else str
        shown = [name for name in names if os.fsdecode(name) not in hidden]
        return shown + [as_given(os.path.basename(place)) for place in added]

    def _scandir(self, plain: Plain, path: Path = ".") -> Any:
        entries = plain(path)
        added, hidden = self._files.listed(path)
        if not hidden:
            return entries
        # Each of them is alone in its folder.
        further = (entry for place in added for entry in plain(os.path.dirname(place)))
        return _Listing(entries, further, hidden)


def _whole(path: Path, folder: int | None) -> Path:
    """The path by which a file is known that was given below an open folder."""
    if folder is None or not os.path.isdir("/proc/self/fd"):
        return path
    return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fsdecode(path))


class _Listing:
    """The entries of a folder and of the redirected files that belong there, as os.scandir gives them."""

    def __init__(self, entries: Any, further: Iterator[Any], hidden: set[str]) -> None:
        self.close = entries.close
        self._shown = itertools.chain((entry for entry in entries if os.fsdecode(entry.name) not in hidden), further)

    def __iter__(self) -> Iterator[Any]:
        return self._shown

    def __next__(self) -> Any:
        return next(self._shown)

    def __enter__(self) -> "_Listing":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
