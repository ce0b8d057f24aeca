"""The rows of `devices.json` as typed objects, read once and only when somebody asks.

Makers count a card's memory in GiB and call it GB, so the file says `nominal_gib`; bandwidth and rates are decimal.
Rows of one family stand in the order of preference: the first is what the bare name, such as "a100", means.
"""

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from memfit.catalogue.context import assume_context_bytes
from memfit.core.device import Device, Kind, Origin
from memfit.core.units import GIB


@dataclass(frozen=True, slots=True)
class Row:
    """A device with what only the catalogue needs to know of it.

    Args:
        device: the device itself.
        aliases: other names people and drivers use for it.
        context_source: where `device.context_bytes` was measured; None where it is assumed.
    """

    device: Device
    aliases: tuple[str, ...]
    context_source: str | None


@cache
def read_rows() -> tuple[Row, ...]:
    """All rows of the catalogue, CUDA devices first."""
    # Slow to import, and `import memfit` needs no device.
    from importlib.resources import files

    text = files("memfit.catalogue").joinpath("devices.json").read_text(encoding="utf-8")
    content = json.loads(text)
    return tuple(_row(kind, entry) for kind in (Kind.CUDA, Kind.HOST) for entry in content[kind.value])


def _row(kind: Kind, entry: dict[str, Any]) -> Row:
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
    )
    return Row(device, tuple(entry.get("aliases", ())), entry.get("context_source"))
