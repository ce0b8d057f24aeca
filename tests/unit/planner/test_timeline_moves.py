import dataclasses

from memfit.core.replay import AllocatorOptions
from memfit.core.timeline import Category, Phase, Timeline
from memfit.core.units import KIB, MIB
from memfit.planner.timeline_moves import (
    Spans,
    autocast,
    checkpoint_units,
    checkpointed,
    expand_segments,
    free_gradients,
    free_leftovers,
    fuse_optimizer,
    halve_micro_batch,
    level_of_units,
    shard,
    shrink_states,
)
from tests.unit.planner.builders import Script, is_sound, live, most, situation, training

WEIGHT, HIDDEN = 8 * MIB, 32 * MIB


def test_half_a_batch_halves_what_grows_with_it():
    timeline = training()
    moved = halve_micro_batch(situation(timeline)).timeline

    assert is_sound(moved)
    assert most(moved, Category.ACTIVATION) == most(timeline, Category.ACTIVATION) // 2
    assert most(moved, Category.BATCH) == 2 * MIB
    for same in (Category.PARAMETER, Category.OPTIMIZER_STATE):
        assert most(moved, same) == most(timeline, same)


def test_half_a_batch_halves_what_kernels_work_in_but_not_what_stays():
    # GIVEN an attention whose kernel takes memory for its own work, beside cuBLAS's workspace and cuDNN's
    script = Script()
    script.allocate(16 * MIB, Category.WORKSPACE, "", "cuBLAS workspace")
    script.enter(Phase.FORWARD, 1)
    kept = script.allocate(HIDDEN, Category.ACTIVATION, "head")
    script.free(script.allocate(64 * MIB, Category.WORKSPACE, "head", "aten._safe_softmax"))
    script.free(script.allocate(48 * MIB, Category.WORKSPACE, "head", "aten.convolution"))
    script.enter(Phase.BACKWARD, 1)
    script.free(kept)

    moved = halve_micro_batch(situation(script.timeline())).timeline

    sizes = [block.size_bytes for block in moved.blocks if block.category is Category.WORKSPACE]
    assert sizes == [16 * MIB, 32 * MIB, 48 * MIB]


def test_accumulation_holds_the_gradients_of_the_first_half():
    timeline = training(4)
    moved = halve_micro_batch(situation(timeline)).timeline

    # At its highest, the step as it is has no gradient yet; with two halves there is one for each parameter.
    assert live(timeline, Category.GRADIENT, timeline.peak()[0]) == 0
    assert live(moved, Category.GRADIENT, moved.peak()[0]) == 4 * WEIGHT


def test_gradients_of_two_steps_never_meet():
    moved = halve_micro_batch(situation(training(4, num_steps=3, zero_late=True))).timeline

    assert most(moved, Category.GRADIENT) == 4 * WEIGHT


def test_what_has_the_shape_of_a_parameter_does_not_shrink():
    # GIVEN a backward pass that makes a copy of a parameter beside what grows with the batch
    script = Script()
    script.allocate(WEIGHT, Category.PARAMETER, "head")
    script.enter(Phase.FORWARD, 1)
    kept = script.allocate(HIDDEN, Category.ACTIVATION, "head")
    script.enter(Phase.BACKWARD, 1)
    script.free(script.allocate(WEIGHT, Category.TEMPORARY, "head"))
    script.free(kept)

    moved = halve_micro_batch(situation(script.timeline())).timeline

    assert most(moved, Category.TEMPORARY) == WEIGHT
    assert most(moved, Category.ACTIVATION) == HIDDEN // 2


def test_halving_says_what_it_does_to_batch_norm():
    plain, normed = (halve_micro_batch(situation(training(op=op))) for op in ("aten.mm", "aten.native_batch_norm"))

    assert (plain.keeps, normed.keeps) == ("rounding", "changes training")
    assert "statistics of batch norm" in normed.how
    assert "statistics" not in plain.how


def test_without_activations_there_is_no_batch_to_halve():
    assert halve_micro_batch(situation(Timeline((), 0))) is None


def test_checkpointing_keeps_outputs_and_one_unit():
    # GIVEN four layers that keep a hidden tensor of 32 MiB and an output of 16 MiB each
    timeline = training(4)
    assert most(timeline, Category.ACTIVATION) == 4 * (HIDDEN + HIDDEN // 2)

    move = checkpoint_units(situation(timeline))

    # THEN all outputs and one hidden tensor are left
    assert most(move.timeline, Category.ACTIVATION) == 4 * (HIDDEN // 2) + HIDDEN
    assert is_sound(move.timeline)
    assert move.title == "checkpoint activations of 4 blocks"
    assert "layers.0 to layers.3" in move.how
    assert move.keeps == "exact"


def test_checkpointing_leaves_the_rest_alone():
    timeline = training(4)
    moved = checkpoint_units(situation(timeline)).timeline

    def others(t):
        return sorted((b.size_bytes, b.category, b.module) for b in t.blocks if b.category is not Category.ACTIVATION)

    assert others(moved) == others(timeline)


def test_checkpointing_of_batch_norm_updates_it_twice():
    move = checkpoint_units(situation(training(op="aten.native_batch_norm")))

    assert move.keeps == "changes training"
    assert "update twice" in move.how


def test_small_leftovers_are_not_taken_for_the_output():
    # GIVEN units that end with the statistics of a norm
    script = Script()
    script.enter(Phase.FORWARD, 1)
    kept = []
    for layer in range(3):
        for size, name in ((HIDDEN, "conv"), (HIDDEN // 2, "norm"), (256, "norm")):
            kept.append(script.allocate(size, Category.ACTIVATION, f"layers.{layer}.{name}"))
    script.enter(Phase.BACKWARD, 1)
    for index in reversed(kept):
        script.free(index)

    moved = checkpoint_units(situation(script.timeline())).timeline

    assert most(moved, Category.ACTIVATION) == 3 * (HIDDEN // 2) + HIDDEN + 256


def test_the_better_of_two_levels_is_checkpointed():
    # GIVEN two stages of four blocks: a stage at once would need all its activations again
    stages = training(8, names="stages.{}")
    nested = dataclasses.replace(
        stages, blocks=tuple(dataclasses.replace(b, module=_nested(b.module)) for b in stages.blocks)
    )

    move = checkpoint_units(situation(nested))

    assert move.title == "checkpoint activations of 8 blocks"
    assert "stages.0.blocks.0 to stages.1.blocks.3" in move.how


def _nested(module):
    kind, _, rest = module.partition(".")
    if kind != "stages":
        return module
    number, _, inner = rest.partition(".")
    return f"stages.{int(number) // 4}.blocks.{int(number) % 4}.{inner}"


def test_without_repetition_nothing_is_checkpointed():
    assert checkpoint_units(situation(training(1))) is None


def test_autocast_needs_to_know_that_parameters_have_32_bits():
    timeline = training(4)
    elements = 4 * WEIGHT // 4

    assert autocast(situation(timeline)) is None
    assert autocast(situation(timeline, num_parameters=2 * elements)) is None
    assert autocast(situation(timeline, num_parameters=elements)) is not None


def test_autocast_halves_products_and_adds_copies_of_parameters():
    timeline = training(4)
    moved = autocast(situation(timeline, num_parameters=WEIGHT)).timeline

    assert most(moved, Category.ACTIVATION) == most(timeline, Category.ACTIVATION) // 2
    copies = [b for b in moved.blocks if b.op == "aten._to_copy"]
    updates = [span for span in Spans(moved).all if span.phase is Phase.OPTIMIZER]
    assert [b.size_bytes for b in copies] == [4 * WEIGHT // 2] * 2
    assert [b.end for b in copies] == [span.start - 1 for span in updates]
    assert is_sound(moved)


def test_autocast_leaves_sums_and_norms_wide():
    timeline = training(4, op="aten.native_layer_norm")
    moved = autocast(situation(timeline, num_parameters=WEIGHT)).timeline

    assert most(moved, Category.ACTIVATION) == most(timeline, Category.ACTIVATION)


def test_autocast_is_not_offered_twice():
    # GIVEN a forward pass that casts its parameter
    script = Script()
    script.allocate(WEIGHT, Category.PARAMETER, "head")
    script.enter(Phase.FORWARD, 1)
    script.allocate(WEIGHT // 2, Category.ACTIVATION, "head", "aten._to_copy")

    assert autocast(situation(script.timeline(), num_parameters=WEIGHT // 4)) is None


def test_only_the_chosen_units_are_checkpointed():
    timeline = training(num_layers=4)
    some = checkpointed(timeline, {"layers.0", "layers.1"}, 1)
    every = checkpointed(timeline, {f"layers.{number}" for number in range(4)}, 1)

    assert is_sound(some)
    assert every.peak()[1] < some.peak()[1] < timeline.peak()[1]


def test_there_is_no_level_where_nothing_repeats():
    assert level_of_units(training(names="part{}")) is None
    assert level_of_units(training()) == 1


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


WEIGHT = 8 * MIB


def temporaries_of_updates(timeline):
    updates = [span for span in Spans(timeline).all if span.phase == "optimizer"]
    return max(live(timeline, Category.TEMPORARY, tick) for span in updates for tick in range(span.start, span.end))


def test_a_fused_optimizer_has_one_temporary_at_a_time():
    timeline = training(4)
    moved = fuse_optimizer(situation(timeline)).timeline

    assert temporaries_of_updates(timeline) == 4 * WEIGHT
    assert temporaries_of_updates(moved) == WEIGHT
    assert most(moved, Category.ACTIVATION) == most(timeline, Category.ACTIVATION)
    assert is_sound(moved)


def test_an_optimizer_that_works_one_by_one_is_left_alone():
    assert fuse_optimizer(situation(training(foreach=False))) is None


def test_states_in_8_bits_have_a_scale_for_each_256():
    timeline = training(4, num_steps=1)
    move = shrink_states(situation(timeline))

    elements = WEIGHT // 4
    assert most(move.timeline, Category.OPTIMIZER_STATE) == 8 * (elements + 4 * elements // 256)
    assert most(move.timeline, Category.PARAMETER) == most(timeline, Category.PARAMETER)
    assert move.keeps == "changes training"


def test_small_states_stay_as_they_are():
    assert shrink_states(situation(training(weight=16 * KIB - 4))) is None
    assert shrink_states(situation(Timeline((), 0))) is None


def test_two_devices_hold_half_each_and_gather_units():
    timeline = training(8)
    move = shard(situation(timeline))

    for category in (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER_STATE):
        assert most(move.timeline, category) == most(timeline, category) // 2
    gathered = [b.size_bytes for b in move.timeline.blocks if b.op == "all_gather"]
    # Two layers forward, three backward, in each of two steps; nothing lies outside of the layers.
    assert gathered == [2 * WEIGHT, 3 * WEIGHT] * 2
    assert most(move.timeline, Category.ACTIVATION) == most(timeline, Category.ACTIVATION)
    assert "fully_shard(block) for each of layers.0 to layers.7" in move.how
    assert is_sound(move.timeline)


def test_what_lies_outside_of_the_units_is_gathered_as_a_whole():
    script = Script()
    script.allocate(100 * MIB, Category.PARAMETER, "embedding")
    timeline = training(4)
    shifted = Timeline((*script.blocks, *(_later(b) for b in timeline.blocks)), timeline.num_ticks + 1, timeline.marks)

    gathered = [b.size_bytes for b in shard(situation(shifted)).timeline.blocks if b.op == "all_gather"]

    assert gathered[0] == 100 * MIB + 2 * WEIGHT


def _later(block):
    return dataclasses.replace(block, start=block.start + 1, end=None if block.end is None else block.end + 1)


def test_sharding_needs_units_parameters_and_a_single_device():
    assert shard(situation(training(4), num_devices=2)) is None
    assert shard(situation(training(1))) is None
    assert shard(situation(training(4).without(lambda block: block.category is Category.PARAMETER))) is None
