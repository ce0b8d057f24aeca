"""`memfit.Guard` of a Keras model: guarded calls of `fit`, and of `train_on_batch` in loops of one's own.

Keras's own `train_on_batch` is called, and finds a training function that undoes and repeats, as it does within a
guarded `fit`: what it returns is what Keras returns. Between calls nobody tells where training is; so the guard looks
before each batch whether its steps are still in place, and puts them back where `compile` or a `fit` took them off.
"""

import atexit
import contextlib
import os
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from memfit._estimator import is_torch_module, require_keras
from memfit._fit_options import AUTO, FitOptions
from memfit._keras_fit import KerasFit, guarded_call
from memfit.core.errors import BadInput
from memfit.core.plan import Plan
from memfit.core.settings import Settings

_BATCHES = "batches"
"""Folder of the checkpoints of `train_on_batch`, inside of that of `fit`."""

_ENDLESS = 2**62

_INSTEAD: dict[str, tuple[Any, str]] = {
    "optimizer": (None, "the optimizer is the one that the model was compiled with: memfit.Guard(model)"),
    "scheduler": (None, "give the optimizer a schedule as its learning_rate, or fit() a LearningRateScheduler"),
    "scaler": (None, "under the policy mixed_float16, Keras scales the loss by itself"),
    "ema": (None, "compile the model with an optimizer that has use_ema=True"),
    "accumulate": (1, "give batches of the size of one update; what doesn't fit is split by the guard"),
    "clip_norm": (None, "compile the model with an optimizer that has global_clipnorm="),
    "clip_value": (None, "compile the model with an optimizer that has clipvalue="),
    "clip": (None, "compile the model with an optimizer that has clipnorm=, global_clipnorm= or clipvalue="),
    "grow_after": (100, "on devices, larger micro-batches are tried again by themselves"),
    "state": (None, "checkpoints hold the model, its optimizer and what callbacks of fit() remember; keep the rest"),
    "device": (None, "training runs where Keras runs (keras.device); budget= says how much memory it may take"),
}
"""Options of a guard of PyTorch that are refused: what they are by default, and what to use instead."""


def trains_by_keras(model: Any, optimizer: Any) -> bool:
    """Whether a model of Keras is trained by Keras, and not as a module in a loop of PyTorch.

    Args:
        model: one of Keras, whichever its backend.
        optimizer: given beside it.
    """
    return not is_torch_module(model) or not isinstance(optimizer, sys.modules["torch"].optim.Optimizer)


def make_guard(model: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> "KerasGuard":
    """A guard from what `memfit.Guard` was given.

    Args:
        model: of Keras.
        arguments: what followed it by place.
        options: by name.
    """
    if len(arguments) > 1:
        raise BadInput(f"a Keras model is followed by names only, but {len(arguments)} more arguments were given.")
    given = options | ({"optimizer": arguments[0]} if arguments else {})
    for name, (default, instead) in _INSTEAD.items():
        value = given.pop(name, default)
        if value is not default and value != default:
            raise BadInput(f"the guard of a Keras model takes no {name}: {instead}.")
    FitOptions.check_names(given, "the guard of a Keras model")
    return KerasGuard(model, **given)


class KerasGuard:
    """Guards the training of a Keras model: a batch that runs out of memory is undone and run again with less.

        with memfit.Guard(model, budget="8GiB") as guard:
            guard.fit(x, y, epochs=3)
            for x, y in batches:
                loss = guard.train_on_batch(x, y)

    Args:
        model: a compiled `keras.Model`, on TensorFlow, JAX or PyTorch.
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
    """

    def __init__(
        self,
        model: Any,
        *,
        budget: str | int | None = None,
        plan: Plan | str | None = AUTO,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        keep: int = 3,
        approximate: bool = False,
        remember: bool = True,
        micro_batch_size: int | None = None,
    ) -> None:
        self._options = FitOptions(
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
        self.model = model
        """The model, which is the one that was given."""
        self._findings: dict[str, dict[str, Any]] = {}
        self._batches: _Batches | None = None
        self._is_closed = False

    def fit(self, x: Any = None, y: Any = None, **arguments: Any) -> Any:
        """`model.fit`, guarded as by `memfit.fit`; returns Keras's History.

        Args:
            x: as for `model.fit`.
            y: as for `model.fit`.
            **arguments: further ones of `model.fit`.
        """
        self._check_open()
        if self._batches is not None:
            # The model is about to be trained by something else.
            self._batches.save_last()
            self._batches.take_off()
        return guarded_call(self.model.fit, self._options, (x, y), arguments, self._findings)

    def train_on_batch(self, x: Any, y: Any = None, **arguments: Any) -> Any:
        """`model.train_on_batch` as one transaction; returns what Keras returns.

        Args:
            x: as for `model.train_on_batch`.
            y: as for `model.train_on_batch`.
            **arguments: further ones of `model.train_on_batch`.

        Raises:
            CannotFit: memory ran out and nothing is left to try; the model is as it was before the batch.
        """
        self._check_open()
        self._opened().put_on()
        return self.model.train_on_batch(x, y, **arguments)

    @property
    def num_updates(self) -> int:
        """Batches that `train_on_batch` has trained on, those before a resume included: skip so many of a loop's."""
        return self._opened().num_updates

    @property
    def resumed_from(self) -> int | None:
        """Batches that `train_on_batch` had trained on when the checkpoint was made; None: from the beginning."""
        return self._opened().resumed_from

    @property
    def settings(self) -> Settings:
        """How batches of `train_on_batch` are run now."""
        return Settings() if self._batches is None else self._batches.settings

    def save(self) -> None:
        """Writes a checkpoint of what `train_on_batch` has trained, in the background."""
        self._check_open()
        if self._options.checkpoint is None:
            raise BadInput("the guard has no folder for checkpoints: memfit.Guard(model, checkpoint=...).")
        self._opened().save()

    def close(self) -> None:
        """Writes the last checkpoint, waits for it and takes the guard off the model, whose weights are kept."""
        self._is_closed = True
        if self._batches is not None:
            self._batches.save_last()
            self._batches.close()

    def __reduce__(self) -> Any:
        raise TypeError("a guard can't be copied or pickled: it belongs to its model. Copy or save the model instead.")

    def __enter__(self) -> "KerasGuard":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise BadInput("the guard was closed. Make another one: memfit.Guard(model).")

    def _opened(self) -> "_Batches":
        if self._batches is None:
            folder = self._options.checkpoint
            options = replace(self._options, checkpoint=None if folder is None else Path(folder, _BATCHES))
            self._batches = _Batches(options, self._findings)
            self._batches.begin(self.model)
            _unsaved.add(self._batches)
        return self._batches


class _Batches(KerasFit):
    """Guards batches that a loop of the user's own hands over one by one."""

    # Nothing tells a loop that knows of no checkpoints how much of it to skip.
    _takes_folder = False

    resumed_from: int | None = None

    def begin(self, model: Any) -> None:
        """Goes to where the last checkpoint was made."""
        model.make_train_function()
        self.train_begins(model, None, [], {"epochs": _ENDLESS})
        # What a fit begins with is not this loop's.
        model._initial_epoch = None
        if self._resumed is not None:
            self.resumed_from = self._update

    def _load(self, batch: Any) -> None:
        position = self._resumed.progress["data"]
        super()._load(batch)
        self._loop.data.go_on(position)

    def put_on(self) -> None:
        """Before a batch: the steps are in place, whatever happened to the model since the last one."""
        if self._loop is not None and self._loop.is_installed:
            return
        self.take_off()
        self._model.make_train_function()
        self._open_loop(None, [])

    def take_off(self) -> None:
        """The model as it was, until the next batch."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()
            self._remember()

    def save(self) -> None:
        """Writes a checkpoint."""
        self.put_on()
        self._save(at_end=False)

    def save_last(self) -> None:
        """Writes a checkpoint of the last batch, if there is none."""
        if self._checkpoints.is_open and self._update != self._saved and not self._broken:
            self.save()

    @property
    def num_updates(self) -> int:
        """Batches so far."""
        return self._update

    @property
    def settings(self) -> Settings:
        """In use."""
        return Settings() if self._loop is None else self._loop.settings


_unsaved: "weakref.WeakSet[_Batches]" = weakref.WeakSet()


@atexit.register
def _save_what_is_left() -> None:
    """A script may end without a word to its guards."""
    for batches in list(_unsaved):
        with contextlib.suppress(Exception):
            batches.save_last()
