"""Plans of a script: what one dry run saw, other settings computed from it, further runs to prove them.

The script runs on a simulated device without a limit. The timeline of that run is turned into those of other settings.
Moves that cost no time are taken all together first. For every combination of autocast and micro-batches, fastest
first, the fewest units are found that must be computed again; a combination that is slower even with none can't win.
In the end, every move that turns out not to be needed is taken back. The order is fixed, so that the same run of a
script has the same plan.

Every move turns a timeline into another (`timeline_moves`), so that moves combine by applying one after the other,
always in the same order; what the allocator makes of the last timeline is what settings are computed to need. A proof
runs the script once more with settings put into practice without its help, as far as that goes; what remains is
computed on top of that run.
"""

import math
import os
from dataclasses import replace
from functools import partial
from typing import Any

from memfit.allocator import replay, replay_variants
from memfit.core.dryrun import EXIT_CODES, DryRun, Outcome, ProgramFacts, Request
from memfit.core.errors import StepFailed
from memfit.core.estimate import Estimate, Note
from memfit.core.plan import Refusal
from memfit.core.progress import announce
from memfit.core.replay import AllocatorOptions, Replay
from memfit.core.settings import OptimizerKernels, OptimizerState, Settings
from memfit.core.spread import spreads_of
from memfit.core.timeline import Category, Phase, Timeline
from memfit.core.units import format_size
from memfit.planner import moves, timeline_moves
from memfit.planner.candidate import Candidate, CandidateSearch, front_of
from memfit.planner.driver import NotProven, Patience, Question
from memfit.planner.moves import (
    AUTOCAST,
    CHECKPOINT,
    EIGHT_BIT,
    EXPANDABLE,
    FUSED,
    MICRO_BATCH,
    SET_TO_NONE,
    SHARD,
    label,
)
from memfit.planner.speed import ScriptSpeed
from memfit.planner.timeline_moves import AS_IT_IS, Situation, unit_of
from memfit.processes import launch
from memfit.processes.sequence import run_with
from memfit.timing import rates_of

_RAN = (Outcome.COMPLETED, Outcome.ENDED)
# Runs that prove settings, at most. Candidates of which nothing can be run take none.
_MAX_RUNS = 4
_MAX_PROOFS = 12
# Of the time of a step: by less than this, a plan that can be proven is preferred to a faster one that can't.
_WORTH = 0.02
# Where the size of the batch isn't known, it is split into no more parts than this.
_MAX_BLIND_PARTS = 8
_MAX_PARTS = 64
# A proven plan that leaves more of the budget unused than this is worth another look.
_SLACK = 0.05
BATCH_NORM = "batch norm: its statistics would be those of a micro-batch"

_MAKE = {
    FUSED: timeline_moves.fuse_optimizer,
    SET_TO_NONE: timeline_moves.free_gradients,
    AUTOCAST: timeline_moves.autocast,
    MICRO_BATCH: timeline_moves.halve_micro_batch,
    EIGHT_BIT: timeline_moves.shrink_states,
    SHARD: timeline_moves.shard,
    EXPANDABLE: timeline_moves.expand_segments,
}
# Timelines of this many settings are kept.
_MAX_KEPT = 64


class ScriptSpace:
    """Runs a script for the planner, and opens the search for its plans; `question` is what is to be planned."""

    def __init__(
        self, request: Request, allowed: frozenset[str], patience: Patience, *, quiet_output: bool = False
    ) -> None:
        self._request = request
        self._quiet_output = quiet_output
        # What of settings a run had in force.
        self._proven: dict[Settings, Settings] = {AS_IT_IS: AS_IT_IS}
        self._num_runs = 0
        self.question = Question(
            self,
            request.device,
            allowed,
            AS_IT_IS,
            notes_on=self._notes_on,
            patience=patience,
            num_proofs=_MAX_PROOFS,
            reserve=0.0,
            quick_seconds=0.0,
            # In a plan, dropping gradients is the rule, not a move.
            as_planned=lambda settings: replace(settings, set_to_none=True),
        )

    def run(self, *, eager: bool = True) -> Estimate:
        """The script as it is; fails where it doesn't get as far as a step."""
        data = launch.run_child(self._request, stdout_to_stderr=self._quiet_output)
        self._run = run = DryRun.from_json(data)
        self._seen = run.seen or ProgramFacts()
        self._request = self._request.after(self._seen, data.get("loader_ordinal"))
        if run.outcome in _RAN and run.estimate is not None:
            return replace(run.estimate, subject=os.path.basename(run.script))
        why = f": {run.error}" if run.error else ""
        text = f"{run.script} {run.outcome.value} before it could be planned{why}. Dry-run it first: memfit dryrun."
        if run.outcome is Outcome.NO_STEP:
            text = (
                f"{run.script} took no optimizer step{why}. Give the script that trains, with arguments that make it."
            )
        error = StepFailed(text)
        error.exit_code = EXIT_CODES[run.outcome]
        raise error

    def search(self, before: Estimate) -> "ScriptSearch":
        """The candidates, from the run of the script as it is."""
        question, seen = self.question, self._seen
        self._rates = rates_of(question.target)
        self._memory = memory = ScriptMemory(before, self._run.allocator, self._request.count, seen)
        self._speed = ScriptSpeed(seen.work, before.timeline, self._rates)
        question.batch_size, question.dropout = seen.batch_size, memory.has_dropout
        question.approximate = BATCH_NORM if memory.has_batch_norm else ""
        question.hinted = tuple(name for name in (AUTOCAST, EIGHT_BIT, SHARD) if memory.offers(name))
        autocast = moves.autocast_of(question.target)
        self._search = ScriptSearch(memory, self._speed, question.allowed, seen, autocast, question.context_bytes)
        self._search.splits = self._request.splits
        question.refused += self._search.refused
        return self._search

    def with_settings(self, settings: Settings) -> tuple[Estimate, int, bool]:
        """(what the script needs with these settings, 0, whether a run had all of them in force)."""
        search = self._search
        part = provable_part(settings, search.splits)
        if part == AS_IT_IS or self._num_runs >= _MAX_RUNS:
            return self._memory.estimate(settings), 0, settings == AS_IT_IS
        self._num_runs += 1
        search.may_run = self._num_runs < _MAX_RUNS
        words = label(part, AS_IT_IS)
        announce(f"running the script once more with the plan's moves ({words}), to see what it needs then")
        run = run_with(self._request, part, self._run.num_steps)
        if run is None:
            # The script had no batches left, or doesn't take smaller ones.
            search.splits = False
            raise NotProven
        if run.outcome not in _RAN or run.estimate is None:
            # Recomputation is to blame where there is some, else autocast, else everything.
            used = [move.name for move in moves.used_moves(part)]
            names = [name for name in (CHECKPOINT, AUTOCAST) if name in used][:1] or used
            search.allowed -= set(names)
            reason = f"the script failed with it: {run.error or run.outcome.value}"
            raise NotProven(*(Refusal(name, reason) for name in names))
        uncalled = set(part.checkpoint).difference(() if run.seen is None else run.seen.recomputed)
        if uncalled:
            search.uncalled |= uncalled
            names_of = moves.named(tuple(sorted(uncalled)))
            raise NotProven(Refusal(CHECKPOINT, f"{names_of} is no module that is called"))
        self._proven[settings] = part
        if part == settings:
            return run.estimate, 0, True
        return ScriptMemory(run.estimate, run.allocator).estimate(computed_part(settings, search.splits)), 0, False

    def _notes_on(self, settings: Settings) -> list[Note]:
        part, notes = self._proven.get(settings, AS_IT_IS), []

        def note(code: str, text: str) -> None:
            notes.append(Note(code, text))

        if part != settings:
            rest = settings if part == AS_IT_IS else computed_part(settings, self._search.splits)
            others = f"; a run had the rest in force: {label(part, AS_IT_IS)}" if part != AS_IT_IS else ""
            note(
                "computed-part",
                f"what {label(rest, AS_IT_IS)} would save is computed from the script's timeline, because it takes a "
                f"change to the script itself{others}",
            )
        elif settings != AS_IT_IS:
            computed = format_size(self._memory.peak(settings))
            note("proven", f"the script was run with all of these moves in force; {computed} had been computed")
        if part.micro_batches > 1:
            lines = ", ".join(self._request.batch_lines)
            where = f"micro-batches were the first samples of what is copied to the device at {lines}"
            of_loader = "micro-batches were parts of the loader's batches; a loader of smaller ones, padded each for "
            note("split-batches", where if lines else f"{of_loader}itself, may leave more gaps in memory")
        if settings.checkpoint and self._seen.models:
            note("module-paths", f"paths of modules begin at {self._seen.models[0]}")
        if settings.micro_batches > 1 and self._seen.batch_size is None:
            note("batch-size-unknown", "the script's batch must have a sample for each micro-batch")
        if self._speed.seconds_origin is None:
            note("no-times", "plans are ranked by the bytes that modules write: the run showed no whole step's work")
        elif self._rates.reference:
            note("rates", f"times are computed with the rates of {self._rates.reference}")
        return notes


def provable_part(settings: Settings, splits: bool) -> Settings:
    """What of the settings a second run can have in force; with `splits`, smaller batches as well."""
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


class ScriptMemory:
    """What a device must provide for a script, by settings."""

    def __init__(
        self, estimate: Estimate, options: AllocatorOptions, num_devices: int = 1, seen: ProgramFacts | None = None
    ) -> None:
        self._estimate = estimate
        timeline = estimate.timeline
        seen = seen or ProgramFacts()
        self._plain = Situation(
            timeline, options, estimate.num_parameters, num_devices, seen.batch_size, seen.autocast, seen.fusable
        )
        self._level = timeline_moves.level_of_units(timeline)
        self.units = () if self._level is None else tuple(timeline_moves.repeated_units(timeline, self._level))
        self.has_batch_norm = timeline_moves.has_batch_norm(timeline)
        self.has_dropout = any("dropout" in b.op or "bernoulli" in b.op for b in timeline.blocks)
        # Given back by hand in between, or the like: what the run did beside its timeline.
        self._beside = estimate.reserved_peak_bytes - replay(timeline, options).reserved_peak_bytes
        self._steps: dict[tuple[str, ...], tuple[Timeline, AllocatorOptions] | None] = {(): (timeline, options)}
        self._peaks: dict[Settings, int] = {AS_IT_IS: estimate.peak_bytes}
        self._last: tuple[Settings, Timeline] = (AS_IT_IS, timeline)

    def offers(self, name: str) -> bool:
        """Whether a move can be made at all."""
        return bool(self.units) if name == CHECKPOINT else self._after((name,)) is not None

    def unit_bytes(self) -> dict[str, int]:
        """Bytes that each unit keeps for the backward pass in the first step."""
        kept = dict.fromkeys(self.units, 0)
        for block in self._estimate.timeline.blocks:
            if block.category is Category.ACTIVATION and block.phase is Phase.FORWARD:
                unit = unit_of(block.module, self._level or 1)
                if unit in kept:
                    kept[unit] += block.size_bytes
        return kept

    def timeline(self, settings: Settings) -> tuple[Timeline, AllocatorOptions]:
        """The run under these settings; moves that change nothing are skipped."""
        steps = [
            (FUSED, settings.kernels is not OptimizerKernels.KEEP),
            (SET_TO_NONE, settings.set_to_none),
            (AUTOCAST, settings.precision is not None),
            *[(MICRO_BATCH, True)] * (settings.micro_batches.bit_length() - 1),
            (EIGHT_BIT, settings.state is OptimizerState.EIGHT_BIT),
            (SHARD, settings.num_devices > 1),
            (EXPANDABLE, settings.expandable_segments),
        ]
        names: tuple[str, ...] = ()
        for name, is_used in steps:
            if is_used and self._after((*names, name)) is not None:
                names = (*names, name)
        after = self._after(names)
        assert after is not None
        timeline, options = after
        if settings.checkpoint and self._level is not None:
            # The allocator's own settings leave the timeline as it is, and come right after each other.
            key = replace(settings, expandable_segments=False)
            if self._last[0] != key:
                chosen = set(settings.checkpoint)
                self._last = (key, timeline_moves.checkpointed(timeline, chosen, self._level))
            timeline = self._last[1]
        return timeline, options

    def _after(self, names: tuple[str, ...]) -> tuple[Timeline, AllocatorOptions] | None:
        if names not in self._steps:
            before = self._after(names[:-1])
            situation = None if before is None else replace(self._plain, timeline=before[0], options=before[1])
            move = None if situation is None else _MAKE[names[-1]](situation)
            if len(self._steps) >= _MAX_KEPT:
                self._steps = {(): self._steps[()]}
            self._steps[names] = None if move is None else (move.timeline, move.options)
        return self._steps[names]

    def at_least(self, settings: Settings) -> int:
        """Bytes below which these settings can't be: what is alive at once."""
        if settings in self._peaks:
            return self._peaks[settings]
        timeline, _ = self.timeline(settings)
        return timeline.peak()[1] + min(0, self._beside) + self._estimate.context_bytes

    def peak(self, settings: Settings) -> int:
        """Bytes that the device must provide."""
        if settings not in self._peaks:
            timeline, options = self.timeline(settings)
            self._peaks[settings] = self._provided(timeline, replay(timeline, options))
        return self._peaks[settings]

    def _provided(self, timeline: Timeline, replayed: Replay) -> int:
        return max(replayed.reserved_peak_bytes + self._beside, timeline.peak()[1]) + self._estimate.context_bytes

    def estimate(self, settings: Settings) -> Estimate:
        """The whole estimate under these settings."""
        if settings == AS_IT_IS:
            return self._estimate
        timeline, options = self.timeline(settings)
        replayed = replay(timeline, options)
        reserved = self._provided(timeline, replayed) - self._estimate.context_bytes
        live, context_bytes = min(timeline.without_optional().peak()[1], reserved), self._estimate.context_bytes
        return replace(
            self._estimate,
            timeline=timeline,
            replay=replace(replayed, reserved_peak_bytes=reserved),
            certain_bytes=live + context_bytes,
            tight_bytes=live + context_bytes,
            spreads=spreads_of(self._estimate.device, replayed),
            vary=partial(replay_variants, timeline, options),
        )


class ScriptSearch(CandidateSearch):
    """The candidates for a script, of whose first run `seen` tells; a proof says how far off computed peaks are."""

    computes_peaks = True

    def __init__(
        self,
        memory: ScriptMemory,
        speed: ScriptSpeed,
        allowed: frozenset[str],
        seen: ProgramFacts,
        autocast: str,
        context_bytes: int = 0,
    ) -> None:
        self._memory = memory
        self._speed = speed
        self.allowed = allowed
        self._seen = seen
        self._autocast = autocast
        self._context_bytes = context_bytes
        self.splits = False
        """Whether the script's batches can be split without its help."""
        self.may_run = True
        """Whether the script may be run once more."""
        self.uncalled: set[str] = set()
        """Units that turned out not to be called as modules."""
        self._order = {unit: number for number, unit in enumerate(memory.units)}
        self._known: dict[Settings, Candidate] = {}
        self._usable_bytes = self._target_bytes = math.inf
        self._is_done = False
        self.seconds_origin = speed.seconds_origin
        self._choose_moves()

    def _choose_moves(self) -> None:
        """What of the allowed moves can be made; `refused` says which can't."""
        self.refused: list[Refusal] = []
        allowed, memory, size = self.allowed, self._memory, self._seen.batch_size

        def has(name: str, reason: str) -> bool:
            if name in allowed and not memory.offers(name):
                self.refused.append(Refusal(name, reason))
            return name in allowed and memory.offers(name)

        narrow = has(AUTOCAST, "parameters aren't in 32 bits, or the script uses autocast already")
        self.precisions = (None, self._autocast) if narrow else (None,)
        kernels = OptimizerKernels.KEEP
        if memory.offers(FUSED):
            if self._seen.fusable and FUSED in allowed:
                kernels = OptimizerKernels.FUSED
            elif moves.FOREACH_OFF in allowed:
                kernels = OptimizerKernels.SINGLE
        # What takes no more time is tried all together.
        free = replace(
            AS_IT_IS,
            kernels=kernels,
            set_to_none=has(SET_TO_NONE, "no gradient outlives its step"),
            expandable_segments=has(EXPANDABLE, "the script has them already"),
        )
        if has(EIGHT_BIT, "there is no large optimizer state"):
            free = replace(free, state=OptimizerState.EIGHT_BIT)
        units: list[str] = []
        if has(CHECKPOINT, "no part of the model repeats"):
            sizes = memory.unit_bytes()

            def worth(unit: str) -> float:
                # What is saved for each second counts in steps of a tenth, so that equal blocks are equal. Of these the
                # first comes first: the last is needed as soon as the backward pass begins, when everything is there.
                return -round(10 * math.log10(max(1, sizes[unit]) / max(1e-9, self._speed.module(unit))))

            units = sorted((unit for unit in memory.units if unit not in self.uncalled), key=worth)
        self._units = units
        self.parts = [1]
        if MICRO_BATCH in allowed and size == 1:
            self.refused.append(Refusal(MICRO_BATCH, "the batch has one sample"))
        elif has(MICRO_BATCH, "nothing grows with the batch"):
            if memory.has_batch_norm and moves.APPROXIMATE not in allowed:
                self.refused.append(Refusal(MICRO_BATCH, BATCH_NORM, moves.APPROXIMATE))
            else:
                most = _MAX_BLIND_PARTS if size is None else min(size, _MAX_PARTS)
                self.parts = [2**power for power in range(most.bit_length())]
        if has(SHARD, "no part of the model repeats, or it runs on several devices already"):
            free = replace(free, num_devices=2)
        self.free = free

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
        """The fastest candidate whose peak, corrected by the proofs so far, fits; None once a proof is good enough."""
        if self._usable_bytes != usable_bytes:
            self._usable_bytes = self._target_bytes = usable_bytes
        return None if self._is_done or not self.may_run else self.fastest(self._target_bytes)

    def learn(self, candidate: Candidate, needed_bytes: float) -> None:
        """Corrects computed peaks by the peak of a run."""
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
        """Looks again at what may be chosen: whoever could not run the candidate has said why."""
        self._choose_moves()

    def _combinations(self) -> list[Settings]:
        ways = [replace(self.free, micro_batches=n, precision=width) for n in self.parts for width in self.precisions]
        return sorted(ways, key=lambda way: (self._speed.step(way), way.micro_batches, way.precision is not None))

    def _recomputing(self, settings: Settings, count: int) -> Settings:
        """The settings with the first `count` units computed again, named in the order of the model."""
        return replace(settings, checkpoint=tuple(sorted(self._units[:count], key=self._order.__getitem__)))

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
            is_provable = provable_part(settings, self.splits) == settings
            if is_provable and (proven is None or one.seconds < proven.seconds):
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
        low, high = 0, len(self._units)
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
        for name in ("state", "num_devices", "kernels", "set_to_none", "expandable_segments"):
            as_it_is: dict[str, Any] = {name: getattr(AS_IT_IS, name)}
            less = replace(chosen.settings, **as_it_is)
            if less != chosen.settings and self._speed.step(less) <= (1 + _WORTH) * chosen.seconds:
                chosen = self.evaluate(less) if self._fits(less, target_bytes) else chosen
        return chosen

    def smallest(self, count: int) -> list[Candidate]:
        """The settings that are computed to need least; of equal ones the fastest."""
        num_units = len(self._units)
        for settings in self._combinations():
            for some in {0, num_units, max(0, num_units - 1)}:
                self.evaluate(self._recomputing(settings, some))
        self.evaluate(AS_IT_IS)
        least = min(self._known.values(), key=lambda one: (one.computed_bytes, one.seconds))
        return [self._trimmed(least, least.computed_bytes)]

    def front(self) -> list[Candidate]:
        """The best of all that was looked at: none needs less memory in no more time. Largest first."""
        count = len(self._units)
        for settings in self._combinations():
            for some in {0, count // 2, count}:
                self.evaluate(self._recomputing(settings, some))
        return front_of(self._known.values())
