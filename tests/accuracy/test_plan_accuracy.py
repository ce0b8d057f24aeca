"""A sample of what plans promise: memory, gradients, and checkpointing that beats that of every block.

`python -m benchmarks.plan_accuracy`, `plan_gradients` and `plan_checkpointing` score all models.
"""

import importlib.util
from statistics import geometric_mean

import pytest

MISSING = [name for name in ("torch", "timm", "torchvision", "transformers") if importlib.util.find_spec(name) is None]
if MISSING:
    pytest.skip(f"not installed: {', '.join(MISSING)}", allow_module_level=True)

import torch  # noqa: E402

from benchmarks import plan_accuracy, plan_checkpointing, plan_gradients  # noqa: E402
from benchmarks.plan_accuracy import DEFAULT_ALLOW, Row  # noqa: E402
from benchmarks.plan_cases import Training  # noqa: E402
from memfit.core.plan import Plan  # noqa: E402


@pytest.fixture(autouse=True)
def threads_of_this_process():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("training", "share", "allow"),
    [
        (Training("tcn", "adam"), 60, DEFAULT_ALLOW),
        (Training("gpt2", "adamw"), 70, ("checkpoint", "fused-optimizer")),
    ],
    ids=lambda value: value.case if isinstance(value, Training) else None,
)
def test_an_applied_plan_takes_what_was_predicted_and_keeps_its_promise(training, share, allow):
    plain = plan_accuracy.plain_peak(training)
    budget = plain * share // 100

    fits, data = plan_accuracy.make_plan(training, budget, allow)
    plan = Plan.from_json(data)
    measured = plan_accuracy.measure(training, plan)

    assert fits
    assert measured <= budget
    assert abs(plan.after.allocated_bytes / measured - 1) <= plan_accuracy.LIMIT


def test_a_plan_that_takes_more_than_promised_breaks_both_bars():
    row = Row(Training("tcn"), 60, False, True, "as it is", 100, 60, 55, 61)

    assert [bar.met for bar in plan_accuracy.bars([row])] == [False, False]


@pytest.mark.parametrize("case", ["shufflenet_v2", "dropout_decoder"])
def test_exact_plans_leave_gradients_and_buffers_as_they_are(case):
    # The tightest plan there is: batch norm in one model, dropout in the other, are computed again.
    row = plan_gradients.compare(Training(case, "sgd"), 30, ("checkpoint",), seed=1)

    assert row.recomputed > 0
    assert row.worst <= plan_gradients.LIMIT
    assert row.buffers == ()


def test_other_gradients_or_buffers_break_the_bars():
    row = plan_gradients.Row(Training("tcn"), 0, 85, True, "recompute 1", 1, 1e-11, 0.0, ("norm.running_mean",), 0.0)

    assert [bar.met for bar in plan_gradients.bars([row])] == [False, False, True]


def test_chosen_checkpointing_is_never_slower_than_that_of_every_block():
    rows = plan_checkpointing.compare(Training("dropout_decoder", "adamw", 8))

    assert len(rows) == len(plan_checkpointing.WAYS)
    assert not any(row.slower for row in rows)
    assert all(row.chosen_bytes <= row.budget_bytes for row in rows)
    assert geometric_mean(row.ratio for row in rows) <= plan_checkpointing.LIMIT
