"""The first batch of a script's first `fit`, before anything is trained.

Keras draws the batch itself, from whatever the script gives it; only the function that would train on it is another,
which keeps the batch and ends the script.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from memfit.adapters.keras.supervised import replace_fit


class FirstBatch(BaseException):
    """Ends the script: no `except Exception` of its own holds it back.

    Args:
        model: that was to be trained.
        batch: as Keras gives it to `train_step`.
    """

    def __init__(self, model: Any, batch: Any) -> None:
        super().__init__("the first batch of fit")
        self.model = model
        self.batch = batch


def end_at_fit(module: ModuleType, found: Callable[[FirstBatch], None]) -> None:
    """Has the first `fit` of this process end with `FirstBatch`.

    Args:
        module: the package `keras`.
        found: told first, for scripts that catch everything.
    """

    def stop(plain: Callable[..., Any], model: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        def keep(*given: Any) -> Any:
            # The iterator comes last; PyTorch's trainer gives a list with one batch.
            batch = next(iter(given[-1]))
            first = FirstBatch(model, batch)
            found(first)
            raise first

        def make(force: bool = False) -> None:
            model.train_function = keep

        model.make_train_function = make
        try:
            return plain(model, *arguments, **named)
        finally:
            vars(model).pop("make_train_function", None)
            model.train_function = None

    replace_fit(module, stop)
