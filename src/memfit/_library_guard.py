"""The guard of a training loop that belongs to another library, such as a trainer's.

The library runs its own passes, clipping and updates; what it hands over is how to run one part of a batch, and its
update. What to try next, the roll back and the findings are those of `memfit.Guard`. Checkpoints stay the library's.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from memfit._guard import Guard
from memfit.core import run_events
from memfit.core.guarding import BatchSize, BrokenUpdate, CannotFit, OutOfMemory


class LibraryGuard(Guard):
    """Guards passes and updates that a library runs; arguments are those of `memfit.Guard`."""

    _keeps_checkpoints = False

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
        if self._broken:
            raise BrokenUpdate(self._broken)
        loop, transaction = self._loop, self._loop.transaction
        if weighting is not None:
            loop.assumed_weighting = weighting
        if not transaction.entries:
            transaction.open(self._accumulate)
        entry = transaction.add(loss, batch, run)
        size = loop.size_of(batch)
        with self._dropped_at_exceptions(entry):
            self._begin(loss, batch, size)
            # Processes that train together add up their gradients before the update, and that can fail, too.
            self._run(size, due=is_last and loop.num_ranks > 1)
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
        size = self._loop.size_of(transaction.entries[-1].batch)
        try:
            while (failure := transaction.update_by(update)) is not None:
                self._recover_update(size, failure, replay)
        except BrokenUpdate as error:
            self._broken = str(error)
            raise
        self.num_updates += 1
        if self._attempts.changed:
            self._remember()

    def retrying(self) -> AbstractContextManager[None]:
        """Entered around what changes gradients in place: an operator that finds no memory is called again."""
        return self._loop.transaction.retrying()

    def put_back(self, kept: Any) -> None:
        """Has `kept.remember()` and `kept.restore()` called where a window begins and where it is undone."""
        self._loop.transaction.kept.append(kept)

    @property
    def model(self) -> Any:
        """The model that is guarded."""
        return self._loop.model

    @property
    def optimizer(self) -> Any:
        """Its optimizer, without what a library has wrapped around it."""
        return self._loop.optimizer

    def forget(self) -> None:
        """The batches so far will see no update."""
        self._loop.transaction.forget()

    def _recover_update(self, size: BatchSize, failure: OutOfMemory, replay: bool) -> None:
        if replay and self._loop.num_ranks == 1:
            self._recover(size, failure, in_update=True)
            while (again := self._loop.transaction.run(self._settings_of, again=True)) is not None:
                self._recover(size, again, in_update=False)
            return
        run_events.note("oom", update=self.num_updates, source=failure.source, text=failure.text)
        # The other processes know nothing of it, so that nothing can be replayed together.
        left = not replay and self._attempts.failed(size, failure, in_update=True)
        settings = self._attempts.settings(size)
        if not left:
            raise CannotFit(self._loop.explain(failure, settings, ""), failure)
        self._loop.transaction.refit(settings)

    def _commit(self) -> None:
        """The library does it, later."""

    def _after_update(self) -> None:
        """And this is done then."""
