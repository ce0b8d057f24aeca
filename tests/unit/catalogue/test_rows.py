import os
import subprocess
import sys
from datetime import date

import pytest

from memfit.catalogue.rows import assume_context_bytes, read_rows
from memfit.core.device import Kind, Origin
from memfit.core.units import MIB

ROWS = read_rows()
CUDA = [row for row in ROWS if row.device.kind is Kind.CUDA]
HOST = [row for row in ROWS if row.device.kind is Kind.HOST]
DTYPES = ["float32", "tf32", "float16", "bfloat16", "float8"]


def by_name(row):
    return row.device.name


@pytest.mark.parametrize("row", CUDA, ids=by_name)
def test_memory_is_plausible(row):
    device = row.device
    assert 0.85 * device.nominal_bytes <= device.usable_bytes <= device.nominal_bytes
    assert 40 * 2**20 < device.context_bytes < 0.05 * device.usable_bytes


@pytest.mark.parametrize("row", CUDA, ids=by_name)
def test_rates_are_plausible(row):
    device = row.device
    assert 1e11 < device.bandwidth_bytes_per_second < 1e13
    assert set(device.flops) <= set(DTYPES)
    assert device.flops["float32"] > 1e12
    # Pascal cards for games have next to no float16; everything else is at least as fast in fewer bits.
    rates = [device.flops[dtype] for dtype in DTYPES if dtype in device.flops and device.name != "gtx-1080-ti"]
    assert rates == sorted(rates)


@pytest.mark.parametrize("row", CUDA, ids=by_name)
def test_dtypes_follow_the_compute_capability(row):
    device = row.device
    assert ("bfloat16" in device.flops) == ("tf32" in device.flops) == (device.capability >= (8, 0))
    assert ("float8" in device.flops) == (device.capability >= (8, 9))


@pytest.mark.parametrize("row", ROWS, ids=by_name)
def test_every_row_says_where_it_comes_from(row):
    assert row.device.source.startswith("usable: ")
    assert date.fromisoformat(row.device.date) >= date(2026, 1, 1)


@pytest.mark.parametrize("row", HOST, ids=by_name)
def test_host_memory_is_left_to_the_machine(row):
    assert row.device.nominal_bytes is row.device.usable_bytes is row.device.context_bytes is None
    assert row.device.usable_origin is Origin.ASSUMED


def test_names_are_unique_and_canonical():
    names = [row.device.name for row in ROWS]
    assert len(set(names)) == len(names)
    assert all(name == name.lower() and " " not in name for name in names)


def test_variants_of_one_card_grow_together():
    devices = {row.device.name: row.device for row in ROWS}
    for small, large in [("v100-16gb", "v100-32gb"), ("a100-40gb", "a100-80gb"), ("h100-80gb", "h100-nvl-94gb")]:
        assert devices[small].usable_bytes < devices[large].usable_bytes


def test_measured_figures_of_record():
    devices = {row.device.name: row.device for row in ROWS}
    assert devices["t4"].context_bytes == 141426688
    assert round(devices["t4"].usable_bytes / 2**30, 2) == 14.56
    assert round(devices["a10g"].usable_bytes / 2**30, 2) == 22.06
    assert round(devices["rtx-3090"].usable_bytes / 2**30, 2) == 23.69
    assert round(devices["a100-40gb"].usable_bytes / 2**30, 1) == 39.5
    assert round(devices["a100-80gb"].usable_bytes / 2**30, 1) == 79.1


def test_nothing_is_read_at_import():
    # GIVEN a fresh interpreter WHEN the package is imported THEN the file stays closed
    code = (
        "import sys; opened = []\n"
        "sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == 'open' else None)\n"
        "import memfit.catalogue as catalogue\n"
        "assert not any(path.endswith('devices.json') for path in opened)\n"
        "catalogue.list_devices()\n"
        "assert any(path.endswith('devices.json') for path in opened)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": os.pathsep.join(sys.path)})


@pytest.mark.parametrize(
    ("capability", "num_multiprocessors", "measured_bytes"),
    [((7, 5), 40, 141426688), ((8, 6), 82, 256 * MIB), ((8, 9), 142, 426 * MIB)],
)
def test_the_line_goes_through_the_measured_contexts(capability, num_multiprocessors, measured_bytes):
    assert assume_context_bytes(capability, num_multiprocessors) == pytest.approx(measured_bytes, rel=0.01)


def test_a_larger_device_has_a_larger_context():
    sizes = [assume_context_bytes((8, 6), count) for count in range(1, 200)]
    assert sizes == sorted(set(sizes))


def test_multiprocessors_with_more_threads_take_more():
    assert assume_context_bytes((8, 0), 108) > assume_context_bytes((8, 6), 108)
