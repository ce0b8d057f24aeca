"""The guard of a training loop that belongs to another library, such as a trainer's.

The library runs its own passes, clipping and updates; what it hands over is how to run one part of a batch, and its
update. What to try next, the roll back and the findings are the driver's. Checkpoints stay the library's.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from memfit.api.jobs import torch_adapter
from memfit.core.guarding import BrokenUpdate, CannotFit, GuardOptions, OutOfMemory
from memfit.guard.driver import Driver, Terms


class LibraryGuard:
    """Guards passes and updates that a library runs.

    Args:
        model: the module that is trained.
        optimizer: over its parameters.
        options: of the guard.
    """

    def __init__(self, model: Any, optimizer: Any, options: GuardOptions | None = None) -> None:
        options = options or GuardOptions()
        self._loop = torch_adapter().guarded_loop(model, optimizer, options=options, commits=False)
        self._driver = Driver(self._loop, Terms(plan=None, options=options))
        self.model = model  # the model that is guarded
        self.optimizer = self._loop.optimizer  # its optimizer, without what a library has wrapped around it

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

        Args:
            loss: takes the model and a batch, returns the loss: by it is found out how losses of parts add up.
            batch: any nesting of tensors.
            run: runs forward and backward pass of a part, whose loss counts by a factor; returns the loss, detached.
            is_last: whether an update follows.
            weighting: how the losses of parts add up where that can't be found out; None: by their samples.

        Raises:
            CannotFit: memory ran out and nothing is left to try.
        """
        self._driver.check()
        if weighting is not None:
            self._loop.assumed_weighting = weighting
        with self._loop.window(loss, batch, run) as entry:
            # Processes that train together add up their gradients before the update, and that can fail, too.
            self._loop.is_due = is_last and self._loop.num_ranks > 1
            self._driver.step(batch)
        return entry.value

    def update(self, update: Callable[[], object], *, replay: bool) -> None:
        """Has the library update the parameters.

        Args:
            update: does it; may be called again after it ran out of memory.
            replay: whether it clips gradients as well, so that they must be made anew before it is called again.

        Raises:
            CannotFit: memory ran out before anything had changed, and nothing is left to try.
            BrokenUpdate: memory ran out in the middle of it.
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

    def _recover_update(self, failure: OutOfMemory, replay: bool) -> None:
        loop, driver = self._loop, self._driver
        loop.in_update = True
        if replay and loop.num_ranks == 1:
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

    def retrying(self) -> AbstractContextManager[None]:
        """Entered around what changes gradients in place: an operator that finds no memory is called again."""
        context: AbstractContextManager[None] = self._loop.transaction.retrying()
        return context

    def put_back(self, kept: Any) -> None:
        """Has `kept.remember()` and `kept.restore()` called where a window begins and where it is undone."""
        self._loop.transaction.kept.append(kept)

    def forget(self) -> None:
        """The batches so far will see no update."""
        self._loop.transaction.forget()

    def close(self) -> None:
        """Takes all settings off the model."""
        self._driver.close()
