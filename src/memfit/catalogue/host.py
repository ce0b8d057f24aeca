"""How much memory this machine really gives a process.

Inside a container the kernel's total is the host's, not ours: the limit that kills is the control group's. Version 1
of the interface states the tightest limit of a group and its ancestors in `memory.stat`; version 2 has one
`memory.max` per level, and the least of them counts. Which directory is ours follows from /proc/self/cgroup (path in
the hierarchy) and /proc/self/mountinfo (which part of the hierarchy is mounted, and where), as in cgroups(7).
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_ROOT = Path("/")


class _Mount(NamedTuple):
    root: PurePosixPath
    point: PurePosixPath
    is_unified: bool


def host_memory_bytes() -> int | None:
    """Memory a process can have here: the control group's limit, else the physical memory; None where neither tells."""
    known = [size for size in (cgroup_limit_bytes(), physical_memory_bytes()) if size is not None]
    return min(known, default=None)


def physical_memory_bytes() -> int | None:
    """Memory of the whole machine, whatever a process may use of it."""
    # Slow to import, and `import memfit` needs no memory.
    import psutil

    try:
        return int(psutil.virtual_memory().total)
    except (OSError, RuntimeError):
        return None


def resident_bytes() -> int | None:
    """Memory of this process that is in RAM; None where the system doesn't say."""
    import psutil

    try:
        return int(psutil.Process().memory_info().rss)
    except psutil.Error:
        return None


def cgroup_limit_bytes(root: Path = _ROOT) -> int | None:
    """Tightest memory limit of this process's control groups, or None where there is none."""
    limits: list[int | None] = []
    for is_unified, levels in memory_groups(root):
        if is_unified:
            limits += [parse_limit(_read(level / "memory.max")) for level in levels]
        else:
            # Each level states the tightest limit of itself and its ancestors; the first that does is our own.
            stats = (line.partition(" ") for level in levels for line in _read(level / "memory.stat").splitlines())
            limits.append(
                next((parse_limit(text) for key, _, text in stats if key == "hierarchical_memory_limit"), None)
            )
    return min((limit for limit in limits if limit is not None), default=None)


def memory_groups(root: Path = _ROOT) -> Iterator[tuple[bool, list[Path]]]:
    """Where this process's memory is accounted: whether by version 2, and the folders from its own group up."""
    for mount in _memory_mounts(_read(root / "proc/self/mountinfo")):
        path = _group_path(_read(root / "proc/self/cgroup"), mount.is_unified)
        if path is None:
            continue
        point = root / mount.point.relative_to("/")
        # Below the mount point; a namespace may hide how the two relate, and what is mounted is then the best view.
        inside = path.relative_to(mount.root) if path.is_relative_to(mount.root) else PurePosixPath()
        inside = PurePosixPath() if ".." in inside.parts else inside
        # Ancestors up to the mount point; some containers see a path to their own group that isn't mounted.
        yield mount.is_unified, [point / inside, *(point / parent for parent in inside.parents)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return ""


def _memory_mounts(mountinfo: str) -> Iterator[_Mount]:
    """Mounts that may hold memory limits: cgroup2, or cgroup with the memory controller."""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, types = before.split(), after.split()
        if len(fields) < 5 or len(types) < 3 or not fields[4].startswith("/"):
            continue
        is_unified = types[0] == "cgroup2"
        if is_unified or (types[0] == "cgroup" and "memory" in types[2].split(",")):
            yield _Mount(PurePosixPath(_unescape(fields[3])), PurePosixPath(_unescape(fields[4])), is_unified)


def _unescape(text: str) -> str:
    # mountinfo writes space, tab, newline and backslash as octal.
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text


def _group_path(cgroup: str, is_unified: bool) -> PurePosixPath | None:
    """Path of this process in one hierarchy: "0::/path" for version 2, "4:memory:/path" for version 1."""
    for line in cgroup.splitlines():
        number, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        is_ours = (number == "0" and not controllers) if is_unified else "memory" in controllers.split(",")
        if colon and is_ours:
            return PurePosixPath(path.removesuffix(" (deleted)"))
    return None


def parse_limit(text: str) -> int | None:
    """Bytes of a limit; None for "max", for version 1's near-infinity and for anything unreadable."""
    word = text.strip()
    if not (word.isascii() and word.isdigit()):
        return None
    # Version 1 writes "no limit" as the largest multiple of the page size below 2**63.
    return int(word) if int(word) < 2**62 else None
