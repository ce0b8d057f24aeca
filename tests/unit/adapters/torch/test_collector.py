import gc

import pytest
import torch

from memfit.adapters.torch.collector import UsualCollector


class Operators:
    """Stands for those of a simulation: what is entered around each operator."""

    around = None


@pytest.fixture
def switched_off():
    gc.disable()
    yield
    gc.enable()


class Node:
    def __init__(self):
        self.me = self
        self.tensor = torch.empty(1)


def made_until_collected(collector, operators, inside):
    """Cycles that were made until the first was collected."""
    seen = []
    gc.callbacks.append(lambda phase, info: seen.append(phase))
    try:
        with collector.running(operators):
            for number in range(10_000):
                Node()
                with operators.around:
                    kept = [[] for _ in range(inside)]
                if seen:
                    return number
                del kept
    finally:
        gc.callbacks.pop()
    return None


def test_what_an_operator_makes_and_keeps_does_not_count(switched_off):
    alone = made_until_collected(UsualCollector(), Operators(), 0)

    assert alone < 1000
    assert made_until_collected(UsualCollector(), Operators(), 50) == pytest.approx(alone, abs=60)


def test_operators_inside_of_operators_are_one(switched_off):
    collector, operators = UsualCollector(), Operators()

    with collector.running(operators), operators.around:
        with operators.around:
            pass
        assert not gc.isenabled()


def test_the_collector_is_left_as_it_was(switched_off):
    thresholds = gc.get_threshold()
    operators = Operators()

    with pytest.raises(ValueError, match="stop"), UsualCollector().running(operators):
        with operators.around:
            kept = [[] for _ in range(1000)]
        assert gc.isenabled()
        assert gc.get_threshold()[0] > thresholds[0] + len(kept) // 2
        raise ValueError("stop")

    assert not gc.isenabled()
    assert gc.get_threshold() == thresholds
    with operators.around:
        pass
    assert not gc.isenabled()
