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
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memfit.catalogue.host import cgroup_limit_bytes, host_memory_bytes
from memfit.core import env, run_events
from memfit.core.errors import BadInput, BadModel, MemfitError, MissingDependency
from memfit.core.guarding import BatchSize, BrokenUpdate, CannotFit, OutOfMemory
from memfit.core.plan import Plan, PlanNotFound
from memfit.core.settings import Settings
from memfit.core.units import format_size, parse_size
from memfit.guard.attempts import Attempts
from memfit.guard.ceilings import Ceilings, key_of
from memfit.guard.checkpoints import Folder

_log = logging.getLogger("memfit")

AUTO = "auto"
# Of the time of training, what checkpoints may cost where no interval is given; and the least time between two.
_CHECKPOINT_SHARE = 0.01
_CHECKPOINT_SECONDS = 60.0
_FIRST_CHECKPOINT_SECONDS = 5.0
# A larger micro-batch means a step that is traced or compiled again. On the host it is never tried: a process that
# takes too much there may be ended by the system, which nobody can undo.
_GROW_AFTER = 1000
_NEVER = 2**62
_MANY_SAMPLES = 2**40

_used_folders: dict[str, int] = {}
"""How often each folder of checkpoints was used in this process: each fit of a script has its own."""


@dataclass(frozen=True, slots=True)
class FitOptions:
    """How a `fit` is guarded; see `fit`."""

    budget: str | int | None = None
    plan: Plan | str | None = AUTO
    checkpoint: str | os.PathLike[str] | None = None
    checkpoint_every: int | None = None
    keep: int = 3
    approximate: bool = False
    remember: bool = True
    micro_batch_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("checkpoint_every", "keep", "micro_batch_size"):
            value = getattr(self, name)
            if value is None and name != "keep":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BadInput(f"{name} must be a whole number from 1 up, but {value!r} was given.")
        if self.plan is not None and self.plan != AUTO and not isinstance(self.plan, Plan):
            raise BadInput(f"plan must be 'auto', a Plan or None, but {self.plan!r} was given.")

    def budget_bytes(self, request: run_events.RunRequest | None) -> int | None:
        """What the process may take; None: what is there."""
        if self.budget is not None:
            return parse_size(self.budget)
        return None if request is None else request.budget_bytes


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
    _keras_adapter()
    from memfit.adapters.keras.guarding.loop import check_fit

    check_fit(model)
    return _fit(model.fit, options, (x, y), arguments)


def guarded_fit(plain_fit: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call of `model.fit` in a script that knows nothing of memfit, guarded as its supervisor asks.

    Args:
        plain_fit: Keras's own method, which takes the model first.
        model: the model.
        args: of the call.
        kwargs: of the call.
    """
    from memfit.adapters.keras.guarding.callback import FitCallback

    given = kwargs.get("callbacks")
    known = given if isinstance(given, list | tuple) else [given]
    if any(isinstance(one, FitCallback) for one in known) or not getattr(model, "compiled", False):
        return plain_fit(model, *args, **kwargs)
    return _fit(functools.partial(plain_fit, model), FitOptions(), args, kwargs)


def make_callback_class() -> type:
    """The class `memfit.keras.Fit`, which is a callback of Keras."""
    _keras_adapter()
    from memfit.adapters.keras.guarding.callback import FitCallback

    class Fit(FitCallback):
        """Guards the `fit` whose callback it is, as `memfit.fit` does; put it last.

        Args:
            **options: those of `memfit.fit` beside the data.
        """

        def __init__(self, **options: Any) -> None:
            try:
                checked = FitOptions(**options)
            except TypeError:
                names = ", ".join(FitOptions.__slots__)
                unknown = ", ".join(sorted(set(options) - set(FitOptions.__slots__)))
                raise BadInput(f"Fit has no option {unknown}. It takes {names}.") from None
            super().__init__(KerasFit(checked))

    Fit.__module__, Fit.__qualname__ = "memfit.keras", "Fit"
    return Fit


def _fit(plain_fit: Callable[..., Any], options: FitOptions, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from memfit.adapters.keras.guarding.callback import FitCallback

    keeper = KerasFit(options)
    names = list(inspect.signature(plain_fit).parameters)
    arguments = dict(kwargs) | dict(zip(names, args, strict=False))
    given = arguments.get("callbacks")
    callbacks = getattr(given, "callbacks", None)
    if callbacks is not None:
        callbacks.append(FitCallback(keeper))
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
    """

    def __init__(self, options: FitOptions) -> None:
        self._options = options
        self._request = run_events.current()
        self._budget = options.budget_bytes(self._request)
        self._told: set[str] = set()
        self._loop: Any = None
        self._folder: Folder | None = None
        for text in _flags().set_early(is_limited=self._is_limited):
            self._say(text)

    # What Keras tells.

    def train_begins(self, model: Any, iterator: Any, callbacks: list[Any], params: dict[str, Any]) -> None:
        """Puts the guard on, and goes to where the last checkpoint was made."""
        from memfit.adapters.keras.guarding.loop import KerasLoop

        self.close()
        for text in _flags().set_late(is_limited=self._is_limited):
            self._say(text)
        options = self._options
        asked = self._request.checkpoint if self._request else None
        path = options.checkpoint if options.checkpoint is not None else asked
        self._folder = None if path is None else Folder(_own_folder(path), options.keep, announce=_log.warning)
        if self._folder is not None:
            self._folder.claim()
        self._loop = KerasLoop(
            model,
            iterator,
            callbacks,
            self.step,
            approximate=options.approximate,
            is_ordered=self._folder is not None,
        )
        self._model = model
        self._num_epochs = int(params.get("epochs") or 0)
        self._epoch = self._batch = self._skip = 0
        self._update = 0
        self._history: dict[str, list[Any]] = {}
        self._resumed: Any = None
        self._broken = ""
        self._key: str | None = None
        self._why_whole = ""
        self._attempts: Attempts | None = None
        self._ceilings = Ceilings(env.cache_folder() if options.remember else None)
        self._last_saved = time.monotonic()
        self._save_seconds, self._num_saved = 0.0, 0
        self._resume()
        run_events.note("guard", model=type(model).__name__, update=self._update)

    def epoch_begins(self, epoch: int) -> None:
        """Before the first batch of an epoch is drawn."""
        self._epoch, self._batch = epoch, 0
        resumed = self._resumed
        if resumed is not None:
            self._skip = int(resumed.progress["batch"])
            self._loop.data.go_to(resumed.progress["data"], self._skip)
        self._loop.data.begin_epoch(epoch)

    def epoch_ends(self, epoch: int) -> None:
        """After validation."""
        if self._loop is None:
            return
        self._loop.data.end_epoch(self._batch)
        self._epoch, self._batch = epoch + 1, 0
        is_last = self._epoch >= self._num_epochs or bool(self._model.stop_training)
        if self._folder is not None and (is_last or self._is_time_to_save()):
            self._save(at_end=True)

    def train_ends(self) -> None:
        """Takes the guard off."""
        if self._resumed is not None:
            # Nothing was left to do.
            self._load_history(self._resumed)
        self.close()

    def close(self) -> None:
        """Leaves the model as it was without a guard, and waits for the last checkpoint."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()
            loop.model._initial_epoch = None
            self._remember()
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    # One batch.

    def step(self, batch: Any) -> Any:
        """Trains on a batch, however often that has to be tried; the logs."""
        if self._broken:
            raise BrokenUpdate(self._broken)
        if self._resumed is not None:
            self._load(batch)
        loop = self._loop
        if self._batch < self._skip:
            return self._pass_over()
        loop.watch_callbacks()
        size = loop.size_of(batch)
        loop.build(batch)
        if self._key is None:
            self._begin(batch, size)
        logs = self._run(batch, size)
        self._batch += 1
        self._update += 1
        loop.data.count()
        if self._attempts is not None and self._attempts.changed:
            self._remember()
        if self._folder is not None and self._is_time_to_save():
            self._save(at_end=False)
        return logs

    def _run(self, batch: Any, size: BatchSize) -> Any:
        loop, attempts = self._loop, self._known_attempts
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
                if failure is None:
                    raise
            self._recover(size, failure)
            failures.append(failure)
        loop.done()
        attempts.succeeded(size)
        if failures:
            self._tell_size(size)
        return logs

    def _put_on(self, size: BatchSize) -> None:
        """The settings that are to be tried; those that the model can't have are left out."""
        while True:
            settings = self._settings(size)
            try:
                self._loop.put_on(settings)
                return
            except (BadInput, BadModel) as error:
                if settings.micro_batch_size and not self._why_whole:
                    self._why_whole = str(error)
                elif self._known_attempts.without_level():
                    self._say(f"{error} It goes on without.")
                else:
                    raise

    def _recover(self, size: BatchSize, failure: OutOfMemory) -> None:
        """Everything back, and what to try next; raises where nothing is left."""
        try:
            self._loop.roll_back()
        except BrokenUpdate as error:
            self._broken = str(error)
            run_events.note("oom", update=self._update, source=failure.source, text=failure.text)
            raise
        run_events.note(
            "oom",
            update=self._update,
            source=failure.source,
            requested_bytes=failure.requested_bytes,
            text=failure.text,
        )
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
        attempts = self._known_attempts
        first = options.plan.settings if isinstance(options.plan, Plan) else Settings()
        asked = json.loads(json.dumps([options.plan == AUTO, self._budget, options.approximate, first.to_json()]))
        self._key = key_of((*loop.identity(batch), host_memory_bytes(), asked))
        known = self._ceilings.get(self._key) if self._update == 0 else None
        if known is not None:
            try:
                attempts.load(known)
            except (MemfitError, KeyError, TypeError, ValueError):
                # Written by another version.
                known = None
        if options.plan == AUTO and self._budget is not None and known is None and self._update == 0:
            planned = self._planned(batch)
            if planned is not None:
                attempts.adopt(planned, size)
        for most in (options.micro_batch_size, self._request.micro_batch_size if self._request else None):
            if most and size.num_samples:
                attempts.bound(size, most)
        self._note_size(size)

    @property
    def _known_attempts(self) -> Attempts:
        if self._attempts is None:
            plan, loop = self._options.plan, self._loop
            self._attempts = Attempts(
                plan.settings if isinstance(plan, Plan) else Settings(),
                stronger=loop.stronger_moves(),
                whole_first=loop.mixes_samples,
                grow_after=_NEVER if loop.device_name == "host" else _GROW_AFTER,
            )
        return self._attempts

    def _planned(self, batch: Any) -> Settings | None:
        """Settings that are expected to fit into the budget; None where none could be found out."""
        from memfit import _keras_plan

        budget = int(self._budget or 0)
        on_host = self._loop.device_name == "host"
        if on_host:
            # The budget is for the whole process, and a part of it is taken.
            budget = max(1, budget - _resident_bytes())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = _keras_plan.plan_keras(
                    self._model, batch, device="host" if on_host else None, budget=budget, measure=False
                )
        except PlanNotFound as error:
            run_events.note("cannot fit", text=str(error))
            raise CannotFit(str(error)) from error
        except Exception:
            # What can't be planned is found out step by step.
            _log.debug("no plan could be made", exc_info=True)
            return None
        settings: Settings = found.settings
        return settings

    # Checkpoints.

    def _resume(self) -> None:
        found = None if self._folder is None else self._folder.latest()
        if found is None:
            return
        self._resumed = self._loop.read(found.path)
        progress = self._resumed.progress
        self._update = int(progress["update"])
        self._epoch = int(progress["epoch"])
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
        run_events.note("resume", update=self._update)

    def _load(self, batch: Any) -> None:
        """At the first batch after a resume, when all other callbacks have had their say."""
        resumed, self._resumed = self._resumed, None
        self._loop.build(batch)
        if self._skip and self._attempts is not None:
            # As at the time of the checkpoint: settings may come with variables of their own.
            self._put_on(self._loop.size_of(batch))
        self._loop.load_variables(resumed, in_epoch=bool(self._skip))
        if not self._skip:
            # Metrics begin anew, and the state that Keras holds is that of before.
            self._loop.load_variables(resumed, in_epoch=False)
        self._loop.load_callbacks(resumed)
        self._load_history(resumed)
        self._position = resumed.progress["data"]
        if not self._skip:
            self._loop.data.caught_up(self._position)
        else:
            self._skipped_logs = self._loop.metrics()

    def _pass_over(self) -> dict[str, Any]:
        self._batch += 1
        self._loop.data.count()
        if self._batch == self._skip:
            self._loop.data.caught_up(self._position)
            self._last_saved = time.monotonic()
        return dict(self._skipped_logs)

    def _load_history(self, resumed: Any) -> None:
        history = getattr(self._model, "history", None)
        if history is not None and hasattr(history, "history"):
            history.history.update({name: list(values) for name, values in resumed.progress["history"].items()})
            history.epoch = list(resumed.progress["epochs"])

    def _save(self, *, at_end: bool) -> None:
        if self._folder is None:
            return
        started = time.perf_counter()
        history = getattr(self._model, "history", None)
        progress = {
            "update": self._update,
            "epoch": self._epoch,
            "batch": self._batch,
            "stopped": at_end and bool(self._model.stop_training),
            "attempts": self._known_attempts.to_json(),
            "data": self._loop.data.position(at_end=at_end),
            "history": _plain_history(history),
            "epochs": [int(epoch) for epoch in getattr(history, "epoch", [])],
        }
        written = self._folder.write(
            self._update, lambda directory: self._loop.write(directory, progress), asynchronous=True
        )
        self._save_seconds = time.perf_counter() - started
        self._last_saved = time.monotonic()
        self._num_saved += 1
        if written:
            run_events.note("checkpoint", update=self._update, path=str(self._folder.path))

    def _is_time_to_save(self) -> bool:
        if self._options.checkpoint_every is not None:
            return self._batch > 0 and self._update % self._options.checkpoint_every == 0
        passed = time.monotonic() - self._last_saved
        # Sooner at first: a run that ends early has more to lose than the time that a checkpoint takes.
        seldom = min(_CHECKPOINT_SECONDS, _FIRST_CHECKPOINT_SECONDS * 2**self._num_saved)
        return passed >= max(seldom, self._save_seconds / _CHECKPOINT_SHARE)

    # Settings and words.

    def _settings(self, size: BatchSize) -> Settings:
        """How to run batches now, whatever their size."""
        many = None if size.num_samples is None or self._why_whole else _MANY_SAMPLES
        return self._known_attempts.settings(replace(size, num_samples=many))

    @property
    def _is_limited(self) -> bool:
        return self._budget is not None or cgroup_limit_bytes() is not None or self._request is not None

    def _remember(self) -> None:
        if self._key is not None and self._attempts is not None and self._attempts.changed:
            self._attempts.changed = False
            self._ceilings.put(self._key, self._attempts.to_json())

    def _note_size(self, size: BatchSize) -> None:
        """A supervisor that has to start the run again begins with less than this."""
        most = self._settings(size).micro_batch_size or size.num_samples
        if most and size.num_samples:
            most = min(most, size.num_samples)
        run_events.note("step", update=self._update, micro_batch_size=most)

    def _tell_size(self, size: BatchSize) -> None:
        settings = self._settings(size)
        self._note_size(size)
        most = settings.micro_batch_size
        parts = f"micro-batches of {most}" if most else "whole batches"
        extra = f", {len(settings.checkpoint)} parts of the model recomputed" if settings.checkpoint else ""
        differs = self._loop.differences
        self._say(f"memory ran out; going on with {parts}{extra}" + (f". Approximate: {differs}" if differs else ""))

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


def _own_folder(path: str | os.PathLike[str]) -> Path:
    """The folder, or one inside of it for each further fit of this process, in their order."""
    key = os.path.abspath(path)
    count = _used_folders[key] = _used_folders.get(key, 0) + 1
    return Path(path) if count == 1 else Path(path, f"fit-{count}")


def _plain_history(history: Any) -> dict[str, list[float]]:
    found = getattr(history, "history", None)
    if not isinstance(found, dict):
        return {}
    return {str(name): [float(value) for value in values] for name, values in found.items()}


def _resident_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def _flags() -> Any:
    from memfit.adapters.keras.guarding import flags

    return flags


def _keras_adapter() -> None:
    """Refuses to go on without Keras."""
    if "keras" in sys.modules:
        return
    from importlib.util import find_spec

    if find_spec("keras") is None:
        raise MissingDependency("Keras isn't installed. Install it with: pip install 'memfit[keras]'")
