"""The space of plans of a script: what one dry run saw, other settings computed from it, further runs to prove them.

The script runs on a simulated device without a limit. The timeline of that run is turned into those of other settings.
A proof runs the script once more with settings put into practice without its help, as far as that goes; what remains
is computed on top of that run.
"""

import os
from dataclasses import replace

from memfit.core.dryrun import EXIT_CODES, DryRun, Outcome, Request, Seen
from memfit.core.errors import StepFailed
from memfit.core.estimate import Estimate, Note
from memfit.core.plan import Refusal
from memfit.core.progress import announce
from memfit.core.settings import Settings
from memfit.core.units import format_size
from memfit.planner.budget import Patience, autocast_of
from memfit.planner.driver import NotProven, Question
from memfit.planner.move import AS_IT_IS
from memfit.planner.moves import AUTOCAST, CHECKPOINT, EIGHT_BIT, SHARD, label, named, used_moves
from memfit.planner.script_memory import ScriptMemory
from memfit.planner.script_search import (
    BATCH_NORM,
    ScriptMoves,
    ScriptSearch,
    computed_part,
    possible_moves,
    provable_part,
)
from memfit.planner.speed import ScriptSpeed, rates_of
from memfit.processes import launch
from memfit.processes.sequence import run_with

_RAN = (Outcome.COMPLETED, Outcome.ENDED)
# Runs that prove settings, at most. Candidates of which nothing can be run take none.
_MAX_RUNS = 4
_MAX_PROOFS = 12


class ScriptSpace:
    """Runs a script for the planner, and opens the search for its plans."""

    def __init__(
        self, request: Request, allowed: frozenset[str], patience: Patience, *, quiet_output: bool = False
    ) -> None:
        self._request = request
        self._allowed = allowed
        self._quiet_output = quiet_output
        self._uncalled: set[str] = set()
        # What of settings a run had in force.
        self._proven: dict[Settings, Settings] = {AS_IT_IS: AS_IT_IS}
        self._splits = False
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
        """What is to be planned, completed by `search`."""

    def run(self, *, eager: bool = True) -> Estimate:
        """The script as it is.

        Raises:
            StepFailed: it didn't get as far as a step.
        """
        data = launch.run_child(self._request, stdout_to_stderr=self._quiet_output)
        self._run = run = DryRun.from_json(data)
        self._seen = run.seen or Seen()
        self._request = self._request.after(self._seen, data.get("loader_ordinal"))
        self._splits = self._request.splits
        if run.outcome in _RAN and run.estimate is not None:
            return replace(run.estimate, subject=os.path.basename(run.script))
        why = f": {run.error}" if run.error else ""
        if run.outcome is Outcome.NO_STEP:
            text = (
                f"{run.script} took no optimizer step{why}. Give the script that trains, with arguments that make it."
            )
        else:
            text = f"{run.script} {run.outcome.value} before it could be planned{why}. Dry-run it first: memfit dryrun."
        error = StepFailed(text)
        error.exit_code = EXIT_CODES[run.outcome]
        raise error

    def search(self, before: Estimate) -> ScriptSearch:
        """The candidates, from the run of the script as it is."""
        question, seen = self.question, self._seen
        self._rates = rates_of(question.target)
        self._memory = ScriptMemory(before, self._run.allocator, self._request.count, seen)
        self._speed = ScriptSpeed(seen.work, before.timeline, self._rates)
        question.batch_size, question.dropout = seen.batch_size, self._memory.has_dropout
        question.approximate = BATCH_NORM if self._memory.has_batch_norm else ""
        question.hinted = tuple(name for name in (AUTOCAST, EIGHT_BIT, SHARD) if self._memory.offers(name))
        question.refused += self._possible_moves().refused
        self._search = ScriptSearch(
            self._memory, self._speed, self._possible_moves, question.context_bytes, lambda: self._num_runs < _MAX_RUNS
        )
        return self._search

    def _possible_moves(self) -> ScriptMoves:
        """What may be chosen, after what runs have shown."""
        found = possible_moves(
            self._memory,
            self._speed,
            self._allowed,
            batch_size=self._seen.batch_size,
            fusable=self._seen.fusable,
            autocast=autocast_of(self.question.target),
        )
        units = tuple(unit for unit in found.units if unit not in self._uncalled)
        return replace(found, splits=self._splits, units=units)

    def with_settings(self, settings: Settings) -> tuple[Estimate, int, bool]:
        """(what the script needs with these settings, 0, whether a run had all of them in force).

        Raises:
            NotProven: the script fails with them, or doesn't take them.
        """
        part = provable_part(settings, self._splits)
        if part == AS_IT_IS or self._num_runs >= _MAX_RUNS:
            return self._memory.estimate(settings), 0, settings == AS_IT_IS
        self._num_runs += 1
        words = label(part, AS_IT_IS)
        announce(f"running the script once more with the plan's moves ({words}), to see what it needs then")
        run = run_with(self._request, part, self._run.num_steps)
        if run is None:
            # The script had no batches left, or doesn't take smaller ones.
            self._splits = False
            raise NotProven
        if run.outcome not in _RAN or run.estimate is None:
            # Recomputation is to blame where there is some, else autocast, else everything.
            used = [move.name for move in used_moves(part)]
            names = [name for name in (CHECKPOINT, AUTOCAST) if name in used][:1] or used
            self._allowed -= set(names)
            reason = f"the script failed with it: {run.error or run.outcome.value}"
            raise NotProven(*(Refusal(name, reason) for name in names))
        uncalled = set(part.checkpoint).difference(() if run.seen is None else run.seen.recomputed)
        if uncalled:
            self._uncalled |= uncalled
            raise NotProven(Refusal(CHECKPOINT, f"{named(tuple(sorted(uncalled)))} is no module that is called"))
        self._proven[settings] = part
        if part == settings:
            return run.estimate, 0, True
        return ScriptMemory(run.estimate, run.allocator).estimate(computed_part(settings, self._splits)), 0, False

    def _notes_on(self, settings: Settings) -> list[Note]:
        part, notes = self._proven.get(settings, AS_IT_IS), []

        def note(code: str, text: str) -> None:
            notes.append(Note(code, text))

        if part != settings:
            rest = settings if part == AS_IT_IS else computed_part(settings, self._splits)
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
        if not self._speed.is_known:
            note("no-times", "plans are ranked by the bytes that modules write: the run showed no whole step's work")
        elif self._rates.reference:
            note("rates", f"times are computed with the rates of {self._rates.reference}")
        return notes
