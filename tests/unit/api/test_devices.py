import pytest

from memfit.api.devices import resolve, target_within
from memfit.core.device import Device, Kind, Origin
from memfit.core.errors import BadInput
from memfit.core.units import GIB, MIB

UNKNOWN = Device("some", "Some GPU", Kind.CUDA, None, None, Origin.ASSUMED)


def test_the_budget_is_the_capacity():
    target = target_within("rtx-3090", "10GiB")

    assert (target.name, target.usable_bytes) == ("rtx-3090", 10 * GIB)
    assert target_within("rtx-3090", 3 * MIB).usable_bytes == 3 * MIB
    assert target_within("rtx-3090", None).usable_bytes > 20 * GIB


def test_a_budget_alone_makes_a_device():
    target = target_within(None, "10GiB")

    assert (target.kind, target.usable_bytes) == (Kind.CUDA, 10 * GIB)


def test_the_host_has_the_memory_that_is_asked_for():
    assert target_within("cpu", "1000TiB").usable_bytes == 1000 * 1024 * GIB


@pytest.mark.parametrize(
    ("device", "budget", "words"),
    [
        ("rtx-3090", "80GiB", "is more than NVIDIA GeForce RTX 3090 has"),
        ("rtx-3090", 0, "must be positive, but 0 was given"),
        ("rtx-3090", -5, "must be positive, but -5 was given"),
        (UNKNOWN, None, "memory of Some GPU is unknown; give a budget such as budget='16GiB'"),
    ],
)
def test_budgets_that_make_no_sense_are_refused(device, budget, words):
    with pytest.raises(BadInput, match=words):
        target_within(device, budget)


def test_a_device_is_what_it_was():
    assert resolve(UNKNOWN) is UNKNOWN


def test_what_is_no_name_is_refused():
    with pytest.raises(BadInput, match=r"device must be a name such as 'rtx-3090' .* but 3 was given"):
        resolve(3)
