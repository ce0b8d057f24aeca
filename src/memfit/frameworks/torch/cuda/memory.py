"""What `torch.cuda` says of memory: statistics, snapshots, what is free, and the error when nothing is.

The figures are those of the allocator that the simulation asks for every block. PyTorch's own formatting of them
(`memory_summary`) is left in place.
"""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from memfit.allocator.live import LiveAllocator
from memfit.core.device import Device
from memfit.core.patching import Replacement, in_owner
from memfit.core.units import GIB, KIB, MIB
from memfit.frameworks.torch.cuda.devices import UNKNOWN_TOTAL_BYTES, CudaDevices
from memfit.frameworks.torch.shapes.patching import in_extension

MEMORY_HISTORY = "memory-history"
MEMORY_POOL = "memory-pool"
ALLOCATOR_SETTINGS = "allocator-settings"
_WITHOUT_EFFECT = """
    _cuda_cudaCachingAllocator_enable _cuda_resetPeakHostMemoryStats _cuda_resetAccumulatedHostMemoryStats
    _cuda_attach_out_of_memory_observer _cuda_allocationTraceback _cuda_setMemoryMetadata _host_emptyCache
    _accelerator_emptyHostCache
""".split()  # noqa: SIM905
# Far from 0, which stands for no memory.
_FIRST_ADDRESS = 0x7F0000000000


def total_bytes(device: Device) -> int:
    """What PyTorch shows as the memory of the device, before anything is in it."""
    return device.usable_bytes or UNKNOWN_TOTAL_BYTES


def free_bytes(device: Device, reserved_bytes: int) -> int:
    """What is left on the device next to the CUDA context of this process and what its allocator has reserved."""
    return max(0, total_bytes(device) - (device.context_bytes or 0) - reserved_bytes)


def format_bytes(size_bytes: int) -> str:
    """A size as PyTorch's errors write it (`c10::CachingAllocator::format_size`).

    >>> format_bytes(1024), format_bytes(20 * 2**20), format_bytes(2**30), format_bytes(3 * 2**30)
    ('1024 bytes', '20.00 MiB', '1024.00 MiB', '3.00 GiB')
    """
    if size_bytes <= KIB:
        return f"{size_bytes} bytes"
    unit, name = (KIB, "KiB") if size_bytes <= MIB else (MIB, "MiB") if size_bytes <= GIB else (GIB, "GiB")
    return f"{size_bytes / unit:.2f} {name}"


def out_of_memory_message(
    device: Device, memory: LiveAllocator, requested_bytes: int, index: int = 0, process_id: int | None = None
) -> str:
    """PyTorch's own words when a request can't be met (2.13, `DeviceCachingAllocator::malloc`).

    A driver that can't tell whose process it is, as in a container, says `process_id`; None: "this process".
    """
    allocated_bytes, reserved_bytes = memory.allocated_bytes, memory.reserved_bytes
    in_use = format_bytes(reserved_bytes + (device.context_bytes or 0))
    process = (
        f"Including non-PyTorch memory, this process has {in_use} memory in use. "
        if process_id is None
        else f"Process {process_id} has {in_use} memory in use. "
    )
    allowed = "" if memory.limit_bytes is None else f"{format_bytes(memory.limit_bytes)} allowed; "
    return (
        f"CUDA out of memory. Tried to allocate {format_bytes(memory.device_request_bytes(requested_bytes))}. "
        f"GPU {index} has a total capacity of {format_bytes(total_bytes(device))} "
        f"of which {format_bytes(free_bytes(device, reserved_bytes + memory.others_bytes))} is free. {process}{allowed}"
        f"Of the allocated memory {format_bytes(allocated_bytes)} is allocated by PyTorch, "
        f"and {format_bytes(reserved_bytes - allocated_bytes)} is reserved by PyTorch but unallocated. "
        "If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "
        "to avoid fragmentation.  See documentation for Memory Management  "
        "(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
    )


class CudaMemory:
    """The answers of `torch.cuda.memory`.

    All devices but the first are empty.
    """

    def __init__(self, devices: CudaDevices, memory: LiveAllocator, report: Callable[[str, str], None]) -> None:
        self._devices = devices
        self._memory = memory
        self._report = report
        self._fraction = 1.0
        self._raw: dict[int, Any] = {}
        self._addresses = itertools.count(_FIRST_ADDRESS, 2**21)

    def nested_stats(self, index: int) -> dict[str, Any]:
        """Statistics of a device as PyTorch's extension gives them: {"allocated_bytes": {"all": {"current": ...}}}."""
        nested: dict[str, Any] = {}
        for name, value in self._memory.stats().items():
            *path, last = name.split(".")
            place = nested
            for part in path:
                place = place.setdefault(part, {})
            place[last] = value if index == 0 else 0
        return nested

    def info(self, index: int | None = None) -> tuple[int, int]:
        """(free, total) bytes of a device."""
        index = self._devices.current if index is None else index
        self._devices.check(index)
        device = self._devices.device
        held_bytes = self._memory.reserved_bytes + self._memory.others_bytes
        return free_bytes(device, held_bytes if index == 0 else 0), total_bytes(device)

    def snapshot(self, *arguments: Any) -> dict[str, Any]:
        """The segments and their blocks, without history."""
        segments = [self._describe(blocks) for blocks in self._memory.segments()]
        return {"segments": segments, "device_traces": [[] for _ in range(self._devices.count)]}

    def _describe(self, blocks: list[Any]) -> dict[str, Any]:
        # Blocks in use carry what was asked for; free ones nothing.
        used = [block for block in blocks if block.state == 0]
        head = blocks[0]
        small = head.pool.page_bytes == 2 * MIB
        # The pools of expandable segments both begin at 0.
        base = _FIRST_ADDRESS if small else 2 * _FIRST_ADDRESS
        return {
            "device": 0,
            "address": base + head.address,
            "total_size": sum(block.size for block in blocks),
            "allocated_size": sum(block.size for block in used),
            "active_size": sum(block.size for block in used),
            "requested_size": sum(block.requested for block in used),
            "stream": 0,
            "segment_type": "small" if small else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": [
                {
                    "address": base + block.address,
                    "size": block.size,
                    "requested_size": block.requested if block.state == 0 else 0,
                    "state": "active_allocated" if block.state == 0 else "inactive",
                    "frames": [],
                }
                for block in blocks
            ],
        }

    def allocate_raw(self, size_bytes: int, stream: int = 0) -> int:
        """An address, as `torch.cuda.caching_allocator_alloc` gives to other libraries."""
        block = self._memory.malloc(size_bytes, stream)
        if block is None:
            raise torch.OutOfMemoryError(out_of_memory_message(self._devices.device, self._memory, size_bytes))
        address = next(self._addresses)
        self._raw[address] = block
        return address

    def free_raw(self, address: int) -> None:
        """Frees what `allocate_raw` gave."""
        block = self._raw.pop(address, None)
        if block is None:
            raise RuntimeError(f"invalid device pointer: {address:#x}")
        self._memory.free(block)

    def set_fraction(self, fraction: float, index: int) -> None:
        """Allows the process a share of the device."""
        self._devices.check(index)
        if index == 0:
            self._fraction = fraction
            self._memory.limit(int(fraction * total_bytes(self._devices.device)))

    def _reset(self, reset: Callable[[], None], index: int) -> None:
        self._devices.check(index)
        if index == 0:
            reset()

    def _ignore_history(self, *arguments: Any, **options: Any) -> None:
        self._report(MEMORY_HISTORY, "the history of allocations isn't recorded; memfit's own report has it")

    def _ignore_settings(self, settings: str) -> None:
        self._report(ALLOCATOR_SETTINGS, f"{settings!r} came after the start and was ignored; set PYTORCH_ALLOC_CONF")

    def replacements(self) -> list[Replacement]:
        """What PyTorch has to see so that it shows this memory."""
        memory = self._memory
        low: dict[str, Any] = {
            **dict.fromkeys(_WITHOUT_EFFECT, lambda *arguments: None),
            "_cuda_memoryStats": self.nested_stats,
            "_cuda_resetPeakMemoryStats": lambda index: self._reset(memory.reset_peaks, index),
            "_cuda_resetAccumulatedMemoryStats": lambda index: self._reset(memory.reset_counts, index),
            "_cuda_emptyCache": memory.empty_cache,
            "_cuda_memorySnapshot": self.snapshot,
            "_cuda_setMemoryFraction": self.set_fraction,
            "_cuda_getMemoryFraction": lambda index: self._fraction,
            "_cuda_cudaCachingAllocator_raw_alloc": self.allocate_raw,
            "_cuda_cudaCachingAllocator_raw_delete": self.free_raw,
            "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
            "_cuda_getAllocatorBackend": lambda: "native",
            "_cuda_getAllocator": object,
            "_cuda_hostMemoryStats": dict,
            "_cuda_record_memory_history": self._ignore_history,
            "_cuda_record_memory_history_legacy": self._ignore_history,
            "_cuda_isHistoryEnabled": lambda: False,
            "_cuda_getMemoryMetadata": lambda: "",
            "_accelerator_emptyCache": memory.empty_cache,
            "_accelerator_isAllocatorInitialized": lambda: True,
            "_accelerator_getDeviceStats": self.nested_stats,
            "_accelerator_resetPeakStats": lambda index: self._reset(memory.reset_peaks, index),
            "_accelerator_resetAccumulatedStats": lambda index: self._reset(memory.reset_counts, index),
            "_accelerator_getMemoryInfo": self.info,
            "_accelerator_setAllocatorSettings": self._ignore_settings,
            "_cuda_cudaCachingAllocator_set_allocator_settings": self._ignore_settings,
        }
        pools = self._pools()
        history = dict.fromkeys(("_record_memory_history", "_dump_snapshot"), self._ignore_history)
        return [*in_extension(low), *in_owner(torch.cuda, pools), *in_owner(torch.cuda.memory, pools | history)]

    def _pools(self) -> dict[str, Any]:
        """Private pools, which are served from the common one."""
        report = self._report
        numbers = itertools.count(1)

        class MemPool:
            """A pool of its own, in name only."""

            def __init__(self, *arguments: Any, **options: Any) -> None:
                report(MEMORY_POOL, "a private memory pool was served from the common one")
                self.id = (0, next(numbers))
                self.allocator = None

            def use_count(self) -> int:
                return 1

            def snapshot(self, include_traces: bool = True) -> list[Any]:
                return []

        return {"MemPool": MemPool, "use_mem_pool": lambda pool, device=None: nullcontext()}
