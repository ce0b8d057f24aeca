"""How sure an estimate is."""

import dataclasses

import pytest

from memfit.core.device import Device, Kind, Origin
from memfit.core.replay import Replay
from memfit.core.spread import (
    CONTEXT_SIZE,
    GROUPED,
    ORDER,
    TENSORS,
    cache_spread,
    capacity_width,
    probability,
    spreads_of,
)
from memfit.core.units import GIB, MIB

GPU = Device("x", "X", Kind.CUDA, GIB, GIB, Origin.MEASURED, context_bytes=100 * MIB, context_origin=Origin.MEASURED)
HOST = Device("cpu", "CPU", Kind.HOST, GIB, GIB, Origin.MEASURED)


def replayed(reserved_bytes):
    return Replay((), (), reserved_bytes, reserved_bytes, reserved_bytes, 1)


def named(*given, **options):
    return {spread.name: spread for spread in spreads_of(*given, **options)}


def test_probabilities_follow_the_normal_distribution_and_are_never_certain():
    # 1.96 standard deviations, one of them, none, and far away
    assert probability(196, 196) == pytest.approx(0.975, abs=1e-3)
    assert probability(100, 196) == pytest.approx(0.841, abs=1e-3)
    assert probability(-100, 196) == pytest.approx(0.159, abs=1e-3)
    assert probability(10**12, 1) == 0.99
    assert probability(-(10**12), 1) == pytest.approx(0.01)
    assert probability(0, 0) == 0.99
    assert probability(-1, 0) == pytest.approx(0.01)


def test_what_replays_differ_by_is_the_width_of_the_cache():
    # GIVEN a replay that is as likely, or two between which all are
    one = cache_spread(replayed(GIB), [replayed(GIB - 50 * MIB)])
    several = cache_spread(replayed(GIB), [replayed(GIB), replayed(GIB - 50 * MIB)])

    # THEN what it differs by is one standard deviation; and what they differ by in the mean is a width, beside the one
    # that convolutions have, which mostly take less
    assert one.below_bytes == one.above_bytes == pytest.approx(1.96 * 50 * MIB, abs=1)
    assert several.above_bytes == pytest.approx(((50 * MIB) ** 2 / 2 + (0.02 * GIB) ** 2) ** 0.5, abs=1)
    assert several.below_bytes > 3 * 0.02 * GIB
    assert not several.decides


def test_what_nothing_explains_is_a_share_of_what_is_reserved():
    tensors = named(GPU, replayed(GIB))[TENSORS]

    assert tensors.decides and tensors.below_bytes == tensors.above_bytes == round(0.02 * GIB)


def test_an_assumed_context_is_less_sure_than_a_measured_one():
    assumed = dataclasses.replace(GPU, context_origin=Origin.ASSUMED)

    assert named(GPU, replayed(GIB))[CONTEXT_SIZE].above_bytes == 5 * MIB
    assert named(assumed, replayed(GIB))[CONTEXT_SIZE].above_bytes == 50 * MIB
    assert CONTEXT_SIZE not in named(HOST, replayed(GIB))


def test_grouped_convolutions_and_orders_are_one_sided_where_they_are():
    spreads = named(GPU, replayed(100), grouped_bytes=40, orders=(0.75, 1.0))

    assert (spreads[GROUPED].below_bytes, spreads[GROUPED].above_bytes) == (0, 40)
    assert (spreads[ORDER].below_bytes, spreads[ORDER].above_bytes) == (25, 0)


def test_only_an_assumed_capacity_may_be_off():
    assert capacity_width(GPU) == 0
    assert capacity_width(dataclasses.replace(GPU, usable_origin=Origin.ASSUMED)) == pytest.approx(0.02 * GIB)
