from dataclasses import replace
from itertools import pairwise

import pytest

from memfit.core.plan import Refusal
from memfit.core.settings import OptimizerKernels, OptimizerState
from memfit.core.units import MIB
from memfit.planner.moves import allowed_moves
from memfit.planner.script_memory import AS_IT_IS
from memfit.planner.script_search import BATCH_NORM, ScriptSearch, computed_part, possible_moves, provable_part
from tests.unit.planner.script_builders import NUM_LAYERS, memory_of, speed_of, stack

EXACT = ("exact",)
DEFAULT = ("exact", "rounding", "-autocast", "-shard")


def search(timeline=None, allow=DEFAULT, splits=True, **options):
    """A search, and what it may choose from."""
    timeline = timeline or stack()
    memory, speed = memory_of(timeline), speed_of(timeline)
    given = {"batch_size": 16, "fusable": True, "autocast": "amp-bf16", **options}
    space = possible_moves(memory, speed, allowed_moves(allow), **given)
    space.splits = splits
    return ScriptSearch(memory, speed, lambda: space), space


def share(found, part):
    return int(found.evaluate(AS_IT_IS).computed_bytes * part)


def test_what_fits_is_left_alone():
    found, _ = search()

    assert found.fastest(share(found, 1)).settings == AS_IT_IS


def test_no_more_units_than_needed_are_computed_again():
    # GIVEN moves that keep every number
    found, _ = search(allow=EXACT)
    target = share(found, 0.8)

    # WHEN something has to go
    best = found.fastest(target)

    # THEN the first layers are computed again, and with one less it would not fit
    chosen = best.settings.checkpoint
    assert chosen == tuple(f"layers.{number}" for number in range(len(chosen)))
    assert 0 < len(chosen) < NUM_LAYERS
    assert best.computed_bytes <= target
    assert found.evaluate(replace(best.settings, checkpoint=chosen[:-1])).computed_bytes > target


def test_micro_batches_are_cheaper_than_computing_again():
    found, _ = search(stack(hidden=128 * MIB))
    best = found.fastest(share(found, 0.7))

    assert best.settings.micro_batches == 2
    assert best.settings.checkpoint == ()


def test_where_parts_cannot_be_proven_an_equal_plan_that_can_is_taken():
    # GIVEN segments that grow cost nothing, nor do gradients freed early, while micro-batches cost a little
    timeline = stack(zero_late=True)
    found, _ = search(timeline, splits=False)
    best = found.fastest(share(found, 0.97))

    assert best.settings.micro_batches == 1


def test_moves_that_are_not_needed_are_taken_back():
    found, space = search(allow=EXACT)
    best = found.fastest(share(found, 0.8))

    assert space.free.expandable_segments
    kept = [
        replace(best.settings, expandable_segments=False),
        replace(best.settings, set_to_none=False),
    ]
    for less in kept:
        assert less == best.settings or found.evaluate(less).computed_bytes > share(found, 0.8)


def test_where_nothing_fits_the_smallest_is_known():
    found, _ = search(allow=EXACT)

    assert found.fastest(50 * MIB) is None
    (smallest,) = found.smallest()
    assert smallest.computed_bytes > 50 * MIB
    assert all(smallest.computed_bytes <= one.computed_bytes for one in found.front())


def test_the_front_has_nothing_that_another_beats():
    found, _ = search(allow=("exact", "rounding", "changes training"))
    front = found.front()

    assert len(front) > 3
    for larger, smaller in pairwise(front):
        assert larger.computed_bytes > smaller.computed_bytes
        assert larger.seconds < smaller.seconds


def test_the_same_question_has_the_same_answer():
    one, other = search()[0], search()[0]

    assert one.fastest(share(one, 0.7)) == other.fastest(share(one, 0.7))
    assert one.front() == other.front()


@pytest.mark.parametrize(
    ("fusable", "allow", "kernels"),
    [
        (True, DEFAULT, OptimizerKernels.FUSED),
        (False, DEFAULT, OptimizerKernels.SINGLE),
        (True, EXACT, OptimizerKernels.KEEP),
    ],
)
def test_kernels_are_those_that_the_optimizer_has(fusable, allow, kernels):
    assert search(allow=allow, fusable=fusable)[1].free.kernels is kernels


def test_only_what_is_allowed_is_chosen():
    _, narrow = search(allow=EXACT)
    _, wide = search(allow=("exact", "rounding", "changes training"))

    assert (narrow.parts, narrow.autocast, narrow.num_devices) == ((1,), None, 1)
    assert narrow.free.state is OptimizerState.KEEP
    assert (wide.parts, wide.autocast, wide.num_devices) == ((1, 2, 4, 8, 16), "amp-bf16", 2)
    assert wide.free.state is OptimizerState.EIGHT_BIT


@pytest.mark.parametrize(("batch_size", "parts"), [(None, (1, 2, 4, 8)), (6, (1, 2, 4)), (1, (1,))])
def test_a_batch_has_no_more_parts_than_samples(batch_size, parts):
    assert search(batch_size=batch_size)[1].parts == parts


def test_batch_norm_keeps_the_batch_whole():
    timeline = stack(op="aten.native_batch_norm")
    _, strict = search(timeline)
    _, lenient = search(timeline, allow=(*DEFAULT, "approximate"))

    assert strict.parts == (1,)
    assert Refusal("micro-batch", BATCH_NORM, "approximate") in strict.refused
    assert lenient.parts == (1, 2, 4, 8, 16)


def test_settings_fall_into_what_a_run_can_show_and_the_rest():
    settings = replace(AS_IT_IS, micro_batches=4, checkpoint=("layers.0",), state=OptimizerState.EIGHT_BIT)

    assert provable_part(settings, splits=True) == replace(settings, state=OptimizerState.KEEP)
    assert computed_part(settings, splits=True) == replace(AS_IT_IS, state=OptimizerState.EIGHT_BIT)
    assert provable_part(settings, splits=False) == replace(AS_IT_IS, checkpoint=("layers.0",))
    assert computed_part(settings, splits=False).micro_batches == 4
