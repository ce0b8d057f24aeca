"""Speed of chosen plans on this CPU, against the best of an exhaustive measured grid of the same moves.

    python -m benchmarks.plan_speed [case ...] [--rounds N]

For half of the plain peak, the planner chooses among micro-batches, modules to compute again and a fused optimizer,
with short measured passes to go by. The grid has every number of micro-batches, each with nothing computed again, with
what the integer programme chooses for it, and with every repeated block computed again, each with and without the fused
optimizer: all that a trace proves to fit. Every plan of the grid is run for real, turn by turn, on the same model in
the same process. A plan that takes half again as long as the fastest in the first turn is not run again.
"""

import argparse
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are built from configurations, nothing is fetched

import memfit
from benchmarks.plan_cases import Made, Training, apart, make
from benchmarks.reporting import Bar, publish, table
from memfit import Job
from memfit.api.jobs import torch_adapter
from memfit.catalogue import find_device
from memfit.core.plan import PlanNotFound
from memfit.core.settings import OptimizerKernels, Settings, Weighting
from memfit.frameworks.torch.apply.fitted import Fitted
from memfit.planner.candidate import possible_parts
from memfit.planner.memory import StepMemory
from memfit.planner.moves import label
from memfit.planner.search import ProfiledSearch, Space, Variant
from memfit.planner.speed import StepSpeed
from memfit.planner.timeline_moves import repeated_units
from memfit.timing import rates_of

LIMIT = 1.05
SHARE = 50
ROUNDS = 4
# The planner keeps this much of a budget free.
RESERVE = 0.01
HOPELESS = 1.5
FINALISTS = 3
FINAL_ROUNDS = 8
FINAL_STEPS = 3
ALLOW = ("checkpoint", "micro-batch", "fused-optimizer")
TRAININGS = (
    Training("mobilenet_v3_large", "adam", 2),
    Training("deit_tiny", "adamw", 2),
    Training("mlp_mixer", "sgd", 2),
    Training("bert", "adamw", 2),
    Training("gpt2", "adamw", 4),
    Training("llama", "adamw", 4),
)
METHOD = """\
Seconds of a whole step, forward, backward and update: the least of all turns, each of which runs a step to warm up and
one that counts. The least of many noisy times is too low, and the machine's speed drifts: so the fastest three of the
grid and the chosen plan are timed anew, turn by turn, with three steps that count, of which the median is taken. The
ratio is that of the chosen plan to another within a turn, the median of all turns; shown is the greatest, with medians
of the times."""


@dataclass(frozen=True, slots=True)
class Row:
    """The chosen plan beside the grid.

    Args:
        training: the model, its batch and its optimizer.
        chosen: the planner's choice, in a few words.
        chosen_seconds: measured time of its step.
        predicted_seconds: what the planner expected.
        best: the fastest of the grid, in a few words.
        best_seconds: measured time of its step.
        plain_seconds: measured time of the plain step, which doesn't fit.
        num_plans: of the grid, all of which fit.
        ratio: of the chosen plan's time to that of the fastest, within a turn; the median of all turns.
    """

    training: Training
    chosen: str
    chosen_seconds: float
    predicted_seconds: float
    best: str
    best_seconds: float
    plain_seconds: float
    num_plans: int
    ratio: float


class Grid:
    """All plans of the moves that fit a budget.

    Args:
        made: the training.
        weighting: how losses of micro-batches add up.
    """

    def __init__(self, made: Made, weighting: Weighting) -> None:
        device = find_device("cpu")
        job = Job(made.model, made.loss, made.batch, optimizer=made.optimizer)
        self._opened: Any = torch_adapter().open_job(job, device, None)
        subject = torch_adapter().planning(self._opened, device)
        self._size: int = subject.batch_size
        first, larger = (subject.profile(size, Settings()) for size in (self._size, 2 * self._size))
        self._memory = StepMemory(first, larger)
        flops, bandwidth = subject.host_rates()
        rates = replace(rates_of(device), flops={"float32": flops}, bandwidth=bandwidth)
        sizes = sorted({max(1, self._size // part) for part in (1, 2, 4, 8)})
        self._speed = StepSpeed(first, larger, rates, subject.measure(sizes), subject.measure_updates())
        self._splits = "batch-norm" not in first.features and self._memory.scales
        self._weighting = weighting
        self._fusable = "fusable" in first.features
        possible = {unit.path for unit in first.units if not unit.refused}
        self._blocks = tuple(path for path in repeated_units(first.timeline, 1) if path in possible)

    def plans(self, budget_bytes: int) -> list[Settings]:
        """Those that a trace proves to fit."""
        found: list[Settings] = []
        kernels = [OptimizerKernels.KEEP, *([OptimizerKernels.FUSED] * self._fusable)]
        for parts in possible_parts(self._size) if self._splits else (1,):
            for kind in kernels:
                base = Settings(micro_batches=parts, weighting=self._weighting, kernels=kind)
                for settings in (base, self._chosen(base, budget_bytes), replace(base, checkpoint=self._blocks)):
                    if settings is not None and settings not in found and self.peak(settings) <= budget_bytes:
                        found.append(settings)
        return found

    def peak(self, settings: Settings) -> int:
        """Traced peak of live bytes."""
        peak: int = self._opened.trace(self._size, settings).timeline.peak()[1]
        return peak

    def _chosen(self, base: Settings, budget_bytes: int) -> Settings | None:
        """The modules that the integer programme picks for a number of micro-batches."""
        variant = Variant(Settings(), self._memory, self._speed)
        optimizer = Settings(kernels=base.kernels)
        space = Space(
            (variant,), (optimizer,), (base.micro_batches,), self._size, base=Settings(weighting=base.weighting)
        )
        best = ProfiledSearch(space).best(budget_bytes * (1 - RESERVE))
        return None if best is None else best.settings


def step_seconds(made: Made, settings: Settings, num_steps: int = 1) -> float:
    """Median seconds of some steps, after one that warms up."""
    times = []
    with Fitted(settings, made.model, made.optimizer) as fitted:
        fitted.step(made.loss, made.batch)
        for _ in range(num_steps):
            started = time.perf_counter()
            fitted.step(made.loss, made.batch)
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def race(made: Made, plans: Sequence[Settings], rounds: int, always: Iterable[Settings]) -> dict[Settings, float]:
    """The least seconds of each plan, run turn by turn; hopeless ones once.

    Args:
        made: the training.
        plans: to run.
        rounds: turns.
        always: those that are run in every turn.
    """
    step_seconds(made, plans[0])
    times = {plan: step_seconds(made, plan) for plan in plans}
    limit = HOPELESS * min(times.values())
    kept = [plan for plan in plans if times[plan] <= limit or plan in set(always)]
    for number in range(1, rounds):
        # There and back again, so that nobody always follows the same one.
        for plan in kept if number % 2 else kept[::-1]:
            times[plan] = min(times[plan], step_seconds(made, plan))
    return times


def turns(made: Made, plans: Sequence[Settings], rounds: int) -> dict[Settings, list[float]]:
    """The seconds of each plan in every turn."""
    times: dict[Settings, list[float]] = {plan: [] for plan in plans}
    for number in range(rounds):
        for plan in plans if number % 2 else plans[::-1]:
            times[plan].append(step_seconds(made, plan, FINAL_STEPS))
    return times


def _median_ratio(chosen: Sequence[float], other: Sequence[float]) -> float:
    return statistics.median(one / two for one, two in zip(chosen, other, strict=True))


def compare(training: Training, rounds: int) -> Row | str:
    """The row of a training, or why there is none; call it in a fresh process."""
    made = make(training)
    options: dict[str, Any] = {"optimizer": made.optimizer, "device": "cpu"}
    estimate = memfit.estimate(made.model, made.loss, made.batch, **options)
    budget = estimate.timeline.peak()[1] * SHARE // 100
    try:
        plan = memfit.plan(made.model, made.loss, made.batch, budget=budget, allow=ALLOW, **options)
    except PlanNotFound as error:
        return str(error).splitlines()[0]
    grid = Grid(made, plan.settings.weighting).plans(budget)
    plain = Settings()
    plans = list(dict.fromkeys([plan.settings, *grid, plain]))
    times = race(made, plans, rounds, (plan.settings, plain))
    # The least of many noisy times is too low: the fastest few are timed anew, beside the plan.
    fastest = sorted((one for one in plans if one != plain), key=lambda one: times[one])[:FINALISTS]
    final = turns(made, list(dict.fromkeys([plan.settings, *fastest])), FINAL_ROUNDS)
    times.update({one: statistics.median(seconds) for one, seconds in final.items()})
    ratios = {one: _median_ratio(final[plan.settings], seconds) for one, seconds in final.items()}
    best = max(ratios, key=lambda one: ratios[one])
    return Row(
        training,
        label(plan.settings),
        times[plan.settings],
        plan.seconds_after.seconds or 0.0,
        label(best),
        times[best],
        times[plain],
        len(plans) - 1,
        ratios[best],
    )


def run(trainings: Iterable[Training], rounds: int) -> tuple[list[Row], list[str]]:
    """(rows, remarks on trainings without one), each printed as it is known."""
    rows: list[Row] = []
    remarks: list[str] = []
    for training in trainings:
        found = apart(partial(compare, training, rounds), training.case)
        if isinstance(found, Row):
            rows.append(found)
            print(" | ".join(_cells(found)), flush=True)
        else:
            remarks.append(f"{training.title}: {found}")
            print(remarks[-1], flush=True)
    return rows, remarks


def _cells(row: Row) -> tuple[str, ...]:
    def milliseconds(seconds: float) -> str:
        return f"{1000 * seconds:.0f} ms"

    return (
        f"{row.training.title}, {row.training.optimizer}",
        milliseconds(row.plain_seconds),
        str(row.num_plans),
        row.chosen,
        milliseconds(row.chosen_seconds),
        milliseconds(row.predicted_seconds),
        row.best,
        milliseconds(row.best_seconds),
        f"{row.ratio:.3f}",
    )


def bars(rows: Sequence[Row]) -> list[Bar]:
    """The claim, with what was measured."""
    worst = max(rows, key=lambda row: row.ratio)
    claim = f"chosen plan over the fastest of the grid, worst of {len(rows)} models"
    measured = f"{worst.ratio:.3f} ({worst.training.case})"
    return [Bar(claim, measured, f"at most {LIMIT:.2f}", worst.ratio <= LIMIT)]


def main() -> None:
    """Compare the named cases, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [training.case for training in TRAININGS]
    parser.add_argument("cases", nargs="*", metavar="case", choices=[[], *known], help="default: all")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of every plan; the least time counts")
    options = parser.parse_args()
    chosen = [training for training in TRAININGS if not options.cases or training.case in options.cases]
    rows, remarks = run(chosen, options.rounds)
    headers = ("training", "plain", "plans", "chosen", "measured", "predicted", "fastest", "measured", "ratio")
    sections = [METHOD, table(headers, map(_cells, rows)), *remarks]
    whole = not options.cases and options.rounds == ROUNDS
    publish("plan_speed", "Speed of chosen plans on the CPU", bars(rows), sections, save=whole)


if __name__ == "__main__":
    main()
