"""The rows of `devices.json` as typed objects, read once and only when somebody asks.

Makers count a card's memory in GiB and call it GB, so the file says `nominal_gib`; bandwidth and rates are decimal.
Rows of one family stand in the order of preference: the first is what the bare name, such as "a100", means.
"""

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from memfit.core.device import Device, Kind, Origin
from memfit.core.units import GIB, MIB

_BASE_MIB = 21.0
_MIB_PER_MULTIPROCESSOR = 2.85

# CUDA C++ Programming Guide, technical specifications per compute capability: 2048 resident threads.
_WIDE_CAPABILITIES = {(6, 0), (6, 1), (7, 0), (8, 0), (9, 0), (10, 0)}


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """A device with what only the catalogue needs to know of it."""

    device: Device
    aliases: tuple[str, ...]
    """Other names people and drivers use for it."""
    context_source: str | None
    """Where `device.context_bytes` was measured; None where it is assumed."""


@cache
def _content() -> dict[str, Any]:
    # Slow to import, and `import memfit` needs no device.
    from importlib.resources import files

    content: dict[str, Any] = json.loads(files("memfit.catalogue").joinpath("devices.json").read_text(encoding="utf-8"))
    return content


def read_instances() -> dict[str, str]:
    """Names of the devices in those families of AWS instances that have whole devices of one kind."""
    return dict(_content()["aws_instances"])


@cache
def read_rows() -> tuple[DeviceRow, ...]:
    """All rows of the catalogue, CUDA devices first."""
    content = _content()
    return tuple(_row(kind, entry) for kind in (Kind.CUDA, Kind.HOST) for entry in content[kind.value])


def _row(kind: Kind, entry: dict[str, Any]) -> DeviceRow:
    """A row of the file; one of the host's devices says nothing of memory, capability or context."""
    capability = tuple(entry["capability"]) if "capability" in entry else None
    context_bytes = entry.get("context_bytes")
    if capability is not None and not context_bytes:
        context_bytes = assume_context_bytes(capability, entry["num_multiprocessors"])
    bandwidth = entry.get("bandwidth_gb_per_second")
    device = Device(
        name=entry["name"],
        title=entry["title"],
        kind=kind,
        nominal_bytes=entry["nominal_gib"] * GIB if "nominal_gib" in entry else None,
        usable_bytes=entry.get("usable_bytes"),
        usable_origin=Origin(entry.get("usable_origin", Origin.ASSUMED)),
        capability=capability,
        num_multiprocessors=entry.get("num_multiprocessors"),
        bandwidth_bytes_per_second=None if bandwidth is None else bandwidth * 1e9,
        flops={dtype: rate * 1e12 for dtype, rate in entry.get("teraflops", {}).items()},
        context_bytes=context_bytes,
        context_origin=Origin.MEASURED if entry.get("context_source") else Origin.ASSUMED,
        source=entry["source"],
        date=entry["date"],
        cache_bytes=round(entry["cache_mib"] * MIB) if "cache_mib" in entry else None,
    )
    return DeviceRow(device, tuple(entry.get("aliases", ())), entry.get("context_source"))


def assume_context_bytes(capability: tuple[int, int], num_multiprocessors: int) -> int:
    """Bytes a CUDA context is assumed to take on a device of this size.

    The driver sets memory aside for every thread a device can hold at once, so a context grows with the number of
    multiprocessors. Three measured contexts with modules loaded lazily (CUDA 11.7 and later) lie on one line within 1%:

        Tesla T4, 40 multiprocessors, CUDA 12.8              134.9 MiB
        GeForce RTX 3090, 82 multiprocessors, CUDA 12.8      256 MiB
        RTX 6000 Ada, 142 multiprocessors, CUDA 13.0         426 MiB

    Multiprocessors that hold 2048 threads instead of 1536 are taken to need 4/3 as much each. For the A100 that gives
    431 MiB; in its out-of-memory messages the part of a process outside PyTorch is 409 to 503 MiB, kernels included.

    >>> assume_context_bytes((7, 5), 40) // MIB
    135
    >>> assume_context_bytes((8, 0), 108) // MIB
    431
    """
    per_multiprocessor = _MIB_PER_MULTIPROCESSOR * (4 / 3 if capability in _WIDE_CAPABILITIES else 1)
    return round((_BASE_MIB + per_multiprocessor * num_multiprocessors) * MIB)
