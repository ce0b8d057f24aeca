"""Writes src/memfit/catalogue/prices.json: for each device of the catalogue, the cheapest instance that has it.

    python scripts/derive_prices.py instances.csv

The table has one row per instance type, with the columns `instance`, `accel`, `count`, `mem_mib_each` and a price per
hour whose column names the region and the month, such as `ondemand_us_east_1_2026_08`. A fraction of a card (g6f) and
accelerators that the catalogue lacks are left out.
"""

import argparse
import csv
import json
import re
from pathlib import Path
from typing import Any

from memfit.catalogue import list_devices
from memfit.core.device import Device, Kind
from memfit.core.units import MIB

OUTPUT = Path(__file__).parents[1] / "src" / "memfit" / "catalogue" / "prices.json"

_PRICE_COLUMN = re.compile(r"ondemand_(?P<region>\w+?)_(?P<date>\d{4}_\d{2})")
# Instances' names of accelerators, and the beginnings of the catalogue's; memory tells the variants apart.
_NAMES = {
    "T4": "t4",
    "A10G": "a10g",
    "L4": "l4",
    "L40S": "l40s",
    "V100": "v100",
    "A100": "a100",
    "H100": "h100-80gb",
    "H200": "h200",
    "B200": "b200",
    "RTX PRO Server 6000": "rtx-pro-6000",
}
# Lists state an accelerator's memory as the maker does, or as the driver does: up to 8% apart.
_TOLERANCE = 0.08


def derive(rows: list[dict[str, str]]) -> dict[str, Any]:
    """The content of prices.json from the rows of the table."""
    column, found = next((name, match) for name in rows[0] if (match := _PRICE_COLUMN.fullmatch(name)))
    region, date = found["region"].replace("_", "-"), found["date"].replace("_", "-")
    devices = [device for device in list_devices() if device.kind is Kind.CUDA]
    cheapest: dict[str, dict[str, Any]] = {}
    for row in rows:
        device = _device_of(row, devices)
        if device is None or not row[column]:
            continue
        count = int(row["count"])
        price = round(float(row[column]) / count, 6)
        entry = {"usd_per_hour": price, "instance": row["instance"], "num_devices": count}
        known = cheapest.get(device.name)
        # Of equal prices the smaller instance: nobody needs to rent eight devices for one.
        if known is None or (price, count) < (known["usd_per_hour"], known["num_devices"]):
            cheapest[device.name] = entry
    return {
        "source": "AWS on-demand prices, one device's share of the cheapest instance type that has it",
        "region": region,
        "date": date,
        "devices": dict(sorted(cheapest.items())),
    }


def _device_of(row: dict[str, str], devices: list[Device]) -> Device | None:
    prefix = _NAMES.get(row["accel"])
    memory_bytes = int(row["mem_mib_each"]) * MIB
    for device in devices:
        is_named = prefix is not None and (device.name == prefix or device.name.startswith(f"{prefix}-"))
        if is_named and device.nominal_bytes and abs(memory_bytes / device.nominal_bytes - 1) < _TOLERANCE:
            return device
    return None


def render(content: dict[str, Any]) -> str:
    """The file's text, one device per line."""
    lines = [f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in content["devices"].items()]
    head = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items() if key != "devices"]
    return "{\n" + ",\n".join(head) + ',\n  "devices": {\n' + ",\n".join(lines) + "\n  }\n}\n"


def main() -> None:
    """Reads the table that the command line names, and writes the file."""
    parser = argparse.ArgumentParser(description="Derive the prices of devices from a table of instances.")
    parser.add_argument("table", type=Path, help="CSV file with one row per instance type")
    arguments = parser.parse_args()
    with arguments.table.open(newline="", encoding="utf-8") as file:
        OUTPUT.write_text(render(derive(list(csv.DictReader(file)))), encoding="utf-8")


if __name__ == "__main__":
    main()
