"""Predicted peaks of plans against the measured peaks of the same plans, put into practice on the CPU.

    python -m benchmarks.plan_accuracy [case ...] [--shares 80 60 40 25]

For each model and budget, a share of the plain step's predicted peak, a plan is made in one process, and written as
JSON. Another process builds the model anew, applies the plan and runs two steps under PyTorch's profiler: the peak is
the greatest sum of live bytes of the CPU allocator, as in `benchmarks.measure_cpu`. Nothing is timed: times of the
planner are computed from the machine's rates, so that the same question has nearly the same answer.

Where no plan fits, the smallest that was found is run instead: its peak must be right, too. Then the budget is tried
once more with micro-batches allowed in spite of batch norm.
"""

import argparse
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are built from configurations, nothing is fetched

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

import memfit
from benchmarks.measure_cpu import MARK, NUM_STEPS
from benchmarks.plan_cases import Made, Training, apart, make
from benchmarks.reporting import Bar, percent, publish, table
from memfit.core.plan import Plan, PlanNotFound
from memfit.core.units import format_size
from memfit.frameworks.torch.verify.measure import allocations, find_peak, storage_bytes
from memfit.planner.moves import label

LIMIT = 0.03
SHARES = (80, 60, 40, 25)
DEFAULT_ALLOW = ("exact", "rounding")
APPROXIMATE = (*DEFAULT_ALLOW, "approximate")
TRAININGS = (
    Training("resnet18", "sgd", 4),
    Training("mobilenet_v3_large", "adam", 1),
    Training("mlp_mixer", "sgd", 1),
    Training("unet", "adam", 1),
    Training("vae", "adam", 4),
    Training("bert", "adamw", 2),
    Training("gpt2", "adamw", 2),
    Training("llama", "adamw", 2),
    Training("t5", "adamw", 2),
    Training("transformer_translation", "adam", 2),
    Training("lstm_language_model", "sgd", 2),
    Training("tied_decoder", "adamw", 2),
)
METHOD = """\
The plain peak is the predicted one. A row says what the plan does, what was predicted for it and what was measured, in
percent of the plain peak. "no plan" means that nothing allowed fits: the row then shows the smallest step that was
found, which promises nothing but its own peak, and smaller budgets aren't tried."""


@dataclass(frozen=True, slots=True)
class Row:
    """A plan that was run.

    Args:
        training: the model, its batch and its optimizer.
        share: budget in percent of the plain peak.
        approximate: whether micro-batches were allowed in spite of batch norm.
        fits: whether the plan was promised to fit; otherwise it is the smallest that was found.
        label: what it does, in a few words.
        plain_bytes: predicted peak of the step as it is.
        budget_bytes: what the plan may take.
        predicted_bytes: peak of the plan.
        measured_bytes: the same, of real steps.
    """

    training: Training
    share: int
    approximate: bool
    fits: bool
    label: str
    plain_bytes: int
    budget_bytes: int
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """Of the prediction."""
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def exceeds(self) -> bool:
        """Whether a promise was broken."""
        return self.fits and self.measured_bytes > self.budget_bytes


def plain_peak(training: Training, dtype: torch.dtype | None = None) -> int:
    """Predicted peak of the step as it is."""
    made = make(training, dtype=dtype)
    estimate = memfit.estimate(made.model, made.loss, made.batch, optimizer=made.optimizer, device="cpu")
    return estimate.timeline.peak()[1]


def make_plan(
    training: Training, budget_bytes: int, allow: Sequence[str] = DEFAULT_ALLOW
) -> tuple[bool, dict[str, Any]]:
    """(whether a plan for the budget was found, that plan as JSON, or the smallest there is)."""
    made = make(training)
    options: dict[str, Any] = {
        "optimizer": made.optimizer,
        "device": "cpu",
        "options": memfit.PlanOptions(measure=False),
    }
    try:
        plan = memfit.plan(made.model, made.loss, made.batch, budget=budget_bytes, allow=allow, **options)
    except PlanNotFound as error:
        if error.smallest is None:
            raise
        return False, error.smallest.to_json()
    return True, plan.to_json()


def measure(training: Training, plan: Plan) -> int:
    """Greatest sum of live bytes of steps with a plan applied to a model built anew; call it in a fresh process."""
    made = make(training)
    baseline = storage_bytes(made.tensors)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        _run_steps(made, plan)
    return baseline + find_peak(allocations(prof))[0]


def _run_steps(made: Made, plan: Plan) -> None:
    loss = None
    with plan.apply(made.model, made.optimizer) as fitted:
        for number in range(1, NUM_STEPS + 1):
            with record_function(f"{MARK}step:{number}"):
                loss = fitted.step(made.loss, made.batch)
    del loss


def score(training: Training, share: int, plain_bytes: int, *, approximate: bool = False) -> Row:
    """Makes a plan and runs it."""
    budget = plain_bytes * share // 100
    allow = APPROXIMATE if approximate else DEFAULT_ALLOW
    what = f"{training.case} within {share}%"
    fits, data = apart(partial(make_plan, training, budget, allow), f"planning {what}")
    plan = Plan.from_json(data)
    measured = apart(partial(measure, training, plan), f"measuring {what}")
    return Row(
        training,
        share,
        approximate,
        fits,
        label(plan.settings),
        plain_bytes,
        budget,
        plan.after.allocated_bytes,
        measured,
    )


def run(trainings: Iterable[Training], shares: Sequence[int]) -> list[Row]:
    """All rows, each printed as it is known; a budget below one that can't be met isn't tried."""
    rows: list[Row] = []
    for training in trainings:
        plain: int = apart(partial(plain_peak, training), f"estimating {training.case}")
        approximate = False
        for share in sorted(shares, reverse=True):
            found = _rows_of(training, share, plain, approximate=approximate)
            rows.extend(found)
            for row in found:
                _show(row)
            if not found[-1].fits:
                break
            approximate = found[-1].approximate
    return rows


def _rows_of(training: Training, share: int, plain_bytes: int, *, approximate: bool) -> list[Row]:
    first = score(training, share, plain_bytes, approximate=approximate)
    if first.fits or approximate:
        return [first]
    second = score(training, share, plain_bytes, approximate=True)
    # The same, where it has no batch norm, or where that isn't what stands in the way.
    return [first] if second.label == first.label else [first, second]


def _show(row: Row) -> None:
    print(" | ".join(map(str, _cells(row))), flush=True)


def _cells(row: Row) -> tuple[str, ...]:
    def part(size: int) -> str:
        return f"{size / row.plain_bytes:.1%}"

    outcome = "exceeds its budget" if row.exceeds else "fits" if row.fits else "no plan; smallest"
    moves = row.label + (" (approximate)" if row.approximate else "")
    name = f"{row.training.title}, {row.training.optimizer}"
    sizes = (part(row.predicted_bytes), part(row.measured_bytes), percent(row.error))
    return (name, format_size(row.plain_bytes), f"{row.share}%", outcome, moves, *sizes)


def bars(rows: Sequence[Row]) -> list[Bar]:
    """The claims, with what was measured."""
    worst = max(rows, key=lambda row: abs(row.error))
    broken = [row for row in rows if row.exceeds]
    promised = sum(row.fits for row in rows)
    error = f"{abs(worst.error):.2%} ({worst.training.case}, {worst.share}%)"
    names = ", ".join(f"{row.training.case} {row.share}%" for row in broken)
    models = len({row.training for row in rows})
    return [
        Bar(f"greatest error of {len(rows)} plans of {models} models", error, "at most 3%", abs(worst.error) <= LIMIT),
        Bar(f"plans of {promised} that exceed their budget", f"{len(broken)} {names}".strip(), "none", not broken),
    ]


def main() -> None:
    """Plan, run and compare the named cases, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [training.case for training in TRAININGS]
    parser.add_argument("cases", nargs="*", metavar="case", choices=[[], *known], help="default: all")
    parser.add_argument("--shares", nargs="+", type=int, default=SHARES, help="budgets in percent of the plain peak")
    options = parser.parse_args()
    chosen = [training for training in TRAININGS if not options.cases or training.case in options.cases]
    rows = run(chosen, options.shares)
    fitting = sum(row.fits and not row.approximate for row in rows)
    asked = len(chosen) * len(options.shares)
    approximate = sum(row.fits and row.approximate for row in rows)
    counts = (
        f"Of {asked} budgets {fitting} could be met with exact and rounding moves; {approximate} more with approximate "
        f"micro-batches; the rest is below what the step can be made to need."
    )
    headers = ("training", "plain peak", "budget", "outcome", "moves", "predicted", "measured", "error")
    whole = not options.cases and tuple(options.shares) == SHARES
    sections = [METHOD, counts, table(headers, map(_cells, rows))]
    publish("plan_accuracy", "Accuracy of plans on the CPU", bars(rows), sections, save=whole)


if __name__ == "__main__":
    main()
