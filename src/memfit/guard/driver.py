"""The one driver of guarded training, for every framework and every kind of loop.

A step is tried until it fits: what to try next is `Attempts`' business, how to try and how to undo it that of a
`GuardedLoop`, which each framework implements. The rest is here: what earlier runs, a supervisor, a plan or a budget
say before the first step, checkpoints, resuming, and what is said to the user and to `memfit run`.
"""

import contextlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from memfit.catalogue.host import host_memory_bytes
from memfit.core import env, run_events
from memfit.core.adapter import GuardedLoop
from memfit.core.errors import BadInput, MemfitError
from memfit.core.guarding import AUTO, BatchSize, Blame, BrokenUpdate, CannotFit, GuardOptions, MemoryFailure
from memfit.core.plan import Plan, PlanNotFound
from memfit.core.settings import Settings
from memfit.core.units import format_size, parse_size
from memfit.guard.attempts import Attempts, Ceilings, key_of
from memfit.guard.checkpointing import Checkpointing

_log = logging.getLogger("memfit")


@dataclass(frozen=True, slots=True)
class Terms:
    """What a guard was asked for, checked."""

    plan: Plan | Settings | str | None = AUTO  # "auto", a `Plan`, settings, or None
    budget: str | int | None = None  # "10GiB", bytes, or None
    checkpoint: str | os.PathLike[str] | None = None  # folder, or None
    options: GuardOptions = field(default_factory=GuardOptions)  # the rest
    make_plan: Callable[..., Plan] | None = None  # the planner

    def __post_init__(self) -> None:
        if self.plan is not None and self.plan != AUTO and not isinstance(self.plan, Plan | Settings):
            raise BadInput(f"plan must be 'auto', a Plan or None, but {self.plan!r} was given.")
        if not isinstance(self.options, GuardOptions):
            raise BadInput(f"options must be memfit.GuardOptions(...), but {self.options!r} was given.")
        if self.budget is not None:
            parse_size(self.budget)

    @property
    def settings(self) -> Settings:
        """The settings to begin with."""
        settings = self.plan.settings if isinstance(self.plan, Plan) else self.plan
        # An update that happens inside of the backward pass can't be undone when that fails.
        return replace(settings, step_in_backward=False) if isinstance(settings, Settings) else Settings()

    @property
    def budget_bytes(self) -> int | None:
        """What may be taken, by the user's word or the supervisor's; None: what is there."""
        if self.budget is not None:
            return parse_size(self.budget)
        request = run_events.current()
        return None if request is None else request.budget_bytes

    @property
    def folder(self) -> str | os.PathLike[str] | None:
        """The folder of checkpoints, or else the supervisor's."""
        request = run_events.current()
        return self.checkpoint if self.checkpoint is not None or request is None else request.checkpoint

    def ceilings(self) -> Ceilings:
        """Findings of earlier runs, unless they are not to be remembered."""
        return Ceilings(env.cache_folder() if self.options.remember else None)


class Driver:
    """Guards one training run, of which the loop is the framework's part.

    Without a folder there are no checkpoints; `ceilings` are findings that guards of this process share.
    """

    def __init__(
        self,
        loop: GuardedLoop,
        terms: Terms,
        folder: str | os.PathLike[str] | None = None,
        ceilings: Ceilings | None = None,
    ) -> None:
        self.loop = loop
        self._terms = terms
        self._request = run_events.current()
        self._budget = terms.budget_bytes
        self._share = 1.0 if self._request is None else self._request.share
        self._first = terms.settings
        asked = [terms.plan == AUTO, self._budget, self._share, self._first.to_json()]
        self._asked = json.loads(json.dumps(asked))
        self._ceilings = terms.ceilings() if ceilings is None else ceilings
        self._key: str | None = None
        self._attempts: Attempts | None = None
        self._splitting_known = self._first.micro_batches > 1
        self._why_whole = ""  # why batches aren't split, where they aren't
        self._goes_on = False  # whether what is tried first is what a checkpoint says
        self._said: set[str] = set()
        self._mark: Any = None  # where the loop was after the last update, where no checkpoint has been written of it
        self.num_updates = 0  # real updates so far, those before a resume included
        self.resumed_from: int | None = None  # the update of the checkpoint that this run goes on from
        options = terms.options
        self.checkpointing = Checkpointing(
            folder, options.keep, options.checkpoint_every, owner=loop.owner, ranks=loop.ranks
        )
        if loop.learns_from_start or self._first != Settings():
            _ = self.attempts
        self._resume()
        run_events.note("guard", model=loop.model_name, update=self.num_updates)

    @property
    def attempts(self) -> Attempts:
        """What was found out; made when something is: while memory suffices, nobody looks for what would save some."""
        if self._attempts is None:
            self._attempts = Attempts(self._first, self.loop.fallbacks())
        return self._attempts

    def settings_of(self, batch: Any) -> Settings:
        """How to run a batch now."""
        if self._attempts is None:
            return Settings()  # nobody looks at the batch
        settings = self._settings(self.loop.size_of(batch))
        return replace(settings, micro_batches=self._on_all(settings.micro_batches))

    def _settings(self, size: BatchSize) -> Settings:
        if self._attempts is None:
            return Settings()
        return self._attempts.settings(replace(size, num_samples=None) if self._why_whole else size)

    def _on_all(self, num_parts: int) -> int:
        """The number of micro-batches of the process that needs most."""
        return -self.loop.ranks.agree([-num_parts])[0]

    # One step.

    def check(self) -> None:
        """Refuses to go on with a model that is between two steps."""
        if self.loop.broken:
            raise BrokenUpdate(self.loop.broken)

    def step(self, batch: Any) -> list[MemoryFailure]:
        """Runs the step of a batch that the loop has been given, as often as it takes; what ran out on the way."""
        if self._key is None:
            self._begin(batch)
        return self.run(batch)

    def run(self, batch: Any) -> list[MemoryFailure]:
        """As `step`, without the preparations for the first step."""
        loop = self.loop
        size = BatchSize(None) if self._attempts is None else loop.size_of(batch)
        self._check_splitting(size)
        failures: list[MemoryFailure] = []
        while True:
            try:
                failure = loop.attempt(self.settings_of, again=bool(failures))
            except ValueError as error:
                if not self._adapts(error, again=bool(failures)):
                    raise
                loop.roll_back()
                continue
            if failure is None:
                break
            failures.append(failure)
            self.recover(failure)
            size = loop.size_of(batch)
        if self._attempts is not None:
            self._attempts.succeeded(size)
        if failures:
            self._tell_size(size)
        if loop.happened is not None:
            self.updated()
        return failures

    def restore_settings(self, batch: Any, put_on: Callable[[Settings], None]) -> None:
        """Has the settings put on that were in use when a checkpoint was written."""
        if self._attempts is None:
            return
        self._check_splitting(self.loop.size_of(batch))
        while True:
            try:
                put_on(self.settings_of(batch))
                return
            except BadInput as error:
                if not self._adapts(error, again=False):
                    raise

    def _adapts(self, error: ValueError, *, again: bool) -> bool:
        """Whether settings that an error is about are left out from now on."""
        if self._attempts is None:
            return False
        blame = self.loop.blame(error, again=again)
        if blame is Blame.SINGLE_SAMPLES:
            return self._attempts.need_samples(2)
        if blame is Blame.PARTS and not self._why_whole:
            self._why_whole = str(error)
            self.say(f"{error} Batches are run as a whole.")
            return True
        if blame is None or not self._attempts.without_level():
            return False
        self.say(f"{error} The guard continues without it.")
        return True

    def recover(self, failure: MemoryFailure) -> None:
        """Everything back, and what to try next; raises where nothing is left."""
        loop = self.loop
        try:
            loop.roll_back()
        except BrokenUpdate as error:
            loop.broken = str(error)
            raise
        finally:
            self.note_failure(failure)
        size = self._splittable(loop.size_of(loop.batch))
        if not self.attempts.failed(size, failure, in_update=loop.in_update, num_halvings=loop.num_halvings):
            text = loop.explain(failure, self.settings_of(loop.batch), self._why_whole)
            run_events.note("cannot fit", text=text)
            raise CannotFit(text, failure)
        self._agree()

    def note_failure(self, failure: MemoryFailure) -> None:
        """Tells the supervisor what ran out."""
        asked = failure.requested_bytes
        source, text = failure.source, failure.text
        run_events.note("oom", update=self.num_updates, source=source, requested_bytes=asked, text=text)

    def _check_splitting(self, size: BatchSize) -> None:
        """Micro-batches that an earlier run, a supervisor or the user asks for are weighed like any others."""
        if self._attempts is None or self._splitting_known:
            return
        if self._on_all(self._settings(size).micro_batches) > 1:
            self._splittable(size)
            if self._why_whole:
                self.say(f"{self._why_whole} Batches are run as a whole.")

    def _splittable(self, size: BatchSize) -> BatchSize:
        """The size of the batch in work, without a number of samples where it can't or may not be split."""
        if size.num_samples is None:
            self._why_whole = self._why_whole or self.loop.why_not_split()
            return size
        if not self._splitting_known:
            self._splitting_known = True
            splitting = self.loop.splitting()
            self._why_whole = self._why_whole or splitting.refused
            if splitting.remark:
                self.say(splitting.remark)
            if splitting.weighting is not None:
                self.attempts.weigh(splitting.weighting)
        return replace(size, num_samples=None) if self._why_whole else size

    # Before the first step.

    def _begin(self, batch: Any) -> None:
        """What earlier runs, a supervisor or a budget say."""
        size, host = self.loop.size_of(batch), host_memory_bytes()
        key = key_of((*self.loop.identity(batch, host), self._asked))
        known = self._ceilings.get(key, only_own=self._goes_on)
        if known is not None:
            try:
                self.attempts.load(known)
            except (MemfitError, KeyError, TypeError, ValueError):
                # Written by another version.
                known = None
        if self._terms.plan == AUTO and known is None:
            # A resumed run that knew what fits goes on with it.
            is_known = self._goes_on and self._ceilings.get(key) is not None
            if self._attempts is not None and not is_known:
                self._attempts.replan = lambda: self._replan(host)
            # A supervisor that starts a run again has it planned anew: what the checkpoint says was too much.
            is_new = not self._goes_on or (self._request is not None and self._request.attempt > 1)
            if self._budget is not None and is_new:
                self._plan_for_budget(self._budget, size)
        for most in (self._terms.options.micro_batch_size, self._request and self._request.micro_batch_size):
            if most and size.num_samples:
                self.attempts.bound(size, most)
        self._agree()
        self._key = key
        self._note_size(size)

    def _plan_for_budget(self, budget: int, size: BatchSize) -> None:
        try:
            planned = self._planned(self.loop.usable_bytes(budget, self._share))
        except PlanNotFound as error:
            if self._request is None or error.smallest is None:
                # Nothing smaller could be planned by another attempt.
                run_events.note("cannot fit", text=str(error), planned=True)
                raise CannotFit(str(error)) from error
            # The supervisor holds the limit: what is computed to be a little too much may be enough yet.
            self.say("no plan is computed to fit; the smallest is tried")
            planned = error.smallest.settings
        except CannotFit as error:
            run_events.note("cannot fit", text=str(error), planned=True)
            raise
        except Exception as error:
            self.say(f"no plan could be made for {format_size(budget)}; what fits is found out step by step: {error}")
            return
        if self.attempts.adopt(planned, size):
            part = "" if self._share == 1 else f"{self._share:.0%} of what is left of "
            self._tell_size(size, f"planned for {part}{format_size(budget)}")

    def _replan(self, host: int | None) -> Settings | None:
        """Settings that are expected to fit into what is there, or None."""
        budget = None if self._budget is None else int(self._budget * self._share)
        room = self.loop.room_bytes(host, budget)
        if room is None or self._why_whole:
            return None
        try:
            return self._planned(room)
        except Exception:
            # What can't be planned, or for whose libraries there is no room, is found out step by step.
            _log.debug("no plan could be made", exc_info=True)
            return None

    def _planned(self, budget_bytes: int) -> Settings:
        assert self._terms.make_plan is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.loop.plan(self._terms.make_plan, budget_bytes)

    def _agree(self) -> None:
        """All processes go on as the neediest of them."""
        if self._attempts is not None:
            self._attempts.settle(self.loop.ranks.agree(self._attempts.votes()))

    # Checkpoints.

    def updated(self) -> None:
        """An update was due, and made where `happened` says so."""
        self.num_updates += bool(self.loop.happened)
        self._mark = self.loop.mark() if self.checkpointing.is_open else None
        self._remember()
        if self.loop.happened and self.checkpointing.is_due(self.num_updates):
            self.save()

    def save(self) -> None:
        """Writes a checkpoint now, the last part of it in the background."""
        findings = None if self._attempts is None else self._attempts.to_json()
        progress = {"attempts": findings, "asked": self._asked, "update": self.num_updates}
        self.checkpointing.save(self.num_updates, lambda directory: self.loop.write_state(directory, progress))
        self._mark = None

    def save_last(self) -> None:
        """Writes a checkpoint of the last update, if there is none and all is as it was then.

        Not where a batch was given out after it that hasn't been trained on, for a resume would leave that out; nor
        where the user's code has changed the parameters since.
        """
        mark, self._mark = self._mark, None
        if self.loop.ranks.num_ranks > 1 and (sys.exc_info()[0] is not None or not self.loop.is_connected):
            return  # the other processes, which would have to take part, know nothing of an exception here
        if self.loop.ranks.agreed(mark is not None and not self.loop.broken and self.loop.is_at(mark)):
            self.save()

    def save_last_alone(self) -> None:
        """As `save_last`, for a run of one process: other ranks would have to take part, and may not come by here."""
        if self.loop.ranks.num_ranks == 1:
            self.save_last()

    def _resume(self) -> None:
        try:
            latest = self.checkpointing.latest()
            progress = None if latest is None else self.loop.read_state(latest, Attempts.check_progress)
        except BaseException:
            self.checkpointing.close()
            raise
        if latest is None or progress is None:
            return
        self.num_updates = self.resumed_from = int(progress["update"])
        self._goes_on = progress.get("asked", self._asked) == self._asked
        if self._goes_on and progress["attempts"] is not None:
            self.attempts.load(progress["attempts"], resumes=True)
        self.say(*self.loop.resumed(latest))
        run_events.note("resume", update=self.num_updates, path=str(latest))

    def _remember(self) -> None:
        if self._key is not None and self._attempts is not None and self._attempts.changed and self.loop.ranks.is_first:
            self._attempts.changed = False
            self._ceilings.put(self._key, self._attempts.to_json())

    def close(self) -> None:
        """Waits for the last checkpoint and leaves the model as it was without a guard."""
        # From here on the folder may be another's.
        self._mark = None
        try:
            self.checkpointing.close()
        finally:
            self.loop.close()
            self._remember()

    def __del__(self) -> None:
        # Nobody has closed it, and what it was made for is over. One that failed when it was made has no mark.
        if getattr(self, "_mark", None) is not None:
            with contextlib.suppress(Exception):
                self.save_last_alone()
                self.checkpointing.close()

    # Words.

    def _note_size(self, size: BatchSize) -> None:
        """A supervisor that has to start the run again begins with less than this."""
        most = self._settings(size).micro_batch_size or size.num_samples
        if most and size.num_samples:
            most = min(most, size.num_samples)
        run_events.note("step", update=self.num_updates, micro_batch_size=most)

    def _tell_size(self, size: BatchSize, why: str = "memory ran out; going on") -> None:
        settings = self._settings(size)
        self._note_size(size)
        parts = f"micro-batches of {settings.micro_batch_size}" if settings.micro_batch_size else "whole batches"
        extra = f", {len(settings.checkpoint)} parts of the model recomputed" if settings.checkpoint else ""
        differs = self.loop.differences(settings)
        text = f"{why} with {parts}{extra}" + (f". Approximate: {differs}" if differs else "")
        run_events.note("settings", update=self.num_updates, text=text)
        self.say(text)

    def say(self, *texts: str) -> None:
        """Logs what has not been said before."""
        for text in texts:
            if text not in self._said and self.loop.ranks.is_first:
                self._said.add(text)
                _log.warning(text)
