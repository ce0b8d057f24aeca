"""The step that `memfit.jax.train_step` makes with `guard=True`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from memfit.api.jobs import jax_adapter
from memfit.core.guarding import BatchSize, GuardOptions
from memfit.core.settings import Settings
from memfit.guard.driver import Driver, Terms


class GuardedStep:
    """A step of JAX that is run again in more parts where memory runs out.

    Args:
        loss: as for `memfit.jax.train_step`.
        optimizer: of optax.
        settings: how it is run at first.
    """

    def __init__(self, loss: Callable[[Any, Any], Any], optimizer: Any, settings: Settings) -> None:
        first = replace(settings, donate=False)
        self._loop = jax_adapter().guarded_loop(loss, optimizer, settings=first)
        self._driver = Driver(self._loop, Terms(first, options=GuardOptions(remember=False)))
        self._first = first
        self._size: BatchSize | None = None
        self.num_retries = 0  # how often a batch was run again

    def init(self, params: Any) -> Any:
        """The optimizer's state for these parameters."""
        return self._loop.init(params)

    def __call__(self, params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        """One update; parameters and state that were given are used up, as those of a donating step are."""
        self._driver.check()
        self._loop.take(params, state, batch)
        try:
            self.num_retries += len(self._driver.step(batch))
            result: tuple[Any, Any, Any] = self._loop.result
        finally:
            # What isn't used any more must not stay in memory.
            self._loop.take(None, None, None)
            self._loop.result = None
        self._size = self._loop.size_of(batch)
        return result

    @property
    def settings(self) -> Settings:
        """How batches of the last one's size are run now."""
        return self._first if self._size is None else self._driver.attempts.settings(self._size)
