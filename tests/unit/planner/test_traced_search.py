import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.core.device import Device, Kind, Origin
from memfit.core.settings import Settings
from memfit.core.step_facts import StepFacts, StepPart
from memfit.core.units import MIB
from memfit.planner.driver import Question
from memfit.planner.moves import allowed_moves
from memfit.planner.traced_search import (
    ForwardSpeed,
    TracedSearch,
    TracedVariant,
    levels,
    num_moves,
    open_traced_search,
)

PLAIN = TracedVariant(Settings(), 1.0, 1.0, fixed_bytes=100, gradient_bytes=10)
PARTS = tuple(StepPart(f"block{number}", 10.0, 1.0) for number in range(8))


def search(**changes):
    return TracedSearch(**{"variants": (PLAIN,), "peak_bytes": 1100, "batch_size": 10, "parts": PARTS, **changes})


def test_levels_take_first_what_spares_most_for_its_work():
    parts = [StepPart("cheap", 100.0, 1.0), StepPart("dear", 100.0, 50.0), StepPart("small", 5.0, 5.0)]
    found = levels(parts)
    assert found[0] == ("cheap",)
    assert found[-1] == ("cheap", "dear", "small")


@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 1000)), min_size=1, max_size=12))
def test_levels_spare_more_and_more(sizes):
    parts = [StepPart(str(place), float(size), float(work)) for place, (size, work) in enumerate(sizes)]
    kept = {part.path: part.kept_bytes for part in parts}
    spared = [sum(kept[path] for path in level) for level in levels(parts)]
    assert spared[-1] == sum(kept.values())
    cell = sum(kept.values()) / 400
    assert all(a <= b + 2 * cell * len(parts) for a, b in itertools.pairwise(spared))


def test_nothing_to_recompute_gives_no_levels():
    assert levels([]) == [] == levels([StepPart("empty", 0.0, 1.0)])


def test_what_fits_as_it_is_is_left_alone():
    best = search().best(1200)
    assert best.settings == Settings()
    assert best.computed_bytes == 1100


def test_less_memory_takes_as_few_parts_as_are_computed_to_fit():
    best = search(parts=()).best(620)
    # 100 fixed, 10 for the sums, a half of what grows.
    assert (best.settings.micro_batches, best.settings.micro_batch_size, best.computed_bytes) == (2, 5, 610)


def in_parts(count):
    return Settings(micro_batches=count, micro_batch_size=-(-10 // count))


def test_a_trace_corrects_those_of_its_kind():
    # GIVEN a step of which a half needs more than computed
    step = search(parts=())
    half = step.best(620).settings
    step.learn(step.evaluate(half), 800)
    # THEN it no longer fits, and the next is judged by the same measure
    assert step.evaluate(half).computed_bytes == 800
    assert step.best(620).settings.micro_batches > 2
    # AND two traces make a line
    third = step.evaluate(in_parts(3))
    step.learn(step.evaluate(in_parts(10)), 400)
    assert 400 < step.evaluate(in_parts(5)).computed_bytes < third.computed_bytes < 800


def test_recomputation_is_chosen_where_parts_of_a_batch_are_not_allowed():
    step = search(may_split=False)
    best = step.best(700)
    assert best.settings.micro_batches == 1 and best.settings.checkpoint
    assert best.computed_bytes <= 700 < 1100
    assert step.best(50) is None


def test_without_recomputation_there_is_none():
    assert all(not one.settings.checkpoint for one in search(may_recompute=False).candidates())


def test_recomputing_costs_its_share_of_the_forward_pass_and_every_part_a_call():
    step = search(speed=ForwardSpeed(1.0, 0.5))
    plain = step.evaluate(Settings()).seconds
    assert plain == pytest.approx(3 * (10 + 0.5))
    every = Settings(checkpoint=tuple(part.path for part in PARTS))
    assert step.evaluate(every).seconds == pytest.approx(plain * 4 / 3)
    assert step.evaluate(Settings(micro_batches=2, micro_batch_size=5)).seconds == pytest.approx(3 * (10 + 1.0))


def test_slow_loops_make_parts_the_last_resort():
    quick, slow = search(), search(loop_factor=20.0)
    assert quick.best(700).settings.micro_batches > 1
    assert slow.best(700).settings.micro_batches == 1
    assert slow.best(700).settings.checkpoint
    assert slow.best(250).settings.micro_batches > 1


def test_what_cannot_be_run_is_not_offered_again():
    step = search(parts=())
    first = step.best(620)
    step.exclude(first)
    assert step.best(620).settings != first.settings


def test_a_forced_precision_is_not_taken_for_traced():
    narrow = TracedVariant(Settings(precision="amp-bf16"), 0.5, 1.0, 100, 10)
    step = search(variants=(narrow,))
    assert not step.is_traced(narrow.settings)
    assert step.evaluate(narrow.settings).computed_bytes == 600


def test_gradients_are_a_floor_for_what_is_only_computed():
    heavy = TracedVariant(Settings(), 1.0, 1.0, fixed_bytes=100, gradient_bytes=500)
    assert min(one.computed_bytes for one in search(variants=(heavy,)).candidates()) >= 600


def test_smallest_leaves_out_what_was_traced():
    step = search()
    [first] = step.smallest(1)
    step.learn(first, first.computed_bytes)
    assert step.smallest(1)[0].settings != first.settings


def test_moves_are_counted():
    assert num_moves(Settings()) == 0
    assert num_moves(Settings(micro_batches=2, checkpoint=("a", "b"), precision="amp-bf16")) == 4


BLOCK = (StepPart("block", MIB, 1e6),)
BEFORE = SimpleNamespace(
    state_bytes={"parameter": 4 * MIB, "gradient": 4 * MIB, "optimizer state": 8 * MIB},
    batch_bytes=MIB,
    reserved_peak_bytes=100 * MIB,
)


def opened(facts, allow=("exact", "rounding"), precision="keep", kind=Kind.CUDA, measure=None):
    device = Device("some", "Some", kind, (8, 0), 50 * MIB, Origin.MEASURED, flops={"float32": 1e12})
    question = Question(None, device, allowed_moves(allow), Settings(), "keras", batch_size=8)
    return open_traced_search(facts, question, precision, measure, BEFORE), question


def facts(**changes):
    return StepFacts(
        **{"framework": "keras:jax", "precisions": ("amp-bf16", "amp-fp16"), "moves": frozenset(), **changes}
    )


def test_the_step_as_it_is_comes_first_with_what_does_not_grow():
    search, question = opened(facts(parts=BLOCK))

    assert search.variants[0].settings == Settings()
    assert search.variants[0].fixed_bytes == 13 * MIB
    assert question.framework == "keras:jax"
    assert search.seconds_origin is Origin.ASSUMED


def test_state_that_is_copied_counts_twice_unless_it_is_donated():
    search, _ = opened(facts(moves=frozenset({"donate"}), copies_state=True))

    assert [one.fixed_bytes for one in search.variants] == [25 * MIB, 13 * MIB]
    assert search.variants[1].settings.donate


@pytest.mark.parametrize(("precision", "expected"), [("keep", {None}), ("auto", {None, "amp-bf16"})])
def test_mixed_precision_is_tried_where_it_may_be(precision, expected):
    search, _ = opened(facts(), precision=precision)

    assert {one.settings.precision for one in search.variants} == expected


def test_moves_are_those_that_are_allowed_and_can_be_applied():
    able = facts(moves=frozenset({"lora", "jit-compile"}))

    search, _ = opened(able, allow=("exact", "rounding", "lora", "qlora"))

    assert {(one.settings.lora_rank > 0, bool(one.settings.jit_compile)) for one in search.variants} == {
        (False, False),
        (False, True),
        (True, False),
    }


def test_only_pytorch_has_torch_compile():
    _, question = opened(facts(), allow=("compile",))
    (refusal,) = (one for one in question.refused if one.name == "compile")
    assert "JAX compiles steps as they are, Keras with jit-compile" in refusal.reason


def test_what_can_not_be_done_is_refused_with_the_reason():
    _, question = opened(facts(approximate="BatchNorm sees parts", not_recomputed="nothing is marked"))

    assert [(one.name, one.allowed_by) for one in question.refused] == [
        ("micro-batch", "approximate"),
        ("checkpoint", ""),
    ]


def test_forward_passes_are_timed_on_the_processor_alone():
    timed = facts(parts=BLOCK, time_forward=lambda: (0.5, 0.0))

    search, question = opened(timed, kind=Kind.HOST)
    assert search.speed.sample_seconds == 0.5 and question.is_measured
    search, question = opened(timed, kind=Kind.HOST, measure=False)
    assert search.speed is None and not question.is_measured
