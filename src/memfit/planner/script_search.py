"""The search for settings under which a script fits: the fastest of those that are computed to.

Moves that cost no time are taken all together first. For every combination of autocast and micro-batches, fastest
first, the fewest units are found that must be computed again; a combination that is slower even with none can't win.
In the end, every move that turns out not to be needed is taken back. The order is fixed, so that the same run of a
script has the same plan.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from memfit.core.plan import Refusal
from memfit.core.settings import OptimizerKernels, OptimizerState, Settings
from memfit.planner.candidate import Candidate, front_of
from memfit.planner.move import AS_IT_IS
from memfit.planner.moves import (
    APPROXIMATE,
    AUTOCAST,
    CHECKPOINT,
    EIGHT_BIT,
    EXPANDABLE,
    FOREACH_OFF,
    FUSED,
    MICRO_BATCH,
    SET_TO_NONE,
    SHARD,
)
from memfit.planner.script_memory import ScriptMemory
from memfit.planner.speed import ScriptSpeed

# Of the time of a step: by less than this, a plan that can be proven is preferred to a faster one that can't.
_WORTH = 0.02
# Where the size of the batch isn't known, it is split into no more parts than this.
_MAX_BLIND_PARTS = 8
_MAX_PARTS = 64
# A proven plan that leaves more of the budget unused than this is worth another look.
_SLACK = 0.05
BATCH_NORM = "batch norm: its statistics would be those of a micro-batch"


def provable_part(settings: Settings, splits: bool) -> Settings:
    """What of the settings a second run can have in force without a change to the script.

    `splits` says whether the script's batches can be split without its help.
    """
    parts = settings.micro_batches if splits else 1
    return replace(settings, micro_batches=parts, state=OptimizerState.KEEP, num_devices=1)


def computed_part(settings: Settings, splits: bool) -> Settings:
    """The rest: what is computed on top of a run with the provable part in force."""
    return replace(
        AS_IT_IS,
        micro_batches=1 if splits else settings.micro_batches,
        weighting=settings.weighting,
        state=settings.state,
        num_devices=settings.num_devices,
    )


@dataclass(slots=True)
class ScriptMoves:
    """What may be changed about a script.

    Args:
        autocast: "amp-bf16" or "amp-fp16"; None where the precision stays.
        parts: numbers of micro-batches, 1 first.
        free: settings that take no more time, all of which are tried together.
        units: modules that may be computed again, those that save most for their time first.
        num_devices: devices to shard over.
        refused: moves that are allowed and make no sense here.
        splits: whether the script's batches can be split without its help.
    """

    autocast: str | None
    parts: tuple[int, ...]
    free: Settings
    units: tuple[str, ...]
    num_devices: int
    refused: tuple[Refusal, ...]
    splits: bool = False


def possible_moves(
    memory: ScriptMemory,
    speed: ScriptSpeed,
    allowed: frozenset[str],
    *,
    batch_size: int | None,
    fusable: bool,
    autocast: str | None,
) -> ScriptMoves:
    """What of the allowed moves can be made, with autocast as the device is good at."""
    refused: list[Refusal] = []

    def has(name: str, reason: str) -> bool:
        if name in allowed and not memory.offers(name):
            refused.append(Refusal(name, reason))
        return name in allowed and memory.offers(name)

    narrow = has(AUTOCAST, "parameters aren't in 32 bits, or the script uses autocast already")
    kernels = OptimizerKernels.KEEP
    if memory.offers(FUSED):
        if fusable and FUSED in allowed:
            kernels = OptimizerKernels.FUSED
        elif FOREACH_OFF in allowed:
            kernels = OptimizerKernels.SINGLE
    free = replace(
        AS_IT_IS,
        kernels=kernels,
        set_to_none=has(SET_TO_NONE, "no gradient outlives its step"),
        expandable_segments=has(EXPANDABLE, "the script has them already"),
        state=OptimizerState.EIGHT_BIT if has(EIGHT_BIT, "there is no large optimizer state") else OptimizerState.KEEP,
    )
    units: tuple[str, ...] = ()
    if has(CHECKPOINT, "no part of the model repeats"):
        sizes = memory.unit_bytes()

        def worth(unit: str) -> float:
            # What is saved for each second counts in steps of a tenth, so that equal blocks are equal. Of these the
            # first comes first: the last is needed as soon as the backward pass begins, when everything is there.
            return -round(10 * math.log10(max(1, sizes[unit]) / max(1e-9, speed.module(unit))))

        units = tuple(sorted(memory.units, key=worth))
    parts: tuple[int, ...] = (1,)
    if MICRO_BATCH in allowed and batch_size == 1:
        refused.append(Refusal(MICRO_BATCH, "the batch has one sample"))
    elif has(MICRO_BATCH, "nothing grows with the batch"):
        if memory.has_batch_norm and APPROXIMATE not in allowed:
            refused.append(Refusal(MICRO_BATCH, BATCH_NORM, APPROXIMATE))
        else:
            most = _MAX_BLIND_PARTS if batch_size is None else min(batch_size, _MAX_PARTS)
            parts = tuple(2**power for power in range(most.bit_length()))
    return ScriptMoves(
        autocast=autocast if narrow else None,
        parts=parts,
        free=free,
        units=units,
        num_devices=2 if has(SHARD, "no part of the model repeats, or it runs on several devices already") else 1,
        refused=tuple(refused),
    )


class ScriptSearch:
    """The candidates for a script; a proof tells how far off the computed peaks are.

    Args:
        memory: of the script.
        speed: of the script.
        open_moves: what may be chosen, after what proofs have shown so far.
        context_bytes: what the device takes for itself.
        may_run: whether the script may be run once more.
    """

    computes_peaks = True

    def __init__(
        self,
        memory: ScriptMemory,
        speed: ScriptSpeed,
        open_moves: Callable[[], ScriptMoves],
        context_bytes: int = 0,
        may_run: Callable[[], bool] = lambda: True,
    ) -> None:
        self._memory = memory
        self._speed = speed
        self._open = open_moves
        self._context_bytes = context_bytes
        self._may_run = may_run
        self._order = {unit: number for number, unit in enumerate(memory.units)}
        self._known: dict[Settings, Candidate] = {}
        self._usable_bytes = math.inf
        self._target_bytes = math.inf
        self._is_done = False
        self.has_times = speed.is_known
        self._space = open_moves()

    @property
    def plain(self) -> Candidate:
        """The script as it is."""
        return self.evaluate(AS_IT_IS)

    def evaluate(self, settings: Settings) -> Candidate:
        """What settings are computed to need."""
        if settings not in self._known:
            computed_bytes = self._memory.peak(settings) - self._context_bytes
            self._known[settings] = Candidate(settings, computed_bytes, self._speed.step(settings))
        return self._known[settings]

    def is_traced(self, settings: Settings) -> bool:
        """The first run was that of the script as it is."""
        return settings == AS_IT_IS

    def best(self, usable_bytes: float) -> Candidate | None:
        """The fastest that fits by what proofs have said of computed peaks; None once a proof is good enough."""
        if self._usable_bytes != usable_bytes:
            self._usable_bytes = self._target_bytes = usable_bytes
        return None if self._is_done or not self._may_run() else self.fastest(self._target_bytes)

    def learn(self, candidate: Candidate, needed_bytes: float) -> None:
        """Corrects what may be computed to be needed by what a run needed."""
        context, budget = self._context_bytes, self._usable_bytes + self._context_bytes
        ratio = (needed_bytes + context) / max(1, candidate.computed_bytes + context)
        corrected = int(budget / ratio) - context
        if needed_bytes > self._usable_bytes:
            self._target_bytes = min(candidate.computed_bytes - 1, corrected)
            return
        slowed = candidate.settings.checkpoint or candidate.settings.micro_batches > 1
        self._is_done = not slowed or needed_bytes + context > (1 - _SLACK) * budget
        # What is computed to be above the budget may still fit.
        self._target_bytes = max(self._target_bytes + 1, corrected)

    def exclude(self, candidate: Candidate) -> None:
        """Looks again at what may be chosen: whoever could not run the candidate knows why."""
        self._space = self._open()

    def contenders(self, usable_bytes: float, most_seconds: float) -> list[Candidate]:
        """None: scripts aren't run to be timed."""
        return []

    def _combinations(self) -> list[Settings]:
        space = self._space
        free = replace(space.free, num_devices=space.num_devices)
        precisions = (None,) if space.autocast is None else (None, space.autocast)
        found = [replace(free, micro_batches=parts, precision=width) for parts in space.parts for width in precisions]
        return sorted(found, key=lambda one: (self._speed.step(one), one.micro_batches, one.precision is not None))

    def _recomputing(self, settings: Settings, count: int) -> Settings:
        """The settings with the first `count` units computed again, named in the order of the model."""
        return replace(settings, checkpoint=tuple(sorted(self._space.units[:count], key=self._order.__getitem__)))

    def fastest(self, target_bytes: float) -> Candidate | None:
        """The fastest settings that are computed to need no more than `target_bytes`; None where none do."""
        if self.plain.computed_bytes <= target_bytes:
            return self.plain
        best: Candidate | None = None
        proven: Candidate | None = None
        for settings in self._combinations():
            if best is not None and self._speed.step(settings) > (1 + _WORTH) * best.seconds:
                break
            one = self._fewest(settings, target_bytes)
            if one is None:
                continue
            if best is None or one.seconds < best.seconds:
                best = one
            if provable_part(settings, self._space.splits) == settings and (
                proven is None or one.seconds < proven.seconds
            ):
                proven = one
        if best is None:
            return None
        chosen = proven if proven is not None and proven.seconds <= (1 + _WORTH) * best.seconds else best
        return self._trimmed(chosen, target_bytes)

    def _fewest(self, settings: Settings, target_bytes: float) -> Candidate | None:
        """The settings with as few units computed again as it takes."""
        found = self._fitting(settings, target_bytes)
        if found is not None:
            return found
        low, high = 0, len(self._space.units)
        found = self._fitting(self._recomputing(settings, high), target_bytes) if high else None
        while found is not None and high - low > 1:
            middle = (low + high) // 2
            better = self._fitting(self._recomputing(settings, middle), target_bytes)
            if better is None:
                low = middle
            else:
                high, found = middle, better
        return found

    def _fitting(self, settings: Settings, target_bytes: float) -> Candidate | None:
        """What fits of the settings as they are and without segments that grow, which don't always help."""
        both = dict.fromkeys((settings, replace(settings, expandable_segments=False)))
        return next((self.evaluate(one) for one in both if self._fits(one, target_bytes)), None)

    def _fits(self, settings: Settings, target_bytes: float) -> bool:
        # Replaying costs more than adding up.
        if settings not in self._known and self._memory.at_least(settings) - self._context_bytes > target_bytes:
            return False
        return self.evaluate(settings).computed_bytes <= target_bytes

    def _trimmed(self, chosen: Candidate, target_bytes: float) -> Candidate:
        """Without the moves that are not needed and save no time worth the trouble."""
        plain: dict[str, Any] = {
            name: getattr(AS_IT_IS, name)
            for name in ("state", "num_devices", "kernels", "set_to_none", "expandable_segments")
        }
        for name, value in plain.items():
            less = replace(chosen.settings, **{name: value})
            if less == chosen.settings or self._speed.step(less) > (1 + _WORTH) * chosen.seconds:
                continue
            if self._fits(less, target_bytes):
                chosen = self.evaluate(less)
        return chosen

    def smallest(self, count: int = 1) -> list[Candidate]:
        """The settings that are computed to need least; of equal ones the fastest."""
        num_units = len(self._space.units)
        for settings in self._combinations():
            for some in {0, num_units, max(0, num_units - 1)}:
                self.evaluate(self._recomputing(settings, some))
        self.evaluate(AS_IT_IS)
        least = min(self._known.values(), key=lambda one: (one.computed_bytes, one.seconds))
        return [self._trimmed(least, least.computed_bytes)]

    def front(self) -> list[Candidate]:
        """The best of all that was looked at: none needs less memory in no more time. Largest first."""
        count = len(self._space.units)
        for settings in self._combinations():
            for some in {0, count // 2, count}:
                self.evaluate(self._recomputing(settings, some))
        return front_of(self._known.values())
