"""What memfit does in a supervised script when it has imported Keras: every `fit` of a model is guarded.

Keras has one `fit` per backend, and `keras.Model` inherits it. It is replaced in the class that defines it, so that
models, subclasses and a `fit` of the user's own that calls Keras's are all reached, however the script imports them.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from memfit.core.patching import put_in_front_once
from memfit.core.run_events import note

GuardedFit = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
"""Takes Keras's own method, the model, and the arguments of the call."""


def install(module: ModuleType, guarded_fit: GuardedFit) -> None:
    """Sends every `fit` of this process through a guard."""
    note("keras", backend=module.backend.backend())
    replace_method(module, "fit", guarded_fit)


def replace_method(module: ModuleType, name: str, instead: GuardedFit) -> None:
    """Has a method of every model call `instead`, which is given Keras's own; the first to ask wins."""
    owner = next((kind for kind in module.Model.__mro__ if name in vars(kind)), None)
    if owner is not None:
        put_in_front_once(owner, name, lambda plain, model, *given, **named: instead(plain, model, given, named))
