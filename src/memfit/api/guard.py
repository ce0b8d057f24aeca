"""`memfit.Guard`: training whose steps are transactions, driven by `memfit.guard.driver`."""

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from memfit.api import plan as planning
from memfit.api.jobs import is_keras_model, is_torch_module, torch_adapter
from memfit.core.errors import BadBatch, BadInput
from memfit.core.guarding import AUTO, CannotFit, GuardOptions, StepResult, check_counts
from memfit.core.plan import Plan
from memfit.core.settings import Settings
from memfit.guard.checkpointing import Best, save_at_exit
from memfit.guard.checkpoints import Folder
from memfit.guard.driver import Driver, Terms

_OF_KERAS = {
    "optimizer": "the optimizer is the one that the model was compiled with: memfit.Guard(model)",
    "scheduler": "give the optimizer a schedule as its learning_rate, or fit() a LearningRateScheduler",
    "clip_norm": "compile the model with an optimizer that has global_clipnorm=",
}
"""Arguments that a Keras model takes in another place."""


class Guard:
    """Guards a training loop: a step that runs out of memory is undone and run again with less.

        with memfit.Guard(model, optimizer, checkpoint="runs/a") as guard:
            for batch in guard.batches(loader):
                guard.step(loss, batch)

    A compiled model of Keras needs no more than itself:

        with memfit.Guard(model, budget="8GiB") as guard:
            history = guard.fit(x, y, epochs=3)
            loss = guard.train_on_batch(x[:64], y[:64])

    Args:
        model: the module, as the loss function gets it; DDP and FSDP2 models, too. Or a compiled `keras.Model`.
        optimizer: over its parameters; a Keras model brings its own.
        scheduler: a learning-rate scheduler, stepped after every real update; step it yourself where its unit is
            the epoch, and give it in `GuardOptions.state` instead.
        clip_norm: greatest norm of all gradients together.
        accumulate: batches of one update.
        plan: "auto" plans before the first step where there is a budget, and for PyTorch when memory runs out for the
            first time; a `Plan` is put into practice from the start; None tries smaller and smaller micro-batches.
        budget: what the step may take, "10GiB" or bytes; the memory that is there by default. For Keras on the host,
            what the whole process may take.
        checkpoint: folder of checkpoints; the newest that is whole is resumed from. None: no checkpoints.
        options: what is rarely needed.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        *,
        scheduler: Any = None,
        clip_norm: float | None = None,
        accumulate: int = 1,
        plan: Plan | str | None = AUTO,
        budget: str | int | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        options: GuardOptions | None = None,
    ) -> None:
        check_counts(accumulate=accumulate)
        terms = Terms(plan, budget, checkpoint, options or GuardOptions(), make_plan)
        self.model = model
        """The model, which is the one that was given."""
        self._best: Best | None = None
        self._keras: Any = None
        if is_keras_model(model) and trains_by_keras(model, optimizer):
            from memfit.api.fit import KerasTraining

            given = {"optimizer": optimizer, "scheduler": scheduler, "clip_norm": clip_norm}
            for name, value in given.items():
                if value is not None:
                    raise BadInput(f"the guard of a Keras model takes no {name}: {_OF_KERAS[name]}.")
            if accumulate != 1:
                raise BadInput(
                    "the guard of a Keras model takes no accumulate: give batches of the size of one update; what "
                    "doesn't fit is split by the guard."
                )
            self._keras = KerasTraining(model, terms)
            return
        self._torch_loop = torch_adapter().guarded_loop(
            model,
            optimizer,
            scheduler=scheduler,
            clip_norm=clip_norm,
            accumulate=accumulate,
            settings=terms.settings,
            options=terms.options,
            finish_window=self.finish_window,
        )
        self._torch_driver = Driver(self._torch_loop, terms, terms.folder)
        save_at_exit(self._torch_driver.save_last_alone)

    @property
    def _loop(self) -> Any:
        if self._keras is not None:
            raise BadInput("Keras trains this model: use guard.fit(x, y) or guard.train_on_batch(x, y).")
        return self._torch_loop

    @property
    def _driver(self) -> Driver:
        driver: Driver = self._torch_driver if self._keras is None else self._keras.driver
        return driver

    def _of_keras(self) -> Any:
        if self._keras is None:
            raise BadInput("fit and train_on_batch train a compiled keras.Model: use guard.step(loss, batch).")
        return self._keras

    # A loop of PyTorch.

    def batches(self, loader: Any) -> Iterator[Any]:
        """The batches of one epoch; after a resume, those that are left of it, and none of an epoch that is over.

        Args:
            loader: a DataLoader, a stream, or anything that can be iterated over again and again.
        """
        batches: Iterator[Any] = self._loop.batches.over(loader)
        return batches

    def step(self, loss: Callable[[Any, Any], Any] | None = None, batch: Any = ...) -> StepResult:
        """Forward, backward, and, with the last batch of a window, clipping and the update.

        Args:
            loss: takes the model and a batch, returns the scalar loss, or (loss, weight), where the weight is what the
                loss was divided by, such as the number of tokens; without it each sample counts the same. Or a
                criterion with a batch (x, y), or None where the model returns its loss.
            batch: any nesting of tensors; always to be given.

        Any other exception leaves the guard without this batch; the rest of its window is run again with the next.

        Raises:
            CannotFit: memory ran out and nothing is left to try; everything is as it was before the step.
            BadBatch: no batch was given; nothing has begun.
        """
        loop, driver = self._loop, self._driver
        if batch is ...:
            raise BadBatch(
                "step needs a batch: guard.step(loss, batch), or guard.step(batch=batch) where the model returns its "
                "loss."
            )
        driver.check()
        with loop.window(loss, batch) as entry:
            failures = driver.step(batch)
        return StepResult(
            loss=entry.value if entry.value is not None else float("nan"),
            micro_batches=entry.num_parts,
            retries=len(failures),
            updated=loop.happened is True,
            skipped=loop.happened is False,
            settings=driver.attempts.settings(loop.size_of(batch)),
            approximate=loop.transaction.differences(entry.num_parts),
            failures=tuple(failures),
            extra_bytes=loop.transaction.extra_bytes,
        )

    def finish_window(self) -> None:
        """Makes an update of the batches that don't fill a window, as `batches` does at the end of an epoch."""
        transaction = self._loop.transaction
        if not transaction.entries:
            return
        self._loop.end_window()
        try:
            self._driver.run(transaction.entries[-1].batch)
        except CannotFit:
            transaction.entries.clear()
            raise

    def epochs(self, total: int) -> Iterator[int]:
        """Numbers of the epochs that are left of `total`: none that was over before a resume.

        Args:
            total: epochs of the whole run.
        """
        yield from self._loop.batches.epochs(total)
        self._driver.save_last()

    @property
    def epoch(self) -> int:
        """The epoch in progress, counted from 0."""
        return int(self._loop.batches.epoch)

    @property
    def best(self) -> Best:
        """The best parameters so far, not the best model: `guard.best.offer(score, higher_is_better=True)`."""
        if self._best is None:
            loop, driver = self._loop, self._driver
            path = driver.checkpointing.path
            kept = path / "best" if path is not None and loop.ranks.is_first else None
            folder = None if kept is None else Folder(kept, 1, owner=loop.optimizer)
            self._best = Best(loop.kept_parameters(), lambda: driver.num_updates, folder, driver.save_last_alone)
        return self._best

    # A model of Keras.

    def fit(self, x: Any = None, y: Any = None, **arguments: Any) -> Any:
        """`model.fit` of a Keras model, guarded as by `memfit.fit`; returns Keras's History.

        Args:
            x: as for `model.fit`.
            y: as for `model.fit`.
            **arguments: further ones of `model.fit`.
        """
        return self._of_keras().fit(x, y, arguments)

    def train_on_batch(self, x: Any, y: Any = None, **arguments: Any) -> Any:
        """`model.train_on_batch` of a Keras model as one transaction; returns what Keras returns.

        Args:
            x: as for `model.train_on_batch`.
            y: as for `model.train_on_batch`.
            **arguments: further ones of `model.train_on_batch`.

        Raises:
            CannotFit: memory ran out and nothing is left to try; the model is as it was before the batch.
        """
        return self._of_keras().train_on_batch(x, y, arguments)

    @property
    def settings(self) -> Settings:
        """How batches of `train_on_batch` are run now."""
        settings: Settings = self._of_keras().settings
        return settings

    # Both.

    @property
    def num_updates(self) -> int:
        """Real updates so far, those before a resume included; with Keras, those of `train_on_batch`."""
        return self._driver.num_updates

    @property
    def resumed_from(self) -> int | None:
        """The update after which the checkpoint was made that this run goes on from; None: from the beginning."""
        return self._driver.resumed_from

    def save(self) -> None:
        """Writes a checkpoint now, in the background; only between two updates."""
        if self._keras is not None:
            self._keras.save()
            return
        if self._loop.transaction.entries:
            raise BadInput("a checkpoint is written at the end of an accumulation window, and this one is not over.")
        self._driver.save()

    def close(self) -> None:
        """Writes the last checkpoint, waits for it and leaves model and optimizer as they were without a guard."""
        if self._keras is not None:
            self._keras.close()
            return
        driver, loop = self._torch_driver, self._torch_loop
        if loop.transaction.entries and not loop.broken:
            driver.say(
                f"{len(loop.transaction.entries)} batches of an accumulation window that is not full were not "
                "applied: call finish_window() before close()"
            )
        driver.save_last()
        if self._best is not None:
            self._best.close()
        driver.close()

    def __reduce__(self) -> Any:
        raise TypeError("a guard can't be copied or pickled: it belongs to its model. Copy or save the model instead.")

    def __enter__(self) -> "Guard":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_plan(*arguments: Any, **options: Any) -> Plan:
    """`memfit.plan` as guards ask for it: nothing is measured, for memory is short."""
    return planning.plan(*arguments, options=planning.PlanOptions(measure=False), **options)


def trains_by_keras(model: Any, optimizer: Any) -> bool:
    """Whether a model of Keras is trained by Keras, and not as a module in a loop of PyTorch.

    Args:
        model: one of Keras, whichever its backend.
        optimizer: given beside it.
    """
    return not is_torch_module(model) or not isinstance(optimizer, sys.modules["torch"].optim.Optimizer)
