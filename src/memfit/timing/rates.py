"""The rates of a device that the time model computes with."""

from dataclasses import dataclass

from memfit.catalogue import find_device
from memfit.core.device import Device, Kind, Origin
from memfit.core.units import MIB
from memfit.timing.fitted import fitted

# Shares of a processor's peak rates that well-written training code reaches (assumed).
_HOST_FLOPS_SHARE = 0.6
_HOST_BANDWIDTH_SHARE = 0.75
# Whose rates are taken where the catalogue has none for the target.
_REFERENCE = "rtx-3090"
# Second-level cache of each multiprocessor and generation, where the catalogue doesn't say (assumed): Ada and Blackwell
# have far more than those before.
_CACHE_BYTES = (((12, 0), 0.6 * MIB), ((8, 9), 0.6 * MIB), ((8, 0), 0.1 * MIB), ((0, 0), 0.08 * MIB))
_USUAL_MULTIPROCESSORS = 82
# Host to device and back, pinned memory: PCIe 3, 4 and 5 with 16 lanes (assumed), by compute capability.
_TRANSFER = ((9, 50e9), (8, 24e9), (0, 12e9))
# Time between two operators that PyTorch runs on a processor (assumed).
_HOST_LAUNCH_SECONDS = 4e-6


@dataclass(frozen=True, slots=True)
class Rates:
    """Speed of a device.

    Args:
        flops: peak operations per second by dtype; "float32" is that of the plain units.
        bandwidth: of memory, bytes per second.
        multiprocessors: how many.
        cache_bytes: of the second-level cache.
        kind: whether kernels are a GPU's.
        transfer: to the host and back, pinned memory, bytes per second.
        launch_seconds: least time between two operators on a processor.
        reference: the device whose rates were taken, where the catalogue has none for this one.
    """

    flops: dict[str, float]
    bandwidth: float
    multiprocessors: int = 1
    cache_bytes: float = 0.0
    kind: Kind = Kind.CUDA
    transfer: float = 12e9
    launch_seconds: float = _HOST_LAUNCH_SECONDS
    reference: str = ""

    @property
    def origin(self) -> Origin:
        """How a time is known that is computed with these rates: what kernels make of them is known of GPUs alone."""
        return Origin.SIMULATED if self.kind is Kind.CUDA and not self.reference else Origin.ASSUMED


def rates_of(device: Device) -> Rates:
    """Rates of a device; those of an RTX 3090 where the catalogue has none for it."""
    known = device if device.flops and device.bandwidth_bytes_per_second else find_device(_REFERENCE)
    reference = "" if known is device else known.title
    flops, bandwidth = known.flops, known.bandwidth_bytes_per_second or 1e11
    transfer = next(rate for least, rate in _TRANSFER if (device.capability or (8, 0))[0] >= least)
    if device.kind is Kind.HOST:
        scaled = {name: rate * _HOST_FLOPS_SHARE for name, rate in flops.items()}
        bandwidth *= _HOST_BANDWIDTH_SHARE
        return Rates(scaled, bandwidth, kind=Kind.HOST, transfer=transfer, reference=reference)
    multiprocessors = known.num_multiprocessors or _USUAL_MULTIPROCESSORS
    capability = known.capability or (8, 0)
    each = next(size for least, size in _CACHE_BYTES if capability >= least)
    cache = known.cache_bytes or each * multiprocessors
    # Clocks differ from those that nominal rates are computed with: most where the power is limited.
    sustained = fitted().sustained.get(known.name, (1.0, 1.0))
    flops, bandwidth = {name: rate * sustained[0] for name, rate in flops.items()}, bandwidth * sustained[1]
    return Rates(flops, bandwidth, multiprocessors, cache, transfer=transfer, reference=reference)
