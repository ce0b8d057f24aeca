"""A view of the file system in which a script's writes are its own.

Functions that stand in for Python's own can be walked around: by a shell, by a library in C++, by a child process. So
the process of a dry run gets a mount namespace of its own, in which every writable file system is the lower layer of
an overlay. The script and all that it starts read the user's files, and find what they write, change and remove, in
layers in a folder of ours. Nobody else sees those, and the files below stay what they are. Root may do this as it is;
anybody else in a user namespace in which only that user is known.

Two rules of the kernel shape the view of an unprivileged user. A folder below which another file system is mounted
can't be the lower layer, lest what that hides show. And a folder that belongs to somebody else can't be copied into
the upper layer, which writing below it takes. Such folders are built anew, entry by entry, down to those that can be.

When the script has ended, however that was, the layers show what it wrote (`collect`).
"""

import contextlib
import ctypes
import errno
import functools
import itertools
import json
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from memfit.core.progress import announce
from memfit.core.redirected_files import LAYER, is_within, move_folder

LAYERS = "layers.json"
"""In the first folder of a dry run: pairs of a folder of the user and of the one with what was written."""

# From linux/sched.h and linux/mount.h.
_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 32, 4096, 16384, 1 << 18
# What a remount must keep of a mount that was made by somebody more privileged: as statvfs tells it, as mount takes it.
_KEPT_FLAGS = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
_DETACH = 2
_CAPABILITIES = 0x20080522

# There programs talk to the kernel and to each other; nothing of it outlives the system's run.
_LIVE = ("/dev", "/proc", "/sys", "/run", "/var/run")
_LIVE_KINDS = {
    *("autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs", "efivarfs"),
    *("fusectl", "hugetlbfs", "mqueue", "nsfs", "proc", "pstore", "rpc_pipefs", "securityfs", "selinuxfs", "sysfs"),
    "tracefs",
}
# What is in memory, and what a desktop shows of the files of others.
_PASSING_KINDS = {"tmpfs", "ramfs", "fuse.gvfsd-fuse", "fuse.portal"}
# Renaming a folder of the lower layer takes attributes that only root may set.
_OPTIONS_OF_ROOT = ("index=off,redirect_dir=on,volatile", "index=off,redirect_dir=on")
_OPTIONS = ("index=off,userxattr,volatile", "index=off,userxattr")
_MAX_COPIED_BYTES = 16 * 2**20
# Python's own, which say nothing of the script.
_BYTECODE = "__pycache__"


class _MountPoint(NamedTuple):
    path: str
    kind: str
    is_read_only: bool


def enter(folders: Sequence[str], *, shared: Sequence[str] = (), written: Sequence[str] = ()) -> tuple[str, list[str]]:
    """Moves this process, which must have a single thread, to a view of its own where the system allows that.

    Args:
        folders: of ours, the first of which stays what it is in the view; layers are put into the first that can
            take them. An overlay, as the file system of most containers is, can't.
        shared: folders in which writing is real, such as caches of downloads.
        written: folders in which the script is likely to write.

    Returns:
        Why there is no such view, "" where there is one; and the folders that can be read and not written.
    """
    if not sys.platform.startswith("linux"):
        return "only Linux has mount namespaces", []
    reasons = []
    for place in folders:
        view = _View(folders[0], shared, written)
        # By another process first: one that fails half-way is left in a namespace where it is nobody.
        reason = _tried(view, Path(place, "trial"))
        if not reason:
            return "", view.enter(Path(place, "view"))
        reasons.append(reason)
    return reasons[0], []


def _tried(view: "_View", place: Path) -> str:
    """Why the view can't be had, or ""."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        reason = ""
        try:
            view.enter(place)
        except BaseException as error:
            reason = str(error) or type(error).__name__
        finally:
            os.write(writing, reason.encode(errors="replace")[:512] or b"\0")
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return "" if answer == b"\0" else answer.decode(errors="replace") or "it ended"


def copy_renamed_folders() -> None:
    """From now on this process copies the folders that it renames: of the layer below, only root may rename them."""
    for name in ("rename", "replace"):
        plain = getattr(os, name)
        setattr(os, name, functools.wraps(plain)(functools.partial(_rename, plain)))


def _rename(plain: Callable[..., None], src: Any, dst: Any, **descriptors: int | None) -> None:
    try:
        plain(src, dst, **descriptors)
    except OSError as error:
        has_moved = error.errno == errno.EXDEV and os.path.isdir(src) and not os.path.islink(src)
        if not has_moved or descriptors or os.stat(src).st_dev != os.stat(os.path.dirname(dst) or ".").st_dev:
            raise
        move_folder(src, dst)


class _View:
    """A view that is being built, in which `folder` stays what it is; the others are as for `enter`."""

    def __init__(self, folder: str, shared: Sequence[str], written: Sequence[str]) -> None:
        self._folder = os.path.realpath(folder)
        self._written = [os.path.realpath(path) for path in (*written, tempfile.gettempdir()) if os.path.isdir(path)]
        self._live = [path for path in _LIVE if os.path.isdir(path) and not os.path.islink(path)]
        shared = sorted({os.path.realpath(path) for path in shared})
        self._shared = [path for path in (*shared, self._folder) if os.path.isdir(path)]
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._is_root = False
        self._root = ""
        self._mounts: dict[str, _MountPoint] = {}
        self._split_above: set[str] = set()
        self._layers: list[tuple[str, str]] = []
        self._read_only: list[str] = []

    def enter(self, place: Path) -> list[str]:
        """Enters it, with its layers in `place`; the folders that can be read and not written."""
        working, user, group = os.getcwd(), os.geteuid(), os.getegid()
        self._is_root = user == 0 and self._libc.unshare(_NEW_MOUNTS) == 0
        if not self._is_root:
            self._call("unshare", _NEW_MOUNTS | _NEW_USER)
            maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
            for name, text in maps.items():
                Path("/proc/self", name).write_text(text, encoding="ascii")
        self._mount("none", "/", None, _RECURSIVE | _PRIVATE)
        self._mounts = {mount.path: mount for mount in _mounts() if os.path.lexists(mount.path)}
        if not self._is_root:
            self._split_above = set(self._mounts).union(map(_topmost_owned, self._written))
        self._root = str(place / "root")
        os.makedirs(self._root)
        os.chdir(place)
        # Folders before those in them.
        for path in sorted(self._mounts, key=lambda path: (path != "/", path.count("/"))):
            mount = self._mounts[path]
            if path != "/" and (mount.kind in _LIVE_KINDS or _is_live(path) or mount.is_read_only):
                # A mount that is shown as it is shows those below it as well.
                if not os.path.samefile(path, self._at(path)):
                    self._bind(path)
            elif os.path.isdir(path):
                self._lay_over(path)
            else:
                self._bind(path, read_only=True)
        for path in self._live:
            self._bind(path)
        for path in self._kept_among_live():
            self._lay_over(path)
        for path in self._shared:
            self._bind(path)
        for path in _sockets():
            # One may be gone by now, with its process.
            with contextlib.suppress(FileNotFoundError):
                self._bind(path)
        os.chdir(self._root)
        self._call("pivot_root", b".", b".")
        self._call("umount2", b".", _DETACH)
        os.chdir(working)
        # Whoever finds it takes it that files are kept apart, so that it comes last.
        _note(self._folder, self._layers)
        if not self._is_root:
            # Those of the namespace, by which the script could write to what it may not.
            self._libc.capset((ctypes.c_uint32 * 2)(_CAPABILITIES, 0), (ctypes.c_uint32 * 6)())
        return self._read_only

    def _kept_among_live(self) -> list[str]:
        """Folders of the user's that are no talk among programs: disks below /run/media, a script in /dev/shm."""
        # Where what is written stays, and can be written at all.
        disks = [
            mount.path
            for mount in self._mounts.values()
            if _is_live(mount.path) and not mount.is_read_only and mount.kind not in _LIVE_KINDS | _PASSING_KINDS
        ]
        written = [path for path in self._written if _is_live(path) and path not in self._mounts]
        folders = sorted({path for path in (*disks, *written) if os.path.isdir(path)}, key=lambda path: path.count("/"))
        # A layer over a folder covers those in it, as far as those are on the same disk.
        return [p for p in folders if p in disks or not any(is_within(p, other) and p != other for other in folders)]

    def _lay_over(self, path: str) -> None:
        """Shows a folder with a layer of its own, or entry by entry where that can't be."""
        if any(is_within(each, path) and each != path for each in self._split_above):
            self._split(path)
            return
        for option in _OPTIONS_OF_ROOT if self._is_root else _OPTIONS:
            try:
                self._overlay(path, option)
            except OSError as error:
                refused = error
            else:
                return
        if path == "/" or any(is_within(each, path) for each in self._written):
            raise refused
        self._bind(path, read_only=True)
        if os.access(path, os.W_OK):
            self._read_only.append(path)

    def _overlay(self, path: str, option: str) -> None:
        name = str(len(self._layers))
        upper = Path(name, "upper")
        for layer in (upper, Path(name, "work")):
            layer.mkdir(parents=True, exist_ok=True)
        # What is seen of the folder itself is the upper layer's.
        self._make_alike(upper, path)
        # Paths may hold what separates options: so one is a descriptor, and the others begin here.
        lower = os.open(path, os.O_PATH | os.O_DIRECTORY)
        try:
            layers = f"lowerdir=/proc/self/fd/{lower},upperdir={name}/upper,workdir={name}/work,{option}"
            self._mount("memfit", self._at(path), "overlay", 0, layers)
        finally:
            os.close(lower)
        self._layers.append((path, os.path.abspath(upper)))

    def _make_alike(self, folder: Path, path: str) -> None:
        status = os.stat(path)
        mode = stat.S_IMODE(status.st_mode)
        if self._is_root:
            os.chown(folder, status.st_uid, status.st_gid)
        elif status.st_uid != os.geteuid():
            # Somebody else's folder has become this user's, who may do no more there than before.
            rights = sum(right for right in (os.R_OK, os.W_OK, os.X_OK) if os.access(path, right))
            mode = mode & ~stat.S_IRWXU | rights << 6
        folder.chmod(mode)

    def _split(self, path: str) -> None:
        root = Path(self._at(path))
        if path in self._mounts:
            # Among the layers, where it can be seen from outside.
            upper = Path(str(len(self._layers)), "upper")
            upper.mkdir(parents=True)
            self._make_alike(upper, path)
            self._mount(str(upper), str(root), None, _BIND)
            self._layers.append((path, os.path.abspath(upper)))
        for entry in os.scandir(path):
            try:
                self._show(entry, root / entry.name)
            except FileNotFoundError:
                # Others, who don't wait for us, remove theirs from a folder such as /tmp.
                if os.path.lexists(entry.path):
                    raise

    def _show(self, entry: "os.DirEntry[str]", place: Path) -> None:
        status = entry.stat(follow_symlinks=False)
        if entry.is_symlink():
            place.symlink_to(os.readlink(entry.path))
        elif entry.is_dir():
            place.mkdir()
            self._make_alike(place, entry.path)
            if entry.path not in self._mounts:
                self._lay_over(entry.path)
        elif entry.is_file() and status.st_size <= _MAX_COPIED_BYTES and os.access(entry.path, os.R_OK):
            shutil.copy2(entry.path, place)
        else:
            place.touch()
            os.utime(place, ns=(status.st_atime_ns, status.st_mtime_ns))
            self._bind(entry.path, read_only=entry.is_file())

    def _bind(self, path: str, *, read_only: bool = False) -> None:
        place = self._at(path)
        self._mount(path, place, None, _BIND | _RECURSIVE)
        if read_only:
            held = os.statvfs(place).f_flag
            kept = sum(flag for seen, flag in _KEPT_FLAGS.items() if held & seen)
            self._mount("none", place, None, _BIND | _REMOUNT | _READ_ONLY | kept)

    def _at(self, path: str) -> str:
        return self._root if path == "/" else self._root + path

    def _mount(self, source: str, place: str, kind: str | None, flags: int, options: str = "") -> None:
        words = (os.fsencode(source), os.fsencode(place), kind.encode() if kind else None, ctypes.c_ulong(flags))
        self._call("mount", *words, options.encode() or None, what=f"{kind or 'bind'} of {place}")

    def _call(self, function: str, *arguments: object, what: str = "") -> None:
        if getattr(self._libc, function)(*arguments):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), what or function)


def _mounts() -> Iterator[_MountPoint]:
    """All mounts; of those at the same path the last is the one that is seen."""
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        _, _, _, _, path, options, *_ = before.split(" ")
        kind, _, options_of_all = after.split(" ")[:3]
        # Spaces and the like are written as \040.
        path = re.sub(r"\\([0-7]{3})", lambda escaped: chr(int(escaped[1], 8)), path)
        yield _MountPoint(path, kind, "ro" in options.split(",") or "ro" in options_of_all.split(","))


def _sockets() -> list[str]:
    """Those on which other processes listen, who would not be reached through an overlay."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/net/unix").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        paths = {words[7] for words in (line.split(maxsplit=7) for line in lines) if len(words) == 8}
        return [path for path in paths if path.startswith("/") and not _is_live(path) and os.path.exists(path)]
    return []


def _is_live(path: str) -> bool:
    return any(is_within(path, root) for root in _LIVE)


def _topmost_owned(path: str) -> str:
    """The first folder on the way to `path` that is this user's; `path` itself where none is."""
    parts = Path(path)
    above = [str(each) for each in reversed((parts, *parts.parents))]
    return next((each for each in above if os.stat(each).st_uid == os.geteuid()), path)


def collect(folder: Path, kept: str = "") -> dict[str, str]:
    """Each file that the script wrote or changed, by the path it knew, and where it is now; "" where it is not kept.

    `folder` is the one given to `enter`. Files are `kept` there by their paths below the working folder or the root.
    """
    written = {path: place for above, layer in _layers(folder) for path, place in _written(above, Path(layer))}
    places = dict.fromkeys(sorted(written), "")
    target = Path(kept)
    if kept and written and target.exists() and any(target.iterdir()):
        # In it, where nothing is yet.
        target = next(each for number in itertools.count(1) if not (each := Path(kept, str(number))).exists())
    for path, place in sorted(written.items()) if kept else ():
        below = os.path.relpath(path)
        there = target / (path.lstrip(os.sep) if below.startswith(os.pardir) else below)
        try:
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(place, there)
            places[path] = str(there)
        except OSError as error:
            announce(f"{path} can't be kept as {there}: {error.strerror or error}")
    return places


def written_bytes(folder: Path) -> int:
    """Bytes on disk of all that the script has written; `folder` is the first of those given to `enter`."""
    total = 0
    for _, layer in _layers(folder):
        for current, _, names in os.walk(layer):
            for name in names:
                with contextlib.suppress(OSError):
                    total += os.lstat(os.path.join(current, name)).st_blocks * 512
    return total


def redirect(folder: str) -> None:
    """Says that what the script writes is in the layer of `RedirectedFiles`; `folder` is that of the dry run."""
    _note(folder, [("/", os.path.join(folder, LAYER))])


def _note(folder: str, layers: list[tuple[str, str]]) -> None:
    Path(folder, LAYERS).write_text(json.dumps(layers), encoding="utf-8")


def _layers(folder: Path) -> list[tuple[str, str]]:
    with contextlib.suppress(OSError, ValueError):
        return [(str(above), str(layer)) for above, layer in json.loads(Path(folder, LAYERS).read_text("utf-8"))]
    return []


def _written(above: str, layer: Path) -> Iterator[tuple[str, Path]]:
    """(path, place) of the files of a layer that are new, or newer than what is below."""
    for current, folders, names in os.walk(layer):
        folders[:] = [name for name in folders if name != _BYTECODE]
        for name in names:
            place = Path(current, name)
            path = os.path.normpath(os.path.join(above, place.relative_to(layer)))
            status, before = place.lstat(), None
            with contextlib.suppress(OSError):
                before = os.lstat(path).st_mtime_ns
            # What was removed is a device file, and what only changed its owner or mode is a copy.
            if stat.S_ISREG(status.st_mode) and status.st_mtime_ns != before:
                yield path, place
