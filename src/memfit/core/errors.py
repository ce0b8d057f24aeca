"""Every error memfit raises on purpose.

    MemfitError
    +-- BadInput (ValueError)       the caller gave something that can't be used
    |   +-- InvalidSize             "24 bananas"
    |   +-- UnknownDevice           no such device; names the nearest
    |   +-- BadBatch                empty, zero-sized or disagreeing tensors
    |   +-- BadLoss                 not a scalar, or independent of the parameters
    |   +-- BadOptimizer            an optimizer of another model
    |   +-- BadModel                not a module, tensors on mixed devices
    |   +-- BadTarget               a FILE.py:function, timm: or hf: name that can't be loaded
    |   +-- UnusableColumns (data/sources/tables.py)  text as features; carries the other columns
    |   +-- BadFile                 a saved estimate that can't be read, a page that can't be written
    |       +-- BadCheckpoint (core/guarding.py)  damaged, incomplete or of another model
    +-- StepFailed                  the user's own code raised; carries its line
    +-- PlanNotFound (core/plan.py) nothing that is allowed fits; carries the smallest plan
    +-- CannotFit (core/guarding.py)     memory ran out, and nothing is left to try
    +-- BrokenUpdate (core/guarding.py)  memory ran out in an update that could not be finished
    +-- MissingDependency           an extra that isn't installed; names the command that installs it

Each message says what was given, what was expected and what to do. `exit_code` is what the command line returns.
"""


class MemfitError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = 2


class BadInput(MemfitError, ValueError):
    """The caller gave something that can't be used."""


class InvalidSize(BadInput):
    """A size that can't be parsed."""


class UnknownDevice(BadInput):
    """A device name that isn't in the catalogue."""


class BadBatch(BadInput):
    """A batch that can't be used: empty, zero-sized, or its tensors disagree."""


class BadLoss(BadInput):
    """A loss that isn't a scalar or doesn't depend on the parameters."""


class BadOptimizer(BadInput):
    """An optimizer that doesn't belong to the model."""


class BadModel(BadInput):
    """A model that isn't one, or whose tensors are on mixed devices."""


class BadTarget(BadInput):
    """A name on the command line that can't be loaded."""


class BadFile(BadInput):
    """A file that can't be read as what it should be, or can't be written."""


class StepFailed(MemfitError):
    """The user's own code raised while its step was traced."""


class MissingDependency(MemfitError):
    """An optional part that isn't installed."""


def reason_of(error: BaseException) -> str:
    """What an error says of itself, in one line and without a full stop; its type where it says nothing.

    >>> reason_of(FileNotFoundError(2, "No such file or directory")), reason_of(KeyError())
    ('No such file or directory', 'KeyError')
    """
    text = getattr(error, "strerror", None) or str(error)
    return " ".join(text.split()).rstrip(". ") or type(error).__name__


EXTRAS = {
    "bitsandbytes": "quantized",
    "fsspec": "data",
    "h5py": "data",
    "jax": "jax",
    "keras": "keras",
    "optuna": "search",
    "pillow": "data",
    "pyarrow": "data",
    "s3fs": "s3",
    "tensorflow": "tensorflow",
    "timm": "timm",
    "torch": "torch",
    "torchvision": "timm",
    "transformers": "hf",
}
"""The extra of memfit that brings an optional package."""


def how_to_install(package: str) -> str:
    """The command that installs a package, with the extra that it belongs to.

    >>> how_to_install("pyarrow"), how_to_install("hdf5plugin")
    ("`pip install pyarrow` (memfit's extra 'data')", '`pip install hdf5plugin`')
    """
    extra = f" (memfit's extra {EXTRAS[package]!r})" if package in EXTRAS else ""
    return f"`pip install {package}`{extra}"
