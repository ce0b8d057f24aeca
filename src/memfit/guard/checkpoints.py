"""A folder of checkpoints, of which the newest whole one can always be found, whenever the process was killed.

A checkpoint is written into a hidden directory beside its final place. Once its files are there they are hashed and
forced to disk, the manifest is written last, and the directory is renamed, which happens entirely or not at all. Older
checkpoints go only after that. A failure to write, such as a full disk, never stops the training: it is announced, the
half-written checkpoint is removed, and the last one stays.

Hashing and forcing to disk take the most time and need none of the caller's data, so they can go on in a thread while
the training goes on.
"""

import atexit
import contextlib
import errno
import os
import re
import shutil
import threading
import uuid
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from memfit.core.errors import BadFile, BadInput
from memfit.guard.checkpoint_manifest import NAME, Damaged, Manifest, check, describe, read

try:
    import fcntl
except ImportError:  # Windows: two runs in one folder go unnoticed there
    fcntl = None  # type: ignore[assignment,unused-ignore]

_FINISHED = re.compile(r"step-(\d+)(?:-(\d+))?")
_TEMPORARY = re.compile(r"\.step-\d+(?:-\d+)?\.(?:tmp|old)-(\d+)-[0-9a-f]+")
_LOCK = ".lock"
# What file systems answer that can't do what was asked, though nothing is wrong.
_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EBADF, errno.EPERM}

_living: "weakref.WeakSet[Folder]" = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint.

    Args:
        path: its directory.
        step: updates of the parameters that had been made.
        info: what its writer said about it.
        created: when it was written, as an ISO 8601 time in UTC.
        number: its place in the order in which the folder's checkpoints were written.
    """

    path: Path
    step: int
    info: dict[str, Any]
    created: str
    number: int


class Folder:
    """Checkpoints of one run, the newest `keep` of them.

    Args:
        path: the folder; made when it is first needed.
        keep: how many checkpoints stay.
        announce: called with one sentence where a checkpoint couldn't be written or used; a warning if not given.

    Raises:
        BadInput: `keep` is less than 1.
    """

    def __init__(
        self, path: str | os.PathLike[str], keep: int = 3, announce: Callable[[str], None] | None = None
    ) -> None:
        if keep < 1:
            raise BadInput(f"at least 1 checkpoint must be kept, and keep = {keep} was given")
        self.path = Path(path)
        self.keep = keep
        self._announce = _warn if announce is None else announce
        self._thread: threading.Thread | None = None
        self._unsaid: list[str] = []
        self._last_said: str | None = None
        self._own: set[str] = set()
        """Names of the temporary directories that are in use here."""
        self._bad: set[str] = set()
        """Names of checkpoints that were found damaged."""
        self._lock: int | None = None
        self._lock_owner = 0
        self.skipped: tuple[str, ...] = ()
        """What `latest` passed over when it was called last, with reasons."""
        _living.add(self)

    # Writing.

    def claim(self) -> None:
        """Makes the folder and takes possession of it, to learn before the first checkpoint whether that works.

        Raises:
            BadFile: it can't be made or written to, or belongs to another run that is still alive.
        """
        try:
            self._take()
            probe = self.path / f".probe-{os.getpid()}-{uuid.uuid4().hex[:8]}"
            probe.write_bytes(b"memfit")
            probe.unlink()
        except OSError as error:
            raise BadFile(
                f"checkpoints can't be written to {str(self.path)!r}: {_reason(error)}. "
                "Give a folder that can be written to, or make room."
            ) from error

    def write(
        self,
        step: int,
        fill: Callable[[Path], None],
        *,
        info: dict[str, Any] | None = None,
        asynchronous: bool = False,
    ) -> bool:
        """Writes a checkpoint; False, with an announcement, where the system didn't let it.

        Args:
            step: updates of the parameters so far.
            fill: writes the files into the directory that it is given, before this returns.
            info: anything that JSON can hold.
            asynchronous: hash the files and force them to disk in a thread. True then means that the files are written;
                whether the rest went well shows at the next call.
        """
        writer: Writer | None = None
        try:
            writer = self.begin(step)
            fill(writer.directory)
            writer.finish(info, asynchronous=asynchronous)
        except OSError as error:
            if writer is not None:
                writer.abandon()
            self._failed(step, error)
            self._say()
            return False
        except BaseException:
            if writer is not None:
                writer.abandon()
            raise
        return True

    def begin(self, step: int) -> "Writer":
        """A directory for the files of a new checkpoint; waits for one that is still being finished.

        Raises:
            OSError: the folder can't be written to.
        """
        self.wait()
        self._take()
        name = self._free_name(step)
        temporary = f".{name}.tmp-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._own.add(temporary)
        try:
            (self.path / temporary).mkdir()
        except OSError:
            self._own.discard(temporary)
            raise
        return Writer(self, step, self.path / temporary, name)

    def wait(self) -> None:
        """Waits until a checkpoint that is being finished in a thread is on disk or has failed, and announces that."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
            self._thread = None
        self._say()

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being finished in a thread, so that a new one would have to wait."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Waits, and gives up possession of the folder."""
        self.wait()
        if self._lock is not None and self._lock_owner == os.getpid():
            with contextlib.suppress(OSError):
                os.close(self._lock)
        self._lock = None

    # Reading.

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint; None where there is none. Those passed over are announced and in `skipped`."""
        self.wait()
        found: list[tuple[Manifest, Path]] = []
        skipped: dict[str, str] = {}
        for path in self._finished():
            try:
                found.append((read(path), path))
            except Damaged as damage:
                skipped[path.name] = str(damage)
        latest = None
        for manifest, path in sorted(found, key=lambda pair: (pair[0].number, pair[0].step), reverse=True):
            try:
                check(path, manifest, checksums=True)
            except Damaged as damage:
                skipped[path.name] = str(damage)
                continue
            latest = Checkpoint(path, manifest.step, manifest.info, manifest.created, manifest.number)
            break
        self._bad |= set(skipped)
        self.skipped = tuple(f"{name}: {reason}" for name, reason in sorted(skipped.items()))
        for text in self.skipped:
            used = "there is no other" if latest is None else f"{latest.path.name} is used"
            self._announce(f"the checkpoint {text}; {used} ({self.path})")
        return latest

    # Parts.

    def _take(self) -> None:
        """Makes the folder and locks it, for as long as this process lives.

        The lock is of the kind that belongs to the process alone: workers of a loader that outlive a killed run for
        some seconds must not keep the next one out.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if fcntl is None or (self._lock is not None and self._lock_owner == os.getpid()):
            return
        handle = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                os.close(handle)
                raise OSError(
                    errno.EBUSY, "it is in use by another run that is still alive; give each run its own folder"
                ) from None
        self._lock, self._lock_owner = handle, os.getpid()

    def _finished(self) -> list[Path]:
        try:
            return sorted(path for path in self.path.iterdir() if _FINISHED.fullmatch(path.name) and path.is_dir())
        except OSError:
            return []

    def _free_name(self, step: int) -> str:
        """A name that isn't taken: a step may be written again, and the old directory must stay until it is."""
        name = plain = f"step-{step:09d}"
        copy = 1
        while (self.path / name).exists():
            copy += 1
            name = f"{plain}-{copy}"
        return name

    def _next_number(self) -> int:
        numbers = [0]
        for path in self._finished():
            with contextlib.suppress(Damaged):
                numbers.append(read(path).number)
        return max(numbers) + 1

    def _finish(self, writer: "Writer", info: dict[str, Any]) -> None:
        """Everything after the files are written."""
        directory = writer.directory
        files = describe(directory)
        created = datetime.now(UTC).isoformat(timespec="seconds")
        manifest = Manifest(self._next_number(), writer.step, created, files, info)
        content = manifest.to_bytes()
        for name in files:
            _force(directory / name)
        with (directory / NAME).open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        for path in (*(path for path in directory.rglob("*") if path.is_dir()), directory):
            _force_directory(path)
        os.rename(directory, self.path / writer.name)
        _force_directory(self.path)
        self._own.discard(directory.name)
        self._last_said = None
        with contextlib.suppress(OSError):
            self._prune(writer.name)

    def _prune(self, written: str) -> None:
        """Removes what is older than the newest `keep`, what was found damaged, and what dead writers left.

        What has just been written is whole, and never goes.
        """
        numbered = []
        for path in self._finished():
            if path.name == written:
                continue
            try:
                manifest = read(path)
                check(path, manifest, checksums=False)
                is_whole = path.name not in self._bad
            except Damaged:
                is_whole = False
            if is_whole:
                numbered.append((manifest.number, path))
            else:
                self._remove(path)
        for _, path in sorted(numbered, reverse=True)[self.keep - 1 :]:
            self._remove(path)
        for path in self.path.iterdir():
            temporary = _TEMPORARY.fullmatch(path.name)
            if temporary and path.name not in self._own and self._is_stale(int(temporary[1])):
                shutil.rmtree(path, ignore_errors=True)

    def _remove(self, path: Path) -> None:
        """Removes a checkpoint so that a kill in between leaves no half of it under its name."""
        hidden = self.path / f".{path.name}.old-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        os.rename(path, hidden)
        shutil.rmtree(hidden, ignore_errors=True)
        self._bad.discard(path.name)

    def _is_stale(self, process: int) -> bool:
        # Whoever holds the lock is the only one that writes here, whatever process has that number by now.
        return self._lock is not None or process == os.getpid() or not _is_alive(process)

    def _failed(self, step: int, error: OSError) -> None:
        reason = _reason(error)
        if reason != self._last_said:
            self._last_said = reason
            self._unsaid.append(
                f"the checkpoint of step {step} can't be written to {str(self.path)!r}: {reason}. The training goes "
                "on; the checkpoints before it stay, and the next one is tried when it is due."
            )

    def _say(self) -> None:
        while self._unsaid:
            self._announce(self._unsaid.pop(0))


class Writer:
    """A checkpoint that is being written; made by `Folder.begin`.

    Args:
        folder: where it will be.
        step: updates of the parameters so far.
        directory: where its files go until it is finished.
        name: what its directory will be called.
    """

    def __init__(self, folder: Folder, step: int, directory: Path, name: str) -> None:
        self.folder = folder
        self.step = step
        self.directory = directory
        self.name = name

    def finish(self, info: dict[str, Any] | None = None, *, asynchronous: bool = False) -> None:
        """All files are written: hashes them, forces them to disk, gives the checkpoint its name, removes old ones.

        Raises:
            OSError: not with `asynchronous`, where `Folder.wait` announces it.
        """
        info = dict(info or {})
        if asynchronous:
            thread = threading.Thread(target=self._finish_quietly, args=(info,), name="memfit-checkpoint", daemon=False)
            try:
                thread.start()
            except RuntimeError:
                # Memory for a thread is lacking, or the interpreter is on its way out.
                self.folder._finish(self, info)
            else:
                self.folder._thread = thread
            return
        self.folder._finish(self, info)

    def abandon(self) -> None:
        """Removes what has been written."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.folder._own.discard(self.directory.name)

    def _finish_quietly(self, info: dict[str, Any]) -> None:
        try:
            self.folder._finish(self, info)
        except Exception as error:
            self.abandon()
            self.folder._failed(self.step, error if isinstance(error, OSError) else OSError(f"{error!r}"))


def _force(path: Path) -> None:
    handle = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _force_directory(path: Path) -> None:
    """Makes names in a directory last; where the system can't, a crash of the machine may lose the newest."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:
        return  # Windows opens no directories
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(handle)


def _is_alive(process: int) -> bool:
    import psutil

    return bool(psutil.pid_exists(process))


def _reason(error: OSError) -> str:
    return {
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "the disk quota is used up",
        errno.EROFS: "the file system is read-only",
        errno.EACCES: "no permission to write there",
        errno.EPERM: "no permission to write there",
        errno.EEXIST: "it is a file, and a folder is needed",
        errno.ENOTDIR: "a part of the path is a file, and a folder is needed",
        errno.EFBIG: "a file would be longer than is allowed",
    }.get(error.errno or 0, error.strerror or str(error))


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)


@atexit.register
def _say_what_is_left() -> None:
    """The last checkpoint of a run may fail after its last line; threads have ended by now."""
    for folder in list(_living):
        folder.wait()
