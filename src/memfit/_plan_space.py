"""The space that a plan is searched in: which moves make sense for a step, and profiles of the ways to run it."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memfit._plan_target import Patience, autocast_of, reference
from memfit.catalogue import find_device
from memfit.core.device import Device, Kind, Origin
from memfit.core.errors import BadInput, MissingDependency, StepFailed, UnknownDevice
from memfit.core.estimate import Note
from memfit.core.job import AUTOCASTS, Job
from memfit.core.plan import Refusal
from memfit.core.progress import doing
from memfit.core.settings import Settings, Weighting
from memfit.core.timeline import Category
from memfit.planner.moves import (
    APPROXIMATE,
    AUTOCAST,
    CHANNELS_LAST,
    CHECKPOINT,
    CHUNKED_LOSS,
    EIGHT_BIT,
    FREEZE,
    HOST_OPTIMIZER,
    LORA,
    MICRO_BATCH,
    OFFLOAD,
    QLORA,
    SET_TO_NONE,
    STEP_IN_BACKWARD,
    used_moves,
)

if TYPE_CHECKING:
    from memfit.core.profile import Measurement, Profile
    from memfit.planner.memory import StepMemory
    from memfit.planner.search import Space, Variant
    from memfit.planner.speed import Rates, StepSpeed

_LORA_RANK = 16
# What timing real passes of one way to compute them may take, about.
_MEASURE_SECONDS = 4.0
_CHUNKS = 16
# Operations and bytes per second of a processor that nobody measured (assumed).
_ASSUMED_HOST = (1e11, 2e10)
# Parts of the repeated blocks, from the input on, that freezing is tried with.
_FROZEN_SHARES = (0.25, 0.5, 0.75)


class Opening:
    """Opens the space of plans of a job.

    Args:
        job: what to plan.
        subject: answers what a plan asks of the job.
        target: the device, with the budget as its capacity.
        allowed: names of the moves that may be used.
        count: devices to shard over.
        auto: whether autocast may be chosen.
        forced: autocast that must be used, or None.
        measure: whether to time real steps; None: if it can be done.
        patience: how long that may take.
    """

    def __init__(
        self,
        job: Job,
        subject: Any,
        target: Device,
        allowed: frozenset[str],
        count: int,
        *,
        auto: bool,
        forced: str | None,
        measure: bool | None,
        patience: Patience | None = None,
    ) -> None:
        self._job = job
        self._patience = patience or Patience()
        self._subject = subject
        self._target = target
        self._allowed = allowed
        self._count = count
        self._auto = auto and forced is None
        self._forced = forced
        self._measure = measure
        self._batch_size: int | None = subject.batch_size
        self._weighting = Weighting()
        own = job.precision if job.precision in AUTOCASTS else None
        self.plain = Settings(set_to_none=job.set_to_none, precision=own)
        """The step as it is."""
        self.refused: list[Refusal] = []
        self.notes: list[Note] = []
        self.is_timed = False
        """Whether real passes were timed."""
        self.approximate = ""
        """Why micro-batches only approximate the step, or ""."""

    def space(self, *, fits: bool = False) -> "Space":
        """What may be chosen.

        Args:
            fits: whether the step fits as it is: then only what makes it faster is considered.
        """
        from memfit.planner.search import Space, optimizer_choices

        rates = self._rates()
        plain = self._variant(Settings(precision=self.plain.precision), rates)
        if fits:
            self._allowed -= {MICRO_BATCH, CHECKPOINT, OFFLOAD, STEP_IN_BACKWARD, EIGHT_BIT, HOST_OPTIMIZER}
            self._allowed -= {CHUNKED_LOSS, LORA, QLORA, FREEZE}
        variants = self._variants(plain, rates)
        profile = plain.memory.profile
        on_host = self._target.kind is Kind.HOST
        self._remark_on_parameters(profile)
        self._remark_on_units(profile)
        return Space(
            variants,
            optimizer_choices(
                profile.features,
                self._allowed,
                on_host=on_host,
                has_optimizer=self._job.optimizer is not None,
                sharded=self._count > 1,
            ),
            self._parts(profile),
            self._batch_size,
            recompute=CHECKPOINT in self._allowed,
            offload=OFFLOAD in self._allowed and not on_host,
            base=self._common_settings(),
            plain=plain,
            approximate=self.approximate,
        )

    def _common_settings(self) -> Settings:
        settings = replace(self.plain, weighting=self._weighting, num_devices=self._count)
        return replace(settings, set_to_none=True) if SET_TO_NONE in self._allowed else settings

    def _variants(self, plain: "Variant", rates: "Rates") -> "tuple[Variant, ...]":
        """Ways to compute the forward pass, the one with the fewest changes first."""
        given = Settings(precision=self._forced)
        first = plain if given == plain.settings else self._variant(given, rates, plain.speed)
        found = [first]
        for way in self._ways(first.memory.profile):
            try:
                found.append(self._variant(way, rates, plain.speed))
            except (StepFailed, BadInput, MissingDependency) as error:
                name = ", ".join(move.name for move in used_moves(way, batch_size=None, plain=self.plain))
                self.refused.append(Refusal(name, str(error).split("\n")[0]))
        return tuple(found)

    def _variant(self, changes: Settings, rates: "Rates", plain: "StepSpeed | None" = None) -> "Variant":
        from memfit.planner.memory import StepMemory
        from memfit.planner.search import Variant
        from memfit.planner.speed import StepSpeed

        with doing("profiling the step"):
            profile = self._subject.profile(self._batch_size, changes)
        memory, larger = StepMemory(profile), None
        for other in self._other_sizes():
            # A library may take another algorithm, with a workspace, at another size: then the next one is tried.
            second = self._profile(other, changes)
            if second is not None and StepMemory(profile, second).scales:
                memory, larger = StepMemory(profile, second), second
                break
        measured, updates = self._measurements(memory, changes.precision) if _is_timed(changes) else ((), {})
        speed = StepSpeed(profile, larger, rates, measured, updates, None if measured else plain, changes.channels_last)
        return Variant(changes, memory, speed)

    def _ways(self, profile: "Profile") -> list[Settings]:
        """Changes to how the forward pass is computed that make sense and are allowed."""
        from memfit.planner.search import merged

        allowed, features = self._allowed, profile.features
        ways = [Settings(precision=self._forced)]
        in_half = "autocast" in features or self._job.precision in ("fp16", "bf16")
        if self._auto and not in_half and AUTOCAST in allowed:
            ways.append(Settings(precision=autocast_of(self._target)))
        if CHANNELS_LAST in allowed and {"convolution", "channels-first"} <= features:
            # Tensor cores compute 16-bit convolutions in this format; in others it changes little.
            ways += [
                replace(way, channels_last=True)
                for way in ways
                if (way.precision or in_half) and self._target.kind is Kind.CUDA
            ]
        if CHUNKED_LOSS in allowed and "cross-entropy" in features:
            ways += [merged(way, Settings(cross_entropy_chunks=_CHUNKS)) for way in ways]
        trained: list[Settings] = []
        if LORA in allowed:
            trained.append(Settings(lora_rank=_LORA_RANK))
        if QLORA in allowed:
            trained.append(Settings(lora_rank=_LORA_RANK, quantized_base=True))
        if FREEZE in allowed:
            trained += [Settings(freeze=paths) for paths in frozen_parts(profile)]
        ways += [merged(way, other) for other in trained for way in ways]
        return ways[1:]

    def _other_sizes(self) -> tuple[int, ...]:
        """Batch sizes that tell how blocks grow."""
        size = self._batch_size
        if size is None or size < 2:
            return ()
        return (2 * size, *((size // 2,) if size >= 4 else ()), size + 1)

    def _profile(self, batch_size: int, changes: Settings) -> "Profile | None":
        try:
            found: Profile = self._subject.profile(batch_size, changes)
        except (StepFailed, BadInput):
            return None
        return found

    def _parts(self, profile: "Profile") -> tuple[int, ...]:
        """Numbers of micro-batches that may be tried."""
        from memfit.planner.search import possible_parts

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
            self.approximate = "; ".join(reasons)
            if APPROXIMATE not in self._allowed:
                self._refuse_approximate(self.approximate)
                self.approximate = ""
                return (1,)
        # Statistics of a single sample are no statistics: batch norm refuses it.
        least = 2 if "batch-norm" in profile.features else 1
        size = self._batch_size
        return tuple(parts for parts in possible_parts(size) if size // parts >= least)

    def _refuse_approximate(self, why: str) -> None:
        reason = f"{why}; allow {APPROXIMATE!r} to use them anyway"
        self.refused.append(Refusal(MICRO_BATCH, reason, APPROXIMATE))

    def _is_in_hand(self) -> bool:
        """Whether real steps can be timed on the target here."""
        place = self._subject.place()
        try:
            return bool(place) and find_device(place).name == self._target.name
        except UnknownDevice:
            return False

    def _rates(self) -> "Rates":
        """Speed of the device: of the catalogue, or measured where it is this machine's processor."""
        from memfit.planner.speed import rates_of

        rates = rates_of(self._target, reference())
        if self._target.kind is Kind.HOST and self._target.name == "cpu":
            flops, bandwidth = _ASSUMED_HOST if self._measure is False else self._subject.host_rates()
            return replace(rates, flops={"float32": flops}, bandwidth=bandwidth, reference="")
        if rates.reference:
            text = f"the speed of {self._target.title} is unknown; that of {rates.reference} is assumed"
            self.notes.append(Note("speed-assumed", text))
        return rates

    def _measurements(
        self, memory: "StepMemory", precision: str | None
    ) -> "tuple[tuple[Measurement, ...], dict[str, float]]":
        """Short real passes, where the device is the one in hand and the model has values."""
        if self._measure is False:
            return (), {}
        if not self._is_in_hand():
            if self._measure:
                raise BadInput(
                    f"steps can't be measured: {self._target.title} is not the device in hand, or the model or batch "
                    "has no values. Leave out measure=True."
                )
            return (), {}
        left = self._patience.left(_MEASURE_SECONDS)
        if not left:
            return (), {}
        sizes = self._sizes_to_measure(memory)
        with doing(f"timing real passes of {', '.join(map(str, sorted(sizes)))} samples on this machine"):
            measured = self._subject.measure(sizes, precision=precision, limit_seconds=left)
        if measured and not any(note.code == "calibrated" for note in self.notes):
            shown = ", ".join(str(one.batch_size) for one in measured)
            text = f"times are computed from real passes of {shown} samples, timed on this machine"
            self.notes.append(Note("calibrated", text))
            self.is_timed = True
        return measured, self._subject.measure_updates()

    def _sizes_to_measure(self, memory: "StepMemory") -> list[int]:
        """Micro-batch sizes from small to large of which a pass stays within the budget."""
        size = min(self._batch_size or 1, self._subject.num_samples or 1)
        if not memory.scales:
            return [size]
        sizes = sorted({max(1, size // part) for part in (1, 2, 4, 8)})
        fitting = [one for one in sizes if memory.peak(Settings(), one) <= (self._target.usable_bytes or 0)]
        # The extremes first: time may not suffice for all.
        return [*fitting[:1], *fitting[:0:-1]] or sizes[:1]

    def _remark_on_parameters(self, profile: "Profile") -> None:
        if profile.optimizer == "LBFGS":
            text = "LBFGS keeps pairs of gradients and steps, up to history_size; those of two steps are counted"
            self.notes.append(Note("growing-state", text))
        if "shared-parameters" in profile.features:
            text = "modules share parameters: each has one gradient and one state, as in the plain step"
            self.notes.append(Note("shared-parameters", text))
        if "frozen-parameters" in profile.features:
            frozen, total = profile.num_parameters - profile.num_trainable, profile.num_parameters
            text = f"{frozen:,} of {total:,} parameters are frozen: they have no gradient and no state, and stay so"
            self.notes.append(Note("frozen-parameters", text))

    def _remark_on_units(self, profile: "Profile") -> None:
        for unit in profile.units:
            if unit.refused and _is_outermost_refusal(unit, profile.units):
                self.refused.append(Refusal(CHECKPOINT, f"{unit.path} ({unit.kind}): {unit.refused}"))


def _is_timed(changes: Settings) -> bool:
    """Whether real passes of this way are timed: those that differ in nothing but the width of numbers."""
    return changes == Settings(precision=changes.precision)


def _is_outermost_refusal(unit: Any, units: Any) -> bool:
    return not any(other.refused and unit.path.startswith(f"{other.path}.") for other in units)


def frozen_parts(profile: "Profile") -> list[tuple[str, ...]]:
    """Modules to freeze: what comes before the repeated blocks, and a growing part of these."""
    from memfit.planner.structure import unit_of

    trained = {block.module for block in profile.timeline.blocks if block.category is Category.PARAMETER}
    blocks = list(dict.fromkeys(unit for unit in (unit_of(path, 1) for path in _in_order(profile, trained)) if unit))
    if len(blocks) < 2:
        return []
    before: list[str] = []
    for path in _in_order(profile, trained):
        if unit_of(path, 1) is not None:
            break
        before.append(path)
    return [(*before, *blocks[: max(1, round(share * len(blocks)))]) for share in _FROZEN_SHARES]


def _in_order(profile: "Profile", paths: set[str]) -> list[str]:
    """Modules with parameters in the order in which they compute."""
    return [path for path in dict.fromkeys(work.module for work in profile.work) if path in paths]
