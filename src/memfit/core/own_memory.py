"""What this process holds and may hold, as the kernel tells it."""

import sys
from pathlib import Path

STATUS = Path("/proc/self/status")
_FIELDS = (b"VmPeak", b"VmHWM", b"VmRSS", b"VmData")


def limits() -> tuple[int | None, int | None]:
    """(RLIMIT_DATA, RLIMIT_AS) of this process, None where there is no limit."""
    if sys.platform == "win32":
        return None, None
    import resource

    soft = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS)]
    data, space = (None if limit == resource.RLIM_INFINITY else limit for limit in soft)
    return data, space


def read_sizes(status: Path = STATUS) -> tuple[int, int, int, int] | None:
    """Bytes of (peak address space, peak resident, resident, private data); None where the system doesn't tell."""
    try:
        text = status.read_bytes()
    except OSError:
        return None
    sizes = dict.fromkeys(_FIELDS, 0)
    for line in text.splitlines():
        name, _, value = line.partition(b":")
        if name in sizes:
            sizes[name] = int(value.split()[0]) * 1024
    space, peak, resident, data = sizes.values()
    return (space, peak, resident, data) if peak else None
