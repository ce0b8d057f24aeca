from dataclasses import replace

import pytest

from memfit.catalogue import find_device, list_devices
from memfit.core.device import Kind
from memfit.timing.rates import rates_of


def test_rates_are_the_catalogue_s():
    device = find_device("a100-40gb")
    rates = rates_of(device)
    assert rates.flops == device.flops
    assert rates.bandwidth == device.bandwidth_bytes_per_second
    assert rates.cache_bytes == device.cache_bytes
    assert rates.reference == ""


def test_a_device_of_unknown_speed_borrows_that_of_another():
    rates = rates_of(find_device("24GiB"))
    assert "3090" in rates.reference and rates.flops


def test_newer_devices_have_a_faster_bus():
    speeds = [rates_of(find_device(name)).transfer for name in ("t4", "a100", "h100")]
    assert speeds == sorted(speeds) and len(set(speeds)) == 3


def test_processors_reach_a_share():
    processor = replace(find_device("cpu"), flops={"float32": 1e12}, bandwidth_bytes_per_second=1e11)
    rates = rates_of(processor)
    assert rates.kind is Kind.HOST
    assert 0 < rates.flops["float32"] < 1e12
    assert 0 < rates.bandwidth < 1e11


@pytest.mark.parametrize("device", [device for device in list_devices() if device.kind is Kind.CUDA], ids=str)
def test_every_gpu_has_rates_and_a_cache(device):
    rates = rates_of(device)
    assert not rates.reference
    assert rates.flops["float32"] > 1e12 and rates.bandwidth > 1e11 and rates.multiprocessors > 1
    assert 2**20 < rates.cache_bytes < 2**28
