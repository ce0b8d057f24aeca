"""`memfit.fit` and `memfit.keras.Fit`: a `fit` of Keras whose batches are transactions.

Keras's own `fit` and `train_on_batch` are called, and find a training function in which the driver (`guard.driver`)
undoes and repeats steps: what they return is what Keras returns.
"""

import functools
import inspect
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memfit.api.guard import make_plan
from memfit.api.jobs import keras_adapter, require_keras
from memfit.catalogue.host import cgroup_limit_bytes
from memfit.core import run_events
from memfit.core.errors import BadInput, BadModel
from memfit.core.guarding import AUTO, GuardOptions
from memfit.core.plan import Plan
from memfit.core.settings import Settings
from memfit.guard.attempts import Ceilings
from memfit.guard.checkpointing import call_ended, folder_of_call, save_at_exit
from memfit.guard.driver import Driver, Terms

_log = logging.getLogger("memfit")

_BATCHES = "batches"
"""Folder of the checkpoints of `train_on_batch`, inside of that of `fit`."""

_INSTEAD = {
    "scaler": "under the policy mixed_float16, Keras scales the loss by itself",
    "ema": "compile the model with an optimizer that has use_ema=True",
    "clip_value": "compile the model with an optimizer that has clipvalue=",
    "clip": "compile the model with an optimizer that has clipnorm=, global_clipnorm= or clipvalue=",
    "grow_after": "on devices, larger micro-batches are tried again automatically",
    "state": "checkpoints hold the model, its optimizer and the state of fit() callbacks; save anything else",
}
"""Options of a guard of PyTorch that are refused, and what to use instead."""


def fit(
    model: Any,
    x: Any = None,
    y: Any = None,
    *,
    budget: str | int | None = None,
    plan: Plan | str | None = AUTO,
    checkpoint: str | os.PathLike[str] | None = None,
    options: GuardOptions | None = None,
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
        options: what is rarely needed.
        **arguments: further ones of `model.fit`.
    """
    terms = Terms(plan, budget, checkpoint, options or GuardOptions(), make_plan)
    _check_fit(model)
    return _guarded_call(model.fit, terms, (x, y), arguments)


def guarded_fit(
    plain_fit: Callable[..., Any],
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    budget: int | None = None,
) -> Any:
    """A call of `model.fit` in a script that knows nothing of memfit, guarded as its supervisor asks.

    `plain_fit` is Keras's own method, which takes the model first; `budget` holds where the supervisor names none.
    """
    from memfit.frameworks.keras.guard.callbacks import FitCallback

    request = run_events.current()
    given = kwargs.get("callbacks")
    known = given if isinstance(given, list | tuple) else [given]
    if any(isinstance(one, FitCallback) for one in known) or not getattr(model, "compiled", False):
        return plain_fit(model, *args, **kwargs)
    try:
        _check_fit(model)
    except BadModel as error:
        _log.warning("this fit has no guard: %s", error)
        return plain_fit(model, *args, **kwargs)
    is_asked = request is not None and request.budget_bytes is not None
    terms = Terms(budget=None if is_asked else budget, make_plan=make_plan)
    return _guarded_call(functools.partial(plain_fit, model), terms, args, kwargs)


def make_callback_class() -> type:
    """The class `memfit.keras.Fit`, which is a callback of Keras."""
    require_keras()
    from memfit.frameworks.keras.guard.callbacks import FitCallback

    class Fit(FitCallback):
        """Guards the `fit` whose callback it is, as `memfit.fit` does; put it last.

        Args:
            budget: as for `memfit.fit`.
            plan: as for `memfit.fit`.
            checkpoint: as for `memfit.fit`.
            options: as for `memfit.fit`.
        """

        def __init__(
            self,
            *,
            budget: str | int | None = None,
            plan: Plan | str | None = AUTO,
            checkpoint: str | os.PathLike[str] | None = None,
            options: GuardOptions | None = None,
        ) -> None:
            super().__init__(GuardedFit(Terms(plan, budget, checkpoint, options or GuardOptions(), make_plan)))

    Fit.__qualname__ = "Fit"
    return Fit


def _check_fit(model: Any) -> None:
    require_keras()
    from memfit.frameworks.keras.guard.loop import check_fit

    check_fit(model)


def _guarded_call(
    plain_fit: Callable[..., Any],
    terms: Terms,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    ceilings: Ceilings | None = None,
) -> Any:
    """A call of `fit` with a guard among its callbacks."""
    from memfit.frameworks.keras.guard.callbacks import FitCallback

    guarded = GuardedFit(terms, ceilings)
    names = list(inspect.signature(plain_fit).parameters)
    arguments = dict(kwargs) | dict(zip(names, args, strict=False))
    given: Any = arguments.get("callbacks")
    callbacks = getattr(given, "callbacks", None)
    if callbacks is not None:
        own = FitCallback(guarded)
        own.set_model(given.model)
        own.set_params(given.params)
        callbacks.append(own)
    else:
        given = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
        arguments["callbacks"] = [*given, FitCallback(guarded)]
    try:
        return plain_fit(**arguments)
    finally:
        guarded.close()


class _KerasSteps:
    """Loop and driver of one training, whose steps Keras calls."""

    def __init__(self, terms: Terms, ceilings: Ceilings | None) -> None:
        from memfit.frameworks.keras.guard.flags import set_early

        terms.options.refuse("the guard of a Keras model", _INSTEAD)
        self._terms = terms
        self._ceilings = ceilings
        self._loop: Any = None
        self._driver: Driver | None = None
        self._is_limited = terms.budget_bytes is not None or cgroup_limit_bytes() is not None
        self._said = dict.fromkeys(set_early(is_limited=self._is_limited))
        for text in self._said:
            _log.warning(text)

    def _open(self, model: Any, folder: str | os.PathLike[str] | None, **options: Any) -> None:
        from memfit.frameworks.keras.guard.flags import set_late

        for text in set_late(is_limited=self._is_limited):
            if text not in self._said:
                self._said[text] = None
                _log.warning(text)
        self._loop = keras_adapter().guarded_loop(
            model, self._step, options=self._terms.options, is_ordered=folder is not None, **options
        )
        try:
            self._driver = Driver(self._loop, self._terms, folder, self._ceilings)
        except BaseException:
            self._loop.close()
            raise

    def _step(self, batch: Any) -> Any:
        """Trains on a batch, as often as it takes; the logs."""
        driver, loop = self._driver, self._loop
        assert driver is not None
        try:
            driver.check()
            if loop.enter(batch, driver.restore_settings):
                driver.step(batch)
                return loop.logs
            if loop.is_caught_up:
                driver.checkpointing.wait_anew()
            return dict(loop.logs)
        except BaseException:
            loop.give_back()
            raise


class GuardedFit(_KerasSteps):
    """Guards calls of `fit`, one at a time: a callback tells where Keras is."""

    def __init__(self, terms: Terms, ceilings: Ceilings | None = None) -> None:
        super().__init__(terms, ceilings)
        self._folder: str | os.PathLike[str] | None = None

    def train_begins(self, model: Any, iterator: Any, callbacks: list[Any], params: dict[str, Any]) -> None:
        """Puts the guard on, and goes to where the last checkpoint was made."""
        self.close()
        self._folder = self._terms.folder
        folder = None if self._folder is None else folder_of_call(self._folder)
        num_epochs = int(params.get("epochs") or 0)
        self._open(model, folder, iterator=iterator, callbacks=callbacks, num_epochs=num_epochs)

    def epoch_begins(self, epoch: int) -> None:
        """Before the first batch of an epoch is drawn."""
        self._loop.epoch_begins(epoch)

    def epoch_ends(self, epoch: int, logs: dict[str, Any]) -> None:
        """After validation."""
        driver = self._driver
        if driver is not None:
            is_last = self._loop.epoch_ends(epoch, logs)
            if driver.checkpointing.is_open and (is_last or driver.checkpointing.is_due(driver.num_updates)):
                driver.save()

    def train_ends(self) -> None:
        """Takes the guard off."""
        if self._loop is not None:
            self._loop.train_ends()
        if self._folder is not None:
            call_ended(self._folder)
        self.close()

    def close(self) -> None:
        """Leaves the model as it was without a guard, and waits for the last checkpoint."""
        driver, self._driver, self._loop, self._folder = self._driver, None, None, None
        if driver is not None:
            driver.close()


class KerasTraining(_KerasSteps):
    """Guarded calls of `fit`, and of `train_on_batch` in loops of one's own: what `memfit.Guard` does for Keras.

    Between calls nobody tells where training is; so before each batch the steps are put back where `compile` or a `fit`
    took them off.
    """

    def __init__(self, model: Any, terms: Terms) -> None:
        super().__init__(terms, terms.ceilings())
        _check_fit(model)
        self._model = model
        self._is_closed = False

    def fit(self, x: Any, y: Any, arguments: dict[str, Any]) -> Any:
        """`model.fit`, guarded."""
        self._check_open()
        if self._driver is not None:
            # The model is about to be trained by something else.
            self._driver.save_last()
            self._loop.close()
        return _guarded_call(self._model.fit, self._terms, (x, y), arguments, self._ceilings)

    def train_on_batch(self, x: Any, y: Any, arguments: dict[str, Any]) -> Any:
        """`model.train_on_batch`, guarded."""
        self._check_open()
        _ = self.driver
        self._loop.put_back()
        return self._model.train_on_batch(x, y, **arguments)

    @property
    def driver(self) -> Driver:
        """Of the batches; it has gone to where the last checkpoint was made."""
        if self._driver is None:
            # Nothing tells a loop that knows of no supervisor how much of it to skip, so its folder isn't for this.
            folder = self._terms.checkpoint
            self._model.make_train_function()
            self._open(self._model, None if folder is None else Path(folder, _BATCHES))
            assert self._driver is not None
            save_at_exit(self._driver.save_last)
        return self._driver

    @property
    def settings(self) -> Settings:
        """In use."""
        settings: Settings = Settings() if self._loop is None else self._loop.settings
        return settings

    def save(self) -> None:
        """Writes a checkpoint of the batches."""
        self._check_open()
        if self._terms.checkpoint is None:
            raise BadInput("the guard has no folder for checkpoints: memfit.Guard(model, checkpoint=...).")
        self.driver.save()

    def close(self) -> None:
        """Writes the last checkpoint, waits for it and takes the guard off the model, whose weights are kept."""
        self._is_closed = True
        if self._driver is not None:
            self._driver.save_last()
            self._driver.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise BadInput("the guard was closed. Make another one: memfit.Guard(model).")
