import math
from dataclasses import replace

import numpy as np
import pytest

from memfit.catalogue import find_device
from memfit.core.device import Origin
from memfit.core.timeline import Phase
from memfit.timing.fitted import fitted
from memfit.timing.step import queued, step_time
from tests.unit.timing.operators import elementwise, product

RTX_3090 = find_device("rtx-3090")
STEP = [product(4096, 4096, 4096), elementwise(2**26), product(4096, 4096, 4096, phase=Phase.BACKWARD)]


def test_long_kernels_hide_launches():
    assert queued(np.array([1.0, 1.0]), np.array([0.1, 0.1])) == pytest.approx(2.1)


def test_short_kernels_wait_for_launches():
    assert queued(np.array([0.1, 0.1]), np.array([1.0, 1.0])) == pytest.approx(2.1)
    assert queued(np.array([]), np.array([])) == 0


def test_launches_run_ahead_of_a_busy_device():
    # The last kernels are short, but were launched while the first was running.
    assert queued(np.array([10.0, 0.1, 0.1]), np.array([1.0, 1.0, 1.0])) == pytest.approx(11.2)


def test_the_time_comes_with_its_interval():
    time = step_time(STEP, RTX_3090, "training")
    assert time.lower_seconds < time.seconds < time.upper_seconds
    assert time.origin is Origin.SIMULATED


def test_devices_that_nothing_was_fitted_to_have_a_wider_one():
    def width(device):
        time = step_time(STEP, find_device(device), "training")
        return time.upper_seconds / time.lower_seconds

    assert width("a100-40gb") > width("rtx-3090")


def test_faster_devices_take_less():
    times = [step_time(STEP, find_device(name), "training").seconds for name in ("t4", "rtx-3090", "a100", "h100")]
    assert times == sorted(times, reverse=True)


def test_the_unknown_is_none():
    assert step_time([], RTX_3090, "training") is None
    assert step_time(STEP, find_device("24GiB"), "training") is None
    assert step_time(STEP, find_device("cpu"), "training") is None


def test_another_size_lies_between_those_traced():
    def at(size):
        return [product(size * 256, 1024, 1024), elementwise(size * 2**16)]

    exact = step_time(at(32), RTX_3090, "inference").seconds
    made = step_time(at(8), RTX_3090, "inference", at=(32, 8, (16, at(16)))).seconds
    assert made == pytest.approx(exact)


def test_graphs_of_the_compiler_are_launched_in_less_time():
    work = [elementwise(1024)] * 1000
    eager, compiled = (
        step_time([replace(one, is_compiled=flag) for one in work], RTX_3090, "inference") for flag in (False, True)
    )
    assert compiled.seconds < 0.7 * eager.seconds
    # Its interval is that of compiled steps.
    low, high = fitted().spreads["compiled"]
    assert compiled.upper_seconds / compiled.lower_seconds == pytest.approx(math.exp(high - low))
