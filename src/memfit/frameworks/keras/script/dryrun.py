"""The first training step of a script, before anything is trained.

In `fit` and `train_on_batch` Keras draws the batch itself, from whatever the script gives it; only the function that
would train on it is another, which keeps the batch and ends the script. Loops of the script's own are followed by
`tensorflow_loops` and `jax_loops`.
"""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import keras

from memfit.core.device import Device
from memfit.core.estimate import Note
from memfit.core.patching import Replacement, replace_method, replaced
from memfit.core.settings import Settings
from memfit.core.trace import Trace
from memfit.frameworks.keras import internals


class FirstBatch(BaseException):
    """Ends the script, whatever exceptions it catches, with the first batch as Keras gives it to `train_step`."""

    def __init__(self, model: Any, batch: Any) -> None:
        super().__init__("the first batch of fit")
        self.model = model
        self.batch = batch


class FirstTurn(BaseException):
    """Ends the script when its own loop has gone through one turn."""


class OpenLoop:
    """An iteration of a loop, as a job that can be traced."""

    batch_size = None
    notes: tuple[Note, ...] = ()

    def __init__(self, loop: Any, device: Device, name: str) -> None:
        self.name = name
        self._loop = loop
        self._device = device

    def trace(self, batch_size: int | None, settings: Settings | None = None) -> Trace:
        """The trace of the turn; the script has made its batch, and nothing about it can be changed."""
        found: Trace = self._loop.trace(self._device)
        return found


class TorchLoops:
    """On PyTorch, loops are followed on a simulated GPU only: the script ends where it would make its first update."""

    def __init__(self) -> None:
        from memfit.frameworks.torch.script.steps import call_before_updates

        self._hook = call_before_updates(self._end)
        self._optimizer = internals.base_optimizer.BaseOptimizer
        self._plain = self._optimizer.apply
        self._optimizer.apply = self._end

    @staticmethod
    def _end(*given: Any, **named: Any) -> None:
        raise FirstTurn("the first update of a training loop")

    def close(self) -> None:
        """Steps can be taken again: that of a `fit` is about to be traced."""
        self._hook.remove()
        self._optimizer.apply = self._plain


def follow_loops(found: Callable[[Any], None]) -> Any:
    """Watches loops of the script's own from now on; `found` is told of the first, which can be traced.

    The loop is to be closed when the script has ended; None on a backend without loops of the script's own.
    """
    backend = keras.backend.backend()
    if backend == "torch":
        return TorchLoops()
    if backend not in ("tensorflow", "jax"):
        return None

    def stop(loop: Any) -> None:
        found(loop)
        raise FirstTurn("the first iteration of a training loop")

    module = importlib.import_module(f"memfit.frameworks.keras.script.{backend}_loops")
    loop = (module.TensorFlowScriptLoop if backend == "tensorflow" else module.JaxScriptLoop)(stop)
    loop.watch()
    return loop


def end_at_fit(module: ModuleType, found: Callable[[FirstBatch], None]) -> None:
    """Has the first `fit` or `train_on_batch` end with `FirstBatch`; `found` is told before: scripts may catch it."""

    def stop(plain: Callable[..., Any], model: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        def keep(*given: Any) -> Any:
            # The iterator comes last; PyTorch's trainer gives a list with one batch.
            batch = next(iter(given[-1]))
            first = FirstBatch(model, batch)
            found(first)
            raise first

        def make(force: bool = False) -> None:
            model.train_function = keep

        try:
            with replaced([Replacement(model, "make_train_function", make)]):
                return plain(model, *arguments, **named)
        finally:
            model.train_function = None

    for name in ("fit", "train_on_batch"):
        replace_method(module.Model, name, stop)
