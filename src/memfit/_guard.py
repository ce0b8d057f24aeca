"""`memfit.Guard`: a training loop whose steps are transactions.

Puts the parts together: what to try next (`guard.attempts`), the step that can be undone (`adapters.torch.guarding`),
the checkpoints it resumes from, and what a supervisor or an earlier run has found out.
"""

import atexit
import contextlib
import inspect
import json
import logging
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any

from memfit._checkpointing import Checkpointing
from memfit._estimator import is_keras_model, torch_adapter
from memfit._plan import plan as make_plan
from memfit.catalogue.host import host_memory_bytes
from memfit.core import env, run_events
from memfit.core.errors import BadInput, MemfitError
from memfit.core.guarding import BatchSize, BrokenUpdate, CannotFit, OutOfMemory, StepResult
from memfit.core.plan import Plan, PlanNotFound
from memfit.core.settings import Settings, Weighting
from memfit.core.units import parse_size
from memfit.guard.attempts import Attempts
from memfit.guard.best import Best
from memfit.guard.ceilings import Ceilings, key_of
from memfit.guard.checkpoints import Folder, is_time

_log = logging.getLogger("memfit")

AUTO = "auto"
# What batch norms of PyTorch say to a single value.
_OF_ONE_SAMPLE = "Expected more than 1 value per channel"


class Guard:
    """Guards a training loop: a step that runs out of memory is undone and run again with less.

    A compiled model of Keras needs no more than itself: `memfit.Guard(model)` guards its `fit` and `train_on_batch`.
    Of the options it takes plan, checkpoint, checkpoint_every, keep, budget, micro_batch_size, approximate and
    remember.

        with memfit.Guard(model, budget="8GiB") as guard:
            history = guard.fit(x, y, epochs=3)
            loss = guard.train_on_batch(x[:64], y[:64])

    Args:
        model: the module, as the loss function gets it; DDP and FSDP2 models, too. Or a compiled `keras.Model`.
        optimizer: over its parameters; a Keras model brings its own.
        scheduler: a learning-rate scheduler, stepped after every real update; step it yourself where its unit is
            the epoch, and give it in `state` instead.
        scaler: a `torch.amp.GradScaler`, where the loss runs under float16 autocast.
        ema: a `torch.optim.swa_utils.AveragedModel`, updated after every real update.
        plan: "auto" plans when memory runs out for the first time, or before where there is a budget; a `Plan` is put
            into practice from the start; None tries smaller and smaller micro-batches.
        accumulate: batches of one update.
        clip_norm: greatest norm of all gradients together.
        clip_value: greatest value of an element of a gradient.
        clip: called with the model to clip its gradients in another way.
        checkpoint: folder of checkpoints; the newest that is whole is resumed from. None: no checkpoints.
        checkpoint_every: updates between two checkpoints; None: as often as costs 1% of the time, after 5 s at first
            and in the end once a minute.
        keep: how many checkpoints are kept.
        budget: what the step may take, "10GiB" or bytes; the memory that is there by default.
        micro_batch_size: samples of a micro-batch to begin with; None: the whole batch.
        approximate: whether a batch may be split although its samples see each other in the loss.
        grow_after: good updates after which a larger micro-batch is tried again.
        remember: whether what is found out is kept for later runs of the same model, shapes and device.
        state: further objects with `state_dict` and `load_state_dict` that checkpoints hold, by name.
    """

    def __new__(cls, model: Any, *arguments: Any, **options: Any) -> Any:
        """A guard of PyTorch, or of Keras where the model is one that Keras trains."""
        if cls is Guard and is_keras_model(model):
            from memfit._keras_guard import make_guard, trains_by_keras

            if trains_by_keras(model, arguments[0] if arguments else options.get("optimizer")):
                return make_guard(model, arguments, options)
        return super().__new__(cls)

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        ema: Any = None,
        plan: Plan | str | None = AUTO,
        accumulate: int = 1,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        clip: Callable[[Any], Any] | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        keep: int = 3,
        budget: str | int | None = None,
        micro_batch_size: int | None = None,
        approximate: bool = False,
        grow_after: int = 100,
        remember: bool = True,
        state: dict[str, Any] | None = None,
    ) -> None:
        _check_counts(accumulate=accumulate, keep=keep, grow_after=grow_after, checkpoint_every=checkpoint_every)
        _check_counts(micro_batch_size=micro_batch_size)
        if plan is not None and plan != AUTO and not isinstance(plan, Plan):
            raise BadInput(f"plan must be 'auto', a Plan or None, but {plan!r} was given.")
        torch_adapter()
        from memfit.adapters.torch.guarding.loop import TorchLoop

        request = run_events.current()
        self._request = request
        self._accumulate = accumulate
        self._plans = plan == AUTO
        self._budget = parse_size(budget) if budget is not None else None
        if budget is None and request is not None and request.budget_bytes is not None:
            self._budget = int(request.budget_bytes * request.share)
        self._approximate = approximate
        self._first_size = micro_batch_size
        self._loop = TorchLoop(
            model,
            optimizer,
            scheduler=scheduler,
            scaler=scaler,
            ema=ema,
            clip_norm=clip_norm,
            clip_value=clip_value,
            clip=clip,
            state=state or {},
            finish_window=self.finish_window,
        )
        first = plan.settings if isinstance(plan, Plan) else Settings()
        # An update that happens inside of the backward pass can't be undone when that fails.
        first = replace(first, step_in_backward=False)
        self._asked = json.loads(json.dumps([plan == AUTO, self._budget, first.to_json()]))
        if first.precision == "amp-fp16":
            self._loop.need_scaler()
        self._weighting_known = isinstance(plan, Plan) and plan.settings.micro_batches > 1
        self._attempts = Attempts(
            first,
            stronger=self._loop.stronger_moves(first),
            whole_first=self._loop.mixes_samples_in_norms,
            grow_after=grow_after,
        )
        if self._loop.num_ranks > 1 and self._loop.mixes_samples_in_norms:
            # A norm that is given one sample fails on one process only, and the others would wait for it.
            self._attempts.need_samples(2)
        self._ceilings = Ceilings(env.cache_folder() if remember else None)
        self._key: str | None = None
        self._told: set[str] = set()
        self._happened = False
        """Whether the last update that was due was made."""
        self._broken = ""
        self.num_updates = 0
        """Real updates so far, those before a resume included."""
        self.resumed_from: int | None = None
        """The update after which the checkpoint was made that this run goes on from; None: from the beginning."""
        self._every = checkpoint_every
        self._last_saved = time.monotonic()
        self._save_seconds = 0.0
        self._num_saved = 0
        asked = request.checkpoint if request and self._keeps_checkpoints else None
        folder = checkpoint if checkpoint is not None else asked
        self._checkpointing = Checkpointing(self._loop, folder, keep)
        self._mark: Any = None
        """How everything was after the last update, where no checkpoint has been written of it."""
        self._best: Best | None = None
        self._resume()
        _unsaved.add(self)
        run_events.note("guard", model=type(model).__name__, update=self.num_updates)

    # That of `__new__` would be shown, which says nothing.
    __signature__ = inspect.Signature(list(inspect.signature(__init__).parameters.values())[1:])

    _keeps_checkpoints = True
    """Whether a supervisor's folder for checkpoints is this guard's."""

    # The loop.

    def batches(self, loader: Any) -> Iterator[Any]:
        """The batches of one epoch; after a resume, those that are left of it, and none of an epoch that is over.

        Args:
            loader: a DataLoader, a stream, or anything that can be iterated over again and again.
        """
        return self._loop.batches.over(loader)

    def step(self, loss: Callable[[Any, Any], Any], batch: Any) -> StepResult:
        """Forward, backward, and, with the last batch of a window, clipping and the update.

        Args:
            loss: takes the model and a batch, returns the scalar loss, or (loss, weight), where the weight is what the
                loss was divided by, such as the number of tokens; without it each sample counts the same.
            batch: any nesting of tensors.

        Any other exception leaves the guard without this batch; the rest of its window is run again with the next.

        Raises:
            CannotFit: memory ran out and nothing is left to try; everything is as it was before the step.
        """
        if self._broken:
            raise BrokenUpdate(self._broken)
        transaction = self._loop.transaction
        if not transaction.entries:
            transaction.open(self._accumulate)
        entry = transaction.add(loss, batch)
        size = self._loop.size_of(batch)
        with self._dropped_at_exceptions(entry):
            self._begin(loss, batch, size)
            failures, happened = self._run(size, due=transaction.is_due)
        return StepResult(
            loss=entry.value if entry.value is not None else float("nan"),
            micro_batches=entry.num_parts,
            retries=len(failures),
            updated=happened is True,
            skipped=happened is False,
            settings=self._attempts.settings(size),
            approximate=transaction.differences(entry.num_parts),
            failures=tuple(failures),
            extra_bytes=transaction.extra_bytes,
        )

    def finish_window(self) -> None:
        """Makes an update of the batches that don't fill a window, as `batches` does at the end of an epoch."""
        transaction = self._loop.transaction
        if not transaction.entries:
            return
        try:
            self._run(self._loop.size_of(transaction.entries[-1].batch), due=True, passed=not transaction.is_stale)
        except CannotFit:
            transaction.forget()
            raise

    def save(self) -> None:
        """Writes a checkpoint now, in the background; only between two updates."""
        if self._loop.transaction.entries:
            raise BadInput("a checkpoint is written at the end of an accumulation window, and this one is not over.")
        started = time.perf_counter()
        self._checkpointing.save(self.num_updates, {"attempts": self._attempts.to_json(), "asked": self._asked})
        self._mark = None
        self._save_seconds = time.perf_counter() - started
        self._last_saved = time.monotonic()
        self._num_saved += 1

    @property
    def best(self) -> Best:
        """The best parameters so far, not the best model: `guard.best.offer(score, higher_is_better=True)`."""
        if self._best is None:
            path = self._checkpointing.path
            kept = path / "best" if path is not None and self._loop.is_first else None
            folder = None if kept is None else Folder(kept, 1, _log.warning, self._loop.optimizer)
            self._best = Best(self._loop.kept_parameters(), lambda: self.num_updates, folder, self._save_last_alone)
        return self._best

    def epochs(self, total: int) -> Iterator[int]:
        """Numbers of the epochs that are left of `total`: none that was over before a resume.

        Args:
            total: epochs of the whole run.
        """
        yield from self._loop.batches.epochs(total)
        self._save_last()

    @property
    def epoch(self) -> int:
        """The epoch in progress, counted from 0."""
        return int(self._loop.batches.epoch)

    def close(self) -> None:
        """Writes the last checkpoint, waits for it and leaves model and optimizer as they were without a guard."""
        if self._loop.transaction.entries and not self._broken:
            self._say(
                f"{len(self._loop.transaction.entries)} batches of an accumulation window that is not full were not "
                "applied: call finish_window() before close()"
            )
        self._save_last()
        if self._best is not None:
            self._best.close()
        self._checkpointing.close()
        self._loop.close()
        self._remember()

    def __del__(self) -> None:
        # Nobody has closed it, and what it was made for is over. One that failed when it was made has no mark.
        if getattr(self, "_mark", None) is not None:
            with contextlib.suppress(Exception):
                self._save_last_alone()
                self._checkpointing.close()

    def __reduce__(self) -> Any:
        raise TypeError("a guard can't be copied or pickled: it belongs to its model. Copy or save the model instead.")

    def __enter__(self) -> "Guard":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # One update.

    @contextlib.contextmanager
    def _dropped_at_exceptions(self, entry: Any) -> Iterator[None]:
        """A batch whose passes end in an exception must not count in a later update."""
        try:
            yield
        except BaseException:
            if not self._broken:
                try:
                    self._loop.transaction.drop(entry)
                except BrokenUpdate as error:
                    self._broken = str(error)
            raise

    def _begin(self, loss: Any, batch: Any, size: BatchSize) -> None:
        """Before the first step: what earlier runs, a supervisor or a budget say."""
        if self._key is not None:
            return
        host = host_memory_bytes()
        key = key_of((*self._loop.identity(batch, host), self._accumulate, self._asked))
        known = self._ceilings.get(key)
        if known is not None and self.resumed_from is None:
            try:
                self._attempts.load(known)
            except (MemfitError, KeyError, TypeError, ValueError):
                # Written by another version.
                known = None
        if self._plans and known is None:
            self._attempts.plan_with(lambda: self._replan(host))
            if self._budget is not None:
                self._attempts.adopt(self._planned(loss, batch, self._budget), size)
        for most in (self._first_size, self._request.micro_batch_size if self._request else None):
            if most and size.num_samples:
                self._attempts.bound(size, most)
        self._agree()
        self._key = key
        self._note_size(size)

    def _run(self, size: BatchSize, *, due: bool, passed: bool = False) -> tuple[list[OutOfMemory], bool | None]:
        """Runs until it fits; (what ran out on the way, whether the update happened, None where none was due).

        Args:
            size: of the last batch.
            due: whether an update follows.
            passed: whether the passes of all batches have been run.
        """
        transaction = self._loop.transaction
        failures: list[OutOfMemory] = []
        if not self._weighting_known and self._loop.agreed_parts(self._attempts.settings(size).micro_batches) > 1:
            # Micro-batches that an earlier run, a supervisor or the user asks for are weighed like any others.
            self._splittable(size)
        while True:
            in_update = False
            try:
                failure = None
                if failures or not passed:
                    failure = transaction.run(self._settings_of, again=bool(failures))
                if failure is None and due:
                    in_update = True
                    failure = transaction.finish() or self._commit()
            except BadInput as error:
                if not failures or not self._attempts.without_level():
                    raise
                self._say(f"{error} It goes on without.")
                transaction.roll_back()
                continue
            except ValueError as error:
                if not self._needs_more_samples(error):
                    raise
                transaction.roll_back()
                continue
            if failure is None:
                break
            failures.append(failure)
            self._recover(size, failure, in_update)
        self._attempts.succeeded(size)
        happened = self._happened if due else None
        if due:
            self._after_update()
        if failures:
            self._tell_size(size)
        return failures, happened

    def _needs_more_samples(self, error: ValueError) -> bool:
        """Whether a batch norm was given a micro-batch of one sample, which it can't normalise."""
        is_split = any(entry.num_parts > 1 for entry in self._loop.transaction.entries)
        return is_split and _OF_ONE_SAMPLE in str(error) and self._attempts.need_samples(2)

    def _recover(self, size: BatchSize, failure: OutOfMemory, in_update: bool) -> None:
        """Everything back, and what to try next; raises where nothing is left."""
        transaction = self._loop.transaction
        try:
            transaction.roll_back()
        except BrokenUpdate as error:
            self._broken = str(error)
            raise
        run_events.note(
            "oom",
            update=self.num_updates,
            source=failure.source,
            requested_bytes=failure.requested_bytes,
            text=failure.text,
        )
        ran = transaction.last_run
        if ran is not None and not in_update:
            # In a replay, another batch of the window than the last may be the one that doesn't fit.
            size = self._loop.size_of(ran.batch)
        left = self._attempts.failed(self._splittable(size), failure, in_update=in_update)
        if not left:
            settings = self._settings_of(transaction.entries[-1].batch)
            text = self._loop.explain(failure, settings, self._why_whole)
            run_events.note("cannot fit", text=text)
            raise CannotFit(text, failure)
        self._agree()

    def _commit(self) -> OutOfMemory | None:
        """The update; what ran out before anything had changed."""
        try:
            outcome = self._loop.commit()
        except BaseException as error:
            if self._loop.transaction.entries:
                # The update was under way.
                self._broken = str(error) if isinstance(error, BrokenUpdate) else _interrupted(error)
            raise
        if isinstance(outcome, OutOfMemory):
            return outcome
        self._happened = outcome
        return None

    def _after_update(self) -> None:
        self.num_updates += self._happened
        self._mark = self._loop.mark() if self._checkpointing.is_open else None
        if self._attempts.changed:
            self._remember()
        if self._happened and self._is_time_to_save():
            self.save()

    def _save_last(self) -> None:
        """Writes a checkpoint of the last update, if there is none and all is as it was then.

        Not where a batch was given out after it that hasn't been trained on, for a resume would leave that out; nor
        where the user's code has changed the parameters since.
        """
        mark, self._mark = self._mark, None
        if self._loop.num_ranks > 1 and (sys.exc_info()[0] is not None or not self._loop.is_connected):
            return  # the other processes, which would have to take part, know nothing of an exception here
        is_due = mark is not None and not self._broken and not self._loop.transaction.entries
        if self._loop.agreed(is_due and self._loop.is_at(mark)):
            self.save()

    def _save_last_alone(self) -> None:
        """The same where no other process would have to take part, which may not come by here."""
        if self._loop.num_ranks == 1:
            self._save_last()

    def _is_time_to_save(self) -> bool:
        if not self._checkpointing.is_open:
            return False
        if self._every is not None:
            return self.num_updates % self._every == 0
        passed = time.monotonic() - self._last_saved
        return self._loop.agreed(is_time(passed, self._save_seconds, self._num_saved))

    # Settings.

    def _settings_of(self, batch: Any) -> Settings:
        size = self._loop.size_of(batch)
        settings = self._attempts.settings(replace(size, num_samples=None) if self._why_whole else size)
        return replace(settings, micro_batches=self._loop.agreed_parts(settings.micro_batches))

    _why_whole = ""
    """Why batches aren't split, where they aren't."""

    def _splittable(self, size: BatchSize) -> BatchSize:
        """The size of the batch, without a number of samples where it can't or may not be split."""
        entry = self._loop.transaction.entries[-1]
        if size.num_samples is None:
            self._why_whole = self._loop.why_not_split(entry.batch)
            return size
        if not self._weighting_known:
            self._weighting_known = True
            weighting, reason = self._loop.find_weighting(entry.loss, entry.batch)
            if weighting is None and not self._approximate:
                self._why_whole = reason
            elif weighting is None:
                self._say(f"micro-batches are approximate here: {reason}")
            self._attempts.weigh(weighting or Weighting())
        return replace(size, num_samples=None) if self._why_whole else size

    def _replan(self, host: int | None) -> Settings | None:
        """Settings that are expected to fit into what is there, or None."""
        entry = self._loop.transaction.entries[-1]
        room = self._budget or self._loop.room_bytes(host)
        if room is None or self._why_whole or self._loop.num_ranks > 1:
            # Processes that plan for themselves may come to different plans.
            return None
        try:
            return self._planned(entry.loss, entry.batch, room)
        except Exception:
            # What can't be planned, or for whose libraries there is no room, is found out step by step.
            _log.debug("no plan could be made", exc_info=True)
            return None

    def _planned(self, loss: Any, batch: Any, budget: int) -> Settings:
        self._loop.take_off_settings()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = make_plan(
                    self._loop.plain_model,
                    loss,
                    batch,
                    optimizer=self._loop.optimizer,
                    device=self._loop.device_name(),
                    budget=budget,
                    measure=False,
                    # Nothing that an update inside of the backward pass changes could be undone.
                    allow=["-step-in-backward"],
                )
            except PlanNotFound as error:
                raise CannotFit(str(error)) from error
        return found.settings

    def _agree(self) -> None:
        self._attempts.settle(self._loop.transaction.ranks.agree(self._attempts.votes()))

    def _remember(self) -> None:
        if self._key is not None and self._attempts.changed and self._loop.is_first:
            self._attempts.changed = False
            self._ceilings.put(self._key, self._attempts.to_json())

    def _resume(self) -> None:
        try:
            found = self._checkpointing.resume(self._attempts.check_progress)
        except BaseException:
            self._checkpointing.close()
            raise
        if found is None:
            return
        self.num_updates = self.resumed_from = found["update"]
        if found.get("asked", self._asked) == self._asked:
            self._attempts.load(found["attempts"], resumes=True)
        self._say(f"resumed after update {self.num_updates}")

    # Words.

    def _note_size(self, size: BatchSize) -> None:
        """A supervisor that has to start the run again begins with less than this."""
        most = self._attempts.settings(size).micro_batch_size or size.num_samples
        run_events.note("step", update=self.num_updates, micro_batch_size=most)

    def _tell_size(self, size: BatchSize) -> None:
        settings = self._attempts.settings(size)
        self._note_size(size)
        parts = f"{settings.micro_batches} micro-batches" if settings.micro_batches > 1 else "whole batches"
        extra = f", {len(settings.checkpoint)} modules recomputed" if settings.checkpoint else ""
        differs = self._loop.transaction.differences(settings.micro_batches)
        text = f"memory ran out; going on with {parts}{extra}" + (f". Approximate: {differs}" if differs else "")
        run_events.note("settings", update=self.num_updates, text=text)
        self._say(text)

    def _say(self, text: str) -> None:
        if text not in self._told and self._loop.is_first:
            self._told.add(text)
            _log.warning(text)


_unsaved: "weakref.WeakSet[Guard]" = weakref.WeakSet()


@atexit.register
def _save_what_is_left() -> None:
    """A script may end without a word to its guards."""
    for guard in list(_unsaved):
        with contextlib.suppress(Exception):
            guard._save_last_alone()


def _interrupted(error: BaseException) -> str:
    return (
        f"an update was interrupted by {type(error).__name__}, so that parameters may be between two steps. Resume "
        "from the last checkpoint."
    )


def _check_counts(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise BadInput(f"{name} must be a whole number from 1 up, but {value!r} was given.")
