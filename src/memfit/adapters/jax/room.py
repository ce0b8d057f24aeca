"""Room for a compiled step, asked for before it is run.

A step of JAX that finds no memory is often beyond help: what was donated to it is gone, and on the host XLA ends the
process when one of its kernels finds none. What a step takes beside its arguments is known before: results and
temporaries to the byte, and what kernels on the host take for themselves from a simulated run. That much is allocated
and given back before each step. On accelerators the allocator's own figures are compared.

XLA reports results on the host before it has given the run's memory back, so what isn't there may be a little later.
"""

import mmap
import sys
import time
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy

from memfit.adapters.jax.compiled import read

# Seconds to wait for memory of the last run. Giving 800 MB back has taken up to a tenth of one.
PAUSES = (0.05, 0.2, 0.5)
# Where there is so much more than values need, nobody has to know what kernels take; also in copies of all values.
_AMPLE_BYTES = 64 * 2**20
_AMPLE_COPIES = 3
# What the C library keeps of blocks that were given back, at most, and what the runtime's threads and tasks take: a
# first run with 26 MiB beside values and one block of 21.5 MiB ended in most cases, one with 30 MiB in none of 16.
_KEPT_BYTES = 32 * 2**20
_RUNTIME_BYTES = 12 * 2**20


class Room:
    """What the compiled forms of one function take."""

    def __init__(self) -> None:
        self._needs: dict[Hashable, _Need] = {}
        self._on_host = jax.default_backend() == "cpu"

    def ask(self, key: Hashable, lower: Callable[[], Any], settle: Callable[[], Any] = lambda: None) -> None:
        """Makes sure that a step has the memory that it needs.

        Args:
            key: of the arguments' shapes.
            lower: gives the step, lowered for these arguments.
            settle: waits for the step before, which may still hold what this one needs.

        Raises:
            MemoryError: it isn't there.
        """
        if key not in self._needs:
            self._needs[key] = _Need(lower())
        need = self._needs[key]
        if not self._on_host:
            _ask_device(need.value_bytes)
        elif not _has(need.value_bytes * _AMPLE_COPIES + _AMPLE_BYTES):
            wanted = need.value_bytes + need.scratch_bytes()
            if not _has(wanted):
                settle()
                _wait_for(wanted)


class _Need:
    """Bytes that a lowered step takes beside its arguments."""

    def __init__(self, lowered: Any) -> None:
        self._lowered = lowered
        # JAX keeps the executable, so that the step that follows isn't compiled again.
        memory = lowered.compile().memory_analysis()
        self.value_bytes = 0 if memory is None else beside_arguments(memory)
        self._scratch_bytes: int | None = 0 if memory is None else None

    def scratch_bytes(self) -> int:
        """What kernels and the runtime take for themselves on the host; it takes a moment to find out."""
        if self._scratch_bytes is None:
            run = read(self._lowered).run
            asked = 0 if run is None else run.asked_bytes
            self._scratch_bytes = asked + min(asked, _KEPT_BYTES) + _RUNTIME_BYTES
            self._lowered = None
        return self._scratch_bytes


def shapes_of(arguments: Any) -> Hashable:
    """What a step is compiled for."""
    return tuple(
        (leaf.shape, str(leaf.dtype)) if hasattr(leaf, "dtype") else leaf for leaf in jax.tree.leaves(arguments)
    )


def beside_arguments(memory: Any) -> int:
    """Bytes of results and temporaries.

    Args:
        memory: what `compiled.memory_analysis()` gave.
    """
    return max(0, int(memory.temp_size_in_bytes) + int(memory.output_size_in_bytes) - int(memory.alias_size_in_bytes))


def _has(size_bytes: int) -> bool:
    """Whether the host has so much: asks for it and gives it back, past the C library, whose heap it would change."""
    try:
        if sys.platform == "win32":
            numpy.empty(size_bytes, numpy.uint8)
        else:
            mmap.mmap(-1, max(1, size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, OverflowError, MemoryError):
        return False
    return True


def _wait_for(size_bytes: int) -> None:
    for pause in PAUSES:
        if _has(size_bytes):
            return
        time.sleep(pause)
    if not _has(size_bytes):
        raise MemoryError(f"the step allocates {size_bytes} bytes, which the system doesn't have")


def _ask_device(size_bytes: int) -> None:
    statistics = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in statistics:
        left = statistics["bytes_limit"] - statistics.get("bytes_in_use", 0)
        if size_bytes > left:
            raise MemoryError(f"the step allocates {size_bytes} bytes on the device, and {left} bytes are free")
