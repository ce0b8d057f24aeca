"""memfit inside of the training loops of other libraries: transformers, Lightning and Keras.

None of them is imported before it is used. A loop that uses `accelerate` needs nothing from here: `memfit.Guard` takes
what `accelerator.prepare` returns.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

from memfit.api.jobs import torch_adapter
from memfit.catalogue.host import cgroup_limit_bytes
from memfit.core.guarding import BrokenUpdate, CannotFit, GuardOptions, MemoryFailure
from memfit.core.patching import replace_method
from memfit.guard.driver import Driver, Terms
from memfit.processes.limits import has_devices

LightningGuard: Any  # a callback that guards training steps; made when it is first asked for, see `_lightning_guard`

_INSTEAD = dict.fromkeys(("scaler", "ema", "clip_value", "clip"), "the library has its own") | dict.fromkeys(
    ("state", "checkpoint_every", "keep"), "the library writes the checkpoints"
)
"""Options that a guard inside of a library doesn't take."""


class LibraryGuard:
    """Guards a training loop that belongs to another library, which runs its own passes, clipping and updates.

    What the library hands over is how to run one part of a batch, and its update. What to try next, the roll back and
    the findings are the driver's. Checkpoints stay the library's.
    """

    def __init__(self, model: Any, optimizer: Any, options: GuardOptions | None = None) -> None:
        options = options or GuardOptions()
        self._loop = torch_adapter().guarded_loop(model, optimizer, options=options, commits=False)
        self._driver = Driver(self._loop, Terms(plan=None, options=options))
        self.model = model  # the model that is guarded
        self.optimizer = self._loop.optimizer  # its optimizer, without what a library has wrapped around it
        transaction = self._loop.transaction
        self.retrying = transaction.retrying  # entered around what changes gradients in place, such as clipping
        self.put_back = transaction.kept.append  # takes what has `remember` and `restore`, for windows that are undone
        self.forget = transaction.entries.clear  # the batches so far will see no update
        self.close = self._driver.close

    def passes(
        self,
        loss: Callable[[Any, Any], Any],
        batch: Any,
        run: Callable[[Any, float], Any],
        *,
        is_last: bool,
        weighting: Any = None,
    ) -> Any:
        """Forward and backward pass of a batch; its loss, detached, or None where nothing of it counted.

        By `loss` is found out how losses of parts add up; where it can't be, by the weighting. `run` runs both passes
        of a part, whose loss counts by a factor, and returns the loss, detached. An update follows the last batch.
        """
        self._driver.check()
        if weighting is not None:
            self._loop.assumed_weighting = weighting
        with self._loop.window(loss, batch, run) as entry:
            # Processes that train together add up their gradients before the update, and that can fail, too.
            self._loop.is_due = is_last and self._loop.ranks.num_ranks > 1
            self._driver.step(batch)
        return entry.value

    def update(self, update: Callable[[], object], *, replay: bool) -> None:
        """Has the library update the parameters, again where that ran out of memory before anything had changed.

        With `replay` it clips gradients as well, so that they must be made anew before.
        """
        transaction = self._loop.transaction
        if not transaction.entries:
            update()
            return
        try:
            while (failure := transaction.update_by(update)) is not None:
                self._recover_update(failure, replay)
        except BrokenUpdate as error:
            self._loop.broken = str(error)
            raise
        self._loop.happened = True
        self._driver.updated()

    def _recover_update(self, failure: MemoryFailure, replay: bool) -> None:
        loop, driver = self._loop, self._driver
        loop.in_update = True
        if replay and loop.ranks.num_ranks == 1:
            driver.recover(failure)
            while (again := loop.attempt(driver.settings_of, again=True)) is not None:
                driver.recover(again)
            return
        driver.note_failure(failure)
        size = loop.size_of(loop.batch)
        # The other processes know nothing of it, so that nothing can be replayed together.
        left = not replay and driver.attempts.failed(size, failure, in_update=True)
        settings = driver.attempts.settings(size)
        if not left:
            raise CannotFit(loop.explain(failure, settings, ""), failure)
        loop.transaction.refit(settings)


class GuardedTrainerMixin:
    """A `transformers.Trainer` whose training steps are transactions: `class Mine(GuardedTrainerMixin, Trainer)`.

    A step that runs out of memory is undone and run again with smaller micro-batches, then with recomputation.
    """

    memfit_options: GuardOptions = GuardOptions()
    """approximate, grow_after, micro_batch_size and remember; all else is the trainer's."""

    def train(self, *arguments: Any, **named: Any) -> Any:
        """Trains; where `memfit run` has started the script again, from the last checkpoint."""
        return _trainer_guard(self).train(super().train, arguments, named)  # type: ignore[misc]

    def training_step(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        """Forward and backward pass of one batch, as often as it takes."""
        step = super().training_step  # type: ignore[misc]
        return _trainer_guard(self).training_step(step, model, inputs, arguments, named)

    def _save_checkpoint(self, model: Any, trial: Any = None, **named: Any) -> Any:
        result = super()._save_checkpoint(model, trial, **named)  # type: ignore[misc]
        _trainer_guard(self).saved(trial)
        return result


def guard_trainer(trainer: Any, options: GuardOptions | None = None) -> Any:
    """Guards a `transformers.Trainer` that was made already, of whatever class; returns it.

    Args:
        trainer: the trainer; its class becomes one of the same name with `GuardedTrainerMixin`.
        options: approximate, grow_after, micro_batch_size and remember; all else is the trainer's.
    """
    kind = type(trainer)
    if not isinstance(trainer, GuardedTrainerMixin):
        members = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        trainer.__class__ = type(kind.__name__, (GuardedTrainerMixin, kind), members)
    trainer.memfit_options = options or GuardOptions()
    return trainer


def _trainer_guard(trainer: Any) -> Any:
    guard = vars(trainer).get("_memfit_guard")
    if guard is None:
        torch_adapter()
        from memfit.frameworks.torch.guard.transformers_trainer import TrainerGuard

        guard = trainer._memfit_guard = TrainerGuard(trainer, _maker(trainer.memfit_options))
    return guard


def _maker(options: GuardOptions) -> Any:
    options.refuse("the guard of a trainer", _INSTEAD)

    def make(model: Any, optimizer: Any, scaler: Any = None) -> LibraryGuard:
        return LibraryGuard(model, optimizer, replace(options, scaler=scaler))

    return make


# Lightning.

_LIGHTNING = ("lightning.pytorch", "pytorch_lightning")


def __getattr__(name: str) -> Any:
    if name == "LightningGuard":
        return _lightning_guard(_lightning())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _lightning() -> ModuleType:
    """The Lightning that the program uses: its package has two names."""
    import importlib

    for name in sorted(_LIGHTNING, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ImportError("LightningGuard needs Lightning, which is not installed. Run: pip install lightning")


@functools.cache
def _lightning_guard(lightning: ModuleType) -> Any:
    """The callback, as a class of this Lightning."""
    torch_adapter()
    from memfit.frameworks.torch.guard.lightning_guard import LightningLoop

    class LightningGuard(lightning.Callback):  # type: ignore[misc, name-defined]
        """A callback that makes training steps transactions.

        A step that runs out of memory is undone and run again with smaller micro-batches, then with recomputation.

        Args:
            options: approximate, grow_after, micro_batch_size and remember; all else is the trainer's.
        """

        def __init__(self, options: GuardOptions | None = None) -> None:
            super().__init__()
            self._make_guard = _maker(options or GuardOptions())
            self._loop: LightningLoop | None = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            """Guards the training from here on."""
            self._loop = LightningLoop(trainer, self._make_guard)
            self._loop.attach()

        def on_train_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            """Leaves the trainer as it was."""
            if self._loop is not None:
                self._loop.close()
                self._loop = None

        on_exception = on_train_end

    return LightningGuard


# Scripts under `memfit run`.


def install_transformers(module: ModuleType) -> None:
    """Guards every `Trainer` of this process from when it trains; `module` is `transformers.trainer`."""

    def train(plain: Any, trainer: Any, arguments: Any, named: Any) -> Any:
        if not isinstance(trainer, GuardedTrainerMixin):
            guard_trainer(trainer)
        return _trainer_guard(trainer).train(functools.partial(plain, trainer), arguments, named)

    replace_method(module.Trainer, "train", train)


def install_lightning(module: ModuleType) -> None:
    """Adds a `LightningGuard` to every `Trainer` of this process; `module` is one of Lightning's two packages."""

    def fit(plain: Any, trainer: Any, arguments: Any, named: Any) -> Any:
        from memfit.frameworks.torch.guard.lightning_guard import resumed

        guard = _lightning_guard(module)
        if not any(isinstance(callback, guard) for callback in trainer.callbacks):
            trainer.callbacks.append(guard())
        if len(arguments) <= _CKPT_PATH:
            named["ckpt_path"] = resumed(named.get("ckpt_path"))
        return plain(trainer, *arguments, **named)

    replace_method(module.Trainer, "fit", fit)


def install_keras(module: ModuleType) -> None:
    """Guards every `fit` of Keras in this process; `module` is the package `keras`."""
    from memfit.api.fit import guarded_fit
    from memfit.frameworks.keras import supervised

    # TensorFlow's kernels may end the process where others raise an error: what it does in a container is planned.
    budget = cgroup_limit_bytes() if module.backend.backend() == "tensorflow" and not has_devices() else None
    supervised.install(module, functools.partial(guarded_fit, budget=budget))


TRAINERS = {
    "transformers.trainer": install_transformers,
    "lightning.pytorch": install_lightning,
    "pytorch_lightning": install_lightning,
}
"""What makes the trainers of a library guarded, by the module that has to be imported first."""

# Arguments of `fit` before `ckpt_path`: model, train_dataloaders, val_dataloaders, datamodule.
_CKPT_PATH = 4
