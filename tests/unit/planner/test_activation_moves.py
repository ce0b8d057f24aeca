import dataclasses

from memfit.core.timeline import Category, Phase, Timeline
from memfit.core.units import MIB
from memfit.planner.activation_moves import (
    autocast,
    checkpoint_units,
    checkpointed,
    halve_micro_batch,
    level_of_units,
)
from memfit.planner.structure import Spans
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
