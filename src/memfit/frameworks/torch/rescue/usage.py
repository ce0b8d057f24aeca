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


def peak_share(limit_bytes: int, status: Path = STATUS) -> float:
    """The greatest share of any memory, from 0 to 1; 1 where nothing is known.

    Args:
        limit_bytes: resident host memory that the process may have.
        status: the kernel's account of this process.
    """
    sizes = read_sizes(status)
    if sizes is None:
        return 1.0
    address_space, peak, resident, data = sizes
    data_limit, space_limit = limits()
    shares = [peak / limit_bytes]
    if data_limit:
        shares.append((data + max(0, peak - resident)) / data_limit)
    if space_limit:
        shares.append(address_space / space_limit)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            total_bytes = torch.cuda.get_device_properties(index).total_memory
            shares.append(torch.cuda.memory_reserved(index) / total_bytes)
    return max(shares)
