"""`memfit.plan`: profile, search, prove, report.

The planner computes with profiles; this module feeds it, and has the settings it chooses traced for real. What the
trace finds corrects the planner's limit, until the fastest settings that are proven to fit are found.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memfit._estimator import (
    JAX,
    KERAS,
    Estimator,
    as_job,
    checked_batch_size,
    framework_of,
    is_keras_model,
    torch_adapter,
)
from memfit._plan_space import Opening
from memfit._plan_target import AUTO, KEEP, Patience, cheapest, hints, not_considered, target_within
from memfit.core.device import Device, Kind, Origin
from memfit.core.errors import BadInput, MissingDependency, StepFailed
from memfit.core.estimate import LACKS_PRECISION, Estimate, Note
from memfit.core.job import AUTOCASTS, PRECISIONS, Job, read_precision
from memfit.core.plan import Footprint, Plan, PlannedMove, PlanNotFound, Point, Refusal, Seconds, actions
from memfit.core.progress import doing
from memfit.core.replay import AllocatorOptions
from memfit.core.settings import Keeps, Settings, Weighting
from memfit.core.timeline import Category
from memfit.core.units import format_size
from memfit.planner.moves import (
    CHECKPOINT,
    EIGHT_BIT,
    EXPANDABLE,
    LORA,
    MICRO_BATCH,
    QLORA,
    SHARD,
    allowed_moves,
    label,
    used_moves,
)
from memfit.planner.pareto import undominated
from memfit.reports.plan_actions import use_reports

if TYPE_CHECKING:
    from memfit.planner.search import Candidate, Search, Space, Variant

use_reports()

_DEFAULT_ALLOW = ("exact", "rounding")

# Kept free of the budget: predictions are off by less, in both directions.
_RESERVE = 0.01
# Traces of chosen settings, at least and at most; fewer for large models, whose traces take longer.
_NUM_PROOFS = (4, 12)
_BLOCKS_PER_PLAN = 40_000
_NUM_SMALLEST = 3
# Where steps can be run for real: plans that are computed to take so much longer than the best, at most, are run, too.
_CLOSE = 1.3
_AS_FAST = 1.02
# Timing plans against each other may take so long, and each of them has to be run so often at least.
_RACE_SECONDS = 20.0
_FEWEST_TURNS = 2
_NUM_CONTENDERS = 8
# Of the time of the best proven plan: what is not faster than this is not worth another trace.
_NO_BETTER = 0.99
# Seconds of a trace up to which every move of a plan is traced without.
_QUICK_TRACE = 3.0
# Points of the front that are slower than the plan by more than this interest nobody.
_MAX_SLOWDOWN = 10


def plan(
    model: Any,
    *arguments: Any,
    loss: Callable[[Any, Any], Any] | None = None,
    batch: Any = None,
    optimizer: Any = None,
    device: str | Device | None = None,
    budget: str | int | None = None,
    precision: str = KEEP,
    allow: Iterable[str] = _DEFAULT_ALLOW,
    effective_batch: int | None = None,
    count: int = 1,
    measure: bool | None = None,
    seconds: float | None = None,
) -> Plan:
    """The fastest way to run a training step within a budget of memory, proven on a simulated device.

    Args:
        model: an `nn.Module`, a callable that builds one, a compiled `keras.Model`, a `Job`, or a loss function of
            JAX, followed by its parameters and batch.
        arguments: loss and batch by their place.
        loss: takes the model and a batch and returns the scalar loss, or (loss, weight), where the weight is the
            loss's true denominator, such as the number of tokens; or as for `estimate`.
        batch: any nesting of tensors; the batch of one update.
        optimizer: an instance, a callable that takes parameters, a name such as "adamw", or None.
        device: as for `estimate`.
        budget: what the step may take, "10GiB" or bytes; all of the device by default.
        precision: "keep", "auto" (autocast where it helps), or as for `estimate`.
        allow: "exact", "rounding", "changes training", names of moves such as "lora", and "approximate", which lets
            micro-batches in where samples of a batch see each other. A minus sign leaves a move out.
        effective_batch: samples of one update, where that isn't the size of `batch`.
        count: devices to shard over; `batch` and the figures are then those of one of them.
        measure: whether to time short real steps when the device is the one in hand; None: if it can be done.
        seconds: about how long it may look for a faster plan once one fits, and time real steps; None: until nothing
            better is in sight, and up to 20 s of timing plans against each other.

    Raises:
        PlanNotFound: nothing that is allowed fits.
    """
    precision = read_precision(precision)
    if precision not in (KEEP, AUTO, *PRECISIONS):
        raise BadInput(f"precision must be keep, auto or one of {', '.join(PRECISIONS)}, but {precision!r} was given.")
    allowed = allowed_moves(allow)
    if not isinstance(count, int) or count < 1:
        raise BadInput(f"count must be a whole number from 1 up, but {count!r} was given.")
    if count > 1 and SHARD not in allowed:
        raise BadInput(f"count={count} shards over several devices, but 'shard' is not allowed. Add it to allow.")
    patience = Patience(seconds)
    job = as_job(model, arguments, loss, batch, optimizer=optimizer)
    if job.mode != "training":
        raise BadInput("a plan is for training; the job is one of inference.")
    size = None if effective_batch is None else checked_batch_size(effective_batch)
    target = target_within(device, budget)
    framework = framework_of(job)
    with doing("planning"):
        if framework == KERAS:
            from memfit._keras_plan import plan_keras

            return plan_keras(job, target, size, allowed, precision, measure, patience)
        if framework == JAX:
            from memfit._jax_plan import plan_jax

            return plan_jax(job, target, size, allowed, precision, measure, patience)
        return _Planner(job, target, size, allowed, count, precision, measure, patience).run()


def _apply(found: Plan, model: Any, optimizer: Any) -> Any:
    if is_keras_model(model):
        from memfit.adapters.keras.fitting.fitted import FittedModel

        # Whoever planned has allowed it.
        approximate = any(move.name == MICRO_BATCH and move.keeps is Keeps.CHANGES for move in found.moves)
        return FittedModel(found.settings, model, approximate=approximate)
    if found.framework == JAX:
        from memfit.adapters.jax.training import train_step

        return train_step(model, optimizer, settings=found.settings)
    return torch_adapter().fit(found.settings, model, optimizer)


actions.apply = _apply


def load_plan(path: Any) -> Plan:
    """The plan that `plan.save` wrote."""
    return Plan.load(path)


@dataclass(frozen=True, slots=True)
class _Proof:
    """Settings that were traced."""

    candidate: "Candidate"
    estimate: Estimate
    host_bytes: int


class _Planner:
    """One question: a job, a device with a budget, and what is allowed."""

    def __init__(
        self,
        job: Job,
        target: Device,
        batch_size: int | None,
        allowed: frozenset[str],
        count: int,
        precision: str,
        measure: bool | None,
        patience: Patience,
    ) -> None:
        self._started = time.perf_counter()
        self._patience = patience
        forced = precision if precision in AUTOCASTS else None
        if precision not in (KEEP, AUTO):
            job = replace(job, precision=precision)
        elif job.precision in AUTOCASTS:
            forced = job.precision
        self._target = target
        self._allowed = allowed
        self._count = count
        self._estimator = Estimator(job, target, AllocatorOptions(), batch_size)
        self._subject = torch_adapter().subject(self._estimator.tracer)
        self._batch_size: int | None = self._subject.batch_size
        if job.precision is not None and job.precision not in AUTOCASTS:
            self._subject.check_width(job.precision)
        self._opening = Opening(
            job,
            self._subject,
            target,
            allowed,
            count,
            auto=precision == AUTO,
            forced=forced,
            measure=measure,
            patience=patience,
        )
        self._refused = self._opening.refused
        self._proofs: dict[Settings, _Proof | None] = {}
        self._was_timed = False
        self._timed_over_computed = 1.0

    @property
    def _budget(self) -> int:
        assert self._target.usable_bytes is not None
        return self._target.usable_bytes

    def run(self) -> Plan:
        from memfit.planner.search import Search

        before = self._estimator.run(eager=False)
        self._check_fixed_cost(before)
        space = self._opening.space(fits=bool(before.fits) and before.reserved_peak_bytes <= self._usable)
        search = Search(space)
        proof = self._prove_best(search, before, space)
        if proof is None:
            proof = self._prove_smallest(search)
            if proof is None or not self._is_kept(proof):
                raise self._not_found(proof, search, before, space)
        elif self._opening.is_timed:
            proof = self._fastest_timed(proof, search)
        return self._plan(proof, before, search, space)

    # Proof.

    @property
    def _usable(self) -> float:
        """What the allocator may take: the budget, less a reserve and the CUDA context."""
        return self._budget * (1 - _RESERVE) - (self._target.context_bytes or 0)

    def _is_kept(self, proof: _Proof) -> bool:
        """Whether the promise holds, with the reserve."""
        return bool(proof.estimate.fits) and proof.estimate.reserved_peak_bytes <= self._usable

    def _prove_best(self, search: "Search", before: Estimate, space: "Space") -> _Proof | None:
        """The fastest settings that a trace proves to fit, or None.

        What the allocator takes beyond the live bytes that were computed depends on the settings. Each proof tells it
        for its combination; what it is for others is first expected to be as for the plain step, then, where nothing
        would fit, to be nothing. The search goes on until it has nothing faster to offer than what is proven.
        """
        usable = self._usable
        plain = space.plain or space.variants[0]
        live_bytes = plain.memory.peak(self._opening.plain, self._batch_size)
        search.expect(usable * max(0.0, 1 - live_bytes / max(1, before.reserved_peak_bytes)))
        best: _Proof | None = None
        hopeful = False
        for _ in range(_num_proofs(before)):
            candidate = search.best(usable)
            if candidate is None and not hopeful:
                hopeful = True
                search.expect(0.0)
                candidate = search.best(usable)
            if candidate is None or (best is not None and candidate.seconds >= best.candidate.seconds * _NO_BETTER):
                break
            if best is not None and self._patience.is_over:
                break
            proof = self._prove(candidate, usable)
            if proof is None:
                search.exclude(candidate)
                continue
            search.learn(candidate, proof.estimate.reserved_peak_bytes)
            if self._is_kept(proof) and (best is None or candidate.seconds < best.candidate.seconds):
                best = proof
        return best

    def _fastest_timed(self, best: _Proof, search: "Search") -> _Proof:
        """Of the plan and those that are computed to take about as long, the one that is fastest when really run."""
        from memfit.planner.search import num_changed

        left = self._patience.left(_RACE_SECONDS)
        # A race of steps that take too long to be run twice tells nothing.
        most = min(_NUM_CONTENDERS, int(left / (_FEWEST_TURNS * max(1e-9, best.candidate.seconds))))
        if most < 2:
            return best
        found = [best]
        for candidate in search.contenders(self._usable, _CLOSE * best.candidate.seconds):
            if len(found) >= most or self._patience.is_over:
                break
            # The first of those with equal passes has the fastest update.
            if all(candidate.settings.of_passes != known.candidate.settings.of_passes for known in found):
                proof = self._prove(candidate, self._usable)
                if proof is not None and self._is_kept(proof):
                    found.append(proof)
        with doing(f"timing real steps of {len(found)} plans against each other, up to {left:.0f} s"):
            times = self._subject.time_passes([proof.candidate.settings for proof in found], left)
        found = [proof for proof, passes in zip(found, times, strict=False) if passes is not None]
        times = [passes for passes in times if passes is not None]
        if not times:
            return best
        timed = [
            replace(proof.candidate, seconds=passes + proof.candidate.variant.speed.update(proof.candidate.settings))
            for proof, passes in zip(found, times, strict=True)
        ]
        least = min(candidate.seconds for candidate in timed)
        # Times of equal passes differ by as much from turn to turn.
        index = min(
            (place for place, candidate in enumerate(timed) if candidate.seconds <= least * _AS_FAST),
            key=lambda place: (num_changed(timed[place].settings.of_passes), timed[place].seconds),
        )
        self._timed_over_computed = timed[index].seconds / max(1e-12, found[index].candidate.seconds)
        self._was_timed = True
        return replace(found[index], candidate=timed[index])

    def _prove_smallest(self, search: "Search") -> _Proof | None:
        """Settings that fit after all, or those that need least memory, of the few smallest that can be run."""
        usable = self._usable
        least: _Proof | None = None
        for _ in range(_NUM_SMALLEST):
            for candidate in search.smallest(_NUM_SMALLEST):
                proof = self._prove(candidate, usable)
                if proof is None:
                    search.exclude(candidate)
                elif self._is_kept(proof):
                    return proof
                elif least is None or proof.estimate.peak_bytes < least.estimate.peak_bytes:
                    least = proof
            if least is not None:
                return least
        return None

    def _prove(self, candidate: "Candidate", usable: float) -> _Proof | None:
        """A trace with the settings applied; None when they can't be run.

        Where the live bytes would fit and the allocator's cache doesn't, segments that grow may help at no cost.
        """
        settings = candidate.settings
        if settings in self._proofs:
            return self._proofs[settings]
        self._proofs[settings] = None
        try:
            proof = _Proof(candidate, *self._estimator.with_settings(settings))
            may_expand = EXPANDABLE in self._allowed and self._target.kind is Kind.CUDA
            if may_expand and proof.estimate.reserved_peak_bytes > usable >= proof.estimate.allocated_peak_bytes:
                expanded = replace(settings, expandable_segments=True)
                other = _Proof(replace(candidate, settings=expanded), *self._estimator.with_settings(expanded))
                if other.estimate.reserved_peak_bytes < proof.estimate.reserved_peak_bytes:
                    proof = other
            self._proofs[settings] = proof
        except (StepFailed, BadInput, MissingDependency) as error:
            self._refused.append(Refusal("proof", f"{label(settings)}: {str(error).splitlines()[0]}"))
        return self._proofs[settings]

    # Answers.

    def _plan(self, proof: _Proof, before: Estimate, search: "Search", space: "Space") -> Plan:
        from memfit.planner.search import evaluate

        as_it_is = space.plain or space.variants[0]
        plain = evaluate(as_it_is, self._opening.plain, self._batch_size)
        chosen = proof.candidate
        settings = chosen.settings
        if settings.micro_batches > 1 and self._batch_size:
            settings = replace(settings, micro_batch_size=-(-self._batch_size // settings.micro_batches))
        elif settings.weighting.kind != "given":
            settings = replace(settings, weighting=Weighting())
        timed = as_it_is.speed.is_measured(self._batch_size)
        return Plan(
            subject=before.subject,
            device=self._target,
            budget_bytes=self._budget,
            batch_size=self._batch_size,
            settings=settings,
            moves=self._moves(proof, space),
            before=Footprint.of(before),
            after=Footprint.of(proof.estimate, proof.host_bytes),
            # Beside a measured time goes one on the same scale.
            seconds_before=Seconds(
                plain.seconds * self._timed_over_computed, _origin_of(timed and not self._was_timed)
            ),
            seconds_after=Seconds(chosen.seconds, _origin_of(self._was_timed)),
            front=self._front(search, proof, settings),
            refused=tuple(self._refused),
            notes=(*before.notes, *_lacking(proof.estimate, before), *self._opening.notes),
            planned_in_seconds=time.perf_counter() - self._started,
            estimate_before=before,
            estimate_after=proof.estimate,
        )

    def _moves(self, proof: _Proof, space: "Space") -> tuple[PlannedMove, ...]:
        from memfit.planner.search import evaluate

        chosen = proof.candidate
        moves = used_moves(
            chosen.settings,
            batch_size=self._batch_size,
            approximate=self._opening.approximate,
            dropout="dropout" in chosen.variant.memory.profile.features,
            plain=self._opening.plain,
        )
        variants = space.variants if space.plain is None else (*space.variants, space.plain)
        found = []
        for move in moves:
            without = evaluate(_variant_for(move.without, variants), move.without, self._batch_size)
            saves, origin = self._saved(proof, move.without, without.live_bytes)
            costs = chosen.seconds - without.seconds * self._timed_over_computed
            found.append(
                PlannedMove(move.name, move.title, move.keeps, saves, origin, costs, Origin.ASSUMED, move.caveat)
            )
        return tuple(sorted(found, key=lambda move: -move.saves_bytes))

    def _saved(self, proof: _Proof, without: Settings, live_bytes: float) -> tuple[int, Origin]:
        """(bytes that a move saves, how that is known): by a trace without it, where traces are quick."""
        if proof.estimate.seconds < _QUICK_TRACE:
            try:
                estimate, _ = self._estimator.with_settings(without)
                return estimate.peak_bytes - proof.estimate.peak_bytes, Origin.SIMULATED
            except (StepFailed, BadInput, MissingDependency):
                # Without this move the others can't be run.
                pass
        scale = proof.estimate.reserved_peak_bytes / max(1.0, proof.candidate.live_bytes)
        return round((live_bytes - proof.candidate.live_bytes) * scale), Origin.ASSUMED

    def _front(self, search: "Search", proof: _Proof, settings: Settings) -> tuple[Point, ...]:
        """Computed points, on the scale of what the device must provide, and the proven one."""
        context = self._target.context_bytes or 0
        scale = proof.estimate.reserved_peak_bytes / max(1.0, proof.candidate.live_bytes)
        points = [Point(proof.estimate.peak_bytes, proof.candidate.seconds, label(settings), settings, True)]
        for one in search.front():
            if one.settings != proof.candidate.settings and one.seconds < _MAX_SLOWDOWN * proof.candidate.seconds:
                peak = round(one.live_bytes * scale) + context
                points.append(Point(peak, one.seconds, label(one.settings), one.settings))
        front = undominated(points, lambda one: (one.peak_bytes, one.seconds or 0.0), keep=lambda one: one.verified)
        return tuple(front)

    def _check_fixed_cost(self, before: Estimate) -> None:
        """Refuses a budget that not even the weights fit into."""
        fixed = (Category.PARAMETER, Category.BUFFER)
        weights = sum(
            b.size_bytes for b in before.timeline.blocks if b.category in fixed and b.start < _setup_end(before)
        )
        context = self._target.context_bytes or 0
        shared = self._count > 1 or QLORA in self._allowed
        if not shared and weights + context > self._budget:
            device = cheapest(before.peak_bytes)
            taken = f" and the CUDA context {format_size(context)}" if context else ""
            raise PlanNotFound(
                f"a budget of {format_size(self._budget)} is below the fixed cost of {before.subject}: its weights "
                f"take {format_size(weights)}{taken}.\n"
                f"Give a larger budget or device{device[0]}, or shard over several devices (count=2).",
                device_name=device[1],
            )

    def _not_found(self, proof: _Proof | None, search: "Search", before: Estimate, space: "Space") -> PlanNotFound:
        budget = format_size(self._budget)
        if proof is None:
            reason = next((refusal.reason for refusal in reversed(self._refused) if refusal.name == "proof"), "")
            return PlanNotFound(
                f"no plan fits `{before.subject}` into {budget}, and the smallest could not be traced: {reason}"
            )
        smallest = self._plan(proof, before, search, space)
        needs = proof.estimate.peak_bytes
        lines = [
            f"no plan fits `{before.subject}` into {budget}; the smallest needs {format_size(needs)} "
            f"({_RESERVE:.0%} of a budget is kept free)."
        ]
        for name, size in proof.estimate.breakdown.by_category.items():
            lines.append(f"  {name:<44}{format_size(size):>10}")
        lines.append(f"  with: {label(smallest.settings)}")
        lines += not_considered(self._refused)
        device = cheapest(needs)
        able = {
            CHECKPOINT: True,
            MICRO_BATCH: (self._batch_size or 0) > 1,
            EIGHT_BIT: bool(before.state_bytes.get(str(Category.OPTIMIZER_STATE))),
            LORA: True,
        }
        others = hints(self._allowed, self._refused, (name for name, can in able.items() if can))
        larger = "a larger budget" if self._target.kind is Kind.HOST else f"a larger device{device[0]}"
        lines.append(f"Try {others}{larger}.")
        return PlanNotFound("\n".join(lines), smallest, device[1])


def _origin_of(is_measured: bool) -> Origin:
    return Origin.MEASURED if is_measured else Origin.ASSUMED


def _setup_end(before: Estimate) -> int:
    marks = before.timeline.marks
    return marks[1].tick if len(marks) > 1 else before.timeline.num_ticks


def _num_proofs(before: Estimate) -> int:
    least, most = _NUM_PROOFS
    return min(most, max(least, _BLOCKS_PER_PLAN // max(1, len(before.timeline.blocks))))


def _variant_for(settings: Settings, variants: "tuple[Variant, ...]") -> "Variant":
    """The profiled variant that settings belong to, or the one most like it."""
    names = ("precision", "lora_rank", "quantized_base", "freeze", "cross_entropy_chunks", "channels_last")

    def likeness(one: "Variant") -> list[bool]:
        # What comes first counts more.
        return [getattr(one.settings, name) == getattr(settings, name) for name in names]

    return max(variants, key=likeness)


def _lacking(after: Estimate, before: Estimate) -> list[Note]:
    """What the device lacks for the plan's precision, where the step as it is has another."""
    return [note for note in after.notes if note.code == LACKS_PRECISION and note not in before.notes]
