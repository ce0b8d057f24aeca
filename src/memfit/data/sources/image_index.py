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

from memfit.core.errors import BadFile, reason_of
from memfit.data.files import FolderEntry, is_remote, join, list_folder

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
# Names of folders that hold parts of a data set rather than classes.
_PARTS = frozenset(("test", "testing", "train", "training", "val", "valid", "validation"))


class ImageIndex:
    """The images of a folder."""

    def __init__(self, root: str) -> None:
        self.root = root
        # Paths of all images below the root, one after the other, and where each ends.
        self._names = bytearray()
        self._ends = array("q", [0])
        # Of the images: the numbers of their classes, and the bytes of their files.
        self.numbers = array("i")
        self.sizes = array("q")
        # Names of the class folders, sorted; () where the images have none.
        self.classes: tuple[str, ...] = ()
        # Changes with names, sizes and times of change.
        self.digest = ""
        # What a user should know of how the folder was understood: also, in a sentence, links that were not followed.
        self.notes: tuple[str, ...] = ()
        self.left_out = ""

    @property
    def num_images(self) -> int:
        """Images in it."""
        return len(self.sizes)

    def path(self, sample: int) -> str:
        """Path or address of an image."""
        return join(self.root, os.fsdecode(bytes(self._names[self._ends[sample] : self._ends[sample + 1]])))

    def add(self, name: str, entry: FolderEntry, number: int) -> bytes:
        """Adds an image of a class by its path below the root; gives what the digest depends on."""
        size, changed = entry.size, 0
        if not is_remote(self.root):
            # A link to nothing is found to be unreadable when its turn comes.
            with contextlib.suppress(OSError):
                status = os.stat(join(self.root, name))
                size, changed = status.st_size, status.st_mtime_ns
        packed = os.fsencode(name)
        self._names += packed
        self._ends.append(len(self._names))
        self.numbers.append(number)
        self.sizes.append(size)
        return packed + b"\0%d %d\0" % (size, changed)


def build_index(root: str, *, follow_links: bool = False) -> ImageIndex:
    """Looks through a folder, and all folders in it, each once.

    Each folder directly in it is a class, numbered in sorted order, and images beside these folders are left out. Where
    none of them holds an image, those directly in the folder are taken, without classes. What begins with "." is hidden
    and passed over. Links to files are followed; those to folders only where the user asks for it, and then no folder
    is looked into twice, nor any that the root itself lies in.
    """
    root = root.rstrip("/") if is_remote(root) else os.path.abspath(os.path.expanduser(root))
    links = _Links(root, follow_links)
    entries = list_folder(root)
    folders = [entry for entry in entries if entry.is_folder and links.is_new(entry.name)]
    images = [entry for entry in entries if _is_image(entry)]
    index, digest = ImageIndex(root), hashlib.sha256()
    for number, folder in enumerate(folders):
        for name, entry in _walk(root, folder.name, links):
            digest.update(index.add(name, entry, number))
    index.left_out = links.describe()
    if index.num_images:
        names = index.classes = tuple(folder.name for folder in folders)
        notes = [f"{len(images):,} images beside the class folders are left out"] if images else []
        filled = set(index.numbers)
        empty = [name for number, name in enumerate(names) if number not in filled]
        if empty:
            shown = ", ".join(map(repr, empty[:5])) + (f" and {len(empty) - 5} more" if len(empty) > 5 else "")
            notes.append(f"class folders without images: {shown}")
        if {name.lower() for name in names} <= _PARTS:
            listed = ", ".join(map(repr, names))
            notes.append(f"the classes are {listed}; if these are parts of the data, give the folder of one of them")
    elif images:
        for entry in images:
            digest.update(index.add(entry.name, entry, 0))
        notes = ["the images lie in no class folders, and have no labels"]
    else:
        raise BadFile(
            f"{root!r} holds no images ({', '.join(ENDINGS)}). A folder with one folder of images for each class was "
            "expected, or a folder of images." + (f" {index.left_out}." if index.left_out else "")
        )
    digest.update(repr(index.classes).encode())
    index.digest = digest.hexdigest()[:32]
    index.notes = (*notes, index.left_out) if index.left_out else tuple(notes)
    return index


class _Links:
    """Which folders below a root are looked into: each once, and none outside of it unless the user asks."""

    def __init__(self, root: str, follow: bool) -> None:
        self._root = root
        self._real = "" if is_remote(root) else os.path.realpath(root)
        self._follow = follow
        self._left_out: list[str] = []
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
            raise BadFile(f"{path!r} can't be looked into: {reason_of(error)}.") from error
        place = (status.st_dev, status.st_ino)
        if is_passed or place in self._seen:
            self._left_out.append(inside)
            return False
        self._seen.add(place)
        return True

    def _leads_elsewhere(self, destination: str) -> bool:
        """Whether a link leads to a folder that is followed: neither below the root, nor one that the root is in."""
        inner, outer = os.path.join(self._real, ""), os.path.join(destination, "")
        return self._follow and not inner.startswith(outer) and not outer.startswith(inner)

    def describe(self) -> str:
        """What was left out, in a sentence without a full stop; "" where nothing was."""
        if not self._left_out:
            return ""
        shown = ", ".join(map(repr, self._left_out[:3])) + (", ..." if len(self._left_out) > 3 else "")
        more = "" if self._follow else "; --follow-links (follow_links=True) follows those that lead out of the folder"
        return f"{len(self._left_out):,} links to folders were not followed ({shown}){more}"


def _walk(root: str, inside: str, links: _Links) -> Iterator[tuple[str, FolderEntry]]:
    """Images in a folder below the root, then those in its folders, with their paths below the root."""
    entries = list_folder(join(root, inside))
    for entry in entries:
        if _is_image(entry):
            yield f"{inside}/{entry.name}", entry
    for entry in entries:
        if entry.is_folder and links.is_new(f"{inside}/{entry.name}"):
            yield from _walk(root, f"{inside}/{entry.name}", links)


def _is_image(entry: FolderEntry) -> bool:
    return not entry.is_folder and entry.name.lower().endswith(ENDINGS)
