from dataclasses import replace

import pytest

from memfit.core.device import Origin
from memfit.core.profile import Measurement
from memfit.core.settings import OptimizerKernels, OptimizerState, Settings
from memfit.planner.timeline_moves import AS_IT_IS
from tests.unit.planner.profiles import Chain, speed_of
from tests.unit.planner.script_builders import NUM_LAYERS, stack, work
from tests.unit.planner.script_builders import speed_of as script_speed_of

ALL = tuple(f"layers.{number}" for number in range(NUM_LAYERS))


@pytest.fixture
def chain():
    return Chain([3, 3], flops=[10**9, 3 * 10**9])


def scaled(chain, **options):
    return speed_of(chain.profile(4), chain.profile(8), **options)


def test_operators_take_their_operations_at_the_rate(chain):
    # Two layers a block, forward once and backward twice, 4 samples, 1 TFLOP/s.
    assert scaled(chain).passes(4) == pytest.approx(2 * 3 * 4 * 4e9 / 1e12)


def test_small_operators_take_a_launch():
    speed = scaled(Chain([1], flops=[1]))
    assert speed.passes(1) == pytest.approx(4 * 1e-6)


def test_passes_of_another_size_scale(chain):
    speed = scaled(chain)
    assert speed.passes(8) == pytest.approx(2 * speed.passes(4))


def test_recomputation_is_the_forward_pass_of_the_module(chain):
    speed = scaled(chain)
    assert speed.recomputation("layers.1", 4) == pytest.approx(2 * 3e9 * 4 / 1e12)
    assert speed.recomputation("layers.1", 4) == pytest.approx(2 * speed.recomputation("layers.1.a", 4))
    assert speed.recomputation("nowhere", 4) == 0


def test_a_step_adds_up(chain):
    speed = scaled(chain)
    settings = Settings(micro_batches=2, checkpoint=("layers.0",))
    # Two blocks with a gradient of 1 MiB each are added to once.
    added = 3 * 2 * 2**20 / 1e11
    expected = 2 * (speed.passes(2) + speed.recomputation("layers.0", 2)) + added + speed.update(settings)
    assert speed.step(settings, 4) == pytest.approx(expected)
    assert speed.step(settings, 4, hosted_bytes=1e9) == pytest.approx(expected + 2 * 2 * 1e9 / 1e10)


def test_measured_passes_replace_the_model(chain):
    measured = [Measurement(2, 1.0, 2.0, {"layers.0": 0.25}), Measurement(4, 1.5, 3.0, {"layers.0": 0.5})]
    speed = scaled(chain, measured=measured)
    assert speed.passes(2) == 3.0 and speed.passes(4) == 4.5
    assert 3.0 < speed.passes(3) < 4.5
    assert speed.recomputation("layers.0", 2) == pytest.approx(0.25)
    assert not speed.is_measured(4) and not scaled(chain).is_measured(4)
    assert scaled(chain, measured=measured, updates={"keep": 1.0}).is_measured(4)


def test_measured_updates_replace_the_model(chain):
    speed = scaled(chain, updates={"keep": 2.0, "fused": 1.0})
    assert speed.update(Settings()) == 2.0
    assert speed.update(Settings(kernels=OptimizerKernels.FUSED)) == 1.0
    assert speed.update(Settings(kernels=OptimizerKernels.SINGLE)) == 2.0


def test_an_update_on_the_host_crosses_the_bus(chain):
    speed = scaled(chain)
    assert speed.update(Settings(state=OptimizerState.HOST)) > speed.update(Settings())


def test_sharding_costs_communication(chain):
    speed = scaled(chain)

    def passes(num_devices):
        settings = Settings(num_devices=num_devices)
        return speed.step(settings, 4) - speed.update(settings)

    assert passes(4) > passes(2) > passes(1)


def test_other_ways_are_scaled_as_the_plain_step_was_measured(chain):
    plain = scaled(chain, measured=[Measurement(4, 1.0, 2.0, {})], updates={"keep": 7.0})
    other = speed_of(Chain([3, 3], flops=[2 * 10**9] * 2).profile(4), plain=plain)
    computed = speed_of(Chain([3, 3], flops=[2 * 10**9] * 2).profile(4))
    assert other.passes(4) == pytest.approx(computed.passes(4) * 3.0 / scaled(chain).passes(4))
    assert other.update(Settings()) == 7.0
    assert not other.is_measured(4)


def test_updates_of_single_parameters_are_not_free():
    speed = speed_of(Chain([3, 3]).profile(4, features=("foreach", "fusable")))
    plain = speed.update(Settings())
    assert speed.update(Settings(step_in_backward=True)) > plain
    assert speed.update(Settings(state=OptimizerState.EIGHT_BIT)) > plain
    fused = Settings(kernels=OptimizerKernels.FUSED)
    assert speed.update(Settings(kernels=OptimizerKernels.FUSED, step_in_backward=True)) > speed.update(fused)


def test_measured_updates_know_of_those_in_8_bits(chain):
    speed = scaled(chain, updates={"keep": 1.0, "single": 2.0})
    assert speed.update(Settings(state=OptimizerState.EIGHT_BIT)) > 1.0
    assert speed.update(Settings(step_in_backward=True)) == 2.0


@pytest.fixture(scope="module")
def script_speed():
    return script_speed_of(stack())


def test_computing_everything_again_costs_a_third_of_both_passes(script_speed):
    update = script_speed.step(AS_IT_IS) - 3 * NUM_LAYERS * script_speed.module("layers.0")

    assert script_speed.step(replace(AS_IT_IS, checkpoint=ALL)) - update == pytest.approx(
        4 / 3 * (script_speed.step(AS_IT_IS) - update)
    )


def test_a_part_costs_its_share(script_speed):
    one = script_speed.step(replace(AS_IT_IS, checkpoint=ALL[:1])) - script_speed.step(AS_IT_IS)
    three = script_speed.step(replace(AS_IT_IS, checkpoint=ALL[:3])) - script_speed.step(AS_IT_IS)

    assert three == pytest.approx(3 * one)
    assert one == pytest.approx(script_speed.module("layers.0"))
    # "layers.1" is no part of "layers.10".
    assert script_speed.module("layers") == pytest.approx(NUM_LAYERS * one)
    assert script_speed.module("layer") == 0


def test_autocast_is_faster_and_micro_batches_a_little_slower(script_speed):
    plain = script_speed.step(AS_IT_IS)

    assert script_speed.step(replace(AS_IT_IS, precision="amp-bf16")) < 0.5 * plain
    assert plain < script_speed.step(replace(AS_IT_IS, micro_batches=2)) < 1.05 * plain


def test_micro_batches_of_small_operators_cost_their_launches():
    # GIVEN operators that take no longer than it takes to launch them
    small = script_speed_of(stack(), work(flops=1))
    half = replace(AS_IT_IS, micro_batches=512)

    assert small.step(half) > 2 * small.step(AS_IT_IS)


def test_a_fused_update_is_faster_and_a_single_one_slower(script_speed):
    plain = script_speed.step(AS_IT_IS)

    assert script_speed.step(replace(AS_IT_IS, kernels=OptimizerKernels.FUSED)) < plain
    assert script_speed.step(replace(AS_IT_IS, kernels=OptimizerKernels.SINGLE)) > plain


def test_without_work_the_timeline_ranks():
    speed = script_speed_of(stack(), ())

    assert speed.seconds_origin is None
    assert speed.step(replace(AS_IT_IS, checkpoint=ALL[:1])) > speed.step(AS_IT_IS)
    assert script_speed_of(stack()).seconds_origin is Origin.SIMULATED
