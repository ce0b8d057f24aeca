"""A folder of checkpoints, of which the newest whole one can always be found, whenever the process was killed.

A checkpoint is written into a hidden directory beside its final place. Once its files are there they are hashed and
forced to disk, the manifest is written last, and the directory is renamed, which happens entirely or not at all. Older
checkpoints go only after that, and only what a valid manifest claims: whatever else has a name like theirs, is of
another version of the format or can't be read just now is left alone. A failure to write never stops the training: it
is announced, the half-written checkpoint is removed, and the last one stays. Where the disk is full, the oldest
checkpoints make room for the new one, all but the last.

Hashing and forcing to disk take the most time and need none of the caller's data, so they can go on in a thread while
the training goes on.
"""

import atexit
import contextlib
import errno
import logging
import os
import re
import shutil
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from memfit.core.adapter import Ranks, SingleProcess
from memfit.core.errors import BadFile
from memfit.core.guarding import BadCheckpoint
from memfit.core.oom import caught
from memfit.core.plain_files import plain_size
from memfit.core.units import format_size
from memfit.guard import checkpoint_manifest as manifests
from memfit.guard.checkpoint_manifest import NAME, UNFINISHED, Damaged, Manifest, NotOurs, OtherVersion
from memfit.guard.possession import UNSUPPORTED, Possession

_FINISHED = re.compile(r"step-(\d+)(?:-(\d+))?")
_TEMPORARY = re.compile(r"\.step-\d+(?:-\d+)?\.(?:tmp|old)-(\d+)-[0-9a-f]+")
FULL = {errno.ENOSPC, errno.EDQUOT}
# Network file systems fail for moments; what they hold is as it was afterwards.
_RETRY_SECONDS = (0.1, 0.4, 1.0)

_log = logging.getLogger("memfit")
_living: "weakref.WeakSet[Folder]" = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint."""

    path: Path
    step: int  # updates of the parameters that had been made
    info: dict[str, Any]  # what its writer said about it
    number: int  # its place in the order in which the folder's checkpoints were written


class Folder:
    """Checkpoints of one run, the newest `keep` of them.

    Args:
        path: the folder; made when it is first needed.
        keep: how many checkpoints stay, at least 1.
        owner: whose checkpoints they are, such as the optimizer: another folder object of the same owner takes over,
            and one of another owner is refused as long as this one is in use.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        keep: int = 3,
        owner: object = None,
    ) -> None:
        self.path = Path(path)
        self.keep = keep
        self._thread: threading.Thread | None = None
        self._unsaid: list[str] = []
        self._num_failed = 0  # checkpoints in a row that couldn't be written
        self._last_reason = ""
        self._number: int | None = None  # the highest number of a checkpoint here; None before that is known
        self._own: set[str] = set()  # names of the temporary directories that are in use here
        self._bad: set[str] = set()  # names of checkpoints that were found damaged
        self._possession = Possession(self.path, self, owner)
        self.skipped: tuple[str, ...] = ()  # what `latest` passed over when it was called last, with reasons
        _living.add(self)

    # Writing.

    def claim(self) -> None:
        """Takes possession of the folder, to learn before the first checkpoint whether that works; BadFile if not."""
        try:
            self._possession.take()
            probe = self.path / f".probe-{os.getpid()}-{uuid.uuid4().hex[:8]}"
            try:
                probe.write_bytes(b"memfit")
            finally:
                probe.unlink(missing_ok=True)
        except OSError as error:
            is_taken = error.errno == errno.EBUSY
            advice = "" if is_taken else " Give a folder that can be written to, or make room."
            reason = error.strerror if is_taken else _reason(error)
            raise BadFile(f"checkpoints can't be written to {str(self.path)!r}: {reason}.{advice}") from error

    def write(
        self,
        step: int,
        fill: Callable[[Path], None],
        *,
        info: dict[str, Any] | None = None,
        asynchronous: bool = False,
        ranks: Ranks | None = None,
    ) -> bool:
        """Writes a checkpoint; False, with an announcement, where the system didn't let it.

        `fill` writes the files into the directory that it is given. The rest goes on in a thread where `asynchronous`,
        and whether it went well shows at the next call. Of several ranks the first makes and finishes the directory.
        """
        ranks = ranks or SingleProcess()
        while True:
            own: Path | None = None
            problem: OSError | None = None
            try:
                try:
                    own = self.begin(step) if ranks.is_first else None
                except OSError as error:
                    problem = error
                directory = ranks.share("" if own is None else str(own))
                try:
                    failure = caught(partial(fill, Path(directory))) if directory else None
                except OSError as error:
                    problem = error
                else:
                    if failure is not None:
                        # The update that it is of was made: training goes on, and the next checkpoint may fit.
                        problem = OSError(errno.ENOMEM, f"memory ran out: {failure.text or failure.source}")
                failed = ranks.any(problem is not None)
                is_full = failed and ranks.any(problem is not None and problem.errno in FULL)
                if own is not None and not failed:
                    try:
                        self._finish(own, step, info or {}, asynchronous=asynchronous)
                    except OSError as error:
                        problem, failed = error, True
                if not ranks.any(failed):
                    return True
            except BaseException:
                self.abandon(own)
                raise
            again = False
            if ranks.is_first:
                self.abandon(own)
                problem = problem or OSError(errno.ENOSPC if is_full else errno.EIO, "another process can't write")
                again = self._make_room(problem)
                if not again:
                    self._note_failure(step, problem)
                    self._say()
            if not ranks.share("again" if again else ""):
                return False

    def begin(self, step: int) -> Path:
        """A directory for the files of a new checkpoint; waits for one that is still being finished."""
        self.wait()
        self._possession.take()
        # A step may be written again, and the old directory must stay until it is.
        name, copy = f"step-{step:09d}", 1
        while os.path.lexists(self.path / name):
            copy += 1
            name = f"step-{step:09d}-{copy}"
        directory = self.path / f".{name}.tmp-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._own.add(directory.name)
        try:
            directory.mkdir()
            (directory / UNFINISHED).touch()
        except OSError:
            with contextlib.suppress(OSError):
                directory.rmdir()
            self._own.discard(directory.name)
            raise
        return directory

    def abandon(self, directory: Path | None) -> None:
        """Removes what has been written to a directory that `begin` made."""
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
            self._own.discard(directory.name)

    def _finish(self, directory: Path, step: int, info: dict[str, Any], *, asynchronous: bool) -> None:
        """All files are written: the rest, in a thread where that is asked for, whose failure `wait` announces."""

        def finish_quietly() -> None:
            try:
                self._complete(directory, step, info)
            except Exception as error:
                self.abandon(directory)
                problem = error if isinstance(error, OSError) else OSError(f"{error!r}")
                self._make_room(problem)
                self._note_failure(step, problem)

        if asynchronous:
            thread = threading.Thread(target=finish_quietly, name="memfit-checkpoint", daemon=False)
            # Without memory for a thread, or with an interpreter on its way out, it is done here.
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._thread = thread
                return
        self._complete(directory, step, info)

    def _complete(self, directory: Path, step: int, info: dict[str, Any]) -> None:
        """Hashes the files, forces them to disk, gives the checkpoint its name, removes old ones."""
        files = manifests.describe(directory)
        created = datetime.now(UTC).isoformat(timespec="seconds")
        manifest = Manifest(self._next_number(), step, created, files, info)
        content = manifest.to_bytes()
        for name in files:
            _force(directory / name)
        with (directory / NAME).open("xb") as file:
            file.write(content)
        _force(directory / NAME)
        (directory / UNFINISHED).unlink()
        for path in (*(path for path in directory.rglob("*") if path.is_dir()), directory):
            _force(path)
        final = self.path / _final_name(directory)
        os.rename(directory, final)
        _force(self.path)
        self._own.discard(directory.name)
        if self._num_failed:
            self._unsaid.append(f"checkpoints are written again: {final.name} is whole ({self.path})")
        self._num_failed = 0
        # What has just been written is whole, and never goes.
        with contextlib.suppress(OSError):
            self._sweep(final.name)
            older = sorted((m.number, path) for m, path, is_whole in self._claimed() if is_whole and path != final)
            for _, path in older[: max(0, len(older) - self.keep + 1)]:
                with contextlib.suppress(OSError, Damaged, BadCheckpoint):
                    self._remove(path)

    def _next_number(self) -> int:
        highest = self._number or 0
        for path in self._finished():
            try:
                highest = max(highest, manifests.read(path).number)
            except (Damaged, OtherVersion):
                continue
            except OSError:
                if self._number is None:
                    raise
        self._number = highest + 1
        return self._number

    def wait(self) -> None:
        """Waits until a checkpoint that is being finished in a thread is on disk or has failed, and announces that."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
            self._thread = None
        self._say()

    def close(self) -> None:
        """Waits, and gives up possession of the folder."""
        self.wait()
        self._possession.let_go()

    # Reading.

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint; None where there is none. Those passed over are announced and in `skipped`.

        Raises:
            BadCheckpoint: one is of another version of the format, or can't be read just now, so that which is the
                newest isn't known.
        """
        self.wait()
        waits = iter(_RETRY_SECONDS)
        while True:
            try:
                latest, skipped = self._find_latest()
                break
            except OSError as error:
                seconds = next(waits, None)
                if seconds is None:
                    raise BadCheckpoint(
                        f"the checkpoints in {str(self.path)!r} can't be read: {error.strerror or error}"
                        f"{f' ({error.filename})' if error.filename else ''}. Nothing was removed. Start again when "
                        "they can be, or give another folder for checkpoints."
                    ) from error
                time.sleep(seconds)
        self._bad |= set(skipped)
        self.skipped = tuple(f"{name}: {reason}" for name, reason in sorted(skipped.items()))
        for text in self.skipped:
            used = "there is no other" if latest is None else f"{latest.path.name} is used"
            _log.warning(f"the checkpoint {text}; {used} ({self.path})")
        return latest

    def _find_latest(self) -> tuple[Checkpoint | None, dict[str, str]]:
        """(the newest whole one, those passed over with reasons)."""
        claimed: list[tuple[Manifest, Path]] = []
        skipped: dict[str, str] = {}
        for path in self._finished():
            try:
                claimed.append((manifests.read(path), path))
            except Damaged as damage:
                skipped[path.name] = str(damage)
            except OtherVersion as error:
                raise BadCheckpoint(
                    f"the checkpoint {str(path)!r} was written by another version of memfit: {error}. Nothing was read "
                    "or removed. Use the memfit that wrote it, or give another folder for checkpoints."
                ) from None
        self._number = max([self._number or 0, *(manifest.number for manifest, _ in claimed)])
        for manifest, path in sorted(claimed, key=lambda pair: (pair[0].number, pair[0].step), reverse=True):
            try:
                manifests.check(path, manifest, checksums=True)
            except Damaged as damage:
                skipped[path.name] = str(damage)
                continue
            return Checkpoint(path, manifest.step, manifest.info, manifest.number), skipped
        return None, skipped

    def _finished(self) -> list[Path]:
        """What has the name of a checkpoint; an OSError where that can't be found out."""
        try:
            with os.scandir(self.path) as entries:
                return sorted(
                    Path(entry.path)
                    for entry in entries
                    if _FINISHED.fullmatch(entry.name) and (entry.is_symlink() or entry.is_dir(follow_symlinks=False))
                )
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _claimed(self) -> list[tuple[Manifest, Path, bool]]:
        """What valid manifests claim, and whether it is whole as far as the sizes say; never what is unknown."""
        claimed = []
        for path in self._finished():
            with contextlib.suppress(OSError, NotOurs, BadCheckpoint):
                manifest, is_whole = manifests.read(path), path.name not in self._bad
                try:
                    manifests.check(path, manifest, checksums=False)
                except Damaged:
                    is_whole = False
                claimed.append((manifest, path, is_whole))
        return claimed

    # Removing.

    def _make_room(self, error: OSError) -> bool:
        """Removes the oldest checkpoint where the disk is full; whether there is more room now.

        The newest whole one stays, and all do where their room together wouldn't be enough for another.
        """
        if error.errno not in FULL:
            return False
        if self._sweep():
            return True
        whole = sorted((m.number, path, m) for m, path, is_whole in self._claimed() if is_whole)
        while whole:
            _, path, manifest = whole[-1]
            try:
                manifests.check(path, manifest, checksums=True)
                break
            except Damaged:
                self._bad.add(path.name)
                whole.pop()
            except OSError:
                return False
        if len(whole) < 2:
            return False
        oldest = whole[0][1]
        sizes = [sum(entry.size_bytes for entry in manifest.files.values()) for _, _, manifest in whole]
        try:
            if shutil.disk_usage(self.path).free + sum(sizes[:-1]) < sizes[-1]:
                return False
            self._remove(oldest)
        except (OSError, Damaged, BadCheckpoint):
            return False
        self._unsaid.append(
            f"{_reason(error)}: the oldest checkpoint, {oldest.name}, was removed to make room for the next "
            f"({self.path}); {len(whole) - 1} stay"
        )
        return True

    def _sweep(self, written: str = "") -> bool:
        """Removes damaged checkpoints and what dead writers left; whether there were any. What others wrote stays.

        What has just been written stays too, whatever a file system that is shared shows of it so soon.
        """
        swept = False
        for _, path, is_whole in self._claimed():
            if not is_whole and path.name != written:
                with contextlib.suppress(OSError, NotOurs, BadCheckpoint):
                    self._remove(path)
                    swept |= not os.path.lexists(path)
        for path in self.path.iterdir():
            temporary = _TEMPORARY.fullmatch(path.name)
            if temporary is None or path.name in self._own:
                continue
            # Whoever holds the lock is the only one that writes here, whatever process has that number by now.
            process = int(temporary[1])
            if self._possession.is_locked or process == os.getpid() or not psutil.pid_exists(process):
                with contextlib.suppress(OSError, NotOurs, BadCheckpoint):
                    self._remove_left(path)
                    swept |= not os.path.lexists(path)
        return swept

    def _remove(self, path: Path) -> None:
        """Removes what a valid manifest claims, so that a kill in between leaves no half of it under its name."""
        manifest = manifests.read(path)
        hidden = self.path / f".{path.name}.old-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        os.rename(path, hidden)
        self._bad.discard(path.name)
        self._discard(hidden, manifest)

    def _remove_left(self, path: Path) -> None:
        """Removes a hidden directory that a dead writer left, if it is one."""
        with contextlib.suppress(OSError):
            path.rmdir()
            return
        try:
            plain_size(path / UNFINISHED)
        except FileNotFoundError:
            self._discard(path, manifests.read(path))
            return
        shutil.rmtree(path)

    def _discard(self, hidden: Path, manifest: Manifest) -> None:
        """Removes what a manifest claims; what stays gets its name back, where people look for it."""
        path = self.path / _final_name(hidden)
        left = manifests.discard(hidden, manifest)
        if os.path.lexists(hidden) and not os.path.lexists(path):
            os.rename(hidden, path)
        if left:
            self._unsaid.append(f"what memfit didn't write stays in {path}: {', '.join(left[:5])}")

    # Words.

    def _note_failure(self, step: int, error: OSError) -> None:
        """Announces the first failure of a kind, and then the second, fourth, eighth, ... in a row."""
        reason = _reason(error)
        self._num_failed += 1
        if reason == self._last_reason and self._num_failed & (self._num_failed - 1):
            return
        self._last_reason = reason
        in_a_row = f" {self._num_failed} in a row have failed." if self._num_failed > 1 else ""
        room = ""
        if error.errno in FULL:
            with contextlib.suppress(OSError):
                room = f" {format_size(shutil.disk_usage(self.path).free)} are free there."
        self._unsaid.append(
            f"the checkpoint of step {step} can't be written to {str(self.path)!r}: {reason}.{room}{in_a_row} The "
            "training goes on; the checkpoints before it stay, and the next one is tried when it is due."
        )

    def _say(self) -> None:
        while self._unsaid:
            _log.warning(self._unsaid.pop(0))


def _final_name(hidden: Path) -> str:
    """The name of a checkpoint whose directory is hidden: ".step-000000009.tmp-123-00ff"."""
    return hidden.name[1:].partition(".")[0]


def _force(path: Path) -> None:
    """Makes content last, or names in a directory: where the system can't, a crash of it may lose the newest."""
    is_directory = path.is_dir()
    try:
        handle = os.open(path, os.O_RDONLY if is_directory else os.O_RDWR | getattr(os, "O_BINARY", 0))
    except PermissionError:
        if is_directory:
            return  # Windows opens no directories
        raise
    try:
        os.fsync(handle)
    except OSError as error:
        if not is_directory or error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(handle)


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


@atexit.register
def _say_what_is_left() -> None:
    """The last checkpoint of a run may fail after its last line; threads have ended by now."""
    for folder in list(_living):
        folder.wait()
