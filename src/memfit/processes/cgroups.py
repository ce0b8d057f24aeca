"""The memory of the container: its limit, what is used of it, and whether the kernel has killed in it.

Use is what can't be given back: the page cache fills every container to its limit and kills nobody, so the pages of
files that the kernel can drop are not counted. Version 1 and version 2 of control groups say all of it under different
names. Where there is no control group there is nothing here, and the machine's own figures count.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from memfit.catalogue.host import memory_groups, parse_limit

_ROOT = Path("/")
# Such a file is a few lines, and is made in one piece when it is read.
_MAX_FILE_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Room:
    """The tightest limit on what processes here can still get."""

    free_bytes: int  # what they can still get
    limit_bytes: int  # the limit itself
    used_bytes: int  # what is used of it and can't be given back
    limit_of: str  # "container" or "machine"


class ControlGroups:
    """The control groups of this process, which are also those of the processes that it starts."""

    def __init__(self, root: Path = _ROOT) -> None:
        self._root = root
        # Without a controller a hierarchy has folders and no figures.
        self._levels = [
            (is_unified, levels)
            for is_unified, levels in memory_groups(root)
            if any(_used(level, is_unified, {}) is not None and (level / "memory.stat").is_file() for level in levels)
        ]

    def room(self) -> Room | None:
        """The tightest of all limits, that of the machine included; None where nothing is known."""
        rooms = list(self._rooms())
        machine = _table(self._root / "proc/meminfo", unit=1024)
        total, free = machine.get("MemTotal:"), machine.get("MemAvailable:")
        if total is not None and free is not None:
            rooms.append(Room(free, total, total - free, "machine"))
        return min(rooms, key=lambda room: room.free_bytes, default=None)

    def used_bytes(self) -> int | None:
        """What the container's processes hold and can't give back; None without a container."""
        for is_unified, levels in self._levels:
            for level in levels:
                used = _used(level, is_unified, _table(level / "memory.stat"))
                if used is not None:
                    return used
        return None

    def num_kills(self, *, around: bool = False) -> int | None:
        """How often the kernel has killed in our own group for lack of memory; None where it doesn't tell.

        With `around` also in those above it: some of those kills may be of processes that aren't ours.
        """
        counts = [
            _table(level / ("memory.events" if is_unified else "memory.oom_control")).get("oom_kill")
            for is_unified, levels in self._levels
            for level in (levels if around else levels[:1])
        ]
        known = [count for count in counts if count is not None]
        return sum(known) if known else None

    def _rooms(self) -> Iterator[Room]:
        for is_unified, levels in self._levels:
            for level in levels:
                figures = _table(level / "memory.stat")
                limit = _limit(level, is_unified, figures)
                used = None if limit is None else _used(level, is_unified, figures)
                if limit is not None and used is not None:
                    yield Room(max(0, limit - used), limit, used, "container")


def _limit(level: Path, is_unified: bool, figures: dict[str, int]) -> int | None:
    if is_unified:
        return parse_limit(_read(level / "memory.max"))
    # Some groups above ours may be out of sight, and this states the tightest of them all.
    stated = parse_limit(str(figures.get("hierarchical_memory_limit", "")))
    own = parse_limit(_read(level / "memory.limit_in_bytes"))
    return min((limit for limit in (stated, own) if limit is not None), default=None)


def _used(level: Path, is_unified: bool, figures: dict[str, int]) -> int | None:
    charged = _number(_read(level / ("memory.current" if is_unified else "memory.usage_in_bytes")))
    if charged is None:
        return None
    unified, older = ("inactive_file", "active_file", "slab_reclaimable"), ("total_inactive_file", "total_active_file")
    return max(0, charged - sum(figures.get(name, 0) for name in (unified if is_unified else older)))


def _read(path: Path) -> str:
    # Five times a second and several files each: `Path.read_text` takes three times as long.
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return ""
    try:
        return os.read(descriptor, _MAX_FILE_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _table(path: Path, unit: int = 1) -> dict[str, int]:
    """A file of names and numbers, one pair a line."""
    table = {}
    for line in _read(path).splitlines():
        name, *rest = line.split()[:2] or [""]
        value = _number(rest[0]) if rest else None
        if value is not None:
            table[name] = value * unit
    return table


def _number(text: str) -> int | None:
    word = text.strip()
    return int(word) if word.isascii() and word.isdigit() else None
