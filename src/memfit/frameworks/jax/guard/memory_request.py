"""Memory for a compiled step, asked for before it is run.

A step of JAX that finds no memory is often beyond help: what was donated to it is gone, and on the host XLA ends the
process when one of its kernels finds none. What a step takes beside its arguments is known before: results and
temporaries to the byte, and what kernels on the host ask for for themselves within a bound. That much is allocated
and given back before each step, where the system would refuse it: with a limit on the process, or strict overcommit.
Without either, it refuses only what the machine doesn't have. On accelerators the allocator's own figures are compared.

XLA reports results on the host before it has given the run's memory back, so what isn't there may be a little later.
"""

import ctypes
import mmap
import sys
import time
from collections.abc import Callable, Hashable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy

from memfit.core.own_memory import limits, read_sizes
from memfit.frameworks.jax.trace.compiled import read
from memfit.frameworks.xla.scratch import most_asked_bytes

# Seconds to wait for memory of the last run. Giving 800 MB back has taken up to a tenth of one.
_PAUSES = (0.05, 0.2, 0.5)
# What the C library keeps of blocks that were given back, at most, and what the runtime's threads and tasks take: a
# first run with 26 MiB beside values and one block of 21.5 MiB ended in most cases, one with 30 MiB in none of 16.
_KEPT_BYTES = 32 * 2**20
_RUNTIME_BYTES = 12 * 2**20
# XLA's compiler ends the process, too.
_COMPILER_BYTES = 48 * 2**20
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_STRICT = "2"
_PAGE_BYTES = 4096


class NoRoom(MemoryError):
    """The memory that a step needs, margins included, isn't there."""

    def __init__(self, wanted_bytes: int, free_bytes: int) -> None:
        super().__init__(f"a step that has to allocate {wanted_bytes} bytes finds {free_bytes} bytes free")
        self.wanted_bytes = wanted_bytes
        self.free_bytes = free_bytes


class Host:
    """The memory of this machine, as far as the process may have it."""

    @property
    def can_refuse(self) -> bool:
        """Whether the system refuses memory that the machine has: by a limit of the process, or strict overcommit."""
        return sys.platform == "win32" or any(limit is not None for limit in limits()) or _is_strict(_OVERCOMMIT)

    @property
    def data_bytes(self) -> int:
        """Of the process's private memory; 0 where the system doesn't say."""
        sizes = read_sizes()
        return 0 if sizes is None else sizes[-1]

    @property
    def heap_free_bytes(self) -> int:
        """What the C library holds and nobody uses; 0 where it doesn't say."""
        describe = None if sys.platform == "win32" else getattr(ctypes.CDLL(None), "mallinfo2", None)
        if describe is None:
            return 0
        describe.restype = _HeapInfo
        return int(describe().fordblks)

    def has(self, size_bytes: int) -> bool:
        """Whether so much is there: asks for it and gives it back, past the C library, whose heap it would change."""
        try:
            if sys.platform == "win32":
                numpy.empty(size_bytes, numpy.uint8)
            else:
                mmap.mmap(-1, max(1, size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        except (OSError, OverflowError, MemoryError, ValueError):
            return False
        return True

    def ask(self, size_bytes: int, settle: Callable[[], Any]) -> None:
        """Waits until so much is there, or raises NoRoom."""
        if self.has(size_bytes):
            return
        settle()
        for pause in _PAUSES:
            if self.has(size_bytes):
                return
            time.sleep(pause)
        if not self.has(size_bytes):
            raise NoRoom(size_bytes, self._most(size_bytes))

    def _most(self, size_bytes: int) -> int:
        """The most that is there, below `size_bytes`."""
        low, high = 0, size_bytes
        while high - low > max(_PAGE_BYTES, size_bytes >> 8):
            middle = (low + high) // 2
            low, high = (middle, high) if self.has(middle) else (low, middle)
        return low


@cache
def _is_strict(overcommit: Path) -> bool:
    try:
        return overcommit.read_text(encoding="ascii").strip() == _STRICT
    except OSError:
        return False


class _HeapInfo(ctypes.Structure):
    """What mallinfo2(3) gives; of it, only what is free in all heaps is read."""

    _fields_ = (("others", ctypes.c_size_t * 8), ("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t))


class MemoryRequest:
    """A check before each step of one jitted function that the memory it takes is there.

    Nothing is reserved: what each compiled form takes beside its arguments is remembered, and `ask` raises `NoRoom`
    where so much can't be had at that moment.
    """

    def __init__(self, function: Any, host: Host | None = None) -> None:
        self._function = function
        self._host = host or Host()
        self._needs: dict[Hashable, _Need] = {}

    def ask(self, arguments: tuple[Any, ...], settle: Callable[[], Any] = lambda: None) -> None:
        """Makes sure that a step has the memory that it needs, or raises NoRoom.

        `settle` waits for the step before, which may still hold what this one needs.
        """
        key = form_of(arguments)
        need = self._needs.get(key)
        if need is None:
            if self._host.can_refuse:
                self._host.ask(_COMPILER_BYTES, settle)
            arrays = (leaf for leaf in jax.tree.leaves(arguments) if isinstance(leaf, jax.Array))
            devices = {device for array in arrays for device in array.devices()} or {jax.local_devices()[0]}
            lowered = self._function.lower(*arguments)
            need = self._needs[key] = _Need(lowered, sorted(devices, key=lambda one: one.id), self._host)
        need.ask(settle)


class _Need:
    """What a lowered step takes beside its arguments."""

    def __init__(self, lowered: Any, devices: list[Any], host: Host) -> None:
        self._host = host
        # JAX keeps the executable, so that the step that follows isn't compiled again.
        memory = lowered.compile().memory_analysis()
        self._devices = devices
        self.value_bytes: int | None = None if memory is None else beside_arguments(memory)
        """Of results and temporaries on one device; None where it isn't known, and nothing can be asked for."""
        self._lowered = lowered if self._is_on_host else None
        self._scratch_bytes: int | None = None
        self._before: int | None = None
        self._kept_bytes: int | None = None
        """What the process has kept of its first run, and takes for the next one."""

    @property
    def _is_on_host(self) -> bool:
        return all(device.platform == "cpu" for device in self._devices)

    def ask(self, settle: Callable[[], Any]) -> None:
        if self.value_bytes is None:
            return
        if not self._is_on_host:
            _ask_devices(self._devices, self.value_bytes, settle)
            return
        more = self.scratch_bytes() - self._kept() if self._host.can_refuse else 0
        self._host.ask(self.value_bytes * len(self._devices) + more, settle)

    def scratch_bytes(self) -> int:
        """What kernels and the runtime take for themselves on the host; it takes a moment to find out."""
        if self._scratch_bytes is None:
            asked = _asked_bytes(self._lowered) * len(self._devices)
            self._scratch_bytes = asked + min(asked, _KEPT_BYTES) + _RUNTIME_BYTES
            self._lowered = None
        return self._scratch_bytes

    def _kept(self) -> int:
        if self._before is None:
            self._before = self._host.data_bytes
            return 0
        if self._kept_bytes is None:
            self._kept_bytes = max(0, self._host.data_bytes - self._before)
        return min(self._kept_bytes, self._host.heap_free_bytes)


def _asked_bytes(lowered: Any) -> int:
    """What kernels ask for at most; as much as all arguments and results where the program can't be read."""
    try:
        scratch = read(lowered).scratch
    # Programs that memfit can't read must not end a training.
    except Exception:
        scratch = None
    if scratch is not None:
        return most_asked_bytes(scratch)
    memory = lowered.compile().memory_analysis()
    return int(memory.argument_size_in_bytes) + int(memory.output_size_in_bytes)


def form_of(arguments: Any) -> Hashable:
    """What a function is compiled for: the arguments' structure, shapes, types and places."""
    leaves, structure = jax.tree.flatten(arguments)
    return structure, tuple(
        (leaf.shape, leaf.dtype, getattr(leaf, "sharding", None))
        if hasattr(leaf, "dtype")
        else type(leaf)
        if isinstance(leaf, bool | int | float | complex)
        else leaf
        for leaf in leaves
    )


def beside_arguments(memory: Any) -> int:
    """Bytes of results and temporaries, from `compiled.memory_analysis()`."""
    return max(0, int(memory.temp_size_in_bytes) + int(memory.output_size_in_bytes) - int(memory.alias_size_in_bytes))


def _ask_devices(devices: list[Any], size_bytes: int, settle: Callable[[], Any]) -> None:
    if size_bytes > _least_free(devices):
        settle()
    free = _least_free(devices)
    if size_bytes > free:
        raise NoRoom(size_bytes, int(free))


def _least_free(devices: list[Any]) -> float:
    """Of the device that has least; infinite where none of them tells."""
    found = [device.memory_stats() or {} for device in devices]
    return min(
        (one["bytes_limit"] - one.get("bytes_in_use", 0) for one in found if "bytes_limit" in one),
        default=float("inf"),
    )
