"""What os.scandir gives of a folder in which a program has put files that are elsewhere."""

import itertools
import os
from typing import Any


class LayerEntry:
    """A file of the layer, or a link, in a listing of the folder where the program has put it."""

    def __init__(self, folder: str, given: Any, name: str) -> None:
        self._key = os.path.join(folder, name)
        self.name: Any = os.fsencode(name) if isinstance(given, bytes) else name
        self.path = os.path.join(given, self.name)

    def __fspath__(self) -> Any:
        return self.path

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """What is known of it, or of what it leads to."""
        return os.stat(self._key, follow_symlinks=follow_symlinks)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Whether it leads to a folder."""
        return follow_symlinks and os.path.isdir(self._key)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Whether it is a file, or leads to one."""
        return os.path.isfile(self._key) and (follow_symlinks or not self.is_symlink())

    def is_symlink(self) -> bool:
        """Whether it is a link."""
        return os.path.islink(self._key)

    def inode(self) -> int:
        """Its number on its disk."""
        return self.stat(follow_symlinks=False).st_ino


class Listing(itertools.chain[Any]):
    """Entries of a folder, as os.scandir gives them."""

    def __enter__(self) -> "Listing":
        return self

    def __exit__(self, *error: object) -> None:
        """It holds nothing open."""

    close = __exit__
