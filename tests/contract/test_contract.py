"""What memfit must do for every framework, on one small network that each builds in its own way.

    pytest tests/contract                     all frameworks; what isn't installed is skipped
    pytest tests/contract -k keras-jax        one of them

Skips for what a framework has no notion of are in the table `lacks` of its case.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest

import memfit
from memfit.core.device import Origin
from memfit.core.settings import Keeps
from memfit.core.timeline import Category, Phase, Timeline
from tests.contract.case import HIDDEN, INPUTS, NUM_PARAMETERS, OUTPUTS, ROWS, data
from tests.contract.oom_errors import PLAIN_IMPOSTORS

# Frameworks warn of what they will change, in their own good time.
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning")]

SIZE = NUM_PARAMETERS * 4
BATCH_BYTES = ROWS * (INPUTS + OUTPUTS) * 4
HIDDEN_BYTES = ROWS * HIDDEN * 4
DEVICES = ("rtx-3090", "cpu")
MANY_ROWS = 256
# Of the greatest weight: sums of float32 in another order, after three updates.
ROUNDING = 1e-5
# Batches of one run; the second is split into unequal parts where memory holds three samples.
SIZES = (2, 5, 3)
ROOM = 3


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@functools.cache
def estimated(make_case, device):
    """The step on a device; estimates are values that no test can change."""
    return make_case().estimate(device)


@functools.cache
def planned(make_case):
    """(the step as it is, a plan for 60% of its peak)."""
    case, batch = make_case("sgd"), data(MANY_ROWS)
    before = case.estimate(batch=batch)
    return before, case.plan(batch, int(0.6 * before.peak_bytes))


def live_bytes(timeline, tick, category):
    return sum(block.size_bytes for block in timeline.live_at(tick) if block.category is category)


def before(timeline, phase):
    """The last tick before a phase of the first step."""
    return next(mark.tick for mark in timeline.marks if mark.phase is phase and mark.step == 1) - 1


def batches(sizes=SIZES):
    return [data(size, seed) for seed, size in enumerate(sizes)]


@functools.cache
def trained_plainly(make_case, sizes):
    """(weights, losses) of the framework's own loop over batches of these sizes."""
    case = make_case("sgd")
    step = case.plain()
    losses = [step(batch) for batch in batches(sizes)]
    return case.weights(), losses


def assert_same(weights, expected, rounding=ROUNDING):
    for own, other in zip(weights, expected, strict=True):
        assert np.abs(own - other).max() <= rounding * np.abs(other).max()


def assert_moved(weights, first):
    """Tests that compare weights show nothing about weights that stay where they are."""
    assert min(np.abs(own - other).max() for own, other in zip(weights, first, strict=True)) > 1e-3


# Estimates.


def test_a_step_gives_a_timeline_with_every_phase(make_case, device):
    timeline = estimated(make_case, device).timeline

    assert isinstance(timeline, Timeline)
    phases = {(mark.phase, mark.step) for mark in timeline.marks}
    assert {(Phase.FORWARD, 1), (Phase.BACKWARD, 1), (Phase.OPTIMIZER, 1)} <= phases
    assert {block.phase for block in timeline.blocks} == set(Phase)


def test_parameters_and_batch_are_there_before_the_step(make_case, device):
    estimate = estimated(make_case, device)

    tick = before(estimate.timeline, Phase.FORWARD)
    assert estimate.batch_size == ROWS
    assert estimate.num_parameters == NUM_PARAMETERS
    assert estimate.state_bytes[Category.PARAMETER] == SIZE
    assert live_bytes(estimate.timeline, tick, Category.PARAMETER) == SIZE
    assert live_bytes(estimate.timeline, tick, Category.BATCH) == BATCH_BYTES
    assert live_bytes(estimate.timeline, tick, Category.GRADIENT) == 0


def test_gradients_are_as_large_as_the_parameters(make_case, device):
    estimate = estimated(make_case, device)

    timeline = estimate.timeline
    second = next((mark.tick for mark in timeline.marks if mark.step == 2), timeline.num_ticks)
    made = [block for block in timeline.blocks if block.category is Category.GRADIENT and block.start < second]
    assert estimate.state_bytes[Category.GRADIENT] == SIZE
    assert sum(block.size_bytes for block in made) == SIZE


def test_adam_keeps_two_numbers_per_parameter(make_case, device):
    estimate = estimated(make_case, device)

    expected = range(2 * SIZE, 2 * SIZE + make_case.counter_bytes + 1)
    assert estimate.state_bytes[Category.OPTIMIZER_STATE] in expected
    last = estimate.timeline.num_ticks - 1
    assert live_bytes(estimate.timeline, last, Category.OPTIMIZER_STATE) in expected


def test_something_is_kept_for_the_backward_pass(make_case, device):
    timeline = estimated(make_case, device).timeline

    assert live_bytes(timeline, before(timeline, Phase.BACKWARD), Category.ACTIVATION) >= HIDDEN_BYTES


def test_the_peak_covers_what_is_held(make_case, device):
    estimate = estimated(make_case, device)

    held = 3 * SIZE + BATCH_BYTES + HIDDEN_BYTES
    assert estimate.timeline.peak()[1] >= held
    assert estimate.peak_bytes >= held
    assert 0 < estimate.certain_bytes <= estimate.tight_bytes <= estimate.peak_bytes


def test_a_larger_batch_needs_larger_activations_and_the_same_weights(make_case, device):
    small = estimated(make_case, device)
    large = small.at_batch(64 * ROWS)

    tick = before(large.timeline, Phase.BACKWARD)
    assert large.batch_size == 64 * ROWS
    assert live_bytes(large.timeline, tick, Category.ACTIVATION) >= 64 * HIDDEN_BYTES
    assert live_bytes(large.timeline, tick, Category.PARAMETER) == SIZE
    assert large.state_bytes == small.state_bytes
    # What an allocator provides goes in steps; what is asked for doesn't.
    assert large.allocated_peak_bytes >= small.allocated_peak_bytes + 63 * (BATCH_BYTES + HIDDEN_BYTES)


def test_inference_has_neither_gradients_nor_state(case, device):
    estimate = case.estimate_inference(device)

    assert estimate.mode == "inference"
    categories = {block.category for block in estimate.timeline.blocks}
    assert Category.PARAMETER in categories
    assert categories.isdisjoint({Category.GRADIENT, Category.OPTIMIZER_STATE, Category.ACTIVATION})


def test_half_precision_halves_the_weights(case, device):
    estimate = case.estimate_narrow(device)

    tick = before(estimate.timeline, Phase.FORWARD)
    assert live_bytes(estimate.timeline, tick, Category.PARAMETER) == SIZE // 2


def test_autocast_leaves_the_weights_and_changes_the_step(case):
    arguments, given = case.asked_to_plan(data())
    plain = memfit.estimate(*arguments, **given, device="cpu")

    estimate = memfit.estimate(*arguments, **given, device="cpu", precision="amp-bf16")

    # XLA for CPU may widen what it computes in 16 bits: only that the step is another is certain.
    assert estimate.precision == "amp-bf16"
    assert estimate.state_bytes == plain.state_bytes
    assert estimate.timeline != plain.timeline


def test_blocks_name_the_users_layers(make_case, device):
    timeline = estimated(make_case, device).timeline

    kept = [b for b in timeline.blocks if b.phase is Phase.FORWARD and b.category is Category.ACTIVATION]
    assert all(block.op for block in kept)
    assert len({block.module for block in kept if block.module}) >= 2


def test_blocks_name_the_users_line(make_case, device):
    timeline = estimated(make_case, device).timeline

    assert any("_case.py:" in block.source for block in timeline.blocks)


def test_the_users_objects_are_untouched(case, device):
    # GIVEN objects that have been trained for a step
    case.plain()(data())
    numbers, identities = case.numbers(), case.identities()

    case.estimate(device)

    assert case.numbers() == numbers
    assert case.identities() == identities


def test_a_step_that_fails_is_answered_with_the_users_line(make_case, device):
    case = make_case(broken=True)
    numbers, identities = case.numbers(), case.identities()

    with pytest.raises(memfit.StepFailed, match=r"_case\.py:\d+ in broken_loss: KeyError"):
        case.estimate(device)

    assert case.numbers() == numbers
    assert case.identities() == identities


def test_the_same_question_has_the_same_answer(make_case, device):
    first, second = estimated(make_case, device), make_case().estimate(device)

    assert second.timeline == first.timeline
    assert (second.peak_bytes, second.certain_bytes, second.interval_bytes) == (
        first.peak_bytes,
        first.certain_bytes,
        first.interval_bytes,
    )


# The largest batch.


def test_the_largest_batch_fits_and_the_next_does_not(make_case):
    # GIVEN a device that holds what twelve samples take, and sizes of which they are one
    start = estimated(make_case, "cpu")
    device = replace(start.device, usable_bytes=start.at_batch(12).peak_bytes)

    found = make_case().max_batch(device, candidates=(8, 12, 13, 64))

    assert found.limit == 12
    fits = {size: fits for size, _, fits in found.tried}
    assert fits[12] and not fits[13]
    # AND an estimate of its own says the same, up to how a compiler lays out each size
    larger = replace(device, usable_bytes=int(device.usable_bytes * (1 + make_case.layout_slack)))
    assert make_case().estimate(larger, data(12)).fits is True
    assert make_case().estimate(device, data(13)).fits is False
    # AND what is called sure needs less than all of the device
    assert found.batch_size == 8
    assert found.estimate.fit_probability >= 0.95


# Plans.


def test_a_plan_fits_a_budget_that_the_step_exceeds(make_case):
    before, plan = planned(make_case)

    assert plan.before.peak_bytes > plan.budget_bytes
    assert plan.after.peak_bytes <= plan.budget_bytes and plan.fits
    assert plan.batch_size == MANY_ROWS
    assert plan.moves
    assert before.peak_bytes > plan.budget_bytes


def test_a_plan_is_proven_by_a_trace(make_case):
    _, plan = planned(make_case)

    assert plan.after.origin is Origin.SIMULATED
    assert plan.estimate_after is not None and plan.estimate_after.fits
    assert plan.estimate_after.peak_bytes == plan.after.peak_bytes
    assert plan.estimate_after.timeline.blocks


def test_a_plan_is_saved_and_loaded(make_case, tmp_path):
    _, plan = planned(make_case)

    plan.save(tmp_path / "plan.json")

    assert memfit.load_plan(tmp_path / "plan.json") == plan


def test_a_budget_that_nothing_fits_is_answered_with_the_smallest_plan(make_case):
    budget = 3 * SIZE

    with pytest.raises(memfit.PlanNotFound, match=r"no plan fits .* the smallest .*needs") as caught:
        make_case().plan(data(16), budget)

    assert caught.value.smallest is not None
    assert caught.value.smallest.after.peak_bytes > budget


def test_an_applied_plan_trains_as_the_plain_step_does(make_case):
    # GIVEN memory that holds no more samples than a micro-batch of the plan, which is what the first batch has
    _, plan = planned(make_case)
    size = plan.settings.micro_batch_size
    assert size is not None and size < MANY_ROWS
    sizes = (size, MANY_ROWS, MANY_ROWS)
    expected, losses = trained_plainly(make_case, sizes)
    case = make_case("sgd")
    case.room = size
    first = case.weights()

    step = case.fitted(plan)
    found = [step(batch) for batch in batches(sizes)]

    # THEN it gets through, and the numbers are those of the plain loop, up to what the plan says about them
    assert plan.keeps in (Keeps.EXACT, Keeps.ROUNDING)
    assert_same(case.weights(), expected, 0 if plan.keeps is Keeps.EXACT else ROUNDING)
    assert found == pytest.approx(losses, rel=ROUNDING)
    assert_moved(case.weights(), first)


# The guard.


def test_the_plain_step_runs_out_of_memory_where_there_is_none(make_case):
    """Without a guard the tests below would end like this."""
    case = make_case("sgd")
    case.room = ROOM
    step = case.plain()

    step(data(SIZES[0]))
    with pytest.raises(case.out_of_memory):
        step(data(SIZES[1]))


def test_a_guarded_step_without_faults_is_the_plain_step(make_case):
    expected, losses = trained_plainly(make_case, SIZES)
    case = make_case("sgd")

    with case.guarded() as step:
        found = [step(batch) for batch in batches()]

    assert_same(case.weights(), expected, 1e-6)
    assert found == pytest.approx(losses, rel=1e-6)


def test_a_guarded_run_survives_running_out_and_ends_with_the_same_weights(make_case):
    # GIVEN a device that holds three samples, and a batch of five
    expected, losses = trained_plainly(make_case, SIZES)
    case = make_case("sgd")
    case.room = ROOM
    first = case.weights()

    with case.guarded() as step:
        found = [step(batch) for batch in batches()]

    assert_same(case.weights(), expected)
    assert found == pytest.approx(losses, rel=ROUNDING)
    assert_moved(case.weights(), first)


def test_what_cannot_fit_raises_and_leaves_everything_as_it_was(make_case):
    case = make_case("sgd")

    with case.guarded() as step:
        step(data(SIZES[0]))
        weights = case.weights()
        # WHEN not even one sample fits any more
        case.room = 0
        with pytest.raises(memfit.CannotFit, match="memory ran out"):
            step(data(SIZES[1]))
        left = case.weights()

    assert_same(left, weights, 0)
    assert_same(case.weights(), weights, 0)


# What running out of memory looks like.


def test_errors_of_the_framework_are_recognised(make_case):
    expected, _ = trained_plainly(make_case, SIZES[:2])
    for error in make_case().oom_errors():
        case = make_case("sgd")
        with case.guarded() as step:
            step(batches()[0])
            case.fault = error
            # THEN the batch is trained on in spite of the error
            step(batches()[1])
        assert case.fault is None, f"{error!r} was never raised"
        assert_same(case.weights(), expected)


def test_impostors_are_raised_as_they_are(make_case):
    expected, _ = trained_plainly(make_case, SIZES[:2])
    case = make_case("sgd")

    with case.guarded() as step:
        step(batches()[0])
        weights = case.weights()
        for error in (*PLAIN_IMPOSTORS, *case.impostors()):
            case.fault = error
            with pytest.raises(type(error)) as caught:
                step(batches()[1])
            # THEN the error is the user's to see, and the batch was not trained on
            assert str(caught.value) == str(error)
            assert_same(case.weights(), weights, 0)
        # AND the guard goes on with the next batch
        step(batches()[1])

    assert_same(case.weights(), expected)


# Named jobs.


def test_a_named_model_becomes_a_job(make_case, job):
    name, package = job
    pytest.importorskip(package)
    kind = name.partition(":")[0]
    options = {"sequence_length": 8} if kind == "hf" else {"image_size": 64}

    named = memfit.named_job(name, optimizer="adam", **options)
    estimate = memfit.estimate(named, device="rtx-3090", batch_size=2)

    assert isinstance(named, memfit.Job)
    assert estimate.batch_size == 2
    assert name.partition(":")[2] in estimate.subject
    assert estimate.num_parameters > 1_000_000
    assert estimate.state_bytes[Category.OPTIMIZER_STATE] >= 8 * estimate.num_parameters
    assert estimate.peak_bytes > 16 * estimate.num_parameters


def test_a_misspelt_name_is_answered_with_the_right_one(make_case):
    given, meant = make_case.misspelt_job

    with pytest.raises(memfit.BadInput, match=meant):
        memfit.named_job(given)


# Bad input.

BAD_INPUT = {
    "a device that is not there": (lambda case: case.estimate("rtx-309"), "rtx-3090"),
    "an empty batch": (lambda case: case.estimate(batch=data(0)), "empty|0"),
    "inputs and targets of different lengths": (lambda case: case.plan((data(4)[0], data(3)[1]), "1GiB"), r"4[\s\S]*3"),
    "a batch size of nothing": (lambda case: case.estimate(batch_size=0), "0"),
    "a budget that is no size": (lambda case: case.plan(data(), "24 bananas"), "bananas"),
    "a precision that there is none of": (lambda case: case.estimate(precision="fp7"), "fp7"),
    "sizes that are none": (lambda case: case.max_batch("24GiB", candidates=[0]), r"\[0\]"),
    "a guard with empty micro-batches": (lambda case: case.make_bad_guard(), "micro_batch.* but 0 was given"),
}


@pytest.mark.parametrize("question", BAD_INPUT)
def test_bad_input_gets_one_clear_error(case, question):
    ask, words = BAD_INPUT[question]

    with pytest.raises(memfit.BadInput, match=words) as caught:
        ask(case)

    text = str(caught.value)
    assert len(text.splitlines()) <= 3 and len(text) < 500
    assert "Traceback" not in text


# The table of skips.


def test_only_tests_that_there_are_can_be_skipped(framework):
    if not framework.is_of_this_process:
        return
    case = framework.load_case()
    unknown = [name for name in case.lacks if name not in globals()]
    assert not unknown
