"""The space that a plan is searched in: which moves make sense for a step, and profiles of the ways to run it."""

from dataclasses import replace
from itertools import takewhile

from memfit.catalogue import find_device
from memfit.core.adapter import ProfiledStep
from memfit.core.device import Kind, Origin
from memfit.core.errors import BadInput, MissingDependency, StepFailed, UnknownDevice
from memfit.core.estimate import Estimate, Note
from memfit.core.job import AUTOCASTS, Job
from memfit.core.plan import Refusal
from memfit.core.profile import Measurement, Profile
from memfit.core.progress import doing
from memfit.core.settings import Settings, Weighting
from memfit.core.timeline import Category
from memfit.planner import moves
from memfit.planner.candidate import possible_parts
from memfit.planner.driver import Question
from memfit.planner.memory import StepMemory
from memfit.planner.moves import APPROXIMATE, CHECKPOINT, EIGHT_BIT, LORA, MICRO_BATCH, OFFLOAD, QLORA
from memfit.planner.search import ProfiledSearch, Space, Variant, merged, optimizer_ways
from memfit.planner.speed import StepSpeed
from memfit.planner.timeline_moves import unit_of
from memfit.timing import Rates, rates_of

_LORA_RANK = 16
# Traces of chosen settings, at least and at most; fewer for large models, whose traces take longer.
_NUM_PROOFS = (4, 12)
_BLOCKS_PER_PLAN = 40_000
# What timing real passes of one way to compute them may take, about.
_MEASURE_SECONDS = 4.0
_CHUNKS = 16
# Operations and bytes per second of a processor that nobody measured (assumed).
_ASSUMED_HOST = (1e11, 2e10)
# Parts of the repeated blocks, from the input on, that freezing is tried with.
_FROZEN_SHARES = (0.25, 0.5, 0.75)


class ProfiledSpace:
    """Opens the space of plans of a step that is quick to trace, and completes the question about it.

    With `measure`, real steps are timed; None: if that can be done.
    """

    def __init__(
        self, step: ProfiledStep, question: Question, job: Job, precision: str, measure: bool | None = None
    ) -> None:
        self._job = job
        self._question = question
        self._subject = step
        self._target = question.target
        self._allowed = question.allowed
        self._usable_bytes = question.usable_bytes
        self._forced = precision if precision in AUTOCASTS else question.plain.precision
        self._auto = precision == moves.AUTO and self._forced is None
        self._measure = measure
        self._batch_size: int | None = step.batch_size
        self._weighting = Weighting()
        self.refused = question.refused
        self.notes: list[Note] = []
        self.is_timed = False
        """Whether real passes were timed."""

    def search(self, before: Estimate) -> ProfiledSearch:
        """The candidates, from the estimate of the step as it is."""
        question = self._question
        usable = question.usable_bytes
        space = self.space(fits=bool(before.fits) and before.reserved_peak_bytes <= usable)
        search = ProfiledSearch(space, self._question.plain)
        # What the allocator takes beyond the live bytes is first expected to be as for the plain step.
        search.expected_beyond_bytes = usable * max(
            0.0, 1 - search.plain.computed_bytes / max(1, before.reserved_peak_bytes)
        )
        least, most = _NUM_PROOFS
        question.num_proofs = min(most, max(least, _BLOCKS_PER_PLAN // max(1, len(before.timeline.blocks))))
        question.notes = self.notes
        question.dropout = "dropout" in (space.plain or space.variants[0]).memory.profile.features
        question.is_measured = (space.plain or space.variants[0]).speed.is_measured(self._batch_size)
        able = {
            MICRO_BATCH: (self._batch_size or 0) > 1,
            EIGHT_BIT: bool(before.state_bytes.get(str(Category.OPTIMIZER_STATE))),
        }
        question.hinted = (CHECKPOINT, *(name for name, can in able.items() if can), LORA, moves.COMPILE)
        if self.is_timed:
            question.time_plans = self._subject.time_passes
            question.update_seconds = lambda candidate: candidate.variant.speed.update(candidate.settings)
        return search

    def space(self, *, fits: bool = False) -> Space:
        """What may be chosen; where the step `fits` as it is, only what makes it faster."""
        rates = self._rates()
        plain = self._variant(Settings(precision=self._question.plain.precision), rates)
        if fits:
            self._allowed -= {MICRO_BATCH, CHECKPOINT, OFFLOAD, moves.STEP_IN_BACKWARD, EIGHT_BIT, moves.HOST_OPTIMIZER}
            self._allowed -= {moves.CHUNKED_LOSS, LORA, QLORA, moves.FREEZE}
        variants = self._variants(plain, rates)
        profile = plain.memory.profile
        on_host = self._target.kind is Kind.HOST
        self._remark(profile)
        return Space(
            variants,
            optimizer_ways(
                profile.features,
                self._allowed,
                on_host=on_host,
                has_optimizer=self._job.optimizer is not None,
                sharded=self._question.num_devices > 1,
            ),
            self._parts(profile),
            self._batch_size,
            recompute=CHECKPOINT in self._allowed,
            offload=OFFLOAD in self._allowed and not on_host,
            base=replace(
                self._question.plain,
                weighting=self._weighting,
                num_devices=self._question.num_devices,
                set_to_none=self._question.plain.set_to_none or moves.SET_TO_NONE in self._allowed,
            ),
            plain=plain,
            approximate=self._question.approximate,
        )

    def _variants(self, plain: Variant, rates: Rates) -> tuple[Variant, ...]:
        """Ways to compute the forward pass, the one with the fewest changes first."""
        given = Settings(precision=self._forced)
        first = plain if given == plain.settings else self._variant(given, rates, plain.speed)
        found = [first]
        for way in self._ways(first.memory.profile):
            try:
                found.append(self._variant(way, rates, plain.speed))
            except (StepFailed, BadInput, MissingDependency) as error:
                name = ", ".join(move.name for move in moves.used_moves(way, plain=self._question.plain))
                self.refused.append(Refusal(name, str(error).split("\n")[0]))
        return tuple(found)

    def _variant(self, changes: Settings, rates: Rates, plain: StepSpeed | None = None) -> Variant:
        from memfit.planner.search import Variant

        with doing("profiling the step"):
            profile = self._subject.profile(self._batch_size, changes)
        memory, larger = StepMemory(profile), None
        size = self._batch_size or 0
        # A library may take another algorithm, with a workspace, at another size: then the next one is tried.
        for other in self._other_sizes(size, changes, memory):
            try:
                second = self._subject.profile(other, changes)
            except (StepFailed, BadInput):
                continue
            if StepMemory(profile, second).scales:
                memory, larger = StepMemory(profile, second), second
                break
        # Ways that differ in nothing but the width of numbers are timed.
        is_timed = changes == Settings(precision=changes.precision)
        measured, updates = self._measurements(memory, changes.precision) if is_timed else ((), {})
        speed = StepSpeed(profile, larger, rates, measured, updates, None if measured else plain)
        return Variant(changes, memory, speed)

    def _other_sizes(self, size: int, changes: Settings, memory: StepMemory) -> tuple[int, ...]:
        """Sizes that may tell how the step grows, the best first."""
        if changes.compile or self._subject.is_compiled:
            # Compiling again takes as long: only where micro-batches may be needed.
            may_split = MICRO_BATCH in self._allowed and memory.peak(Settings(), size) > self._usable_bytes
            return (size // 2,) if may_split and size >= 4 else ()
        return (2 * size, *((size // 2,) if size >= 4 else ()), size + 1) if size > 1 else ()

    def _ways(self, profile: Profile) -> list[Settings]:
        """Changes to how the forward pass is computed that make sense and are allowed."""
        allowed, features = self._allowed, profile.features
        ways = [Settings(precision=self._forced)]
        in_half = "autocast" in features or self._job.precision in ("fp16", "bf16")
        if self._auto and not in_half and moves.AUTOCAST in allowed:
            ways.append(Settings(precision=moves.autocast_of(self._target)))
        # Of these alone, since each compiled way takes traces of its own; Inductor chooses layouts by itself.
        compiled = [replace(ways[-1], compile=True)] if self._may_compile() else []
        if moves.CHANNELS_LAST in allowed and {"convolution", "channels-first"} <= features:
            # Tensor cores compute 16-bit convolutions in this format; in others it changes little.
            ways += [
                replace(way, channels_last=True)
                for way in ways
                if (way.precision or in_half) and self._target.kind is Kind.CUDA
            ]
        if moves.CHUNKED_LOSS in allowed and "cross-entropy" in features:
            ways += [merged(way, Settings(cross_entropy_chunks=_CHUNKS)) for way in ways]
        trained: list[Settings] = []
        if LORA in allowed:
            trained.append(Settings(lora_rank=_LORA_RANK))
        if QLORA in allowed:
            trained.append(Settings(lora_rank=_LORA_RANK, quantized_base=True))
        if moves.FREEZE in allowed:
            trained += [Settings(freeze=paths) for paths in frozen_parts(profile)]
        ways += [merged(way, other) for other in trained for way in ways]
        return [*ways[1:], *compiled]

    def _may_compile(self) -> bool:
        if moves.COMPILE not in self._allowed:
            return False
        reason = ""
        if self._subject.is_compiled:
            reason = "the step is compiled already"
        elif self._question.num_devices > 1:
            reason = "sharded modules are planned uncompiled"
        if reason:
            self.refused.append(Refusal(moves.COMPILE, reason))
        return not reason

    def _parts(self, profile: Profile) -> tuple[int, ...]:
        """Numbers of micro-batches that may be tried."""
        name = MICRO_BATCH
        if self._subject.gives_weight:
            self._weighting = Weighting("given")
        if name not in self._allowed:
            return (1,)
        if self._batch_size is None:
            self.refused.append(Refusal(name, self._subject.why_not_split()))
            return (1,)
        if self._batch_size == 1:
            self.refused.append(Refusal(name, "the batch has one sample"))
            return (1,)
        reasons = []
        if "batch-norm" in profile.features:
            reasons.append("batch norm would take its statistics from each micro-batch, and update them once for each")
        if "changing-buffers" in profile.features:
            reasons.append("the forward pass changes buffers of the model, and would do so once for each micro-batch")
        if "sparse-gradients" in profile.features:
            reason = "sparse gradients of an embedding grow with each micro-batch instead of being added in place"
            self.refused.append(Refusal(name, f"{reason}. Use nn.Embedding(sparse=False)"))
            return (1,)
        if reasons and APPROXIMATE not in self._allowed:
            self._refuse_approximate("; ".join(reasons))
            return (1,)
        found = self._subject.find_weighting()
        if found.weighting is None:
            reasons.append(found.reason)
        else:
            self._weighting = found.weighting
            if found.origin is Origin.ASSUMED:
                self.notes.append(Note("loss-assumed", found.reason))
        if reasons:
            self._question.approximate = "; ".join(reasons)
            if APPROXIMATE not in self._allowed:
                self._refuse_approximate(self._question.approximate)
                self._question.approximate = ""
                return (1,)
        # Statistics of a single sample are no statistics: batch norm refuses it.
        least = 2 if "batch-norm" in profile.features else 1
        size = self._batch_size
        return tuple(parts for parts in possible_parts(size) if size // parts >= least)

    def _refuse_approximate(self, why: str) -> None:
        reason = f"{why}; allow {APPROXIMATE!r} to use them anyway"
        self.refused.append(Refusal(MICRO_BATCH, reason, APPROXIMATE))

    def _rates(self) -> Rates:
        """Speed of the device: of the catalogue, or measured where it is this machine's processor."""
        rates = rates_of(self._target)
        if self._target.kind is Kind.HOST and self._target.name == "cpu":
            flops, bandwidth = _ASSUMED_HOST if self._measure is False else self._subject.host_rates()
            return replace(rates, flops={"float32": flops}, bandwidth=bandwidth, reference="")
        if rates.reference:
            text = f"the speed of {self._target.title} is unknown; that of {rates.reference} is assumed"
            self.notes.append(Note("speed-assumed", text))
        return rates

    def _measurements(
        self, memory: StepMemory, precision: str | None
    ) -> tuple[tuple[Measurement, ...], dict[str, float]]:
        """Short real passes, where the device is the one in hand and the model has values."""
        if self._measure is False:
            return (), {}
        place = self._subject.place()
        try:
            is_in_hand = bool(place) and find_device(place).name == self._target.name
        except UnknownDevice:
            is_in_hand = False
        if not is_in_hand:
            if self._measure:
                raise BadInput(
                    f"steps can't be measured: {self._target.title} isn't this machine's device, or the model or batch "
                    "has no values. Leave out measure=True."
                )
            return (), {}
        left = self._question.patience.left(_MEASURE_SECONDS)
        if not left:
            return (), {}
        # Micro-batch sizes of which a pass stays within the budget, the extremes first: time may not suffice for all.
        size = min(self._batch_size or 1, self._subject.num_samples or 1)
        sizes = sorted({max(1, size // part) for part in (1, 2, 4, 8)}) if memory.scales else [size]
        if memory.scales:
            fitting = [one for one in sizes if memory.peak(Settings(), one) <= (self._target.usable_bytes or 0)]
            sizes = [*fitting[:1], *fitting[:0:-1]] or sizes[:1]
        with doing(f"timing real passes of {', '.join(map(str, sorted(sizes)))} samples on this machine"):
            measured = self._subject.measure(sizes, precision=precision, limit_seconds=left)
        if measured and not any(note.code == "calibrated" for note in self.notes):
            shown = ", ".join(str(one.batch_size) for one in measured)
            text = f"times are computed from real passes of {shown} samples, timed on this machine"
            self.notes.append(Note("calibrated", text))
            self.is_timed = True
        return measured, self._subject.measure_updates()

    def _remark(self, profile: Profile) -> None:
        """Notes on what is special about the parameters, refusals of modules that can't be computed again."""
        frozen, total = profile.num_parameters - profile.num_trainable, profile.num_parameters
        texts = {
            "growing-state": "LBFGS keeps pairs of gradients and steps, up to history_size; those of two steps are "
            "counted",
            "shared-parameters": "modules share parameters: each has one gradient and one state, as in the plain step",
            "frozen-parameters": f"{frozen:,} of {total:,} parameters are frozen: they have no gradient and no state, "
            "and stay so",
        }
        known = profile.features | ({"growing-state"} if profile.optimizer == "LBFGS" else set())
        self.notes += [Note(code, text) for code, text in texts.items() if code in known]
        refused = [unit for unit in profile.units if unit.refused]
        for unit in refused:
            if not any(unit.path.startswith(f"{other.path}.") for other in refused):
                self.refused.append(Refusal(CHECKPOINT, f"{unit.path} ({unit.kind}): {unit.refused}"))


def frozen_parts(profile: Profile) -> list[tuple[str, ...]]:
    """Modules to freeze: what comes before the repeated blocks, and a growing part of these."""
    trained = {block.module for block in profile.timeline.blocks if block.category is Category.PARAMETER}
    # In the order in which they compute.
    paths = [path for path in dict.fromkeys(work.module for work in profile.work) if path in trained]
    blocks = list(dict.fromkeys(unit for unit in (unit_of(path, 1) for path in paths) if unit))
    before = list(takewhile(lambda path: unit_of(path, 1) is None, paths))
    if len(blocks) < 2:
        return []
    return [(*before, *blocks[: max(1, round(share * len(blocks)))]) for share in _FROZEN_SHARES]
