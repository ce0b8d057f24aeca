"""Plans of steps that are slow to trace: what Keras's and JAX's have in common.

Few traces, each of which proves something: `planner/few_traces.py` says what to prove next, the estimator proves it,
and what was proven becomes the same `Plan` that PyTorch's steps get.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from memfit._estimator import Estimator
from memfit._plan_target import Patience, cheapest, hints, not_considered
from memfit.core.device import Device, Kind, Origin
from memfit.core.errors import BadInput, MissingDependency, StepFailed
from memfit.core.estimate import Estimate, Note
from memfit.core.plan import Footprint, Plan, PlannedMove, PlanNotFound, Point, Refusal, Seconds
from memfit.core.settings import Settings
from memfit.core.timeline import Category
from memfit.core.units import format_size
from memfit.planner.few_traces import Candidate, Search
from memfit.planner.moves import CHECKPOINT, LORA, MICRO_BATCH, label, used_moves
from memfit.planner.pareto import undominated

# Kept free of the budget: predictions are off by less, in both directions.
_RESERVE = 0.01
_MAX_PROOFS = 6
_MAX_SMALLEST = 2
# Of the time of the best proven plan: what is not faster than this is not worth another trace.
_NO_BETTER = 0.99
_MAX_SLOWDOWN = 10
# Moves are traced without each other only where that takes less.
_QUICK_TRACE = 3.0


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be planned, and what is known before anything is searched.

    Args:
        estimator: traces the step.
        target: the device, with the budget as its capacity.
        allowed: names of the moves that may be used.
        plain: the step as it is, or as it must be.
        framework: as in `Plan`.
        approximate: why micro-batches only approximate the step, or "".
        dropout: whether the step has any.
        refused: moves that can't be used, and why.
        notes: what was assumed.
        hinted: moves worth a word where nothing fits.
        patience: how long it may look for something faster once a plan fits.
    """

    estimator: Estimator
    target: Device
    allowed: frozenset[str]
    plain: Settings
    framework: str
    approximate: str = ""
    dropout: bool = False
    refused: list[Refusal] = field(default_factory=list)
    notes: tuple[Note, ...] = ()
    hinted: tuple[str, ...] = (CHECKPOINT, MICRO_BATCH, LORA)
    patience: Patience = field(default_factory=Patience)


class TracedPlanner:
    """Searches, proves and reports.

    Args:
        question: what is to be planned.
        open_search: makes the space of candidates from the estimate of the plain step.
        started: when the planning began, on `time.perf_counter`.
    """

    def __init__(self, question: Question, open_search: Callable[[Estimate], Search], started: float) -> None:
        self._question = question
        self._open = open_search
        self._started = started
        self._proofs: dict[Settings, tuple[Estimate, int] | None] = {}

    def run(self) -> Plan:
        """The fastest plan that a trace proves to fit."""
        question = self._question
        before = question.estimator.run(eager=False)
        self._check_fixed_cost(before)
        search = self._open(before)
        first = search.variants[0].settings
        if first == question.plain:
            self._proofs[first] = (before, 0)
        best = self._prove_best(search)
        if best is None:
            least = self._prove_smallest(search)
            if least is None or not self._is_kept(least.settings):
                raise self._not_found(least, search, before)
            best = least
        return self._plan(best, search, before)

    @property
    def _usable(self) -> float:
        budget = self._question.target.usable_bytes
        assert budget is not None
        return budget * (1 - _RESERVE) - (self._question.target.context_bytes or 0)

    def _is_kept(self, settings: Settings) -> bool:
        proof = self._proofs.get(settings)
        return proof is not None and bool(proof[0].fits) and proof[0].reserved_peak_bytes <= self._usable

    def _prove_best(self, search: Search) -> Candidate | None:
        best: Candidate | None = None
        for _ in range(_MAX_PROOFS):
            candidate = search.best(self._usable)
            if candidate is None or (best is not None and candidate.seconds >= best.seconds * _NO_BETTER):
                break
            if best is not None and self._question.patience.is_over:
                break
            self._prove(candidate, search)
            if self._is_kept(candidate.settings):
                best = candidate
                if search.best(self._usable) == search.evaluate(candidate.settings):
                    break
        return best

    def _prove_smallest(self, search: Search) -> Candidate | None:
        """What needs least of the few that are computed to, and of everything that was traced on the way."""
        for _ in range(_MAX_SMALLEST):
            candidate = search.smallest()
            if candidate is None:
                break
            self._prove(candidate, search)
            if self._is_kept(candidate.settings):
                break
        traced = [search.evaluate(settings) for settings, proof in self._proofs.items() if proof is not None]
        return min(traced, key=lambda one: one.peak_bytes, default=None)

    def _prove(self, candidate: Candidate, search: Search) -> None:
        settings = candidate.settings
        if settings in self._proofs:
            return
        self._proofs[settings] = None
        try:
            proof = self._question.estimator.with_settings(settings)
        except (StepFailed, BadInput, MissingDependency) as error:
            reason = f"{label(settings)}: {str(error).splitlines()[0]}"
            self._question.refused.append(Refusal("proof", reason))
            search.exclude(settings)
            return
        self._proofs[settings] = proof
        search.learn(settings, proof[0].reserved_peak_bytes)

    # Answers.

    def _plan(self, chosen: Candidate, search: Search, before: Estimate) -> Plan:
        question, settings = self._question, chosen.settings
        proof = self._proofs[settings]
        assert proof is not None
        estimate, host_bytes = proof
        plain = search.evaluate(search.variants[0].settings)
        known = search.speed is not None
        origin = Origin.MEASURED if search.speed and search.speed.is_measured and settings == plain.settings else None
        return Plan(
            subject=before.subject,
            device=question.target,
            budget_bytes=question.target.usable_bytes or 0,
            batch_size=question.estimator.tracer.batch_size,
            settings=settings,
            moves=self._moves(chosen, search, before, estimate),
            before=Footprint.of(before),
            after=Footprint.of(estimate, host_bytes),
            seconds_before=Seconds(plain.seconds if known else None, Origin.ASSUMED),
            seconds_after=Seconds(chosen.seconds if known else None, origin or Origin.ASSUMED),
            front=self._front(chosen, search, estimate),
            refused=tuple(question.refused),
            notes=(*before.notes, *question.notes),
            planned_in_seconds=time.perf_counter() - self._started,
            framework=question.framework,
            estimate_before=before,
            estimate_after=estimate,
        )

    def _moves(
        self, chosen: Candidate, search: Search, before: Estimate, estimate: Estimate
    ) -> tuple[PlannedMove, ...]:
        moves = used_moves(
            chosen.settings,
            batch_size=self._question.estimator.tracer.batch_size,
            approximate=self._question.approximate,
            dropout=self._question.dropout,
            plain=self._question.plain,
        )
        found = []
        for move in moves:
            without = search.evaluate(
                replace(move.without, micro_batch_size=0 if move.name == MICRO_BATCH else move.without.micro_batch_size)
            )
            if without.settings == self._question.plain:
                saves, origin = before.peak_bytes - estimate.peak_bytes, Origin.SIMULATED
            else:
                traced = search.is_traced(without.settings)
                saves = round(without.peak_bytes) - estimate.reserved_peak_bytes
                origin = Origin.SIMULATED if traced else Origin.ASSUMED
            costs = chosen.seconds - without.seconds if search.speed is not None else None
            found.append(
                PlannedMove(move.name, move.title, move.keeps, saves, origin, costs, Origin.ASSUMED, move.caveat)
            )
        return tuple(sorted(found, key=lambda move: -move.saves_bytes))

    def _front(self, chosen: Candidate, search: Search, estimate: Estimate) -> tuple[Point, ...]:
        context = self._question.target.context_bytes or 0
        known = search.speed is not None
        points = [(chosen, Point(estimate.peak_bytes, None, label(chosen.settings), chosen.settings, True))]
        for one in search.candidates():
            if one.settings != chosen.settings and one.seconds < _MAX_SLOWDOWN * chosen.seconds:
                verified = search.is_traced(one.settings)
                points.append(
                    (one, Point(round(one.peak_bytes) + context, None, label(one.settings), one.settings, verified))
                )
        kept = undominated(
            points, lambda pair: (pair[1].peak_bytes, pair[0].seconds), keep=lambda pair: pair[0] is chosen
        )
        return tuple(replace(point, seconds=one.seconds if known else None) for one, point in kept)

    def _check_fixed_cost(self, before: Estimate) -> None:
        """Refuses a budget that not even the weights fit into."""
        target = self._question.target
        weights = sum(before.state_bytes.get(str(name), 0) for name in (Category.PARAMETER, Category.BUFFER))
        context = target.context_bytes or 0
        if weights + context > (target.usable_bytes or 0):
            taken = f" and the CUDA context {format_size(context)}" if context else ""
            larger, name = self._larger(before.peak_bytes)
            processor = ', or device="cpu" to plan for the processor' if context else ""
            raise PlanNotFound(
                f"a budget of {format_size(target.usable_bytes or 0)} is below the fixed cost of {before.subject}: its "
                f"weights take {format_size(weights)}{taken}.\nGive {larger}{processor}.",
                device_name=name,
            )

    def _larger(self, needed_bytes: int) -> tuple[str, str]:
        """(what would do, in words; name of a device, or "")."""
        target = self._question.target
        if target.kind is Kind.HOST:
            return "a larger budget", ""
        words, name = cheapest(needed_bytes)
        if name == target.name:
            return f"a larger budget: {target.name} has more", name
        return f"a larger budget or device{words}", name

    def _not_found(self, least: Candidate | None, search: Search, before: Estimate) -> PlanNotFound:
        question = self._question
        budget = format_size(question.target.usable_bytes or 0)
        if least is None:
            reason = next((one.reason for one in reversed(question.refused) if one.name == "proof"), "")
            return PlanNotFound(
                f"no plan fits `{before.subject}` into {budget}, and the smallest could not be traced: {reason}"
            )
        smallest = self._plan(least, search, before)
        needs = smallest.after.peak_bytes
        lines = [
            f"no plan fits `{before.subject}` into {budget}; the smallest that was traced needs {format_size(needs)} "
            f"({_RESERVE:.0%} of a budget is kept free)."
        ]
        lines += [f"  {name:<44}{format_size(size):>10}" for name, size in smallest.after.by_category.items()]
        lines.append(f"  with: {label(smallest.settings)}")
        lines += not_considered(question.refused)
        larger, name = self._larger(needs)
        others = hints(question.allowed, question.refused, question.hinted)
        lines.append(f"Try {others}{larger}.")
        return PlanNotFound("\n".join(lines), smallest, name)
