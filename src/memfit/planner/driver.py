"""The planner: searches, has what it chose traced, and reports what was proven.

What a search computes is not yet a promise. The fastest candidate is traced with its settings applied; the trace
corrects the search, until it has nothing faster to offer than what is proven to fit.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from memfit.core.device import Device, Kind, Origin
from memfit.core.errors import BadInput, MissingDependency, StepFailed
from memfit.core.estimate import LACKS_PRECISION, Estimate, Note
from memfit.core.plan import Footprint, Plan, PlannedMove, PlanNotFound, Point, Refusal, Seconds
from memfit.core.progress import doing
from memfit.core.settings import Settings, Weighting
from memfit.core.timeline import Category
from memfit.core.units import format_size
from memfit.planner.candidate import Candidate, CandidateSearch, undominated
from memfit.planner.moves import CHECKPOINT, EXPANDABLE, MICRO_BATCH, QLORA, SET_TO_NONE, label, used_moves

# Of a peak that is partly computed: runs have needed up to 8% more.
_COMPUTED_RESERVE = 0.1
_NUM_SMALLEST = 3
_NUM_REFUSED = 8
# Of the time of the best proven plan: what is not faster than this is not worth another trace.
_NO_BETTER = 0.99
# Points of the front that are slower than the plan by more than this interest nobody.
_MAX_SLOWDOWN = 10
# Where steps can be run for real: plans that are computed to take so much longer than the best, at most, are run, too.
_CLOSE = 1.3
_AS_FAST = 1.02
# Timing plans against each other may take so long, and each of them has to be run so often at least.
_RACE_SECONDS = 20.0
_FEWEST_TURNS = 2
_NUM_CONTENDERS = 8


class Patience:
    """How long a search may go on, in seconds; None: as long as there is something to find."""

    def __init__(self, seconds: float | None = None) -> None:
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if seconds is not None and not (is_number and seconds >= 0):
            raise BadInput(f"seconds must be a number from 0 up, such as seconds=10, but {seconds!r} was given.")
        self._end = math.inf if seconds is None else time.perf_counter() + seconds

    def left(self, most: float) -> float:
        """Seconds that are left, up to `most`."""
        return max(0.0, min(most, self._end - time.perf_counter()))

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return time.perf_counter() >= self._end


class Proving(Protocol):
    """Runs steps on a simulated device: `memfit.estimator.Estimator`, or the runs of a script."""

    def run(self, *, eager: bool = True) -> Estimate:
        """The step as it is."""

    def with_settings(self, settings: Settings) -> tuple[Any, ...]:
        """(estimate of the step as settings run it, host bytes that they take[, whether all of them were in force])."""


class NotProven(Exception):
    """Settings could not be put into practice because of these moves; none where the search knows enough."""

    def __init__(self, *refused: Refusal) -> None:
        super().__init__("; ".join(refusal.reason for refusal in refused))
        self.refused = refused


@dataclass(slots=True)
class Question:
    """What is to be planned, and what is known before anything is searched.

    Args:
        estimator: traces the step; its `with_settings` raises `NotProven` where that can't be done.
        target: the device, with the budget as its capacity.
        plain: settings of the step as it is, or as it must be.
        approximate: why micro-batches only approximate the step, or "".
        notes_on: what else is to be said of chosen settings.
        hinted: moves worth a word where nothing fits.
        patience: how long to look for something faster once a plan fits.
        reserve: share of the budget that is kept free: predictions are off by less, in both directions.
        quick_seconds: of a trace, up to which every move of a plan is traced without.
        as_planned: settings as the plan holds them, from those that were searched.
        time_plans: seconds of real steps under each of some settings, within a time limit; None where none can run.
        update_seconds: of the optimizer's part of a candidate's step, which is not run when plans are timed.
        is_measured: whether the time of the plain step comes from real passes.
    """

    estimator: Proving
    target: Device
    allowed: frozenset[str]
    plain: Settings
    framework: str = "torch"
    batch_size: int | None = None
    approximate: str = ""
    dropout: bool = False
    refused: list[Refusal] = field(default_factory=list)
    notes: Sequence[Note] = ()
    notes_on: Callable[[Settings], Sequence[Note]] = field(default=lambda settings: ())
    hinted: tuple[str, ...] = (CHECKPOINT, MICRO_BATCH)
    patience: Patience = field(default_factory=Patience)
    num_devices: int = 1
    num_proofs: int = 6
    reserve: float = 0.01
    quick_seconds: float = 3.0
    as_planned: Callable[[Settings], Settings] = field(default=lambda settings: settings)
    time_plans: Callable[[Sequence[Settings], float], list[float | None]] | None = None
    update_seconds: Callable[[Any], float] = field(default=lambda candidate: 0.0)
    is_measured: bool = False

    @property
    def budget_bytes(self) -> int:
        """Bytes that the step may use."""
        assert self.target.usable_bytes is not None
        return self.target.usable_bytes

    @property
    def context_bytes(self) -> int:
        """What the device takes for itself."""
        return self.target.context_bytes or 0

    @property
    def usable_bytes(self) -> float:
        """What the allocator may take: the budget, less a reserve and the CUDA context."""
        return self.budget_bytes * (1 - self.reserve) - self.context_bytes


@dataclass(frozen=True, slots=True)
class _Proof:
    """A candidate that was traced, wholly or in part: then the rest is computed."""

    candidate: Candidate
    estimate: Estimate
    host_bytes: int = 0
    is_whole: bool = True

    @property
    def origin(self) -> Origin:
        return Origin.SIMULATED if self.is_whole else Origin.ASSUMED

    @property
    def needed_bytes(self) -> int:
        """What the device must provide; more than computed where a part is only that."""
        peak_bytes = self.estimate.peak_bytes
        return peak_bytes if self.is_whole else int(peak_bytes * (1 + _COMPUTED_RESERVE))


class Planner:
    """Answers one question.

    `open_search` makes the candidates from the estimate of the plain step, and may complete the question; `started` is
    when the planning began, on `time.perf_counter`.
    """

    def __init__(self, question: Question, open_search: Callable[[Estimate], CandidateSearch], started: float) -> None:
        self._question = question
        self._open = open_search
        self._started = started
        self._proofs: dict[Settings, _Proof | None] = {}
        self._was_timed = False
        self._timed_over_computed = 1.0

    def run(self) -> Plan:
        """The fastest plan that a trace proves to fit; raises `PlanNotFound` where nothing that is allowed does."""
        before = self._question.estimator.run(eager=False)
        self._check_fixed_cost(before)
        search = self._open(before)
        if search.is_traced(search.plain.settings):
            self._proofs[search.plain.settings] = _Proof(search.plain, before)
        proof = self._prove_best(search)
        if proof is None:
            proof = self._prove_smallest(search)
            if proof is None or not self._is_kept(proof):
                raise self._not_found(proof, search, before)
            # It needs less than computed, and so may others that are faster.
            proof = self._prove_best(search, proof) or proof
        elif self._question.time_plans is not None:
            proof = self._fastest_timed(proof, search)
        return self._plan(proof, search, before)

    # Proof.

    def _is_kept(self, proof: _Proof) -> bool:
        """Whether the promise holds, with the reserve."""
        question = self._question
        return bool(proof.estimate.fits) and proof.needed_bytes - question.context_bytes <= question.usable_bytes

    def _prove_best(self, search: CandidateSearch, best: _Proof | None = None) -> _Proof | None:
        """The fastest candidate that is proven to fit; `best` where none is faster."""
        question = self._question
        for _ in range(question.num_proofs):
            candidate = search.best(question.usable_bytes)
            if candidate is None or (best is not None and candidate.seconds >= best.candidate.seconds * _NO_BETTER):
                break
            if best is not None and question.patience.is_over:
                break
            proof = self._prove(candidate, search)
            if proof is not None and self._is_kept(proof):
                best = proof
        return best

    def _prove_smallest(self, search: CandidateSearch) -> _Proof | None:
        """Settings that fit after all, or those that need least of everything that was traced."""
        for _ in range(_NUM_SMALLEST):
            failed = False
            for candidate in search.smallest(_NUM_SMALLEST):
                proof = self._prove(candidate, search)
                if proof is not None and self._is_kept(proof):
                    return proof
                failed |= proof is None
            if not failed:
                break
        traced = [proof for proof in self._proofs.values() if proof is not None]
        return min(traced, key=lambda proof: proof.estimate.peak_bytes, default=None)

    def _prove(self, candidate: Candidate, search: CandidateSearch) -> _Proof | None:
        """A trace with the settings applied; None when they can't be run."""
        question, settings = self._question, candidate.settings
        if settings not in self._proofs:
            self._proofs[settings] = None
            try:
                proof = _Proof(candidate, *question.estimator.with_settings(settings))
                self._proofs[settings] = proof if search.computes_peaks else self._with_segments(proof)
            except NotProven as error:
                question.refused += error.refused
                # What they need may be told in another way once the search knows.
                del self._proofs[settings]
                search.exclude(candidate)
                return None
            except (StepFailed, BadInput, MissingDependency) as error:
                reason = f"{label(settings)}: {str(error).splitlines()[0]}"
                question.refused.append(Refusal("proof", reason))
        proved = self._proofs[settings]
        if proved is None:
            search.exclude(candidate)
        else:
            search.learn(candidate, proved.needed_bytes - question.context_bytes)
        return proved

    def _with_segments(self, proof: _Proof) -> _Proof:
        """Where live bytes would fit and the allocator's cache doesn't, segments that grow may help at no cost."""
        question, settings = self._question, proof.candidate.settings
        may_expand = EXPANDABLE in question.allowed and question.target.kind is Kind.CUDA
        usable = question.usable_bytes
        if not may_expand or not proof.estimate.allocated_peak_bytes <= usable < proof.estimate.reserved_peak_bytes:
            return proof
        expanded = replace(settings, expandable_segments=True)
        other = _Proof(replace(proof.candidate, settings=expanded), *question.estimator.with_settings(expanded))
        return other if other.estimate.reserved_peak_bytes < proof.estimate.reserved_peak_bytes else proof

    def _fastest_timed(self, best: _Proof, search: CandidateSearch) -> _Proof:
        """Of the plan and those that are computed to take about as long, the one that is fastest when really run."""
        question = self._question
        assert question.time_plans is not None
        if best.candidate.settings.compile:
            # Compiling it for real may take minutes.
            return best
        left = question.patience.left(_RACE_SECONDS)
        # A race of steps that take too long to be run twice tells nothing.
        most = min(_NUM_CONTENDERS, int(left / (_FEWEST_TURNS * max(1e-9, best.candidate.seconds))))
        if most < 2:
            return best
        racing = [best]
        for candidate in search.contenders(question.usable_bytes, _CLOSE * best.candidate.seconds):
            if len(racing) >= most or question.patience.is_over:
                break
            # The first of those with equal passes has the fastest update.
            if not candidate.settings.compile and all(
                candidate.settings.of_passes != known.candidate.settings.of_passes for known in racing
            ):
                proof = self._prove(candidate, search)
                if proof is not None and self._is_kept(proof):
                    racing.append(proof)
        with doing(f"timing real steps of {len(racing)} plans against each other, up to {left:.0f} s"):
            times = question.time_plans([proof.candidate.settings for proof in racing], left)
        timed = [
            (proof, replace(proof.candidate, seconds=passes + question.update_seconds(proof.candidate)))
            for proof, passes in zip(racing, times, strict=False)
            if passes is not None
        ]
        if not timed:
            return best
        least = min(candidate.seconds for _, candidate in timed)
        # Times of equal passes differ by as much from turn to turn.
        proof, candidate = min(
            (pair for pair in timed if pair[1].seconds <= least * _AS_FAST),
            key=lambda pair: (pair[1].settings.of_passes.num_changed, pair[1].seconds),
        )
        self._timed_over_computed = candidate.seconds / max(1e-12, proof.candidate.seconds)
        self._was_timed = True
        return replace(proof, candidate=candidate)

    def _plan(self, proof: _Proof, search: CandidateSearch, before: Estimate) -> Plan:
        question, chosen = self._question, proof.candidate
        settings = question.as_planned(chosen.settings)
        if settings.micro_batches > 1 and question.batch_size:
            settings = replace(settings, micro_batch_size=-(-question.batch_size // settings.micro_batches))
        elif settings.weighting.kind != "given":
            settings = replace(settings, weighting=Weighting())
        lacking = [note for note in proof.estimate.notes if note.code == LACKS_PRECISION and note not in before.notes]
        measured_after = self._was_timed or (question.is_measured and chosen.settings == search.plain.settings)

        def seconds(value: float, is_measured: bool) -> Seconds:
            computed = search.seconds_origin
            return Seconds(value, Origin.MEASURED if is_measured else computed) if computed else Seconds(None)

        return Plan(
            subject=before.subject,
            device=question.target,
            budget_bytes=question.budget_bytes,
            batch_size=question.batch_size,
            settings=settings,
            moves=self._moves(proof, search, before),
            before=Footprint.of(before),
            after=Footprint.of(proof.estimate, proof.host_bytes, proof.origin),
            # Beside a measured time goes one on the same scale.
            seconds_before=seconds(
                search.plain.seconds * self._timed_over_computed, question.is_measured and not self._was_timed
            ),
            seconds_after=seconds(chosen.seconds, measured_after),
            front=self._front(proof, search, settings),
            refused=tuple(question.refused),
            notes=(*before.notes, *lacking, *question.notes, *question.notes_on(chosen.settings)),
            planned_in_seconds=time.perf_counter() - self._started,
            framework=question.framework,
            fit_probability=proof.estimate.fit_probability,
            estimate_before=before,
            estimate_after=proof.estimate,
        )

    def _moves(self, proof: _Proof, search: CandidateSearch, before: Estimate) -> tuple[PlannedMove, ...]:
        question, chosen = self._question, proof.candidate
        moves = []
        for move in used_moves(
            chosen.settings,
            batch_size=question.batch_size,
            approximate=question.approximate,
            dropout=question.dropout,
            plain=question.plain,
        ):
            without = search.evaluate(move.without)
            saves, origin = self._saved(move.name, proof, without, search, before)
            known = search.seconds_origin
            costs = chosen.seconds - without.seconds * self._timed_over_computed if known else None
            moves.append(
                PlannedMove(
                    move.name, move.title, move.keeps, saves, origin, costs, known or Origin.ASSUMED, move.caveat
                )
            )
        return tuple(sorted(moves, key=lambda move: -move.saves_bytes))

    def _saved(
        self, name: str, proof: _Proof, without: Candidate, search: CandidateSearch, before: Estimate
    ) -> tuple[int, Origin]:
        """(bytes that a move saves, how that is known): by a trace without it, where there is one or it is quick."""
        question, settings = self._question, without.settings
        known = self._proofs.get(settings)
        if settings == question.plain:
            return before.peak_bytes - proof.estimate.peak_bytes, proof.origin
        if known is not None and known.is_whole and proof.is_whole:
            return known.estimate.peak_bytes - proof.estimate.peak_bytes, Origin.SIMULATED
        if proof.estimate.seconds < question.quick_seconds:
            try:
                estimate = question.estimator.with_settings(settings)[0]
                return estimate.peak_bytes - proof.estimate.peak_bytes, Origin.SIMULATED
            except (StepFailed, BadInput, MissingDependency):
                # Without this move the others can't be run.
                pass
        difference = without.computed_bytes - proof.candidate.computed_bytes
        # A replay of the same events tells as much as a run.
        replayed = search.computes_peaks and name in (EXPANDABLE, SET_TO_NONE)
        return round(difference * self._scale(proof, search)), Origin.SIMULATED if replayed else Origin.ASSUMED

    @staticmethod
    def _scale(proof: _Proof, search: CandidateSearch) -> float:
        """What the allocator made of computed bytes."""
        if search.computes_peaks:
            return 1.0
        return proof.estimate.reserved_peak_bytes / max(1.0, proof.candidate.computed_bytes)

    def _front(self, proof: _Proof, search: CandidateSearch, settings: Settings) -> tuple[Point, ...]:
        """Computed points, on the scale of what the device must provide, and the proven one."""
        question, chosen, scale = self._question, proof.candidate, self._scale(proof, search)
        words = label(chosen.settings, question.plain)
        points = [(chosen, Point(proof.estimate.peak_bytes, None, words, settings, proof.is_whole))]
        shown = question.as_planned(chosen.settings)
        for candidate in search.front():
            other = question.as_planned(candidate.settings)
            if other != shown and candidate.seconds < _MAX_SLOWDOWN * chosen.seconds:
                peak = round(candidate.computed_bytes * scale) + question.context_bytes
                words = label(candidate.settings, question.plain)
                points.append((candidate, Point(peak, None, words, other, search.is_traced(candidate.settings))))
        kept = undominated(
            points, lambda pair: (pair[1].peak_bytes, pair[0].seconds), keep=lambda pair: pair[0] is chosen
        )
        return tuple(
            replace(point, seconds=candidate.seconds if search.seconds_origin else None) for candidate, point in kept
        )

    def _check_fixed_cost(self, before: Estimate) -> None:
        """Refuses a budget that not even the weights fit into."""
        question, context = self._question, self._question.context_bytes
        weights = sum(before.state_bytes.get(str(name), 0) for name in (Category.PARAMETER, Category.BUFFER))
        may_be_less = not weights or question.num_devices > 1 or QLORA in question.allowed
        if may_be_less or weights + context <= question.budget_bytes:
            return
        taken = f" and the CUDA context {format_size(context)}" if context else ""
        larger, name = self._larger(before.peak_bytes)
        processor = ', or device="cpu" to plan for the processor' if context else ""
        raise PlanNotFound(
            f"a budget of {format_size(question.budget_bytes)} is below the fixed cost of {before.subject}: its "
            f"weights take {format_size(weights)}{taken}.\nGive {larger}{processor}.",
            device_name=name,
        )

    def _larger(self, needed_bytes: int) -> tuple[str, str]:
        """(what would do, in words; name of the cheapest device, or "")."""
        from memfit.catalogue.prices import cheapest_device

        target, found = self._question.target, cheapest_device(needed_bytes)
        words = name = ""
        if found is not None:
            device, price = found
            rate = f", {price.usd_per_hour:.2f} USD an hour on AWS ({price.instance}, {price.date})" if price else ""
            name = device.name
            words = f" such as {name} ({format_size(device.usable_bytes or 0)}{rate})"
        if target.kind is Kind.HOST:
            return "a larger budget", name
        if name == target.name:
            return f"a larger budget: {target.name} has more", name
        return f"a larger budget or device{words}", name

    def _not_found(self, least: _Proof | None, search: CandidateSearch, before: Estimate) -> PlanNotFound:
        question = self._question
        budget = format_size(question.budget_bytes)
        if least is None:
            reason = next((one.reason for one in reversed(question.refused) if one.name == "proof"), "")
            return PlanNotFound(
                f"no plan fits `{before.subject}` into {budget}, and the smallest could not be traced: {reason}"
            )
        smallest = self._plan(least, search, before)
        needs = smallest.after.peak_bytes
        known = f"{question.reserve:.0%} of a budget is kept free" if question.reserve else least.origin.value
        lines = [f"no plan fits `{before.subject}` into {budget}; the smallest needs {format_size(needs)} ({known})."]
        lines += [f"  {name:<44}{format_size(size):>10}" for name, size in smallest.after.by_category.items()]
        lines.append(f"  with: {label(least.candidate.settings, question.plain)}")
        refused = [f"    {one.name}: {one.reason}" for one in dict.fromkeys(question.refused)]
        if refused:
            more = [f"    and {len(refused) - _NUM_REFUSED} more"] if len(refused) > _NUM_REFUSED else []
            lines += ["  not considered:", *refused[:_NUM_REFUSED], *more]
        hints = [f"{one.allowed_by} ({one.name})" for one in question.refused if one.allowed_by]
        hints += [name for name in question.hinted if name not in question.allowed]
        others = f"to allow {', '.join(hints)} as well, or " if hints else ""
        larger, name = self._larger(needs)
        lines.append(f"Try {others}{larger}.")
        return PlanNotFound("\n".join(lines), smallest, name)
