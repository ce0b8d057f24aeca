from dataclasses import replace

import pytest

from memfit.core.settings import OptimizerKernels
from memfit.planner.script_memory import AS_IT_IS
from tests.unit.planner.script_builders import NUM_LAYERS, speed_of, stack, work

ALL = tuple(f"layers.{number}" for number in range(NUM_LAYERS))


@pytest.fixture(scope="module")
def speed():
    return speed_of(stack())


def test_computing_everything_again_costs_a_third_of_both_passes(speed):
    update = speed.step(AS_IT_IS) - 3 * NUM_LAYERS * speed.module("layers.0")

    assert speed.step(replace(AS_IT_IS, checkpoint=ALL)) - update == pytest.approx(
        4 / 3 * (speed.step(AS_IT_IS) - update)
    )


def test_a_part_costs_its_share(speed):
    one = speed.step(replace(AS_IT_IS, checkpoint=ALL[:1])) - speed.step(AS_IT_IS)
    three = speed.step(replace(AS_IT_IS, checkpoint=ALL[:3])) - speed.step(AS_IT_IS)

    assert three == pytest.approx(3 * one)
    assert one == pytest.approx(speed.module("layers.0"))
    # "layers.1" is no part of "layers.10".
    assert speed.module("layers") == pytest.approx(NUM_LAYERS * one)
    assert speed.module("layer") == 0


def test_autocast_is_faster_and_micro_batches_a_little_slower(speed):
    plain = speed.step(AS_IT_IS)

    assert speed.step(replace(AS_IT_IS, precision="amp-bf16")) < 0.5 * plain
    assert plain < speed.step(replace(AS_IT_IS, micro_batches=2)) < 1.05 * plain


def test_micro_batches_of_small_operators_cost_their_launches():
    # GIVEN operators that take no longer than it takes to launch them
    small = speed_of(stack(), work(flops=1))
    half = replace(AS_IT_IS, micro_batches=512)

    assert small.step(half) > 2 * small.step(AS_IT_IS)


def test_a_fused_update_is_faster_and_a_single_one_slower(speed):
    plain = speed.step(AS_IT_IS)

    assert speed.step(replace(AS_IT_IS, kernels=OptimizerKernels.FUSED)) < plain
    assert speed.step(replace(AS_IT_IS, kernels=OptimizerKernels.SINGLE)) > plain


def test_without_work_the_timeline_ranks():
    speed = speed_of(stack(), ())

    assert not speed.is_known
    assert speed.step(replace(AS_IT_IS, checkpoint=ALL[:1])) > speed.step(AS_IT_IS)
    assert speed_of(stack()).is_known
