import pytest

from memfit._plan_target import Patience, autocast_of, cheapest, hints, not_considered, reference, target_within
from memfit.catalogue import find_device
from memfit.core.device import Device, Kind, Origin
from memfit.core.errors import BadInput
from memfit.core.plan import Refusal
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
        ("rtx-3090", 0, "must be more than nothing, but 0 was given"),
        ("rtx-3090", -5, "must be more than nothing, but -5 was given"),
        (UNKNOWN, None, "memory of Some GPU is unknown; give a budget such as budget='16GiB'"),
    ],
)
def test_budgets_that_make_no_sense_are_refused(device, budget, words):
    with pytest.raises(BadInput, match=words):
        target_within(device, budget)


def test_the_reference_has_rates():
    assert reference().flops


def test_hints_name_what_is_not_allowed():
    assert hints(frozenset({"lora"}), [], ("8-bit-optimizer", "lora")) == "to allow 8-bit-optimizer as well, or "
    assert hints(frozenset({"lora"}), [], ("lora",)) == ""


def test_micro_batches_are_hinted_at_where_they_were_refused():
    refused = [Refusal("micro-batch", "batch norm", "approximate")]

    assert hints(frozenset(), refused, ()) == "to allow approximate (micro-batch) as well, or "
    # What no word lets in is not hinted at.
    assert hints(frozenset(), [Refusal("micro-batch", "the batch has one sample")], ()) == ""
    assert hints(frozenset(), [Refusal("checkpoint", "random numbers")], ()) == ""


def test_the_cheapest_device_has_a_price():
    words, name = cheapest(10 * GIB)

    assert name in words
    assert "USD an hour on AWS (" in words


def test_nothing_is_large_enough():
    assert cheapest(10**15) == ("", "")


def test_what_was_not_considered_is_listed_once_and_cut():
    refused = [Refusal("checkpoint", f"layer {number}") for number in (*range(10), 0)]
    lines = not_considered(refused)

    assert lines[:2] == ["  not considered:", "    checkpoint: layer 0"]
    assert lines[-1] == "    and 2 more"
    assert not_considered([]) == []


@pytest.mark.parametrize(("name", "width"), [("t4", "amp-fp16"), ("a100-40gb", "amp-bf16"), ("24GiB", "amp-bf16")])
def test_autocast_by_device(name, width):
    assert autocast_of(find_device(name)) == width


def test_patience_ends():
    assert Patience(0).is_over
    assert Patience(0).left(20.0) == 0.0
    assert 0 < Patience(3600).left(20.0) <= 20.0
    assert not Patience().is_over
    assert Patience().left(20.0) == 20.0


@pytest.mark.parametrize("seconds", [-1, "5", True, float("nan")])
def test_patience_is_a_number_of_seconds(seconds):
    with pytest.raises(BadInput, match="seconds must be a number from 0 up, such as seconds=10, but"):
        Patience(seconds)
