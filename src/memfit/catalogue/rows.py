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
    return (*map(_cuda_row, content["cuda"]), *map(_host_row, content["host"]))


def _cuda_row(entry: dict[str, Any]) -> Row:
    major, minor = entry["capability"]
    num_multiprocessors = entry["num_multiprocessors"]
    context_bytes = entry.get("context_bytes") or assume_context_bytes((major, minor), num_multiprocessors)
    device = Device(
        name=entry["name"],
        title=entry["title"],
        kind=Kind.CUDA,
        nominal_bytes=entry["nominal_gib"] * GIB,
        usable_bytes=entry["usable_bytes"],
        usable_origin=Origin(entry["usable_origin"]),
        capability=(major, minor),
        num_multiprocessors=num_multiprocessors,
        bandwidth_bytes_per_second=entry["bandwidth_gb_per_second"] * 1e9,
        flops=_flops(entry),
        context_bytes=context_bytes,
        context_origin=Origin.MEASURED if entry.get("context_source") else Origin.ASSUMED,
        source=entry["source"],
        date=entry["date"],
    )
    return Row(device, tuple(entry.get("aliases", ())), entry.get("context_source"))


def _host_row(entry: dict[str, Any]) -> Row:
    bandwidth = entry.get("bandwidth_gb_per_second")
    device = Device(
        name=entry["name"],
        title=entry["title"],
        kind=Kind.HOST,
        nominal_bytes=None,
        usable_bytes=None,
        usable_origin=Origin.ASSUMED,
        bandwidth_bytes_per_second=None if bandwidth is None else bandwidth * 1e9,
        flops=_flops(entry),
        source=entry["source"],
        date=entry["date"],
    )
    return Row(device, tuple(entry.get("aliases", ())), None)


def _flops(entry: dict[str, Any]) -> dict[str, float]:
    return {dtype: rate * 1e12 for dtype, rate in entry.get("teraflops", {}).items()}
