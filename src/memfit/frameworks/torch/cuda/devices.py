"""Which CUDA devices PyTorch finds: how many, which one is current, and what each can do.

PyTorch's own Python code asks functions of its C extension, which a build without CUDA lacks. Given those, the rest of
`torch.cuda` works as it is, wherever and whenever it was imported: what is replaced is that lowest layer.
"""

import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from memfit.core.device import Device
from memfit.core.patching import Replacement, in_owner
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.shapes.patching import in_extension

UNKNOWN_TOTAL_BYTES = 2**40
"""What a device without a known size says it has."""
DEFAULT_CAPABILITY = (8, 0)
_DEFAULT_MULTIPROCESSORS = 108
_VISIBLE = "CUDA_VISIBLE_DEVICES"


# What a multiprocessor of each capability holds: threads, KiB of shared memory, KiB of it for one block (CUDA C++
# Programming Guide, technical specifications); MiB of L2 cache, which differs by card: that of a common one.
_ARCHITECTURES = {
    (6, 0): (2048, 64, 48, 4),
    (6, 1): (2048, 96, 48, 3),
    (7, 0): (2048, 96, 96, 6),
    (7, 5): (1024, 64, 64, 4),
    (8, 0): (2048, 164, 163, 40),
    (8, 6): (1536, 100, 99, 6),
    (8, 9): (1536, 100, 99, 72),
    (9, 0): (2048, 228, 227, 50),
    (10, 0): (2048, 228, 227, 126),
    (12, 0): (1536, 100, 99, 96),
}
# Architectures that official builds contain. The newer CUDA has dropped what is older than 7.5.
_OLD_BUILD = ("12.6", "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90")
_BUILD = ("13.0", "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120")


class DeviceProperties:
    """What `torch.cuda.get_device_properties` returns."""

    warp_size = 32
    max_threads_per_block = 1024
    regs_per_multiprocessor = 65536
    shared_memory_per_block = 48 * 1024
    memory_bus_width = 256
    clock_rate = 1_500_000
    is_integrated = is_multi_gpu_board = pci_device_id = pci_domain_id = 0

    def __init__(self, device: Device, index: int) -> None:
        self.major, self.minor = device.capability or DEFAULT_CAPABILITY
        threads, shared_kib, per_block_kib, cache_mib = _ARCHITECTURES.get(
            (self.major, self.minor), _ARCHITECTURES[DEFAULT_CAPABILITY]
        )
        self.name = device.title
        self.total_memory = device.usable_bytes or UNKNOWN_TOTAL_BYTES
        self.multi_processor_count = device.num_multiprocessors or _DEFAULT_MULTIPROCESSORS
        self.max_threads_per_multi_processor = threads
        self.shared_memory_per_block_optin = per_block_kib * 1024
        self.shared_memory_per_multiprocessor = shared_kib * 1024
        self.L2_cache_size = cache_mib * 1024**2
        # In kHz; two transfers per clock.
        self.memory_clock_rate = int((device.bandwidth_bytes_per_second or 0) / (2 * self.memory_bus_width / 8) / 1000)
        self.gcnArchName = self.name
        self.pci_bus_id = index + 1
        self.uuid = f"00000000-0000-0000-0000-{index:012x}"

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // 1024**2}MB, multi_processor_count={self.multi_processor_count}, "
            f"uuid={self.uuid}, pci_bus_id={self.pci_bus_id}, pci_device_id={self.pci_device_id}, "
            f"pci_domain_id={self.pci_domain_id}, L2_cache_size={self.L2_cache_size // 1024**2}MB)"
        )


class CudaDevices:
    """The devices PyTorch finds, all of one kind."""

    def __init__(self, device: Device, count: int) -> None:
        self.device = device
        self.installed = count
        """How many there are, hidden ones included."""
        self.assumed = 0
        """How many are taken to be there when the program names one."""
        self.current_stream: Callable[[], int] = lambda: 0
        """The number of this thread's current stream on its current device; 0 is the default one."""
        self._current = threading.local()
        self._process_id = os.getpid()
        # A machine without a GPU may hide all devices from the start; only what the program sets means anything.
        self._visible_before = os.environ.get(_VISIBLE)

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability."""
        return self.device.capability or DEFAULT_CAPABILITY

    @property
    def count(self) -> int:
        """How many the program can see: it may have hidden some with CUDA_VISIBLE_DEVICES."""
        visible = os.environ.get(_VISIBLE)
        if visible is None or visible == self._visible_before:
            return self.installed
        names = [name.strip() for name in visible.split(",")]
        shown = next((place for place, name in enumerate(names) if not name or name.startswith("-")), len(names))
        return min(shown, self.installed)

    @property
    def current(self) -> int:
        """Index of the current device of this thread."""
        return int(getattr(self._current, "index", 0))

    def select(self, index: int) -> None:
        """Makes a device the current one of this thread."""
        self.check(index)
        self._current.index = index

    def exchange(self, index: int) -> int:
        """Makes a device the current one; the index of the one before. Negative: nothing, -1."""
        if index < 0:
            return -1
        before = self.current
        self.select(index)
        return before

    def check(self, index: int) -> None:
        """Raises what CUDA raises for a device that isn't there."""
        if not self._is_there(index):
            error = getattr(torch, "AcceleratorError", RuntimeError)
            raise error(f"CUDA error: invalid device ordinal\n{self._hint(index)}")

    def properties(self, index: int) -> DeviceProperties:
        """Properties of one device, as `torch.cuda.get_device_properties` gives them."""
        if not self._is_there(index):
            raise AssertionError(f"Invalid device id. {self._hint(index)}")
        return DeviceProperties(self.device, index)

    def stay(self) -> None:
        """This process, which was forked off before anything was on the device, may use it."""
        self._process_id = os.getpid()

    def is_forked(self) -> bool:
        """Whether this is a child process of the simulation: CUDA can't be used in those."""
        return os.getpid() != self._process_id

    def _is_there(self, index: int) -> bool:
        return 0 <= index < max(self.count, self.assumed)

    def _hint(self, index: int) -> str:
        devices = "1 device is" if self.count == 1 else f"{self.count} devices are"
        return f"Device {index} was asked for, but {devices} simulated. Use --count {index + 1} for more."

    def replacements(self) -> list[Replacement]:
        """What PyTorch has to see so that it finds these devices."""
        cuda: Any = torch.cuda
        kind = torch.device("cuda")
        version, architectures = _OLD_BUILD if self.capability < (7, 5) else _BUILD
        major, minor = map(int, version.split("."))
        low = {
            "_has_cuda": True,
            "_CudaDeviceProperties": DeviceProperties,
            "_cuda_isInBadFork": self.is_forked,
            "_cuda_hasPrimaryContext": lambda index: index < self.count,
            "_cuda_getDeviceCount": lambda: self.count,
            "_cuda_getDevice": lambda: self.current,
            "_cuda_setDevice": self.select,
            "_cuda_exchangeDevice": self.exchange,
            "_cuda_maybeExchangeDevice": self.exchange,
            "_cuda_canDeviceAccessPeer": lambda index, peer: index != peer,
            "_cuda_getArchFlags": lambda: architectures,
            "_cuda_getCompiledVersion": lambda: 1000 * major + 10 * minor,
            **dict.fromkeys(
                ("_cuda_init", "_cuda_synchronize", "_cuda_ipc_collect", "_cuda_sleep", "_cuda_set_sync_debug_mode"),
                lambda *arguments: None,
            ),
            "_cuda_get_sync_debug_mode": lambda: 0,
            "_cuda_tunableop_is_enabled": lambda: False,
            "_cuda_tunableop_enable": lambda value: None,
            # The same for `torch.accelerator`, which asks for whatever accelerator there is.
            "_get_accelerator": lambda check=None: kind,
            "_accelerator_getAccelerator": lambda: kind,
            "_accelerator_getDeviceIndex": lambda: self.current,
            "_accelerator_setDeviceIndex": lambda index: self.exchange(index) and None,
            "_accelerator_exchangeDevice": self.exchange,
            "_accelerator_maybeExchangeDevice": self.exchange,
            "_accelerator_synchronizeDevice": self.check,
        }
        dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
        supported = {"supported_dtypes": {dtype for dtype in dtypes if not str(dtype).startswith("torch.q")}}

        def get_properties(device: Any = None) -> DeviceProperties:
            internals.lazy_cuda_init()
            return self.properties(internals.device_index(device, optional=True))

        functions = {
            "_CudaDeviceProperties": DeviceProperties,
            "_get_device_properties": self.properties,
            "get_device_properties": get_properties,
            "_exchange_device": self.exchange,
            "_maybe_exchange_device": self.exchange,
            "_is_in_bad_fork": self.is_forked,
            "_initialized": True,
            "_queued_calls": [],
            "_cached_device_count": None,
            "device_count": lambda: self.count,
            "is_bf16_supported": lambda including_emulation=True: including_emulation or self.capability >= (8, 0),
        }
        # PyTorch's own keeps its first answer for ever.
        accelerator = {"get_device_capability": lambda device=None, /: supported}
        return [
            *in_extension(low),
            Replacement(torch.version, "cuda", version),
            *in_owner(cuda, functions),
            *in_owner(torch.accelerator, accelerator if hasattr(torch.accelerator, "get_device_capability") else {}),
        ]
