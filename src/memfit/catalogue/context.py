"""How much memory a CUDA context takes in a process, where nobody measured it.

The driver sets memory aside for every thread a device can hold at once, so a context grows with the number of
multiprocessors. Three measured contexts with modules loaded lazily (CUDA 11.7 and later) lie on one line within 1%:

    Tesla T4, 40 multiprocessors, CUDA 12.8              134.9 MiB
    GeForce RTX 3090, 82 multiprocessors, CUDA 12.8      256 MiB
    RTX 6000 Ada, 142 multiprocessors, CUDA 13.0         426 MiB

Multiprocessors that hold 2048 threads instead of 1536 are taken to need 4/3 as much each. For the A100 that gives
431 MiB; in its out-of-memory messages the part of a process outside PyTorch is 409 to 503 MiB, kernels included.
"""

from memfit.core.units import MIB

_BASE_MIB = 21.0
_MIB_PER_MULTIPROCESSOR = 2.85

# CUDA C++ Programming Guide, technical specifications per compute capability: 2048 resident threads.
_WIDE_CAPABILITIES = {(6, 0), (6, 1), (7, 0), (8, 0), (9, 0), (10, 0)}


def assume_context_bytes(capability: tuple[int, int], num_multiprocessors: int) -> int:
    """Bytes a CUDA context is assumed to take on a device of this size.

    >>> assume_context_bytes((7, 5), 40) // MIB
    135
    >>> assume_context_bytes((8, 0), 108) // MIB
    431
    """
    per_multiprocessor = _MIB_PER_MULTIPROCESSOR * (4 / 3 if capability in _WIDE_CAPABILITIES else 1)
    return round((_BASE_MIB + per_multiprocessor * num_multiprocessors) * MIB)
