from dataclasses import replace

import pytest

from memfit.core.replay import AllocatorOptions
from memfit.core.settings import OptimizerKernels, OptimizerState
from memfit.core.timeline import Category
from memfit.core.units import MIB
from memfit.planner import moves
from memfit.planner.script_space import ScriptMemory
from memfit.planner.timeline_moves import AS_IT_IS
from tests.unit.planner.builders import is_sound, most
from tests.unit.planner.script_builders import CONTEXT, NUM_LAYERS, estimate_of, memory_of, stack

ALL = tuple(f"layers.{number}" for number in range(NUM_LAYERS))


def test_the_script_as_it_is_needs_what_the_run_said():
    estimate = estimate_of(stack())
    memory = ScriptMemory(estimate, AllocatorOptions())

    assert memory.peak(AS_IT_IS) == estimate.peak_bytes
    assert memory.estimate(AS_IT_IS) is estimate
    assert memory.units == ALL


@pytest.mark.parametrize(
    "change",
    [
        {"micro_batches": 2},
        {"checkpoint": ALL},
        {"precision": "amp-bf16"},
        {"state": OptimizerState.EIGHT_BIT},
    ],
)
def test_each_change_saves(change):
    memory = memory_of(stack())
    settings = replace(AS_IT_IS, **change)

    assert memory.at_least(settings) <= memory.peak(settings) < memory.peak(AS_IT_IS)
    assert is_sound(memory.timeline(settings)[0])


def test_changes_that_save_elsewhere_change_the_timeline_only():
    # GIVEN gradients that outlive their step, and an optimizer with large temporaries
    memory = memory_of(stack(zero_late=True))
    plain = memory.timeline(AS_IT_IS)[0]

    # THEN each change is seen where it acts
    early = memory.timeline(replace(AS_IT_IS, set_to_none=True))[0]
    assert max(early.curve()) < max(plain.curve())
    single = memory.timeline(replace(AS_IT_IS, kernels=OptimizerKernels.SINGLE))[0]
    assert most(single, Category.TEMPORARY) < most(plain, Category.TEMPORARY)
    assert memory.timeline(replace(AS_IT_IS, expandable_segments=True))[1].expandable_segments


def test_the_more_is_computed_again_the_less_is_needed():
    memory = memory_of(stack())
    peaks = [memory.peak(replace(AS_IT_IS, checkpoint=ALL[:count])) for count in range(NUM_LAYERS)]

    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] - peaks[4] == pytest.approx(4 * 32 * MIB, rel=0.1)


def test_changes_combine():
    memory = memory_of(stack(hidden=256 * MIB))
    both = replace(AS_IT_IS, micro_batches=4, checkpoint=ALL)

    assert memory.peak(both) < memory.peak(replace(AS_IT_IS, micro_batches=4))
    assert memory.peak(both) < memory.peak(replace(AS_IT_IS, checkpoint=ALL))
    assert most(memory.timeline(replace(AS_IT_IS, micro_batches=4))[0], Category.ACTIVATION) == pytest.approx(
        most(stack(hidden=256 * MIB), Category.ACTIVATION) / 4, rel=0.01
    )


def test_the_estimate_of_settings_agrees_with_their_peak():
    memory = memory_of(stack())
    settings = replace(AS_IT_IS, micro_batches=2)
    estimate = memory.estimate(settings)

    assert estimate.peak_bytes == memory.peak(settings)
    assert estimate.certain_bytes <= estimate.peak_bytes
    assert sum(estimate.breakdown.by_category.values()) == estimate.peak_bytes


@pytest.mark.parametrize("given_back", [4 * MIB, 256 * MIB])
def test_what_the_run_gave_back_by_hand_stays_given_back(given_back):
    # GIVEN a run that took less than its timeline alone would have
    plain = estimate_of(stack())
    less = replace(plain.replay, reserved_peak_bytes=plain.reserved_peak_bytes - given_back)
    memory = ScriptMemory(replace(plain, replay=less), AllocatorOptions())
    settings = replace(AS_IT_IS, state=OptimizerState.EIGHT_BIT)

    # THEN other settings take as much less, but never less than what is alive at once
    live = memory.timeline(settings)[0].peak()[1] + CONTEXT
    assert memory.peak(settings) == max(live, memory_of(stack()).peak(settings) - given_back)
    assert memory.at_least(settings) <= memory.peak(settings)


def test_it_says_which_changes_make_sense():
    memory = memory_of(stack(foreach=False))

    assert memory.offers(moves.CHECKPOINT)
    assert memory.offers(moves.MICRO_BATCH)
    assert not memory.offers(moves.FUSED)
    assert not memory_of(stack(names="part{}")).offers(moves.CHECKPOINT)


def test_each_unit_is_known_by_what_it_keeps():
    assert memory_of(stack()).unit_bytes() == dict.fromkeys(ALL, 2 * 48 * MIB)
