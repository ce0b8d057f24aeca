import dataclasses

import pytest

from memfit.core.device import Device, Kind, Origin


def test_what_is_not_given_is_unknown_or_assumed():
    device = Device("x", "X", Kind.CUDA, None, None, Origin.ASSUMED)

    assert device.capability is device.context_bytes is device.bandwidth_bytes_per_second is None
    assert device.context_origin is Origin.ASSUMED
    assert device.flops == {}


def test_devices_do_not_change():
    device = Device("x", "X", Kind.CUDA, None, None, Origin.ASSUMED)

    with pytest.raises(dataclasses.FrozenInstanceError):
        device.name = "y"


def test_devices_do_not_share_their_rates():
    first, second = (Device("x", "X", Kind.HOST, None, None, Origin.ASSUMED) for _ in range(2))
    first.flops["float32"] = 1.0

    assert second.flops == {}


@pytest.mark.parametrize(("member", "text"), [(Kind.CUDA, "cuda"), (Kind.HOST, "host"), (Origin.MEASURED, "measured")])
def test_enumerations_are_their_text(member, text):
    assert member == text
    assert f"{member}" == text
