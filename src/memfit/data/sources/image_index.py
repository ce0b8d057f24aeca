"""Which images a folder holds, in a form that two million of them can have.

A list of paths costs a hundred bytes and more for each file and, because Python counts references inside the objects,
forked workers that only look at it come to own a copy. So all paths are one array of bytes with another of offsets, and
classes and sizes are arrays too, which workers share for as long as they live.
"""

import contextlib
import hashlib
import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from memfit.core.errors import BadFile
from memfit.data.files import is_remote
from memfit.data.source import Array

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
# Names of folders that hold parts of a data set rather than classes.
_PARTS = frozenset(("test", "testing", "train", "training", "val", "valid", "validation"))


@dataclass(frozen=True, slots=True)
class ImageIndex:
    """The images of a folder.

    Attributes:
        root: the folder.
        names: paths of all images below it, in bytes, one after the other.
        offsets: where each path begins in them and, last, where the last one ends.
        numbers: of the classes of the images.
        sizes: of the files in bytes.
        classes: names of the class folders, sorted; () where the images have none.
        digest: changes with names, sizes and times of change.
        notes: what a user should know of how the folder was understood.
        left_out: links to folders that were not followed, in a sentence, or "".
    """

    root: str
    names: Array
    offsets: Array
    numbers: Array
    sizes: Array
    classes: tuple[str, ...]
    digest: str
    notes: tuple[str, ...]
    left_out: str = ""

    @property
    def num_images(self) -> int:
        """Images in it."""
        return len(self.sizes)

    def path(self, sample: int) -> str:
        """Path or address of an image."""
        name = os.fsdecode(self.names[self.offsets[sample] : self.offsets[sample + 1]].tobytes())
        return f"{self.root}/{name}" if is_remote(self.root) else os.path.join(self.root, name)


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    is_folder: bool
    size: int
    changed: int


@dataclass(slots=True)
class _Gathering:
    root: str
    names: bytearray = field(default_factory=bytearray)
    offsets: "array[int]" = field(default_factory=lambda: array("q", [0]))
    numbers: "array[int]" = field(default_factory=lambda: array("i"))
    sizes: "array[int]" = field(default_factory=lambda: array("q"))
    digest: "hashlib._Hash" = field(default_factory=hashlib.sha256)

    def add(self, name: str, entry: _Entry, number: int) -> None:
        packed = os.fsencode(name)
        self.names += packed
        self.offsets.append(len(self.names))
        self.numbers.append(number)
        self.sizes.append(entry.size)
        self.digest.update(packed + b"\0%d %d\0" % (entry.size, entry.changed))

    def finish(self, classes: tuple[str, ...], notes: tuple[str, ...], left_out: str) -> ImageIndex:
        self.digest.update(repr(classes).encode())
        return ImageIndex(
            self.root,
            np.frombuffer(bytes(self.names), np.uint8),
            np.array(self.offsets, np.int64),
            np.array(self.numbers, np.int32),
            np.array(self.sizes, np.int64),
            classes,
            self.digest.hexdigest()[:32],
            (*notes, left_out) if left_out else notes,
            left_out,
        )


def build_index(root: str, *, follow_links: bool = False) -> ImageIndex:
    """Looks through a folder, and all folders in it, each once.

    Each folder directly in it is a class, numbered in sorted order, and images beside these folders are left out. Where
    none of them holds an image, those directly in the folder are taken, without classes. What begins with "." is hidden
    and passed over. Links to files are followed; those to folders only where the user asks for it, and then no folder
    is looked into twice, nor any that the root itself lies in.
    """
    root = root.rstrip("/") if is_remote(root) else os.path.abspath(os.path.expanduser(root))
    links = _Links(root, follow_links)
    entries = _list(root, "")
    folders = [entry.name for entry in entries if entry.is_folder and links.is_new(entry.name)]
    images = [entry for entry in entries if _is_image(entry)]
    gathered = _Gathering(root)
    for number, folder in enumerate(folders):
        for name, entry in _walk(root, folder, links):
            gathered.add(name, entry, number)
    if gathered.sizes:
        notes = [f"{len(images):,} images beside the class folders are left out"] if images else []
        filled = set(gathered.numbers)
        empty = [name for number, name in enumerate(folders) if number not in filled]
        if empty:
            shown = ", ".join(map(repr, empty[:5])) + (f" and {len(empty) - 5} more" if len(empty) > 5 else "")
            notes.append(f"class folders without images: {shown}")
        if {name.lower() for name in folders} <= _PARTS:
            named = ", ".join(map(repr, folders))
            notes.append(f"the classes are {named}; if these are parts of the data, give the folder of one of them")
        return gathered.finish(tuple(folders), tuple(notes), links.describe())
    for entry in images:
        gathered.add(entry.name, entry, 0)
    if not gathered.sizes:
        raise BadFile(
            f"{root!r} holds no images ({', '.join(ENDINGS)}). A folder with one folder of images for each class was "
            "expected, or a folder of images." + (f" {links.describe()}." if links.left_out else "")
        )
    return gathered.finish((), ("the images lie in no class folders, and have no labels",), links.describe())


def _is_image(entry: _Entry) -> bool:
    return not entry.is_folder and entry.name.lower().endswith(ENDINGS)


class _Links:
    """Which folders below a root are looked into: each once, and none outside of it unless the user asks."""

    def __init__(self, root: str, follow: bool) -> None:
        self._root = root
        self._real = "" if is_remote(root) else os.path.realpath(root)
        self._follow = follow
        self.left_out: list[str] = []
        self._seen: set[tuple[int, int]] = set()
        if self._real and os.path.isdir(root):
            self.is_new("")

    def is_new(self, inside: str) -> bool:
        """Whether to look into the folder at a path below the root."""
        if not self._real:
            return True
        path = os.path.join(self._root, inside)
        try:
            status = os.stat(path)
            # Below a link that is followed, paths are not those of the folders.
            is_passed = bool(inside) and os.path.islink(path) and not self._leads_elsewhere(os.path.realpath(path))
        except OSError as error:
            raise BadFile(f"{path!r} can't be looked into: {error.strerror or error}.") from error
        place = (status.st_dev, status.st_ino)
        if is_passed or place in self._seen:
            self.left_out.append(inside)
            return False
        self._seen.add(place)
        return True

    def _leads_elsewhere(self, destination: str) -> bool:
        """Whether a link leads to a folder that is followed: neither below the root, nor one that the root is in."""
        inner, outer = os.path.join(self._real, ""), os.path.join(destination, "")
        return self._follow and not inner.startswith(outer) and not outer.startswith(inner)

    def describe(self) -> str:
        """What was left out, in a sentence without a full stop; "" where nothing was."""
        if not self.left_out:
            return ""
        shown = ", ".join(map(repr, self.left_out[:3])) + (", ..." if len(self.left_out) > 3 else "")
        more = "" if self._follow else "; follow_links=True follows those that lead out of the folder"
        return f"{len(self.left_out):,} links to folders were not followed ({shown}){more}"


def _walk(root: str, inside: str, links: _Links) -> Iterator[tuple[str, _Entry]]:
    """Images in a folder below the root, then those in its folders, with their paths below the root."""
    entries = _list(root, inside)
    for entry in entries:
        if _is_image(entry):
            yield f"{inside}/{entry.name}", entry
    for entry in entries:
        if entry.is_folder and links.is_new(f"{inside}/{entry.name}"):
            yield from _walk(root, f"{inside}/{entry.name}", links)


def _list(root: str, inside: str) -> list[_Entry]:
    """What isn't hidden in a folder, sorted by name."""
    if is_remote(root):
        from memfit.data.remote_files import list_folder

        listed = list_folder(f"{root}/{inside}".rstrip("/"))
        entries = [_Entry(each.path.rpartition("/")[2], each.is_folder, each.size or 0, 0) for each in listed]
    else:
        folder = os.path.join(root, inside) if inside else root
        try:
            with os.scandir(folder) as scanned:
                entries = [_entry(each) for each in scanned]
        except OSError as error:
            raise BadFile(f"{folder!r} can't be looked into: {error.strerror or error}.") from error
    return sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)


def is_folder_entry(entry: "os.DirEntry[str]") -> bool:
    """Whether an entry is a folder or a link to one; a link that leads in a circle is none."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _entry(entry: "os.DirEntry[str]") -> _Entry:
    if not is_folder_entry(entry) and entry.name.lower().endswith(ENDINGS):
        # A link to nothing is found to be unreadable when its turn comes.
        with contextlib.suppress(OSError):
            status = entry.stat()
            return _Entry(entry.name, False, status.st_size, status.st_mtime_ns)
    return _Entry(entry.name, is_folder_entry(entry), 0, 0)
