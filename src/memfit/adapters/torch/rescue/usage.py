"""How much of the memory that a process may have it has needed at most, read once a step.

Host memory: the greatest resident size so far (VmHWM) is known to the kernel, the greatest amount of private data,
which RLIMIT_DATA limits, is not: it is taken as the present amount (VmData) plus what has been resident at most and
isn't any more (VmHWM - VmRSS). The kernel's peak is not reset between steps, since that would spoil the peak that the
script itself, or whoever waits for it, reads; so the share only ever grows. Devices: what the caching allocator has
reserved, which stays at about its peak.
"""

from pathlib import Path

import torch

from memfit.core.own_memory import STATUS, limits, read_sizes


class Usage:
    """The share of its memory that this process has needed at most.

    Args:
        limit_bytes: resident host memory that it may have; None for what the machine has.
        status: the kernel's account of this process.
    """

    def __init__(self, limit_bytes: int | None = None, status: Path = STATUS) -> None:
        self._limit_bytes = limit_bytes if limit_bytes is not None else _physical_bytes()
        self._status = status

    def peak_share(self) -> float:
        """The greatest share of any memory, from 0 to 1; 1 where nothing is known."""
        return max(self.host_share(), device_share())

    def host_share(self) -> float:
        """The greatest share of host memory and of the limits on it."""
        sizes = read_sizes(self._status)
        if sizes is None:
            return 1.0
        address_space, peak, resident, data = sizes
        shares = [0.0]
        if self._limit_bytes:
            shares.append(peak / self._limit_bytes)
        data_limit, space_limit = limits()
        if data_limit:
            shares.append((data + max(0, peak - resident)) / data_limit)
        if space_limit:
            shares.append(address_space / space_limit)
        return max(shares)


def device_share() -> float:
    """The greatest share of a device's memory that the allocator has reserved."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return 0.0
    return max(
        torch.cuda.memory_reserved(index) / torch.cuda.get_device_properties(index).total_memory
        for index in range(torch.cuda.device_count())
    )


def _physical_bytes() -> int | None:
    try:
        import psutil

        return int(psutil.virtual_memory().total)
    except (ImportError, OSError, RuntimeError):
        return None
