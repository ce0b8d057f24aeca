from memfit.core.replay import AllocatorOptions
from memfit.core.timeline import Category, Phase, Timeline
from memfit.core.units import MIB
from memfit.planner.lifetime_moves import expand_segments, free_gradients, free_leftovers
from memfit.planner.structure import Spans
from tests.unit.planner.builders import Script, is_sound, live, most, situation, training

WEIGHT = 8 * MIB


def in_second_forward(timeline, category):
    span = next(s for s in Spans(timeline).all if s.phase is Phase.FORWARD and s.step == 2)
    return live(timeline, category, span.end - 1)


def test_gradients_that_live_through_the_forward_pass_are_freed():
    timeline = training(4, zero_late=True)
    assert in_second_forward(timeline, Category.GRADIENT) == 4 * WEIGHT

    move = free_gradients(situation(timeline))

    assert in_second_forward(move.timeline, Category.GRADIENT) == 0
    assert most(move.timeline, Category.GRADIENT) == 4 * WEIGHT
    assert move.origin == "simulated"
    assert move.keeps == "exact"
    assert is_sound(move.timeline)


def accumulating(num_steps=3, *, with_heirs=True):
    """Gradients that are filled with zeros: each later backward pass makes a new block and adds it."""
    script = Script()
    gradient = None
    for step in range(1, num_steps + 1):
        script.enter(Phase.FORWARD, step)
        kept = script.allocate(100 * MIB, Category.ACTIVATION, "head")
        script.enter(Phase.BACKWARD, step)
        script.free(kept)
        if gradient is None:
            gradient = script.allocate(WEIGHT, Category.GRADIENT, "head")
        elif with_heirs:
            script.free(script.allocate(WEIGHT, Category.TEMPORARY, "head"))
        script.enter(Phase.OPTIMIZER, step)
        script.free(script.allocate(1, Category.TEMPORARY, "(optimizer)"))
    return script.timeline()


def test_gradients_set_to_zero_are_made_anew():
    timeline = accumulating()
    assert in_second_forward(timeline, Category.GRADIENT) == WEIGHT

    moved = free_gradients(situation(timeline)).timeline

    assert in_second_forward(moved, Category.GRADIENT) == 0
    # What was added to the gradient becomes the gradient, and lives until its step ends.
    update = next(s for s in Spans(moved).all if s.phase is Phase.OPTIMIZER and s.step == 2)
    assert live(moved, Category.TEMPORARY, update.start) == WEIGHT + 1
    assert moved.peak()[1] == 100 * MIB


def test_a_gradient_whose_heir_is_unknown_stays():
    assert free_gradients(situation(accumulating(with_heirs=False))) is None


def test_gradients_that_end_with_their_step_are_left_alone():
    assert free_gradients(situation(training(num_steps=1))) is None
    assert free_gradients(situation(Timeline((), 0))) is None


def leaving(num_steps, *, frees):
    """Steps that leave their logits to the next, or to all later ones."""
    script = Script()
    kept = []
    for step in range(1, num_steps + 1):
        script.enter(Phase.FORWARD, step)
        kept.append(script.allocate(50 * MIB, Category.TEMPORARY, "head", source="train.py:9"))
        if frees and len(kept) > 1:
            script.free(kept.pop(0))
        script.enter(Phase.BACKWARD, step)
        script.free(script.allocate(MIB, Category.TEMPORARY))
        script.enter(Phase.OPTIMIZER, step)
        script.free(script.allocate(MIB, Category.TEMPORARY))
    return script.timeline()


def test_what_a_variable_holds_into_the_next_step_is_freed():
    timeline = leaving(3, frees=True)
    move = free_leftovers(situation(timeline))

    assert timeline.peak()[1] == 100 * MIB
    assert move.timeline.peak()[1] == 51 * MIB
    assert move.how.endswith("50.0 MiB of train.py:9")
    assert move.keeps == "exact"


def test_what_piles_up_is_freed():
    timeline = leaving(3, frees=False)

    assert timeline.peak()[1] == 151 * MIB
    assert free_leftovers(situation(timeline)).timeline.peak()[1] == 51 * MIB


def test_what_the_first_step_makes_once_and_keeps_is_no_leftover():
    timeline = leaving(3, frees=False)
    once = timeline.without(lambda block: block.size_bytes > 2 * MIB and block.start > 0)
    assert sum(b.size_bytes == 50 * MIB for b in once.blocks) == 1

    assert free_leftovers(situation(once)) is None


def test_segments_grow_where_they_do_not_yet():
    timeline = training()
    move = expand_segments(situation(timeline))

    assert move.timeline == timeline
    assert move.options == AllocatorOptions(expandable_segments=True)
    assert expand_segments(situation(timeline, options=move.options)) is None
