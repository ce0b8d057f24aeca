"""What memfit does in a supervised script when it has imported Keras: every `fit` of a model is guarded.

Keras has one `fit` per backend, and `keras.Model` inherits it. It is replaced in the class that defines it, so that
models, subclasses and a `fit` of the user's own that calls Keras's are all reached, however the script imports them.
"""

from types import ModuleType

from memfit.core.patching import Instead, replace_method
from memfit.core.run_events import note


def install(module: ModuleType, guarded_fit: Instead) -> None:
    """Sends every `fit` of this process through a guard."""
    note("keras", backend=module.backend.backend())
    replace_method(module.Model, "fit", guarded_fit)
