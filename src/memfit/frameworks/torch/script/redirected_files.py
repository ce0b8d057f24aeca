"""Files of a dry run, kept apart from the user's.

What a script saves during a dry run holds shapes, or weights of a training that was cut short: neither may replace a
checkpoint on disk. So files that look like checkpoints are written below a folder of their own, and the script finds
them where it put them. The user's older checkpoints are not removed either; the script sees them gone.

This module knows which file is where. `file_functions` makes Python's functions on files ask it.
"""

import errno
import itertools
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import Any

from memfit.core import env

Report = Callable[[str, str], None]
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


class RedirectedFiles:
    """Where the checkpoints of a dry run are.

    A path is known by its key: absolute, with the links on the way to it resolved.

    Args:
        folder: where they go; None: a new temporary folder, made on first use.
        report: takes (code, text) of each file redirected and each deletion skipped.
        private: whether nobody but the script sees what it writes (`memfit.processes.overlay`): then files stay where
            it puts them, and only those of checkpoints are known.
    """

    def __init__(self, folder: str | None, report: Report, *, private: bool = False) -> None:
        self.are_private = private
        self.redirected: dict[str, str] = {}
        """Absolute path asked for -> path written."""
        self.removed: set[str] = set()
        """What the user has on disk and the script removed."""
        self.made: set[str] = set()
        """Folders that the script made."""
        self._folder = None if folder is None else os.path.realpath(folder)
        self._report = report
        self._reported: set[tuple[str, str]] = set()
        self._names: set[str] = set()
        self._numbers = itertools.count()
        self._start = time.time()
        self._plain_lstat, self._plain_open = os.lstat, open
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

    def current(self, path: Path) -> Path:
        """Where the file is that the script finds at `path`."""
        key = self.known(path)
        return path if key is None else self.redirected.get(key, path)

    def existing(self, path: Path) -> Path:
        """Like `current`; raises FileNotFoundError for what the script removed."""
        if self.known(path) in self.removed:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        return self.current(path)

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
            text = f"{key} was not touched; what was saved there is in {self.redirected[key]}"
            if not os.path.isdir(os.path.dirname(key)):
                text += ". Its folder does not exist: without memfit, saving there would fail"
            self._note(REDIRECTED, key, text)
        return self.redirected[key]

    def opened(self, path: Path, mode: str) -> Path:
        """What to open when the script opens `path`."""
        if self.are_private:
            return path
        known = self.known(path)
        if known in self.redirected:
            return self.redirected[str(known)]
        if not set(mode) & set("wxa+"):
            return self.existing(path)
        key = self.key(path)
        is_there = self.is_on_disk(key) and key not in self.removed
        is_users = self.is_older(key)
        is_data = key.lower().endswith(_SUFFIXES_OF_DATA)
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

    def is_on_disk(self, key: str) -> bool:
        """Whether the user has something there, whatever the script sees."""
        return self._status(key) is not None

    def is_regular(self, path: Path) -> bool:
        """Whether a file is or could be at `path`, and not a folder or a device such as /dev/null."""
        return os.path.isfile(path) or not self.is_on_disk(self.key(path))

    def is_older(self, key: str) -> bool:
        """Whether the user had something there before the run."""
        status = self._status(key)
        return status is not None and status.st_mtime < self._start

    def is_checkpoint(self, key: str) -> bool:
        """Whether a file of that name is taken for a checkpoint, or for a part of one."""
        # A temporary folder of the script's own, through which it may talk to other processes, holds none.
        is_scratch = any(
            key.startswith(root) and root + key[len(root) :].partition(os.sep)[0] in self.made for root in self._scratch
        )
        if is_scratch or self._is_apart(key):
            return False
        folder, name = os.path.split(key)
        name = name.lower()
        for suffix in _UNFINISHED:
            name = name.removesuffix(suffix)
        return name.endswith(_SUFFIXES) or (_is_checkpoint_folder(folder) and folder not in self.made)

    def _is_apart(self, key: str) -> bool:
        """Whether this is in a folder that is nobody's work: that of redirected files, or a cache."""
        return key.startswith(tuple(root + os.sep for root in (self._folder, *self._caches) if root))

    def holds_older(self, folder: str) -> bool:
        """Whether checkpoints of the user's are in a folder."""
        if folder in self.made:
            return False
        if _is_checkpoint_folder(folder):
            return True
        files = (os.path.join(where, name) for where, _, names in os.walk(folder) for name in names)
        return any(self.is_checkpoint(file) and self.is_older(file) for file in files)

    def below(self, folder: str) -> list[str]:
        """The redirected files in a folder and its folders."""
        return [key for key in list(self.redirected) if key.startswith(folder + os.sep)]

    def listed(self, path: Path) -> tuple[list[str], set[str]]:
        """What a listing of a folder is to show in addition, and which names of its own it is to leave out."""
        if not self._names or isinstance(path, int):
            return [], set()
        folder = os.path.realpath("." if path is None else os.fsdecode(path))
        added = [place for key, place in list(self.redirected.items()) if os.path.dirname(key) == folder]
        removed = (os.path.basename(key) for key in list(self.removed) if os.path.dirname(key) == folder)
        return added, {os.path.basename(place) for place in added}.union(removed)

    def keep(self, key: str) -> None:
        """The script removes what the user has there: it stays, and the script sees it gone."""
        self._names.add(os.path.basename(key))
        self.removed.add(key)
        self._note(KEPT, key, f"{key} is older than this run and was not removed")

    def forget(self, key: str) -> None:
        """What the script wrote there is gone, and so is for the script what the user has there."""
        self.redirected.pop(key, None)
        if self.is_on_disk(key):
            self.removed.add(key)

    def move_folder(self, source: str, destination: str) -> None:
        """A folder has been renamed."""
        for key in self.below(source):
            self.redirected[destination + key[len(source) :]] = self.redirected.pop(key)
        if source in self.made:
            self.made.discard(source)
            self.made.add(destination)

    def finish(self) -> None:
        """Takes along folders of checkpoints that the script made, which are incomplete without the redirected files.

        To be called when Python's functions are its own again. A later run could take such a folder for a checkpoint
        to resume from.
        """
        asked = {os.path.dirname(path) for path in self.redirected}
        for folder in sorted(self.made, key=len, reverse=True):
            if not os.path.isdir(folder):
                continue
            if _is_checkpoint_folder(folder):
                place = shutil.move(folder, self._new_folder())
                self._note(REDIRECTED, folder, f"{folder}, made by this run, was moved to {place}")
            elif folder in asked and not os.listdir(folder):
                os.rmdir(folder)

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
