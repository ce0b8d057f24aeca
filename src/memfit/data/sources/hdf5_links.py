"""Refuses datasets of an HDF5 file that lie in other files than the user gave.

An HDF5 file can refer to others: by a link to an object of another file, by the sources of a virtual dataset, and by a
dataset whose bytes are in plain files. The library opens them without a word, whatever they are, so that a file from
somewhere else could make a training read any file of this machine. Parts of a virtual dataset, and plain files, that
lie in the folder of the file or below it belong to the data; everything else needs the user's word.
"""

import os
from typing import Any

from memfit.core.errors import BadFile

_MOST_HOPS = 64


def stay_inside(file: Any, path: str, name: str) -> None:
    """Refuses the dataset at a path where it lies outside of the file or of its folder.

    Args:
        file: that is open.
        path: of the dataset in it.
        name: of the file, for the message.

    Raises:
        BadFile: it does.
    """
    root = os.path.realpath(os.path.dirname(os.path.abspath(file.filename)))
    _check(file, path, f"dataset {path!r} of {name!r}", root, set())


def _check(file: Any, path: str, said: str, root: str, seen: set[tuple[str, str]]) -> None:
    import h5py

    item = _resolve(file, path, said)
    if not isinstance(item, h5py.Dataset):
        # Whoever looks for it says that it isn't there.
        return
    folder = os.path.dirname(os.path.abspath(file.filename))
    for part, *_ in item.external or ():
        _refuse_outside(part, folder, root, said, "keeps its values in another file")
    if not item.is_virtual:
        return
    for source in item.virtual_sources():
        # "." is the file itself.
        if (source.file_name, source.dset_name) in seen:
            continue
        seen.add((source.file_name, source.dset_name))
        if source.file_name == ".":
            _check(file, source.dset_name, said, root, seen)
            continue
        place = _refuse_outside(source.file_name, folder, root, said, "is made of other files")
        # A name with a "%" in it stands for many, which lie in the same folder; what is missing is told elsewhere.
        if os.path.isfile(place):
            with h5py.File(place, "r") as other:
                _check(other, source.dset_name, said, root, seen)


def _resolve(file: Any, path: str, said: str) -> Any:
    """What is at a path, found without leaving the file; None where nothing is."""
    import h5py

    group, parts = file, path.split("/")
    for _ in range(_MOST_HOPS):
        while parts and parts[0] in ("", "."):
            parts.pop(0)
        if not parts:
            return group
        if not isinstance(group, h5py.Group):
            return None
        link = group.get(parts[0], getlink=True)
        if isinstance(link, h5py.ExternalLink):
            raise _outside(said, "is a link into another file", link.filename)
        if isinstance(link, h5py.SoftLink):
            group = file if link.path.startswith("/") else group
            parts = [*link.path.split("/"), *parts[1:]]
            continue
        group = group.get(parts.pop(0)) if link is not None else None
    return None


def _refuse_outside(part: str, folder: str, root: str, said: str, what: str) -> str:
    """The place of a file that a dataset refers to, which is in the folder of the first file or below it."""
    places = [os.path.realpath(os.path.join(base, part)) for base in (folder, os.getcwd())]
    place = next((place for place in places if os.path.exists(place)), places[0])
    if not os.path.join(place, "").startswith(os.path.join(root, "")):
        raise _outside(said, what, part)
    return place


def _outside(said: str, what: str, part: str) -> BadFile:
    return BadFile(
        f"{said} {what}, {part!r}, which isn't read unasked. Give that file itself, or follow_links=True where it is "
        "one that you trust."
    )
