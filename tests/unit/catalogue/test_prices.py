import json
from importlib.resources import files

import pytest

from memfit.catalogue import prices
from memfit.catalogue.prices import Price, cheapest_device, hourly_price
from memfit.catalogue.query import find_device, list_devices
from memfit.core.device import Kind
from memfit.core.units import GIB
from scripts.derive_prices import derive, render

CONTENT = json.loads(files("memfit.catalogue").joinpath("prices.json").read_text(encoding="utf-8"))


def row(instance, accelerator, count, memory_mib, price):
    return {
        "instance": instance,
        "accel": accelerator,
        "count": str(count),
        "mem_mib_each": str(memory_mib),
        "ondemand_us_east_1_2026_08": price,
    }


def test_every_priced_device_is_in_the_catalogue():
    assert CONTENT["devices"]
    assert set(CONTENT["devices"]) <= {device.name for device in list_devices()}


def test_the_file_states_its_source_region_and_date():
    assert "AWS" in CONTENT["source"]
    assert (CONTENT["region"], CONTENT["date"]) == ("us-east-1", "2026-08")


def test_a_price_is_found_by_any_name():
    expected = Price(0.526, "g4dn.xlarge", 1, "us-east-1", "2026-08")

    assert hourly_price("t4") == hourly_price("NVIDIA Tesla T4") == expected


def test_a_device_of_eight_costs_an_eighth():
    price = hourly_price("a100-40gb")

    assert price.num_devices == 8
    assert price.usd_per_hour == pytest.approx(21.957642 / 8, abs=1e-6)


@pytest.mark.parametrize("name", ["rtx-3090", "cpu", "24GiB", "no such thing"])
def test_what_nobody_rents_out_has_no_price(name):
    assert hourly_price(name) is None


@pytest.mark.parametrize(
    ("needed_gib", "name"), [(1, "t4"), (14.5, "t4"), (15, "l4"), (40, "l40s"), (60, "rtx-pro-6000"), (120, "h200")]
)
def test_the_cheapest_device_that_is_large_enough(needed_gib, name):
    device, price = cheapest_device(int(needed_gib * GIB))

    assert device.name == name
    assert device.usable_bytes >= needed_gib * GIB
    assert price == hourly_price(name)


def test_no_priced_device_with_enough_memory_is_cheaper():
    for needed_gib in range(1, 170, 7):
        _, chosen = cheapest_device(needed_gib * GIB)
        others = [
            hourly_price(device.name)
            for device in list_devices()
            if device.kind is Kind.CUDA and device.usable_bytes >= needed_gib * GIB
        ]
        assert chosen.usd_per_hour == min(price.usd_per_hour for price in others if price)


def test_without_prices_the_smallest_device_that_is_large_enough(monkeypatch):
    monkeypatch.setattr(prices, "_prices", dict)

    device, price = cheapest_device(find_device("rtx-4090").usable_bytes)

    assert price is None
    enough = [d.usable_bytes for d in list_devices() if d.kind is Kind.CUDA]
    assert device.usable_bytes == min(size for size in enough if size >= find_device("rtx-4090").usable_bytes)


def test_nothing_is_large_enough():
    assert cheapest_device(10_000 * GIB) is None


def test_derived_prices_are_the_cheapest_per_device():
    # GIVEN instances of one, several and fractions of a device, without a price, and with an unknown accelerator
    rows = [
        row("four", "L4", 4, 22888, "4.0"),
        row("one", "L4", 1, 22888, "1.0"),
        row("dear", "L4", 1, 22888, "1.5"),
        row("fraction", "L4", 1, 5722, "0.1"),
        row("large", "A100", 8, 81920, "24"),
        row("small", "A100", 8, 40960, "16"),
        row("unknown", "Trainium", 1, 32768, "1"),
        row("no-price", "H200", 8, 144384, ""),
    ]

    # WHEN prices are derived
    content = derive(rows)

    # THEN each device has its cheapest share, of equal ones that of the smaller instance
    assert content["devices"] == {
        "a100-40gb": {"usd_per_hour": 2.0, "instance": "small", "num_devices": 8},
        "a100-80gb": {"usd_per_hour": 3.0, "instance": "large", "num_devices": 8},
        "l4": {"usd_per_hour": 1.0, "instance": "one", "num_devices": 1},
    }
    assert json.loads(render(content)) == content


def test_the_file_is_as_the_script_writes_it():
    text = files("memfit.catalogue").joinpath("prices.json").read_text(encoding="utf-8")

    assert render(CONTENT) == text
