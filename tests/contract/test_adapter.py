"""What every framework's adapter must do, on one small network that each builds in its own way."""

import importlib
import importlib.util

import pytest

import memfit
from memfit.core.errors import StepFailed
from memfit.core.timeline import Category, Phase, Timeline

FRAMEWORKS = ("torch", "jax", "keras")
NUM_PARAMETERS = 5 * 7 + 7 + 7 * 3 + 3
SIZE = NUM_PARAMETERS * 4
ROWS = 4
BATCH_BYTES = ROWS * (5 + 3) * 4
DEVICES = ("rtx-3090", "cpu")


def lacks(framework):
    """Why a framework can't be tested, or None."""
    # A folder may be there for other uses of a framework, such as streams.
    folder = importlib.util.find_spec(f"memfit.adapters.{framework}")
    if folder is None or importlib.util.find_spec(f"memfit.adapters.{framework}.trace") is None:
        return f"{framework}: no adapter yet"
    return f"{framework}: not installed" if importlib.util.find_spec(framework) is None else None


def find_case(framework):
    module = importlib.import_module(f"tests.contract.{framework}_case")
    return getattr(module, f"{framework.title()}Case")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_framework_has_an_adapter(framework):
    reason = lacks(framework)
    if reason is not None:
        pytest.skip(reason)
    assert find_case(framework)


# The others are named once, by the test above.
@pytest.fixture(params=[framework for framework in FRAMEWORKS if lacks(framework) is None])
def case(request):
    return find_case(request.param)(ROWS)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def estimate(case, device, **options):
    arguments = {"loss": case.loss, "optimizer": case.optimizer} | options
    loss = arguments.pop("loss")
    return memfit.estimate(case.model, loss, case.batch, device=device, **arguments)


def live_bytes(timeline, tick, category):
    return sum(block.size_bytes for block in timeline.live_at(tick) if block.category is category)


def before(timeline, phase, step):
    return next(mark.tick for mark in timeline.marks if mark.phase is phase and mark.step == step) - 1


def test_a_step_gives_a_timeline_with_every_phase(case, device):
    timeline = estimate(case, device).timeline

    assert isinstance(timeline, Timeline)
    assert timeline.blocks
    phases = {(mark.phase, mark.step) for mark in timeline.marks}
    assert {(Phase.FORWARD, 1), (Phase.BACKWARD, 1), (Phase.OPTIMIZER, 1), (Phase.FORWARD, 2)} <= phases


def test_parameters_and_batch_are_there_before_the_step(case, device):
    timeline = estimate(case, device).timeline

    tick = before(timeline, Phase.FORWARD, 1)
    assert live_bytes(timeline, tick, Category.PARAMETER) == SIZE
    assert live_bytes(timeline, tick, Category.BATCH) == BATCH_BYTES
    assert live_bytes(timeline, tick, Category.GRADIENT) == 0
    assert live_bytes(timeline, tick, Category.OPTIMIZER_STATE) == 0


def test_gradients_are_as_large_as_the_parameters(case, device):
    timeline = estimate(case, device).timeline

    assert live_bytes(timeline, before(timeline, Phase.OPTIMIZER, 1), Category.GRADIENT) == SIZE


def test_adam_keeps_two_numbers_per_parameter(case, device):
    timeline = estimate(case, device).timeline

    assert live_bytes(timeline, before(timeline, Phase.FORWARD, 2), Category.OPTIMIZER_STATE) == 2 * SIZE


def test_the_peak_covers_parameters_gradients_and_state(case, device):
    answer = estimate(case, device)

    assert answer.timeline.peak()[1] >= 4 * SIZE
    assert answer.peak_bytes >= 4 * SIZE
    assert answer.lower_bytes <= answer.peak_bytes <= answer.upper_bytes
    assert answer.num_parameters == NUM_PARAMETERS


def test_something_is_kept_for_the_backward_pass(case, device):
    timeline = estimate(case, device).timeline

    # The hidden layer's output, at least.
    kept = live_bytes(timeline, before(timeline, Phase.BACKWARD, 1), Category.ACTIVATION)
    assert kept >= ROWS * 7 * 4


def test_a_larger_batch_needs_larger_activations_and_the_same_weights(case, device):
    small = estimate(case, device)
    large = small.at_batch(64 * ROWS).timeline

    tick = before(large, Phase.BACKWARD, 1)
    assert live_bytes(large, tick, Category.ACTIVATION) >= 64 * ROWS * 7 * 4
    assert live_bytes(large, tick, Category.PARAMETER) == SIZE


def test_inference_has_neither_gradients_nor_state(case, device):
    timeline = estimate(case, device, mode="inference").timeline

    found = {block.category for block in timeline.blocks}
    assert Category.PARAMETER in found
    assert found.isdisjoint({Category.GRADIENT, Category.OPTIMIZER_STATE, Category.ACTIVATION})


def test_half_precision_halves_the_weights(case, device):
    timeline = estimate(case, device, precision="bf16").timeline

    assert live_bytes(timeline, before(timeline, Phase.FORWARD, 1), Category.PARAMETER) == SIZE // 2


def test_blocks_say_where_they_come_from(case, device):
    timeline = estimate(case, device).timeline

    forward = [b for b in timeline.blocks if b.phase is Phase.FORWARD and b.category is Category.ACTIVATION]
    assert all(block.op for block in timeline.blocks)
    assert any(block.module for block in forward)
    assert any("_case.py:" in block.source for block in forward)


def test_the_users_objects_are_untouched(case, device):
    numbers, identities = case.numbers(), case.identities()

    estimate(case, device)

    assert case.numbers() == numbers
    assert case.identities() == identities


def test_the_users_objects_are_untouched_by_a_step_that_fails(case, device):
    numbers, identities = case.numbers(), case.identities()

    with pytest.raises(StepFailed, match=r"_case\.py:\d+ in broken_loss: KeyError"):
        estimate(case, device, loss=case.broken_loss)

    assert case.numbers() == numbers
    assert case.identities() == identities


def test_the_same_question_has_the_same_answer(case, device):
    assert estimate(case, device).timeline == estimate(case, device).timeline
