"""The search for steps that are slow to trace: graphs and compiled programs, where one answer takes seconds.

What is known at first is one trace of the plain step, the size of its state, and what each recomputed part would spare.
Everything else is computed from that, roughly: what grows with the batch shrinks with its parts, what is recomputed
isn't kept. The fastest candidate that is computed to fit is then traced for real; what the trace says corrects the
computation for its kind of candidates, and the next one is chosen, until nothing faster is left to prove.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import product

from memfit.core.device import Kind, Origin
from memfit.core.estimate import Estimate
from memfit.core.plan import Refusal
from memfit.core.progress import doing
from memfit.core.settings import Settings
from memfit.core.step_facts import StepFacts, StepPart
from memfit.core.timeline import Category
from memfit.planner.candidate import Candidate, CandidateSearch, possible_parts
from memfit.planner.driver import Question
from memfit.planner.moves import (
    APPROXIMATE,
    AUTO,
    AUTOCAST,
    CHECKPOINT,
    COMPILE,
    DONATE,
    LORA,
    MICRO_BATCH,
    QLORA,
    WHOLE_COMPILE,
    autocast_of,
)

# Of the forward pass: the backward pass computes two products where it computes one.
_PASSES = 3.0
# Part of a step's time that every further pass costs where nobody measured it.
_CALL_SHARE = 0.01
# Amounts of recomputation that are considered, and steps in which bytes are counted to choose its parts.
_NUM_LEVELS = 10
_NUM_CELLS = 400
_LORA_RANK = 16
# What grows with the batch, and time, in 16 bits, before a trace tells (assumed).
_NARROW_MEMORY = 0.6
_NARROW_SPEED = {Kind.CUDA: 0.6, Kind.HOST: 1.1}
# Compiled as a whole, fewer intermediate results are there; the time is taken to be about the same.
_WHOLE_MEMORY, _WHOLE_SPEED = 0.85, 1.02
# Adapters: no gradients of the layers under them.
_ADAPTED_SPEED = 0.85
# Part of a GPU's rate that steps reach (assumed).
_REACHED = 0.4


@dataclass(frozen=True, slots=True)
class TracedVariant:
    """A way to run the step that micro-batches and recomputation are added to.

    Args:
        memory_factor: what grows with the batch, over that of the plain step (assumed until traced).
        speed_factor: its time over that of the plain step (assumed).
        fixed_bytes: that don't grow with the batch.
        gradient_bytes: what gradients of micro-batches add up in.
    """

    settings: Settings
    memory_factor: float
    speed_factor: float
    fixed_bytes: float
    gradient_bytes: float


@dataclass(frozen=True, slots=True)
class ForwardSpeed:
    """The time of the forward pass of one sample, and of any forward pass, however small it is."""

    sample_seconds: float
    call_seconds: float


@dataclass(slots=True)
class TracedSearch(CandidateSearch):
    """Candidates for one step, and what traces have said of some.

    Args:
        variants: ways to run the step; the plain one first.
        peak_bytes: of the plain step, traced.
        batch_size: samples of an update; None where it can't be split.
        parts: that can be computed again, in order of execution.
        total_work: of the whole forward pass, in the unit of the parts; 0: that of all parts.
        speed: of the plain step; None where nothing is known of the device.
        loop_factor: time of a sample in the loop over micro-batches, over that in a whole batch.
    """

    variants: tuple[TracedVariant, ...]
    peak_bytes: float
    batch_size: int | None
    parts: tuple[StepPart, ...] = ()
    total_work: float = 0.0
    speed: ForwardSpeed | None = None
    may_split: bool = True
    may_recompute: bool = True
    loop_factor: float = 1.0
    _traced: dict[Settings, float] = field(default_factory=dict)
    _learned: dict[tuple[Settings, bool, bool], list[tuple[float, float]]] = field(default_factory=dict)
    _excluded: set[Settings] = field(default_factory=set)
    _menu: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        self.seconds_origin = None if self.speed is None else Origin.ASSUMED
        self._menu = ((), *levels(self.parts)) if self.may_recompute else ((),)
        # Where another precision is wanted in any case, the trace of the plain step isn't one of a candidate.
        if self.variants[0].memory_factor == 1.0:
            self.learn(self.plain, self.peak_bytes)

    @property
    def plain(self) -> Candidate:
        """The step as it is."""
        return self.evaluate(self.variants[0].settings)

    def candidates(self) -> list[Candidate]:
        """All, whether they fit or not."""
        counts = possible_parts(self.batch_size) if self.may_split else (1,)
        choices: list[Settings] = []
        for variant, count, checkpoint in product(self.variants, counts, self._menu):
            size = 0 if count == 1 or self.batch_size is None else -(-self.batch_size // count)
            settings = replace(variant.settings, micro_batches=count, micro_batch_size=size, checkpoint=checkpoint)
            choices.append(settings)
        return [self.evaluate(settings) for settings in choices if settings not in self._excluded]

    def best(self, usable_bytes: float) -> Candidate | None:
        """The fastest that is computed, or known, to fit; of equally fast ones the one that changes least."""
        fitting = [one for one in self.candidates() if one.computed_bytes <= usable_bytes]
        return min(fitting, key=lambda one: (one.seconds, num_moves(one.settings), one.computed_bytes), default=None)

    def front(self) -> list[Candidate]:
        """All candidates."""
        return self.candidates()

    def smallest(self, count: int = 1) -> list[Candidate]:
        """Those that are computed to need least memory, traced ones left out."""
        rest = [one for one in self.candidates() if one.settings not in self._traced]
        return sorted(rest, key=lambda one: (one.computed_bytes, one.seconds))[:count]

    def learn(self, candidate: Candidate, peak_bytes: float) -> None:
        """A trace says what a candidate needs."""
        settings = candidate.settings
        if settings in self._traced:
            return
        self._traced[settings] = peak_bytes
        variant = self._variant_of(settings)
        known = self._learned.setdefault(self._kind(settings, variant), [])
        known.append((self._growing(settings, variant), peak_bytes - self._standing(settings, variant)))
        known.sort()

    def exclude(self, candidate: Candidate) -> None:
        """A candidate can't be run."""
        self._excluded.add(candidate.settings)

    def is_traced(self, settings: Settings) -> bool:
        """Whether a trace said what these settings need."""
        return settings in self._traced

    def evaluate(self, settings: Settings) -> Candidate:
        """What is computed, or known, for settings."""
        variant = self._variant_of(settings)
        peak = self._traced.get(settings)
        if peak is None:
            growing = self._corrected(self._kind(settings, variant), self._growing(settings, variant))
            # Whatever else is small, gradients are there once.
            peak = max(self._standing(settings, variant) + growing, variant.fixed_bytes + variant.gradient_bytes)
        return Candidate(settings, peak, self._seconds(settings, variant), variant)

    def _standing(self, settings: Settings, variant: TracedVariant) -> float:
        """What doesn't depend on the size of a part."""
        return variant.fixed_bytes + (variant.gradient_bytes if settings.micro_batches > 1 else 0)

    def _growing(self, settings: Settings, variant: TracedVariant) -> float:
        """What grows with the size of a part, before any correction."""
        plain = self.variants[0]
        whole = max(0.0, self.peak_bytes - plain.fixed_bytes)
        samples = self.batch_size or 1
        recomputed = [part.kept_bytes for part in self.parts if part.path in set(settings.checkpoint)]
        # One of them at a time is there again, in the backward pass.
        spared = samples * (sum(recomputed) - max(recomputed, default=0.0))
        share = -(-samples // settings.micro_batches) / samples
        return max(0.02 * whole, whole - spared) * share * variant.memory_factor

    def _corrected(self, kind: tuple[Settings, bool, bool], growing: float) -> float:
        """What traces of the same kind of candidates make of a computed size."""
        known = self._learned.get(kind) or self._learned.get((kind[0], False, False)) or []
        points = [point for point in known if point[0] > 0]
        if not points:
            return growing
        below = [point for point in points if point[0] <= growing]
        above = [point for point in points if point[0] > growing]
        first = below[-1] if below else points[0]
        second = above[0] if below and above else points[-1] if first is points[0] else points[-2]
        if len(points) == 1 or first[0] == second[0]:
            return growing * first[1] / first[0]
        slope = (second[1] - first[1]) / (second[0] - first[0])
        return max(0.0, first[1] + slope * (growing - first[0]))

    def _seconds(self, settings: Settings, variant: TracedVariant) -> float:
        samples = self.batch_size or 1
        speed = self.speed or ForwardSpeed(1.0 / samples, _CALL_SHARE)
        total = self.total_work or sum(part.work for part in self.parts)
        again = sum(part.work for part in self.parts if part.path in set(settings.checkpoint))
        passes = _PASSES + (again / total if total else len(settings.checkpoint) / max(1, len(self.parts)))
        slower = variant.speed_factor * (self.loop_factor if settings.micro_batches > 1 else 1.0)
        pass_seconds = samples * speed.sample_seconds * slower + settings.micro_batches * speed.call_seconds
        return passes * pass_seconds

    def _variant_of(self, settings: Settings) -> TracedVariant:
        own = replace(settings, micro_batches=1, micro_batch_size=0, checkpoint=())
        return next((one for one in self.variants if one.settings == own), self.variants[0])

    def _kind(self, settings: Settings, variant: TracedVariant) -> tuple[Settings, bool, bool]:
        return variant.settings, settings.micro_batches > 1, bool(settings.checkpoint)


def num_moves(settings: Settings) -> int:
    """How much settings change, for a choice between equals."""
    whole = settings.jit_compile is not None
    changed = (settings.precision, settings.lora_rank, settings.quantized_base, whole)
    num = (settings.micro_batches > 1) + len(settings.checkpoint) + sum(map(bool, changed))
    # Donation costs nothing: it goes with whatever else is changed.
    return num or int(settings.donate)


def levels(parts: Iterable[StepPart]) -> list[tuple[str, ...]]:
    """Sets of parts to recompute, from little to all: for each amount of memory the one that costs least."""
    known = [part for part in parts if part.kept_bytes > 0]
    if not known:
        return []
    cell = sum(part.kept_bytes for part in known) / _NUM_CELLS
    sizes = [max(1, int(part.kept_bytes / cell)) for part in known]
    total = sum(sizes)
    # Work of nothing known is still work.
    least = max(part.work for part in known) * 1e-6 + 1e-12
    # For each number of cells, the parts that spare at least so many at the least work.
    best: list[tuple[float, tuple[str, ...]]] = [(float("inf") if cells else 0.0, ()) for cells in range(total + 1)]
    for part, size in zip(known, sizes, strict=True):
        for cells in range(total, 0, -1):
            work, paths = best[max(0, cells - size)]
            if work + part.work + least < best[cells][0]:
                best[cells] = (work + part.work + least, (*paths, part.path))
    chosen = [best[round(level / _NUM_LEVELS * total)][1] for level in range(1, _NUM_LEVELS + 1)]
    every = tuple(part.path for part in known)
    return list(dict.fromkeys(paths for paths in (*chosen, every) if paths))


def open_traced_search(
    facts: StepFacts, question: Question, precision: str, measure: bool | None, before: Estimate
) -> TracedSearch:
    """Completes a question, from what an adapter found out and the estimate of the plain step; gives its candidates.

    With `measure`, short forward passes are timed on the device in hand; None: if that can be done.
    """
    allowed, reason, allowed_by = question.allowed, facts.not_split, ""
    if facts.approximate and APPROXIMATE not in allowed:
        reason, allowed_by = f"{facts.approximate}; allow {APPROXIMATE!r} if that is fine", APPROXIMATE
    if reason and MICRO_BATCH in allowed:
        question.refused.append(Refusal(MICRO_BATCH, reason, allowed_by))
    if COMPILE in allowed:
        reason = "torch.compile is for models of PyTorch; JAX compiles steps as they are, Keras with jit-compile"
        question.refused.append(Refusal(COMPILE, reason))
    if facts.not_recomputed and CHECKPOINT in allowed:
        question.refused.append(Refusal(CHECKPOINT, facts.not_recomputed))
    question.approximate, question.dropout = facts.approximate, facts.draws_random_numbers
    question.framework = facts.framework
    question.hinted += tuple(name for name in (LORA,) if name in facts.moves)
    return TracedSearch(
        _variants(facts, question, before, narrow=precision == AUTO),
        before.reserved_peak_bytes,
        question.batch_size,
        facts.parts,
        facts.work,
        _speed(facts, question, measure),
        may_split=MICRO_BATCH in allowed and not reason,
        may_recompute=CHECKPOINT in allowed and bool(facts.parts),
        loop_factor=facts.loop_factor,
    )


def _variants(facts: StepFacts, question: Question, before: Estimate, *, narrow: bool) -> tuple[TracedVariant, ...]:
    usable, plain = question.allowed & facts.moves, question.plain
    state = {name: before.state_bytes.get(str(name), 0) for name in Category}
    weights = state[Category.PARAMETER] + state[Category.BUFFER]
    batch, gradients = before.batch_bytes, state[Category.GRADIENT]
    held = weights + state[Category.OPTIMIZER_STATE]
    fixed = min((2 if facts.copies_state else 1) * held + batch, before.reserved_peak_bytes)
    variants = [TracedVariant(plain, 1.0, 1.0, fixed, gradients)]
    if DONATE in usable:
        variants.append(TracedVariant(replace(plain, donate=True), 1.0, 1.0, held + batch, gradients))
    if narrow and AUTOCAST in question.allowed and not plain.precision:
        speed, best = _NARROW_SPEED.get(question.target.kind, 1.0), autocast_of(question.target)
        name = best if best in facts.precisions else facts.precisions[0]
        variants += [
            replace(
                way, settings=replace(way.settings, precision=name), memory_factor=_NARROW_MEMORY, speed_factor=speed
            )
            for way in variants
        ]
    if WHOLE_COMPILE in usable:
        whole = replace(plain, jit_compile=True)
        variants.append(TracedVariant(whole, _WHOLE_MEMORY, _WHOLE_SPEED, fixed, gradients))
    if LORA in usable:
        variants.append(TracedVariant(replace(plain, lora_rank=_LORA_RANK), 1.0, _ADAPTED_SPEED, weights + batch, 0))
    if QLORA in usable:
        small = replace(plain, lora_rank=_LORA_RANK, quantized_base=True)
        variants.append(TracedVariant(small, 1.0, 1.0, weights / 4 + batch, 0))
    return tuple(variants)


def _speed(facts: StepFacts, question: Question, measure: bool | None) -> ForwardSpeed | None:
    target = question.target
    if target.kind is Kind.HOST:
        if measure is False or question.patience.is_over:
            return None
        with doing("timing forward passes on this machine"):
            times = facts.time_forward()
        if times is None:
            return None
        question.is_measured = True
        return ForwardSpeed(times[0], max(times[1], facts.call_seconds))
    rate = target.flops.get("float32")
    work = facts.work or sum(part.work for part in facts.parts)
    return ForwardSpeed(work / (rate * _REACHED), facts.call_seconds) if rate and work else None
