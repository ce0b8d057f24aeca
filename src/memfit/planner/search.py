"""The search: the fastest settings that stay within a limit, and the front of all limits.

What can be chosen freely (micro-batches, precision, the optimizer's kernels and state, chunks of the loss) is
enumerated; which modules to recompute or offload is left to the integer programme of each combination. Combinations
are taken in order of the time they would need with nothing recomputed: as soon as that alone is more than the best
found, the rest can't be better. The order is fixed, so the same question has the same answer.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

from memfit.core.settings import Keeps, OptimizerKernels, OptimizerState, Settings
from memfit.planner.candidate import Candidate, CandidateSearch, front_of
from memfit.planner.memory import StepMemory, micro_size
from memfit.planner.moves import EIGHT_BIT, FOREACH_OFF, FUSED, HOST_OPTIMIZER, STEP_IN_BACKWARD, used_moves
from memfit.planner.selection import ModuleMoves, Selection
from memfit.planner.speed import StepSpeed

# Of the time of a step: a combination that is faster by less than this is not worth a move.
_WORTH = 0.01
_MAX_TRIES = 5
# What makes a variant, the most telling first.
_VARIANT_SETTINGS = (
    "compile",
    "precision",
    "lora_rank",
    "quantized_base",
    "freeze",
    "cross_entropy_chunks",
    "channels_last",
)


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to compute the forward pass that was profiled, and how its settings differ from the step as it is."""

    settings: Settings
    memory: StepMemory
    speed: StepSpeed


@dataclass(frozen=True, slots=True)
class Space:
    """The choices that a search combines.

    Args:
        variants: ways to compute the forward pass, the step as it is first.
        optimizers: settings of the optimizer alone, as it is first.
        parts: numbers of micro-batches.
        recompute: whether modules may be computed again.
        offload: whether activations may wait on the host.
        base: settings that hold throughout.
        plain: the step as it is, which need not be among the variants.
        approximate: why micro-batches only approximate the step, or "".
    """

    variants: tuple[Variant, ...]
    optimizers: tuple[Settings, ...]
    parts: tuple[int, ...]
    batch_size: int | None
    recompute: bool = True
    offload: bool = False
    base: Settings = field(default_factory=Settings)
    plain: Variant | None = None
    approximate: str = ""


@dataclass(frozen=True)
class _Combination:
    """One choice of everything but the modules."""

    variant: Variant
    settings: Settings
    seconds: float
    space: Space
    module_moves: dict[tuple[object, ...], ModuleMoves]
    """Shared by the combinations of a search that have the same."""

    @cached_property
    def selection(self) -> Selection:
        space, variant = self.space, self.variant
        micro = micro_size(self.settings, space.batch_size)
        key = (id(variant), micro, space.recompute, space.offload)
        if key not in self.module_moves:
            self.module_moves[key] = ModuleMoves(
                variant.memory, variant.speed, micro, recompute=space.recompute, offload=space.offload
            )
        return Selection(variant.memory, self.module_moves[key], self.settings, space.batch_size)

    @cached_property
    def changes_training(self) -> bool:
        moves = used_moves(self.settings, approximate=self.space.approximate)
        return any(move.keeps is Keeps.CHANGES for move in moves)

    @cached_property
    def plain_bytes(self) -> float:
        return self.variant.memory.peak(self.settings, self.space.batch_size)

    def cheapest(self, limit_bytes: float) -> Candidate | None:
        """The fastest choice of modules within the limit; None when there is none."""
        limit = limit_bytes
        for _ in range(_MAX_TRIES):
            settings = self.selection.cheapest(limit)
            if settings is None:
                return None
            candidate = evaluate(self.variant, settings, self.space.batch_size)
            if candidate.computed_bytes <= limit_bytes:
                return candidate
            # What is too small for the programme adds up: it gets so much less.
            limit -= candidate.computed_bytes - limit_bytes + 1
        return None


def evaluate(variant: Variant, settings: Settings, batch_size: int | None) -> Candidate:
    """What settings are computed to need."""
    memory = variant.memory
    hosted = memory.hosted_bytes(settings, batch_size)
    seconds = variant.speed.step(settings, batch_size, hosted)
    return Candidate(settings, memory.peak(settings, batch_size), seconds, variant)


class ProfiledSearch(CandidateSearch):
    """Searches a space; the integer programmes of its combinations are kept between questions."""

    def __init__(self, space: Space, plain: Settings | None = None) -> None:
        self._space = space
        self._plain = plain or Settings()
        self.seconds_origin = space.variants[0].speed.rates.origin
        self._beyond: dict[Settings, float] = {}
        self.expected_beyond_bytes = 0.0
        """What an allocator takes beyond the live bytes, for combinations of which nothing is known yet."""
        module_moves: dict[tuple[object, ...], ModuleMoves] = {}
        combinations: list[_Combination] = []
        for variant, optimizer, parts in product(space.variants, space.optimizers, space.parts):
            if parts == 1 or not (optimizer.step_in_backward or not variant.memory.scales):
                settings = merged(space.base, variant.settings, optimizer, Settings(micro_batches=parts))
                seconds = variant.speed.step(settings, space.batch_size)
                combinations.append(_Combination(variant, settings, seconds, space, module_moves))
        self._combinations = sorted(
            combinations, key=lambda one: (one.seconds, one.settings.micro_batches, one.settings.num_changed)
        )

    def exclude(self, candidate: Candidate) -> None:
        """Leaves out what a candidate that can't be run has in common with others.

        Its modules may be what fails, or the size of its parts: first the combination is tried without modules, then
        left out with all that have as many parts.
        """
        plain = _bare(candidate.settings)
        by_modules = bool(candidate.settings.checkpoint or candidate.settings.offload)
        kept: list[_Combination] = []
        for one in self._combinations:
            if by_modules and one.settings == plain:
                kept.append(replace(one, space=replace(one.space, recompute=False, offload=False)))
            elif one.settings != plain and (
                by_modules or one.settings.micro_batches != plain.micro_batches or plain.micro_batches == 1
            ):
                kept.append(one)
        self._combinations = kept

    @property
    def plain(self) -> Candidate:
        """The step as it is."""
        return evaluate(self._space.plain or self._space.variants[0], self._plain, self._space.batch_size)

    def evaluate(self, settings: Settings) -> Candidate:
        """What settings are computed to need, by the variant that they belong to, or the one most like it."""
        variants = self._space.variants if self._space.plain is None else (*self._space.variants, self._space.plain)

        def likeness(one: Variant) -> list[bool]:
            # What comes first counts more.
            return [getattr(one.settings, name) == getattr(settings, name) for name in _VARIANT_SETTINGS]

        return evaluate(max(variants, key=likeness), settings, self._space.batch_size)

    def learn(self, candidate: Candidate, needed_bytes: float) -> None:
        """Takes note of what a candidate was proven to need: its combination is searched with that from now on."""
        self._beyond[_bare(candidate.settings)] = needed_bytes - candidate.computed_bytes

    def best(self, usable_bytes: float) -> Candidate | None:
        """The fastest whose live bytes, and what the allocator takes beyond, stay within; None when nothing does.

        What changes training is used only where nothing else fits, however fast it is.
        """
        best = self._best(self._limits(usable_bytes))
        if best is None and self.expected_beyond_bytes > 0:
            # From now on, nothing is expected beyond the live bytes.
            self.expected_beyond_bytes = 0.0
            best = self._best(self._limits(usable_bytes))
        return best

    def contenders(self, usable_bytes: float, most_seconds: float) -> list[Candidate]:
        """The best of every combination that stays within and takes no longer, quickest first."""
        limits = self._limits(usable_bytes)
        keeping = [one for one in self._combinations if not one.changes_training]
        bounded = _bounded(keeping, limits, most_seconds)
        found = [one.cheapest(limits[id(one)]) for bound, one in bounded if bound <= most_seconds]
        quick = [one for one in found if one is not None and one.seconds <= most_seconds]
        return sorted(quick, key=lambda candidate: candidate.seconds)

    def _limits(self, usable_bytes: float) -> dict[int, float]:
        beyond, expected = self._beyond, self.expected_beyond_bytes
        return {id(one): usable_bytes - beyond.get(_bare(one.settings), expected) for one in self._combinations}

    def _best(self, limits: dict[int, float]) -> Candidate | None:
        for changes_training in (False, True):
            combinations = [one for one in self._combinations if one.changes_training is changes_training]
            best: Candidate | None = None
            for bound, one in _bounded(combinations, limits):
                if best is not None and bound >= best.seconds * (1 - _WORTH):
                    break
                candidate = one.cheapest(limits[id(one)])
                if candidate is not None and (best is None or candidate.seconds < best.seconds * (1 - _WORTH)):
                    best = candidate
            if best is not None:
                # Of those that are as fast, for all that can be told, the one with the fewest changes.
                equal = [best]
                for one in combinations:
                    if one.seconds > best.seconds * (1 + _WORTH):
                        break
                    if one.plain_bytes <= limits[id(one)]:
                        equal.append(evaluate(one.variant, one.settings, self._space.batch_size))
                return min(equal, key=lambda one: (one.settings.num_changed, one.seconds))
        return None

    def smallest(self, count: int = 1) -> list[Candidate]:
        """Candidates that need least memory, of equals the fastest, at most so many and one for each combination."""
        most = max((one.settings.micro_batches for one in self._combinations), default=1)
        found = [
            evaluate(one.variant, one.selection.smallest(), self._space.batch_size)
            for one in self._combinations
            # Fewer parts than the most there are never need less.
            if one.settings.micro_batches in (1, most)
        ]
        least = min((one.computed_bytes for one in found), default=0.0)
        # What differs by less than a hundredth is as small.
        found.sort(key=lambda one: (round(100 * one.computed_bytes / max(1.0, least)), one.seconds))
        return found[:count]

    def front(self, num_points: int = 8) -> list[Candidate]:
        """Candidates of which none needs less memory in no more time, largest memory first."""

        def within(limit_bytes: float) -> Candidate | None:
            return self._best({id(one): limit_bytes for one in self._combinations})

        low, high = self.smallest()[0], within(float("inf"))
        assert high is not None, "with no limit everything fits"
        step = (high.computed_bytes - low.computed_bytes) / num_points
        between = [within(low.computed_bytes + step * index) for index in range(1, num_points)]
        return front_of([low, high, *(one for one in between if one is not None)])


def _bounded(
    combinations: list[_Combination], limits: dict[int, float], most_seconds: float = float("inf")
) -> list[tuple[float, _Combination]]:
    """(least seconds that it can take within its limit, combination), quickest first; none that can't be within."""
    found: list[tuple[float, _Combination]] = []
    fastest = most_seconds
    for one in combinations:
        if one.seconds >= fastest:
            # Another that needs nothing recomputed is as fast as this one could be.
            break
        # Passes of the largest part that all parts together are worth.
        size, micro = one.space.batch_size, micro_size(one.settings, one.space.batch_size)
        num_passes = float(one.settings.micro_batches) if not size or not micro else size / micro
        bound = one.seconds + num_passes * one.selection.bound(limits[id(one)])
        if bound < float("inf"):
            found.append((bound, one))
            if bound == one.seconds and most_seconds == float("inf"):
                fastest = min(fastest, bound)
    return sorted(found, key=lambda pair: pair[0])


def _bare(settings: Settings) -> Settings:
    """What a combination is told by: everything but the modules and the allocator's segments."""
    return replace(settings, checkpoint=(), offload=(), expandable_segments=False)


def merged(*parts: Settings) -> Settings:
    """The settings in which each of `parts` changes what differs from the defaults."""
    plain, result = Settings(), Settings()
    for part in parts:
        changes = {name: value for name in Settings.__slots__ if (value := getattr(part, name)) != getattr(plain, name)}
        result = replace(result, **changes)
    return result


def optimizer_ways(
    features: frozenset[str], allowed: frozenset[str], *, on_host: bool, has_optimizer: bool, sharded: bool = False
) -> tuple[Settings, ...]:
    """Settings of the optimizer that make sense for a step with these features, as it is first."""
    if not has_optimizer:
        return (Settings(),)
    steps = STEP_IN_BACKWARD in allowed and "steppable" in features
    fuses = FUSED in allowed and "fusable" in features and "fused" not in features
    narrow = EIGHT_BIT in allowed and "adam" in features
    # On the host itself, that saves nothing; of several devices that share states, each moves its shard.
    to_host = HOST_OPTIMIZER in allowed and not on_host
    fused, eight_bit = Settings(kernels=OptimizerKernels.FUSED), Settings(state=OptimizerState.EIGHT_BIT)
    ways = [
        (Settings(), True),
        (fused, fuses),
        (Settings(kernels=OptimizerKernels.SINGLE), FOREACH_OFF in allowed and "foreach" in features),
        (Settings(step_in_backward=True), steps),
        (replace(fused, step_in_backward=True), steps and fuses),
        (eight_bit, narrow),
        (replace(eight_bit, step_in_backward=True), narrow and steps),
        (Settings(shard_offload=True) if sharded else Settings(state=OptimizerState.HOST), to_host),
    ]
    return tuple(settings for settings, used in ways if used)
