"""What memfit has for Keras alone: `memfit.keras.Fit`, the callback that guards a `fit`.

    model.fit(x, y, callbacks=[memfit.keras.Fit(checkpoint="runs/a")])

Keras is loaded when `Fit` is first asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Fit: Any

__all__ = ["Fit"]


def __getattr__(name: str) -> Any:
    if name != "Fit":
        raise AttributeError(f"module 'memfit.keras' has no attribute {name!r}")
    from memfit.api.fit import make_callback_class

    value = globals()[name] = make_callback_class()
    value.__module__ = __name__
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), "Fit"})
