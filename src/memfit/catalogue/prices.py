"""What an hour of a device costs, to name the cheapest one that would do.

The prices are those of one device's share of an AWS instance, on demand, because nearly every data-centre card can be
rented there and the list is public. `prices.json` states region and month and is written by
`scripts/derive_prices.py`. Cards that nobody rents out there, such as GeForce ones, have no price.
"""

import json
from dataclasses import dataclass
from functools import cache

from memfit.catalogue.query import find_device, list_devices
from memfit.core.device import Device, Kind
from memfit.core.errors import UnknownDevice


@dataclass(frozen=True, slots=True)
class Price:
    """An hour of one device, on the type of instance that is cheapest per device."""

    usd_per_hour: float
    instance: str
    num_devices: int
    """Devices of that instance, which are rented together."""
    region: str
    date: str
    """Month of the price list, ISO."""


def hourly_price(device_name: str) -> Price | None:
    """The price of a device, by any of its names; None where none is known.

    >>> hourly_price("t4").instance
    'g4dn.xlarge'
    >>> hourly_price("rtx-3090") is None
    True
    """
    known = _prices().get(device_name)
    if known is not None:
        return known
    try:
        return _prices().get(find_device(device_name).name)
    except UnknownDevice:
        return None


def cheapest_device(needed_bytes: int) -> tuple[Device, Price | None] | None:
    """The cheapest CUDA device with this much usable memory.

    Where no device with a price is large enough, the smallest of the others that is; None where none is.

    >>> cheapest_device(20 * 1024**3)[0].name
    'l4'
    """
    cuda = [device for device in list_devices() if device.kind is Kind.CUDA]
    enough = [(device, _prices().get(device.name)) for device in cuda if (device.usable_bytes or 0) >= needed_bytes]
    priced = [(device, price) for device, price in enough if price is not None]
    if priced:
        return min(priced, key=lambda pair: pair[1].usd_per_hour)
    return min(enough, key=lambda pair: pair[0].usable_bytes or 0, default=None)


@cache
def _prices() -> dict[str, Price]:
    # Slow to import, and `import memfit` needs no price.
    from importlib.resources import files

    content = json.loads(files("memfit.catalogue").joinpath("prices.json").read_text(encoding="utf-8"))
    return {
        name: Price(region=content["region"], date=content["date"], **entry)
        for name, entry in content["devices"].items()
    }
