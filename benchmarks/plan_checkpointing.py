"""Checkpointing chosen by the planner's integer programme against checkpointing of every block, at equal budgets.

    python -m benchmarks.plan_checkpointing [case ...]

Uniform checkpointing computes every repeated block of a model again: every layer of a transformer, every residual
block, or every stage of such blocks where that needs less. What it needs is the first budget; further ones lie a
quarter, a half and three quarters of the way from there to the plain peak, where people who checkpoint every block pay
for memory that they don't need. The planner may choose any modules for each of these budgets. Both are traced with
their modules really computed again, so that both are known to fit. Compared are the floating-point operations that are
computed again, and the computed seconds of that.
"""

import argparse
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are built from configurations, nothing is fetched

from benchmarks.plan_cases import Made, Training, apart, make
from benchmarks.reporting import Bar, publish, table
from memfit import Job
from memfit.api.jobs import torch_adapter
from memfit.catalogue import find_device
from memfit.core.settings import Settings
from memfit.core.units import format_size
from memfit.planner.memory import StepMemory
from memfit.planner.search import ProfiledSearch, Space, Variant
from memfit.planner.speed import StepSpeed
from memfit.planner.timeline_moves import repeated_units
from memfit.timing import rates_of

DEVICE = "a100-40gb"
LIMIT = 0.6
# Of the way from what uniform checkpointing needs to the plain peak.
WAYS = (0.0, 0.25, 0.5, 0.75)
# Blocks are numbered parts of a model, or numbered parts of those.
LEVELS = (1, 2)
# Computing nothing again counts as this share of uniform's operations: a mean of ratios can't hold a zero.
FLOOR = 0.01
# Traces of chosen modules at one budget: the first is nearly always right.
MAX_PROOFS = 6
TRAININGS = (
    Training("resnet18", "sgd", 8),
    Training("resnet50", "sgd", 8),
    Training("mobilenet_v3_large", "sgd", 8),
    Training("efficientnet_b0", "sgd", 8),
    Training("deit_tiny", "adamw", 8),
    Training("convnext_tiny", "adamw", 8),
    Training("vit_small", "adamw", 8),
    Training("swin_tiny", "adamw", 8),
    Training("mlp_mixer", "adamw", 8),
    Training("bert", "adamw", 8),
    Training("gpt2", "adamw", 8),
    Training("llama", "adamw", 8),
    Training("t5", "adamw", 8),
    Training("whisper", "adamw", 8),
    Training("transformer_translation", "adamw", 8),
    Training("dropout_decoder", "adamw", 8),
)
METHOD = f"""\
Peaks are of live bytes on {DEVICE}, from traces with the modules computed again. Seconds come from the device's rates,
the same for both. Where nothing is computed again, the ratio counts as {FLOOR:.0%}."""


@dataclass(frozen=True, slots=True)
class Row:
    """Two choices of modules within one budget.

    Args:
        training: the model, its batch and its optimizer.
        way: of the budget from uniform's peak to the plain one.
        plain_bytes: peak of the step as it is.
        budget_bytes: what both may take.
        uniform_bytes: traced peak with every block computed again.
        chosen_bytes: the same with the planner's modules; None where it found none that fit.
        uniform_flops: computed again by the former.
        chosen_flops: by the latter.
        uniform_seconds: what that takes.
        chosen_seconds: what that takes.
        num_blocks: blocks of uniform checkpointing.
        num_chosen: modules of the planner.
    """

    training: Training
    way: float
    plain_bytes: int
    budget_bytes: int
    uniform_bytes: int
    chosen_bytes: int | None
    uniform_flops: float
    chosen_flops: float
    uniform_seconds: float
    chosen_seconds: float
    num_blocks: int
    num_chosen: int

    @property
    def ratio(self) -> float:
        """Operations computed again, over uniform's; at least the floor."""
        return max(FLOOR, self.chosen_flops / self.uniform_flops)

    @property
    def slower(self) -> bool:
        """Whether it takes longer than uniform checkpointing, or there is no answer."""
        return self.chosen_bytes is None or self.chosen_seconds > self.uniform_seconds * (1 + 1e-9)


class Comparison:
    """A training whose checkpointing can be chosen, costed and traced.

    Args:
        training: which one.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        made: Made = make(training)
        device = find_device(DEVICE)
        job = Job(made.model, made.loss, made.batch, optimizer=made.optimizer)
        self._opened: Any = torch_adapter().open_job(job, device, None)
        subject = torch_adapter().planning(self._opened, device)
        size = subject.batch_size
        self._profile = profile = subject.profile(size, Settings())
        memory = StepMemory(profile)
        self._speed = StepSpeed(profile, None, rates_of(device))
        self._size = size
        variant = Variant(Settings(), memory, self._speed)
        self._search = ProfiledSearch(Space((variant,), (Settings(),), (1,), size))
        self.plain_bytes = self._traced(Settings())
        possible = {unit.path for unit in profile.units if not unit.refused}
        levels = [repeated_units(profile.timeline, level) for level in LEVELS]
        self._uniform = [Settings(checkpoint=tuple(path for path in level if path in possible)) for level in levels]

    def _traced(self, settings: Settings) -> int:
        peak: int = self._opened.trace(self._size, settings).timeline.peak()[1]
        return peak

    def rows(self) -> list[Row]:
        """One row for each budget; none where the model has no repeated blocks, or they save nothing."""
        # Stages of residual blocks or the blocks themselves: whichever needs less.
        least, uniform = min(
            ((self._traced(one), one) for one in self._uniform if one.checkpoint),
            key=lambda pair: pair[0],
            default=(self.plain_bytes, Settings()),
        )
        if least >= self.plain_bytes:
            return []
        found = []
        for way in WAYS:
            budget = round(least + way * (self.plain_bytes - least))
            chosen, peak = self._choose(budget)
            found.append(
                Row(
                    self._training,
                    way,
                    self.plain_bytes,
                    budget,
                    least,
                    peak,
                    self._flops(uniform),
                    self._flops(chosen),
                    self._seconds(uniform),
                    self._seconds(chosen),
                    len(uniform.checkpoint),
                    len(chosen.checkpoint),
                )
            )
        return found

    def _choose(self, budget_bytes: int) -> tuple[Settings, int | None]:
        """The cheapest modules that a trace proves to be within the budget, with their peak.

        As in `memfit.plan`, each trace tells by how much the computed peak is off, for the next search.
        """
        best, best_peak = Settings(), None
        limit = float(budget_bytes)
        tried: set[Settings] = set()
        for _ in range(MAX_PROOFS):
            candidate = self._search.best(limit)
            if candidate is None or candidate.settings in tried:
                break
            tried.add(candidate.settings)
            peak = self._traced(candidate.settings)
            if peak <= budget_bytes and (best_peak is None or self._seconds(candidate.settings) < self._seconds(best)):
                best, best_peak = candidate.settings, peak
            limit = budget_bytes - (peak - candidate.computed_bytes)
        return best, best_peak

    def _flops(self, settings: Settings) -> float:
        calls = [call for unit in self._profile.units if unit.path in settings.checkpoint for call in unit.calls]
        return float(sum(work.flops for call in calls for work in self._profile.work[slice(*call.operations)]))

    def _seconds(self, settings: Settings) -> float:
        return sum(self._speed.recomputation(path, self._size) for path in settings.checkpoint)


def compare(training: Training) -> list[Row]:
    """All rows of a training; call it in a fresh process."""
    return Comparison(training).rows()


def run(trainings: Iterable[Training]) -> list[Row]:
    """All rows, each printed as it is known."""
    rows: list[Row] = []
    for training in trainings:
        found = apart(partial(compare, training), f"comparing {training.case}")
        rows.extend(found)
        for row in found:
            print(" | ".join(_cells(row)), flush=True)
        if not found:
            print(f"{training.case}: no repeated blocks, or they save nothing", flush=True)
    return rows


def _cells(row: Row) -> tuple[str, ...]:
    def part(size: int | None) -> str:
        return "no answer" if size is None else f"{size / row.plain_bytes:.1%}"

    return (
        f"{row.training.title}, {row.training.optimizer}",
        format_size(row.plain_bytes),
        part(row.budget_bytes),
        f"{part(row.uniform_bytes)}, {row.num_blocks} blocks",
        f"{part(row.chosen_bytes)}, {row.num_chosen} modules",
        f"{row.uniform_flops / 1e9:.1f}",
        f"{row.chosen_flops / 1e9:.1f}",
        f"{row.chosen_flops / row.uniform_flops:.2f}",
        f"{row.chosen_seconds / row.uniform_seconds:.2f}",
    )


def bars(rows: Sequence[Row]) -> list[Bar]:
    """The claims, with what was found."""
    slower = [row for row in rows if row.slower]
    names = ", ".join(f"{row.training.case} at {row.way:.0%}" for row in slower)
    models = len({row.training for row in rows})
    mean = geometric_mean(row.ratio for row in rows)
    return [
        Bar(
            f"budgets of {len(rows)} ({models} models) at which it is slower",
            f"{len(slower)} {names}",
            "none",
            not slower,
        ),
        Bar(
            "operations computed again, geometric mean of the ratios", f"{mean:.2f}", f"at most {LIMIT}", mean <= LIMIT
        ),
    ]


def by_way(rows: Sequence[Row]) -> str:
    """The mean ratio of each kind of budget."""
    lines = []
    for way in WAYS:
        ratios = [row.ratio for row in rows if row.way == way]
        budget = "what uniform checkpointing needs" if not way else f"{way:.0%} of the way to the plain peak"
        lines.append((budget, f"{geometric_mean(ratios):.2f}", f"{max(ratios):.2f}"))
    return table(("budget", "geometric mean of the ratios", "greatest"), lines)


def main() -> None:
    """Compare the named cases, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [training.case for training in TRAININGS]
    parser.add_argument("cases", nargs="*", metavar="case", choices=[[], *known], help="default: all")
    names = parser.parse_args().cases
    rows = run(training for training in TRAININGS if not names or training.case in names)
    headers = (
        *("training", "plain peak", "budget", "uniform", "chosen", "GFLOPs again, uniform", "chosen"),
        *("ratio", "ratio of seconds"),
    )
    sections = [METHOD, by_way(rows), table(headers, map(_cells, rows))]
    publish("plan_checkpointing", "Chosen against uniform checkpointing", bars(rows), sections, save=not names)


if __name__ == "__main__":
    main()
