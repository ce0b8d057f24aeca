"""Plans for scripts: what one dry run saw, other settings computed from it, and a second run that proves them.

The script runs on a simulated device without a limit. The planner turns the timeline of that run into those of other
settings and names the fastest that fits. Then the script runs once more with these settings put into practice from
outside, as far as that goes, and the peak of that run counts. Where it is above the budget, the next best is tried.
"""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memfit._estimator import require_torch, resolve
from memfit._plan_target import (
    AUTO,
    KEEP,
    Patience,
    autocast_of,
    cheapest,
    hints,
    not_considered,
    reference,
    target_within,
)
from memfit.allocator import parse_options
from memfit.core import env
from memfit.core.device import Device, Kind, Origin
from memfit.core.dryrun import EXIT_CODES, DryRun, Outcome, Request, Seen
from memfit.core.errors import BadInput, StepFailed
from memfit.core.estimate import Estimate, Note
from memfit.core.plan import Footprint, Plan, PlannedMove, PlanNotFound, Point, Refusal, Seconds
from memfit.core.progress import announce
from memfit.core.settings import Settings
from memfit.core.units import format_size
from memfit.planner.move import AS_IT_IS
from memfit.planner.moves import (
    AUTOCAST,
    CHECKPOINT,
    EIGHT_BIT,
    EXPANDABLE,
    KEEPS,
    SET_TO_NONE,
    SHARD,
    UsedMove,
    allowed_moves,
    label,
    named,
    used_moves,
)
from memfit.planner.pareto import undominated

if TYPE_CHECKING:
    from memfit.planner.script_plan import Candidate, ScriptSearch

_RAN = (Outcome.COMPLETED, Outcome.ENDED)
# Runs that prove settings, at most.
_MAX_PROOFS = 4
# Kept free of the budget where a peak is computed and not proven: runs of scripts have needed up to 8% more.
_RESERVE = 0.1
# A proven plan that leaves more of the budget unused than this is worth another look.
_SLACK = 0.05
_COMPUTED = "computed-part"


def plan_script(
    script: str | os.PathLike[str],
    arguments: Iterable[str] = (),
    *,
    device: str | Device | None = None,
    budget: str | int | None = None,
    module: bool = False,
    count: int = 1,
    steps: int = 3,
    precision: str = KEEP,
    allow: Iterable[str] = ("exact", "rounding"),
    seconds: float | None = None,
    quiet_output: bool = False,
) -> Plan:
    """The fastest known way to run an unmodified training script within a budget of memory.

    Args:
        script: path of the script, or dotted name of a module.
        arguments: what the script is given.
        device: as for `dryrun`; a CUDA device.
        budget: what the script may take, "10GiB" or bytes; all of the device by default.
        module: whether `script` is the name of a module, as for `python -m`.
        count: how many such devices PyTorch sees.
        steps: optimizer steps after which the script is ended.
        precision: "keep", or "auto" to consider autocast; naming "autocast" in `allow` does the same.
        allow: as for `plan`; sharding, which takes a second device, only where it is named.
        seconds: about how long it may look for a faster plan once one fits; None: until nothing better is in sight.
        quiet_output: send what the script prints to standard error.

    Raises:
        PlanNotFound: nothing that is allowed fits.
        StepFailed: the script didn't get as far as a step.
    """
    started = time.perf_counter()
    patience = Patience(seconds)
    if precision not in (KEEP, AUTO):
        raise BadInput(f"precision of a script's plan must be {KEEP!r} or {AUTO!r}, but {precision!r} was given.")
    for option, value in (("count", count), ("steps", steps)):
        if value < 1:
            raise BadInput(f"{option} must be at least 1, but {value} was given.")
    if isinstance(arguments, str):
        raise BadInput(f"arguments must be a list such as {arguments.split()!r}, but the text {arguments!r} was given.")
    target, name = _target(device, budget), os.fspath(script)
    allowed = _allowed(allow, precision)
    # Refused here rather than by the script's process.
    parse_options(env.allocator_settings())
    from memfit.runs.target import find_target

    name = find_target(name, module=module)
    require_torch()
    request = Request(name, module, tuple(map(str, arguments)), target, count, steps, unlimited=True, watch=True)
    return _ScriptPlanner(request, allowed, patience, quiet_output=quiet_output, started=started).run()


def _target(device: str | Device | None, budget: str | int | None) -> Device:
    """The device with the budget as its capacity."""
    found = target_within(device, budget) if device is None else resolve(device)
    if found.kind is not Kind.CUDA:
        raise BadInput(
            f"only CUDA devices can be simulated for a script, but {found.name!r} was given. "
            "Name one, such as device='rtx-3090' (--device rtx-3090); `memfit devices` lists all."
        )
    return target_within(found, budget)


def _allowed(allow: Iterable[str], precision: str) -> frozenset[str]:
    words = [word.strip() for word in (allow.split(",") if isinstance(allow, str) else allow)]
    found = allowed_moves(words)
    if precision == KEEP and AUTOCAST not in words:
        found -= {AUTOCAST}
    return found if SHARD in words else found - {SHARD}


@dataclass(frozen=True, slots=True)
class _Proof:
    """Settings with what is known of them: the estimate of a run with all of them, or a part, in force."""

    candidate: "Candidate"
    estimate: Estimate
    is_whole: bool


class _ScriptPlanner:
    """One question: a script, a device with a budget, and what is allowed."""

    def __init__(
        self, request: Request, allowed: frozenset[str], patience: Patience, *, quiet_output: bool, started: float
    ) -> None:
        self._request = request
        self._patience = patience
        self._asked = self._allowed = allowed
        self._quiet_output = quiet_output
        self._started = started
        self._budget = request.device.usable_bytes or 0
        self._refused: list[Refusal] = []
        self._unused: set[str] = set()
        self._splits = False
        self._num_proofs = 0

    def run(self) -> Plan:
        from memfit.runs.launch import run_child

        data = run_child(self._request, stdout_to_stderr=self._quiet_output)
        self._run = run = DryRun.from_json(data)
        self._seen = run.seen or Seen()
        self._request = self._request.after(self._seen, data.get("loader_ordinal"))
        self._splits = self._request.splits
        if run.outcome not in _RAN or run.estimate is None:
            raise _failed(run)
        self._before = run.estimate
        self._search = self._open(self._allowed)
        proven = self._improved(self._budget, None)
        if proven is None:
            least = self._smallest()
            if self._needs(least) > self._budget:
                raise self._not_found(least)
            # The moves save more than computed.
            ratio = least.estimate.peak_bytes / max(1, least.candidate.peak_bytes)
            proven = self._improved(int(self._budget / ratio), least) or least
        return self._plan(proven)

    def _improved(self, target_bytes: int, proven: _Proof | None) -> _Proof | None:
        """The fastest proof within the budget, from a first guess at what may be computed to be needed."""
        while (best := self._search.fastest(target_bytes)) is not None and self._num_proofs < _MAX_PROOFS:
            if proven is not None and (best.seconds >= proven.candidate.seconds or self._patience.is_over):
                break
            proof = self._prove(best)
            if proof is None:
                self._search = self._open(self._allowed)
                continue
            needs = self._needs(proof)
            ratio = needs / max(1, best.peak_bytes)
            if needs > self._budget:
                target_bytes = min(best.peak_bytes - 1, int(self._budget / ratio))
                continue
            proven = proof
            if not _slowed(best.settings) or needs > (1 - _SLACK) * self._budget:
                break
            # What is computed to be above the budget may still fit.
            target_bytes = max(target_bytes + 1, int(self._budget / ratio))
        return proven

    @staticmethod
    def _needs(proof: _Proof) -> int:
        """What is promised: a peak that is only computed may be exceeded by a little."""
        return proof.estimate.peak_bytes if proof.is_whole else int(proof.estimate.peak_bytes * (1 + _RESERVE))

    def _open(self, allowed: frozenset[str]) -> "ScriptSearch":
        from memfit.planner.script_memory import ScriptMemory
        from memfit.planner.script_plan import ScriptSearch, choices
        from memfit.planner.script_speed import ScriptSpeed
        from memfit.planner.speed import rates_of

        device, seen = self._request.device, self._seen
        self._rates = rates_of(device, reference())
        self._memory = ScriptMemory(self._before, self._run.allocator, self._request.count, seen)
        self._speed = ScriptSpeed(seen.work, self._before.timeline, self._rates)
        self._space = choices(
            self._memory,
            self._speed,
            allowed,
            batch_size=seen.batch_size,
            fusable=seen.fusable,
            autocast=autocast_of(device),
        )
        self._space.splits = self._splits
        self._space.units = tuple(unit for unit in self._space.units if unit not in self._unused)
        return ScriptSearch(self._memory, self._speed, self._space)

    def _prove(self, candidate: "Candidate") -> _Proof | None:
        """What a run with the settings in force needs; None where they can't be, and why is in `_refused`."""
        from memfit.planner.script_memory import ScriptMemory
        from memfit.planner.script_plan import computed_part, provable_part
        from memfit.runs.sequence import run_with

        settings = candidate.settings
        part = provable_part(settings, self._splits)
        if part == AS_IT_IS:
            return _Proof(candidate, self._memory.estimate(settings), settings == AS_IT_IS)
        self._num_proofs += 1
        announce(f"running the script once more with the plan's moves ({_label(part)}), to see what it needs then")
        run = run_with(self._request, part, self._run.num_steps)
        if run is None:
            # The script had no batches left, or doesn't take smaller ones.
            self._splits = False
            return None
        if run.outcome not in _RAN or run.estimate is None:
            self._refuse(part, run)
            return None
        unused = set(part.checkpoint).difference(() if run.seen is None else run.seen.recomputed)
        if unused:
            self._unused |= unused
            self._refused.append(Refusal(CHECKPOINT, f"{named(tuple(sorted(unused)))} is no module that is called"))
            return None
        if part == settings:
            return _Proof(candidate, run.estimate, True)
        rest = ScriptMemory(run.estimate, run.allocator).estimate(computed_part(settings, self._splits))
        return _Proof(candidate, rest, False)

    def _refuse(self, settings: Settings, run: DryRun) -> None:
        """Leaves out what made the script fail: recomputation where there is some, else autocast, else everything."""
        used = [move.name for move in used_moves(settings, batch_size=None)]
        names = [name for name in (CHECKPOINT, AUTOCAST) if name in used][:1] or used
        reason = f"the script failed with it: {run.error or run.outcome.value}"
        self._refused += [Refusal(name, reason) for name in names]
        self._allowed -= set(names)

    def _plan(self, proof: _Proof) -> Plan:
        settings = proof.candidate.settings
        known, origin = self._speed.is_known, Origin.ASSUMED
        as_it_is = self._speed.step(AS_IT_IS)
        return Plan(
            subject=os.path.basename(self._run.script),
            device=self._request.device,
            budget_bytes=self._budget,
            batch_size=self._seen.batch_size,
            settings=_shown(settings),
            moves=self._moves(proof),
            before=Footprint.of(self._before),
            after=Footprint.of(proof.estimate, origin=Origin.SIMULATED if proof.is_whole else Origin.ASSUMED),
            seconds_before=Seconds(as_it_is if known else None, origin),
            seconds_after=Seconds(proof.candidate.seconds if known else None, origin),
            front=self._front(proof),
            refused=(*self._refused, *self._space.refused),
            notes=self._notes(proof),
            planned_in_seconds=time.perf_counter() - self._started,
            estimate_before=self._before,
            estimate_after=proof.estimate,
        )

    def _moves(self, proof: _Proof) -> tuple[PlannedMove, ...]:
        from memfit.planner.script_plan import BATCH_NORM

        settings = proof.candidate.settings
        approximate = BATCH_NORM if self._memory.has_batch_norm else ""
        used = used_moves(
            settings,
            batch_size=self._seen.batch_size,
            approximate=approximate,
            dropout=self._memory.has_dropout,
        )
        if settings.set_to_none:
            title = "free gradients right after each update"
            used.append(UsedMove(SET_TO_NONE, title, KEEPS[SET_TO_NONE], replace(settings, set_to_none=False)))
        found = []
        for move in used:
            without = self._search.candidate(move.without)
            replayed = move.name in (EXPANDABLE, SET_TO_NONE)
            saves = without.peak_bytes - proof.candidate.peak_bytes
            if move.without == AS_IT_IS:
                # The only move: both sides are known.
                saves, replayed = self._before.peak_bytes - proof.estimate.peak_bytes, proof.is_whole
            found.append(
                PlannedMove(
                    move.name,
                    move.title,
                    move.keeps,
                    saves,
                    Origin.SIMULATED if replayed else Origin.ASSUMED,
                    proof.candidate.seconds - without.seconds if self._speed.is_known else None,
                    Origin.ASSUMED,
                    move.caveat,
                )
            )
        return tuple(sorted(found, key=lambda move: -move.saves_bytes))

    def _front(self, proof: _Proof) -> tuple[Point, ...]:
        """The best of what was computed, and the plan itself, largest memory first."""
        chosen = replace(proof.candidate, peak_bytes=proof.estimate.peak_bytes)
        others = [one for one in self._search.front() if _shown(one.settings) != _shown(chosen.settings)]
        kept = undominated((chosen, *others), lambda one: (one.peak_bytes, one.seconds), keep=lambda one: one is chosen)
        return tuple(
            Point(
                one.peak_bytes,
                one.seconds if self._speed.is_known else None,
                _label(one.settings),
                _shown(one.settings),
                one is chosen and proof.is_whole,
            )
            for one in kept
        )

    def _notes(self, proof: _Proof) -> tuple[Note, ...]:
        from memfit.planner.script_plan import computed_part, provable_part

        settings, notes = proof.candidate.settings, list(self._before.notes)
        part = provable_part(settings, self._splits)
        if proof.is_whole and part != AS_IT_IS:
            predicted = format_size(proof.candidate.peak_bytes)
            notes.append(
                Note("proven", f"the script was run with all of these moves in force; {predicted} had been computed")
            )
        elif not proof.is_whole:
            own = _label(computed_part(settings, self._splits))
            rest = f"; a run had the rest in force: {_label(part)}" if part != AS_IT_IS else ""
            notes.append(
                Note(
                    _COMPUTED,
                    f"what {own} would save is computed from the script's timeline, because it takes a change to the "
                    f"script itself{rest}",
                )
            )
        if settings.micro_batches > 1 and part.micro_batches > 1:
            where = ", ".join(self._request.batch_lines)
            notes.append(
                Note(
                    "split-batches",
                    f"micro-batches were the first samples of what is copied to the device at {where}"
                    if where
                    else "micro-batches were parts of the loader's batches; a loader of smaller ones, padded each for "
                    "itself, may leave more gaps in memory",
                )
            )
        if settings.checkpoint and self._seen.models:
            notes.append(Note("module-paths", f"paths of modules begin at {self._seen.models[0]}"))
        if settings.micro_batches > 1 and self._seen.batch_size is None:
            notes.append(Note("batch-size-unknown", "the script's batch must have a sample for each micro-batch"))
        if not self._speed.is_known:
            notes.append(
                Note(
                    "no-times", "plans are ranked by the bytes that modules write: the run showed no whole step's work"
                )
            )
        elif self._rates.reference:
            notes.append(Note("rates", f"times are computed with the rates of {self._rates.reference}"))
        return tuple(notes)

    def _smallest(self) -> _Proof:
        """The settings that need least, proven if there are runs left."""
        smallest = self._search.smallest()
        proof = self._prove(smallest) if self._num_proofs < _MAX_PROOFS else None
        return proof or _Proof(smallest, self._memory.estimate(smallest.settings), False)

    def _not_found(self, proof: _Proof) -> PlanNotFound:
        needs = proof.estimate.peak_bytes
        subject = os.path.basename(self._run.script)
        lines = [
            f"no plan fits {subject} into {format_size(self._budget)}; the smallest needs {format_size(needs)} "
            f"({(Origin.SIMULATED if proof.is_whole else Origin.ASSUMED).value}).",
        ]
        lines += [f"  {name:<44}{format_size(b):>10}" for name, b in proof.estimate.breakdown.by_category.items()]
        lines.append(f"  with: {_label(proof.candidate.settings)}")
        lines += not_considered((*self._refused, *self._space.refused))
        able = (name for name in (AUTOCAST, EIGHT_BIT, SHARD) if self._memory.offers(name))
        others = hints(self._asked, self._space.refused, able)
        words, device_name = cheapest(needs)
        lines.append(f"Try {others}a larger device{words}.")
        return PlanNotFound("\n".join(lines), self._plan(proof), device_name)


def _failed(run: DryRun) -> StepFailed:
    """Why there is nothing to plan with."""
    why = f": {run.error}" if run.error else ""
    if run.outcome is Outcome.NO_STEP:
        text = f"{run.script} took no optimizer step{why}. Give the script that trains, with arguments that make it."
    else:
        text = f"{run.script} {run.outcome.value} before it could be planned{why}. Dry-run it first: memfit dryrun."
    error = StepFailed(text)
    error.exit_code = EXIT_CODES[run.outcome]
    return error


def _shown(settings: Settings) -> Settings:
    """Settings as a plan holds them: there, dropping gradients is the rule, not a move."""
    return replace(settings, set_to_none=True)


def _slowed(settings: Settings) -> bool:
    """Whether a better use of the budget could save time."""
    return bool(settings.checkpoint) or settings.micro_batches > 1


def _label(settings: Settings) -> str:
    text = label(settings)
    if not settings.set_to_none:
        return text
    dropped = "gradients freed early"
    return dropped if settings == replace(AS_IT_IS, set_to_none=True) else f"{text}, {dropped}"
