"""The search: the fastest settings that stay within a limit, and the front of all limits.

What can be chosen freely (micro-batches, precision, the optimizer's kernels and state, chunks of the loss) is
enumerated; which modules to recompute or offload is left to the integer programme of each combination. Combinations
are taken in order of the time they would need with nothing recomputed: as soon as that alone is more than the best
found, the rest can't be better. The order is fixed, so the same question has the same answer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from memfit.core.settings import Keeps, OptimizerKernels, OptimizerState, Settings
from memfit.planner.memory import StepMemory
from memfit.planner.moves import used_moves
from memfit.planner.pareto import undominated
from memfit.planner.selection import Choices, Selection
from memfit.planner.speed import StepSpeed

# Of the time of a step: a combination that is faster by less than this is not worth a move.
_WORTH = 0.01
_MAX_TRIES = 5
# Tried where the batch allows it: parts whose largest has another size than that of fewer parts.
_PARTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96, 128, 192, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to compute the forward pass that was profiled: as it is, under autocast, with another loss...

    Args:
        settings: what differs from the step as it is.
        memory: of this variant.
        speed: of this variant.
    """

    settings: Settings
    memory: StepMemory
    speed: StepSpeed


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings with what they are computed to need.

    Args:
        settings: how the step is run.
        live_bytes: greatest number of live bytes, before any allocator.
        seconds: time of a step.
        variant: the profile behind the figures.
    """

    settings: Settings
    live_bytes: float
    seconds: float
    variant: Variant


@dataclass(frozen=True, slots=True)
class Space:
    """What may be chosen.

    Args:
        variants: ways to compute the forward pass, the step as it is first.
        optimizers: settings of the optimizer alone, as it is first.
        parts: numbers of micro-batches.
        batch_size: samples of the whole batch, or None.
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
    choices: dict[tuple[object, ...], Choices]
    """Shared by the combinations of a search that have the same."""

    @cached_property
    def selection(self) -> Selection:
        space, variant = self.space, self.variant
        micro = None if space.batch_size is None else -(-space.batch_size // self.settings.micro_batches)
        key = (id(variant), micro, space.recompute, space.offload)
        if key not in self.choices:
            self.choices[key] = Choices(
                variant.memory, variant.speed, micro, recompute=space.recompute, offload=space.offload
            )
        return Selection(variant.memory, self.choices[key], self.settings, space.batch_size)

    @property
    def num_passes(self) -> float:
        """Passes of the largest part that all parts together are worth."""
        size, parts = self.space.batch_size, self.settings.micro_batches
        return float(parts) if size is None else size / -(-size // parts)

    @cached_property
    def changes_training(self) -> bool:
        moves = used_moves(self.settings, batch_size=None, approximate=self.space.approximate)
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
            found = self.candidate(settings)
            if found.live_bytes <= limit_bytes:
                return found
            # What is too small for the programme adds up: it gets so much less.
            limit -= found.live_bytes - limit_bytes + 1
        return None

    def candidate(self, settings: Settings) -> Candidate:
        return evaluate(self.variant, settings, self.space.batch_size)


def evaluate(variant: Variant, settings: Settings, batch_size: int | None) -> Candidate:
    """What settings are computed to need."""
    memory = variant.memory
    hosted = memory.hosted_bytes(settings, batch_size)
    seconds = variant.speed.step(settings, batch_size, hosted)
    return Candidate(settings, memory.peak(settings, batch_size), seconds, variant)


def possible_parts(batch_size: int | None) -> tuple[int, ...]:
    """Numbers of micro-batches worth trying: each with a smaller largest part than the one before.

    >>> possible_parts(6)
    (1, 2, 3, 6)
    """
    if batch_size is None:
        return (1,)
    found: list[int] = []
    largest = batch_size + 1
    for parts in (*(number for number in _PARTS if number < batch_size), batch_size):
        size = -(-batch_size // parts)
        # The fewest parts that give this size.
        parts = -(-batch_size // size)
        if size < largest:
            found.append(parts)
            largest = size
    return tuple(found)


class Search:
    """Searches a space; the integer programmes of its combinations are kept between questions."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._choices: dict[tuple[object, ...], Choices] = {}
        self._beyond: dict[Settings, float] = {}
        self._expected = 0.0
        self._combinations = sorted(
            self._all(), key=lambda one: (one.seconds, one.settings.micro_batches, num_changed(one.settings))
        )

    def _all(self) -> Iterable[_Combination]:
        space = self._space
        for variant in space.variants:
            for optimizer in space.optimizers:
                for parts in space.parts:
                    if parts > 1 and (optimizer.step_in_backward or not variant.memory.scales):
                        continue
                    settings = merged(space.base, variant.settings, optimizer, Settings(micro_batches=parts))
                    seconds = variant.speed.step(settings, space.batch_size)
                    yield _Combination(variant, settings, seconds, space, self._choices)

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

    def expect(self, beyond_bytes: float) -> None:
        """Sets what an allocator takes beyond the live bytes, for combinations of which nothing is known yet."""
        self._expected = beyond_bytes

    def learn(self, candidate: Candidate, needed_bytes: float) -> None:
        """Takes note of what a candidate was proven to need: its combination is searched with that from now on."""
        self._beyond[_bare(candidate.settings)] = needed_bytes - candidate.live_bytes

    def best(self, usable_bytes: float) -> Candidate | None:
        """The fastest whose live bytes, and what the allocator takes beyond, stay within; None when nothing does.

        What changes training is used only where nothing else fits, however fast it is.
        """
        return self._best(self._limits(usable_bytes))

    def contenders(self, usable_bytes: float, most_seconds: float) -> list[Candidate]:
        """The best of every combination that stays within and takes no longer, quickest first."""
        limits = self._limits(usable_bytes)
        keeping = [one for one in self._combinations if not one.changes_training]
        found = []
        for bound, one in _bounded(keeping, limits, most_seconds):
            candidate = one.cheapest(limits[id(one)]) if bound <= most_seconds else None
            if candidate is not None and candidate.seconds <= most_seconds:
                found.append(candidate)
        return sorted(found, key=lambda candidate: candidate.seconds)

    def _limits(self, usable_bytes: float) -> dict[int, float]:
        return {
            id(one): usable_bytes - self._beyond.get(_bare(one.settings), self._expected) for one in self._combinations
        }

    def _best(self, limits: dict[int, float]) -> Candidate | None:
        keeping = [one for one in self._combinations if not one.changes_training]
        best = _best_of(keeping, limits)
        if best is None and len(keeping) < len(self._combinations):
            best = _best_of([one for one in self._combinations if one.changes_training], limits)
        return best

    def smallest(self, count: int = 1) -> list[Candidate]:
        """Candidates that need least memory, of equals the fastest, at most so many and one for each combination."""
        most = max((one.settings.micro_batches for one in self._combinations), default=1)
        # Fewer parts than the most there are never need less.
        extremes = [one for one in self._combinations if one.settings.micro_batches in (1, most)]
        found = [one.candidate(one.selection.smallest()) for one in extremes]
        least = min((one.live_bytes for one in found), default=0.0)
        # What differs by less than a hundredth is as small.
        found.sort(key=lambda one: (round(100 * one.live_bytes / max(1.0, least)), one.seconds))
        return found[:count]

    def front(self, num_points: int = 8) -> list[Candidate]:
        """Candidates of which none needs less memory in no more time, largest memory first."""
        low, high = self.smallest()[0], self._within(float("inf"))
        assert high is not None, "with no limit everything fits"
        found = [low, high]
        for index in range(1, num_points):
            limit = low.live_bytes + (high.live_bytes - low.live_bytes) * index / num_points
            best = self._within(limit)
            if best is not None:
                found.append(best)
        return pareto(found)

    def _within(self, limit_bytes: float) -> Candidate | None:
        """The fastest whose live bytes stay within the limit."""
        return self._best({id(one): limit_bytes for one in self._combinations})


def _best_of(combinations: list[_Combination], limits: dict[int, float]) -> Candidate | None:
    best: Candidate | None = None
    for bound, one in _bounded(combinations, limits):
        if best is not None and bound >= best.seconds * (1 - _WORTH):
            break
        found = one.cheapest(limits[id(one)])
        if found is None:
            continue
        if best is None or found.seconds < best.seconds * (1 - _WORTH):
            best = found
    return _simplest(combinations, best, limits)


def _bounded(
    combinations: list[_Combination], limits: dict[int, float], most_seconds: float = float("inf")
) -> list[tuple[float, _Combination]]:
    """(least seconds that it can take within its limit, combination), quickest first; none that can't be within.

    Without `most_seconds`, those are left out that can't be faster than another that needs nothing recomputed.
    """
    found: list[tuple[float, _Combination]] = []
    fastest = most_seconds
    for one in combinations:
        if one.seconds >= fastest:
            # A combination that needs no recomputation is as fast as this one could be.
            break
        bound = one.seconds + one.num_passes * one.selection.bound(limits[id(one)])
        if bound < float("inf"):
            found.append((bound, one))
            if bound == one.seconds and most_seconds == float("inf"):
                fastest = min(fastest, bound)
    return sorted(found, key=lambda pair: pair[0])


def _simplest(combinations: list[_Combination], best: Candidate | None, limits: dict[int, float]) -> Candidate | None:
    """The candidate with the fewest changes among those that are as fast as the best, for all that can be told."""
    if best is None:
        return None
    equal = [best]
    for one in combinations:
        if one.seconds > best.seconds * (1 + _WORTH):
            break
        if one.plain_bytes <= limits[id(one)]:
            equal.append(one.candidate(one.settings))
    return min(equal, key=lambda found: (num_changed(found.settings), found.seconds))


def _bare(settings: Settings) -> Settings:
    """What a combination is told by: everything but the modules and the allocator's segments."""
    return replace(settings, checkpoint=(), offload=(), expandable_segments=False)


def pareto(found: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other beats in both memory and time, largest memory first."""
    return undominated(found, lambda one: (one.live_bytes, one.seconds))


def merged(*parts: Settings) -> Settings:
    """The settings in which each of `parts` changes what differs from the defaults."""
    plain, result = Settings(), Settings()
    for part in parts:
        changes = {name: value for name in Settings.__slots__ if (value := getattr(part, name)) != getattr(plain, name)}
        result = replace(result, **changes)
    return result


def num_changed(settings: Settings) -> int:
    """Settings that differ from the defaults."""
    plain = Settings()
    return sum(getattr(settings, name) != getattr(plain, name) for name in Settings.__slots__ if name != "weighting")


def optimizer_choices(
    features: frozenset[str], allowed: frozenset[str], *, on_host: bool, has_optimizer: bool, sharded: bool = False
) -> tuple[Settings, ...]:
    """Settings of the optimizer that make sense for a step, as it is first.

    Args:
        features: of the profile.
        allowed: names of the moves that may be used.
        on_host: whether the device is the host itself, where moving things to the host saves nothing.
        has_optimizer: whether there is one.
        sharded: whether several devices share parameters and states.
    """
    found = [Settings()]
    if not has_optimizer:
        return tuple(found)
    single, fused = Settings(kernels=OptimizerKernels.SINGLE), Settings(kernels=OptimizerKernels.FUSED)
    if "fused-optimizer" in allowed and "fusable" in features and "fused" not in features:
        found.append(fused)
    if "foreach-off" in allowed and "foreach" in features:
        found.append(single)
    steps = "step-in-backward" in allowed and "steppable" in features
    if steps:
        found.append(Settings(step_in_backward=True))
    if steps and fused in found:
        found.append(replace(fused, step_in_backward=True))
    if "8-bit-optimizer" in allowed and "adam" in features:
        found.append(Settings(state=OptimizerState.EIGHT_BIT))
        if steps:
            found.append(Settings(state=OptimizerState.EIGHT_BIT, step_in_backward=True))
    if "host-optimizer" in allowed and not on_host:
        found.append(Settings(shard_offload=True) if sharded else Settings(state=OptimizerState.HOST))
    return tuple(found)
