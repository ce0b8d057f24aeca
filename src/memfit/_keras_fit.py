"""`memfit.fit` and `memfit.keras.Fit`: a `fit` of Keras whose batches are transactions.

Puts the parts together, as `_guard` does for PyTorch: what to try next (`guard.attempts`), steps that can be undone
(`adapters.keras.guarding`), the checkpoints that the same call goes on from, and what a supervisor or an earlier run
has found out.
"""

import functools
import inspect
import json
import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from memfit._estimator import require_keras
from memfit._fit_checkpoints import FitCheckpoints, plain_history
from memfit._fit_options import AUTO, FitOptions, left_of
from memfit.catalogue.host import cgroup_limit_bytes, host_memory_bytes
from memfit.core import env, run_events
from memfit.core.errors import BadInput, BadModel, MemfitError
from memfit.core.guarding import BatchSize, BrokenUpdate, CannotFit, OutOfMemory
from memfit.core.plan import Plan, PlanNotFound
from memfit.core.settings import Settings
from memfit.core.units import format_size
from memfit.guard.attempts import Attempts
from memfit.guard.ceilings import Ceilings, key_of

_log = logging.getLogger("memfit")

# A larger micro-batch means a step that is traced or compiled again. On the host it is never tried: a process that
# takes too much there may be ended by the system, which nobody can undo.
_GROW_AFTER = 1000
_NEVER = 2**62
_MANY_SAMPLES = 2**40


def fit(
    model: Any,
    x: Any = None,
    y: Any = None,
    *,
    budget: str | int | None = None,
    plan: Plan | str | None = AUTO,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    keep: int = 3,
    approximate: bool = False,
    remember: bool = True,
    micro_batch_size: int | None = None,
    **arguments: Any,
) -> Any:
    """`model.fit` that survives running out of memory; returns Keras's History.

    A batch that doesn't fit is undone and run again in micro-batches, or with activations computed again; the update is
    that of the whole batch. With a folder of checkpoints, the same call goes on where a killed process was, in the
    middle of an epoch.

    Args:
        model: a compiled `keras.Model`, on TensorFlow, JAX or PyTorch.
        x: as for `model.fit`.
        y: as for `model.fit`.
        budget: what the process may take on the host, or on the device, "10GiB" or bytes; what is there by default.
        plan: "auto" plans before the first step where there is a budget; a `Plan` is put into practice from the start;
            None tries smaller and smaller micro-batches.
        checkpoint: folder of checkpoints; the newest that is whole is resumed from. None: no checkpoints.
        checkpoint_every: batches between two checkpoints; None: as often as costs 1% of the time, after 5 s at first
            and in the end once a minute.
        keep: how many checkpoints are kept.
        approximate: whether batches may be split although layers keep statistics of each batch.
        remember: whether what is found out is kept for later runs of the same model, shapes and device.
        micro_batch_size: samples of a micro-batch to begin with; None: the whole batch.
        **arguments: further ones of `model.fit`.
    """
    options = FitOptions(
        budget=budget,
        plan=plan,
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        keep=keep,
        approximate=approximate,
        remember=remember,
        micro_batch_size=micro_batch_size,
    )
    require_keras()
    from memfit.adapters.keras.guarding.loop import check_fit

    check_fit(model)
    return guarded_call(model.fit, options, (x, y), arguments)


def guarded_fit(
    plain_fit: Callable[..., Any],
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    budget: int | None = None,
) -> Any:
    """A call of `model.fit` in a script that knows nothing of memfit, guarded as its supervisor asks.

    Args:
        plain_fit: Keras's own method, which takes the model first.
        model: the model.
        args: of the call.
        kwargs: of the call.
        budget: bytes to plan for where the supervisor names none.
    """
    from memfit.adapters.keras.guarding.callback import FitCallback

    request = run_events.current()
    options = FitOptions(budget=None if request is not None and request.budget_bytes is not None else budget)
    given = kwargs.get("callbacks")
    known = given if isinstance(given, list | tuple) else [given]
    if any(isinstance(one, FitCallback) for one in known) or not getattr(model, "compiled", False):
        return plain_fit(model, *args, **kwargs)
    return guarded_call(functools.partial(plain_fit, model), options, args, kwargs)


def make_callback_class() -> type:
    """The class `memfit.keras.Fit`, which is a callback of Keras."""
    require_keras()
    from memfit.adapters.keras.guarding.callback import FitCallback

    class Fit(FitCallback):
        """Guards the `fit` whose callback it is, as `memfit.fit` does; put it last.

        Args:
            **options: those of `memfit.fit` beside the data.
        """

        def __init__(self, **options: Any) -> None:
            FitOptions.check_names(options, "Fit")
            super().__init__(KerasFit(FitOptions(**options)))

    Fit.__module__, Fit.__qualname__ = "memfit.keras", "Fit"
    return Fit


def guarded_call(
    plain_fit: Callable[..., Any],
    options: FitOptions,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    findings: dict[str, dict[str, Any]] | None = None,
) -> Any:
    """A call of `fit` with a guard among its callbacks.

    Args:
        plain_fit: the model's method.
        options: how it is guarded.
        args: of the call.
        kwargs: of the call.
        findings: see `KerasFit`.
    """
    from memfit.adapters.keras.guarding.callback import FitCallback

    keeper = KerasFit(options, findings)
    names = list(inspect.signature(plain_fit).parameters)
    arguments = dict(kwargs) | dict(zip(names, args, strict=False))
    given: Any = arguments.get("callbacks")
    callbacks = getattr(given, "callbacks", None)
    if callbacks is not None:
        own = FitCallback(keeper)
        own.set_model(given.model)
        own.set_params(given.params)
        callbacks.append(own)
    else:
        given = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
        arguments["callbacks"] = [*given, FitCallback(keeper)]
    try:
        return plain_fit(**arguments)
    finally:
        keeper.close()


class KerasFit:
    """Guards calls of `fit`, one at a time: told by a callback where Keras is, and called with each batch.

    Args:
        options: how.
        findings: what other guards of the same process have found out, by key; what this one does is added.
    """

    _takes_folder = True
    """Whether a supervisor's folder for checkpoints is this guard's."""

    def __init__(self, options: FitOptions, findings: dict[str, dict[str, Any]] | None = None) -> None:
        self._options = options
        self._findings = {} if findings is None else findings
        self._request = run_events.current()
        self._budget = options.budget_bytes(self._request)
        self._share = self._request.share if self._request is not None else 1.0
        self._told: set[str] = set()
        self._loop: Any = None
        self._checkpoints = FitCheckpoints(None, options.keep, None)
        for text in _flags().set_early(is_limited=self._is_limited):
            self._say(text)

    # What Keras tells.

    def train_begins(self, model: Any, iterator: Any, callbacks: list[Any], params: dict[str, Any]) -> None:
        """Puts the guard on, and goes to where the last checkpoint was made."""
        self.close()
        for text in _flags().set_late(is_limited=self._is_limited):
            self._say(text)
        options = self._options
        asked = self._request.checkpoint if self._request and self._takes_folder else None
        path = options.checkpoint if options.checkpoint is not None else asked
        self._checkpoints = FitCheckpoints(path, options.keep, options.checkpoint_every, model)
        self._model = model
        self._open_loop(iterator, callbacks)
        self._num_epochs = int(params.get("epochs") or 0)
        self._epoch = self._batch = self._skip = 0
        self._update = self._saved = 0
        self._ended: tuple[int, dict[str, Any]] | None = None
        self._resumed: Any = None
        self._broken = ""
        self._key: str | None = None
        self._why_whole = ""
        self._attempts: Attempts | None = None
        self._ceilings = Ceilings(env.cache_folder() if options.remember else None)
        self._resume()
        run_events.note("guard", model=type(model).__name__, update=self._update)

    def epoch_begins(self, epoch: int) -> None:
        """Before the first batch of an epoch is drawn."""
        self._epoch, self._batch, self._skip = epoch, 0, 0
        resumed = self._resumed
        if resumed is not None:
            self._skip = int(resumed.progress["batch"])
            self._loop.data.go_to(resumed.progress["data"], self._skip)
        self._loop.data.begin_epoch(epoch)

    def epoch_ends(self, epoch: int, logs: dict[str, Any]) -> None:
        """After validation."""
        if self._loop is None:
            return
        self._ended = epoch, logs
        self._loop.data.end_epoch()
        self._epoch, self._batch = epoch + 1, 0
        is_last = self._epoch >= self._num_epochs or bool(self._model.stop_training)
        if self._checkpoints.is_open and (is_last or self._checkpoints.is_due(self._update)):
            self._save(at_end=True)

    def train_ends(self) -> None:
        """Takes the guard off."""
        if self._resumed is not None:
            # Nothing was left to do.
            self._load_history(self._resumed)
        self._checkpoints.finish()
        self.close()

    def close(self) -> None:
        """Leaves the model as it was without a guard, and waits for the last checkpoint."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()
            loop.model._initial_epoch = None
            self._remember()
        self._checkpoints.close()

    def _open_loop(self, iterator: Any, callbacks: list[Any]) -> None:
        from memfit.adapters.keras.guarding.loop import KerasLoop

        self._loop = KerasLoop(
            self._model,
            iterator,
            callbacks,
            self.step,
            approximate=self._options.approximate,
            is_ordered=self._checkpoints.is_open,
        )

    # One batch.

    def step(self, batch: Any) -> Any:
        """Trains on a batch, however often that has to be tried; the logs."""
        try:
            return self._step(batch)
        except BaseException:
            self._loop.give_back()
            raise

    def _step(self, batch: Any) -> Any:
        if self._broken:
            raise BrokenUpdate(self._broken)
        if self._resumed is not None:
            self._load(batch)
        loop = self._loop
        if self._batch < self._skip:
            return self._pass_over()
        loop.watch_callbacks()
        loop.build(batch)
        if self._key is None:
            self._begin(batch, loop.size_of(batch))
        logs = self._run(batch)
        self._batch += 1
        self._update += 1
        loop.data.count()
        if self._attempts is not None and self._attempts.changed:
            self._remember()
        if self._checkpoints.is_due(self._update):
            self._save(at_end=False)
        return logs

    def _run(self, batch: Any) -> Any:
        loop = self._loop
        size = BatchSize(None) if self._attempts is None else loop.size_of(batch)
        failures: list[OutOfMemory] = []
        while True:
            try:
                self._put_on(size)
                loop.begin(batch)
                logs = loop.run(batch)
                if failures:
                    loop.settle()
                break
            except Exception as error:
                failure = loop.failure(error)
                if failure is None and not self._stays_whole(error):
                    raise
            if failure is None:
                loop.roll_back()
                continue
            size = loop.size_of(batch)
            self._recover(size, failure)
            failures.append(failure)
        loop.done()
        if self._attempts is not None:
            self._attempts.succeeded(size)
        if failures:
            self._tell_size(size)
        return logs

    def _put_on(self, size: BatchSize) -> None:
        """The settings that are to be tried; those that the model can't have are left out."""
        while self._attempts is not None:
            settings = self._settings(size)
            try:
                self._loop.put_on(settings)
                return
            except (BadInput, BadModel) as error:
                if settings.micro_batch_size and self._stays_whole(error):
                    continue
                if self._known_attempts.without_level():
                    self._say(f"{error} It goes on without.")
                else:
                    raise

    def _stays_whole(self, error: Exception) -> bool:
        """Whether batches aren't split from now on, because the model's can't be."""
        if self._why_whole or self._attempts is None or not isinstance(error, BadInput | BadModel):
            return False
        self._why_whole = str(error)
        self._say(f"{error} Batches are run as a whole.")
        return True

    def _recover(self, size: BatchSize, failure: OutOfMemory) -> None:
        """Everything back, and what to try next; raises where nothing is left."""
        try:
            self._loop.roll_back()
        except BrokenUpdate as error:
            self._broken = str(error)
            run_events.note("oom", update=self._update, source=failure.source, text=failure.text)
            raise
        found = {"source": failure.source, "requested_bytes": failure.requested_bytes, "text": failure.text}
        run_events.note("oom", update=self._update, **found)
        attempts = self._known_attempts
        if not self._why_whole:
            self._why_whole = self._loop.why_not_split()
        if self._why_whole:
            size = replace(size, num_samples=None)
        if not attempts.failed(size, failure, in_update=False):
            text = self._explain(failure)
            run_events.note("cannot fit", text=text)
            raise CannotFit(text, failure)

    # Before the first step.

    def _begin(self, batch: Any, size: BatchSize) -> None:
        """What earlier runs, a supervisor or a budget say."""
        loop, options = self._loop, self._options
        first = options.plan.settings if isinstance(options.plan, Plan) else Settings()
        asked = json.loads(
            json.dumps([options.plan == AUTO, self._budget, self._share, options.approximate, first.to_json()])
        )
        self._key = key_of((*loop.identity(batch), host_memory_bytes(), asked))
        known = self._findings.get(self._key)
        if known is None and self._update == 0:
            known = self._ceilings.get(self._key)
        if known is not None:
            try:
                self._known_attempts.load(known)
            except (MemfitError, KeyError, TypeError, ValueError):
                # Written by another version.
                known = None
        # A supervisor that starts a run again has it planned anew: what the checkpoint says was too much.
        is_new = self._update == 0 or (self._request is not None and self._request.attempt > 1)
        if options.plan == AUTO and self._budget is not None and known is None and is_new:
            planned = self._planned(batch)
            if planned is not None and self._known_attempts.adopt(planned, size):
                part = "" if self._share == 1 else f"{self._share:.0%} of what is left of "
                self._tell_size(size, f"planned for {part}{format_size(self._budget)}")
        if isinstance(options.plan, Plan):
            # Put into practice from the first step on.
            _ = self._known_attempts
        for most in (options.micro_batch_size, self._request.micro_batch_size if self._request else None):
            if most and size.num_samples:
                self._known_attempts.bound(size, most)
        self._note_size(size)

    @property
    def _known_attempts(self) -> Attempts:
        """Made when something is known: while memory suffices, there is no need to look for what would save some."""
        if self._attempts is None:
            plan, loop = self._options.plan, self._loop
            self._attempts = Attempts(
                plan.settings if isinstance(plan, Plan) else Settings(),
                stronger=loop.stronger_moves(),
                whole_first=loop.mixes_samples or loop.loops_slowly,
                grow_after=_NEVER if loop.device_name == "host" else _GROW_AFTER,
            )
        return self._attempts

    def _planned(self, batch: Any) -> Settings | None:
        """Settings that are expected to fit into the budget; None where none could be found out."""
        from memfit._plan import plan as make_plan

        on_host = self._loop.device_name == "host"
        budget = left_of(int(self._budget or 0), self._share, on_host=on_host)
        self._say(f"planning for {format_size(budget)} before the first step, whose time this adds to")
        try:
            with warnings.catch_warnings(), self._loop.filled():
                warnings.simplefilter("ignore")
                allow = ["exact", "rounding"] + (["approximate"] if self._options.approximate else [])
                found = make_plan(
                    self._model,
                    batch=batch,
                    device="cpu" if on_host else None,
                    budget=budget,
                    allow=allow,
                    measure=False,
                )
        except PlanNotFound as error:
            if self._request is not None and error.smallest is not None:
                # The supervisor holds the limit: what is computed to be a little too much may be enough yet.
                self._say("no plan is computed to fit; the smallest is tried")
                return error.smallest.settings
            # Nothing smaller could be planned by another attempt.
            run_events.note("cannot fit", text=str(error), planned=True)
            raise CannotFit(str(error)) from error
        except Exception:
            # What can't be planned is found out step by step.
            _log.debug("no plan could be made", exc_info=True)
            return None
        settings: Settings = found.settings
        return settings

    # Checkpoints.

    def _resume(self) -> None:
        found = self._checkpoints.latest()
        if found is None:
            return
        self._resumed = self._loop.read(found.path)
        self._loop.build_early()
        progress = self._resumed.progress
        self._update = self._saved = int(progress["update"])
        self._epoch = int(progress["epoch"])
        if progress["attempts"] is not None:
            self._known_attempts.load(progress["attempts"], resumes=True)
        is_over = self._epoch >= self._num_epochs or bool(progress["stopped"])
        # Keras begins with this epoch, as after its own BackupAndRestore.
        self._model._initial_epoch = max(self._num_epochs, self._epoch) if is_over else self._epoch
        if self._loop.is_built:
            self._loop.load_variables(self._resumed, in_epoch=False)
        elif is_over:
            raise BadModel(
                f"the training in {found.path.parent} is over, and the model {self._model.name!r} has no variables yet "
                "to load the result into. Build it first: call it on one batch."
            )
        self._loop.load_callbacks(self._resumed)
        where = "training was over" if is_over else f"epoch {self._epoch + 1}, batch {int(progress['batch']) + 1}"
        self._say(f"resumed from {found.path}: {where}")
        if not is_over and self._loop.data.is_generator:
            self._say("the data are a generator: what was trained on is drawn and dropped")
        if not is_over and self._loop.data.is_tf_dataset:
            self._say(
                "the data are a tf.data.Dataset: its batches are taken to come in the same order again; give "
                "shuffle() a seed and reshuffle_each_iteration=False if it shuffles"
            )
        run_events.note("resume", update=self._update, path=str(found.path))

    def _load(self, batch: Any) -> None:
        """At the first batch after a resume, when all other callbacks have had their say."""
        resumed, self._resumed = self._resumed, None
        self._loop.build(batch)
        if self._skip and self._attempts is not None:
            # As at the time of the checkpoint: settings may come with variables of their own.
            self._put_on(self._loop.size_of(batch))
        # At the beginning of an epoch metrics begin anew.
        self._loop.load_variables(resumed, in_epoch=bool(self._skip))
        self._loop.load_callbacks(resumed)
        self._load_history(resumed)
        self._position = resumed.progress["data"]
        if self._skip:
            self._skipped_logs = self._loop.metrics()

    def _pass_over(self) -> dict[str, Any]:
        self._batch += 1
        self._loop.data.count()
        if self._batch == self._skip:
            self._loop.data.caught_up(self._position)
            self._checkpoints.wait_anew()
        return dict(self._skipped_logs)

    def _load_history(self, resumed: Any) -> None:
        history = getattr(self._model, "history", None)
        if history is not None and hasattr(history, "history"):
            history.history.update({name: list(values) for name, values in resumed.progress["history"].items()})
            history.epoch = list(resumed.progress["epochs"])

    def _save(self, *, at_end: bool) -> None:
        self._saved = self._update
        self._checkpoints.save(
            self._loop,
            {
                "update": self._update,
                "epoch": self._epoch,
                "batch": self._batch,
                "stopped": at_end and bool(self._model.stop_training),
                "attempts": None if self._attempts is None else self._attempts.to_json(),
                "data": self._loop.data.position(at_end=at_end),
                **plain_history(getattr(self._model, "history", None), self._ended),
            },
        )

    # Settings and words.

    def _settings(self, size: BatchSize) -> Settings:
        """How to run batches now, whatever their size."""
        if self._attempts is None:
            return Settings()
        many = None if size.num_samples is None or self._why_whole else _MANY_SAMPLES
        return self._known_attempts.settings(replace(size, num_samples=many))

    @property
    def _is_limited(self) -> bool:
        return self._budget is not None or cgroup_limit_bytes() is not None

    def _remember(self) -> None:
        if self._key is not None and self._attempts is not None and self._attempts.changed:
            self._attempts.changed = False
            self._findings[self._key] = self._attempts.to_json()
            self._ceilings.put(self._key, self._findings[self._key])

    def _note_size(self, size: BatchSize) -> None:
        """A supervisor that has to start the run again begins with less than this."""
        most = self._settings(size).micro_batch_size or size.num_samples
        if most and size.num_samples:
            most = min(most, size.num_samples)
        run_events.note("step", update=self._update, micro_batch_size=most)

    def _tell_size(self, size: BatchSize, why: str = "memory ran out; going on") -> None:
        settings = self._settings(size)
        self._note_size(size)
        most = settings.micro_batch_size
        parts = f"micro-batches of {most}" if most else "whole batches"
        extra = f", {len(settings.checkpoint)} parts of the model recomputed" if settings.checkpoint else ""
        differs = self._loop.differences
        text = f"{why} with {parts}{extra}" + (f". Approximate: {differs}" if differs else "")
        run_events.note("settings", update=self._update, text=text)
        self._say(text)

    def _explain(self, failure: OutOfMemory) -> str:
        settings = self._loop.settings
        tried = [f"micro-batches of {settings.micro_batch_size}"] if settings.micro_batch_size else ["whole batches"]
        if settings.checkpoint:
            tried.append("recomputation of everything that can be recomputed")
        asked = f" {format_size(failure.requested_bytes)} were asked for." if failure.requested_bytes else ""
        why = f" Batches aren't split: {self._why_whole}" if self._why_whole else ""
        return (
            f"memory ran out, and nothing is left to try. Tried last: {', with '.join(tried)}.{asked} "
            f"{self._loop.describe()}.{why} The model is as it was before the step. Use a smaller model or input, a "
            "lower precision (keras.mixed_precision), or more memory; memfit.estimate says where it goes. "
            f"[{failure.text}]"
        )

    def _say(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            _log.warning(text)


def _flags() -> Any:
    from memfit.adapters.keras.guarding import flags

    return flags
