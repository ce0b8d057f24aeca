"""What this process holds and may hold, as the kernel tells it."""

import sys
from pathlib import Path

STATUS = Path("/proc/self/status")


def limits() -> tuple[int | None, int | None]:
    """(RLIMIT_DATA, RLIMIT_AS) of this process, None where there is no limit."""
    if sys.platform == "win32":
        return None, None
    import resource

    soft = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS)]
    data, space = (None if limit == resource.RLIM_INFINITY else limit for limit in soft)
    return data, space


def status_bytes(path: str | Path, *names: bytes) -> list[int | None]:
    """Sizes by their names in a file such as /proc/self/status; None for each that isn't there."""
    try:
        with open(path, "rb") as file:
            lines = dict(line.split(b":", 1) for line in file.read().splitlines() if b":" in line)
    except OSError:
        lines = {}
    return [int(lines[name].split()[0]) * 1024 if name in lines else None for name in names]


def read_sizes(status: Path = STATUS) -> tuple[int, int, int, int] | None:
    """Bytes of (peak address space, peak resident, resident, private data); None where the system doesn't tell."""
    space, peak, resident, data = (size or 0 for size in status_bytes(status, b"VmPeak", b"VmHWM", b"VmRSS", b"VmData"))
    return (space, peak, resident, data) if peak else None
