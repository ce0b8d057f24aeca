"""TorchScript as the Python that it is made from.

A simulation switches TorchScript off, and PyTorch then gives back the very module that it was to compile. Programs ask
more of a compiled module than to be called: its graph, for a picture in TensorBoard, its code, or a file.
"""

from collections.abc import Callable
from types import new_class
from typing import Any

import torch
from torch import nn

from memfit.core.patching import Replacement, in_owner
from memfit.frameworks.torch import internals

SCRIPT_NOT_SAVED = "script-not-saved"


def script_replacements(report: Callable[[str, str], None]) -> list[Replacement]:
    """Stand-ins for the functions of `torch.jit` that make and keep compiled modules."""

    def save(module: Any, file: Any, *arguments: Any, **options: Any) -> None:
        report(SCRIPT_NOT_SAVED, f"torch.jit.save wrote nothing to {file!r}: there is no compiled code to save")

    def script(value: Any, *arguments: Any, **options: Any) -> Any:
        return compiled(value, save)

    def trace(function: Any, example_inputs: Any = None, *arguments: Any, **options: Any) -> Any:
        named = options.get("example_kwarg_inputs") or {}
        if example_inputs is None:
            given: tuple[Any, ...] = ()
        else:
            given = tuple(example_inputs) if isinstance(example_inputs, tuple | list) else (example_inputs,)
        function(*given, **named)
        return compiled(function, save)

    def unchanged(module: Any, *arguments: Any, **options: Any) -> Any:
        return module

    stand_ins = {
        "script": script,
        "trace": trace,
        "freeze": unchanged,
        "optimize_for_inference": unchanged,
        "save": save,
    }
    return in_owner(torch.jit, stand_ins)


def compiled(value: Any, save: Callable[..., None]) -> Any:
    """A module that shares everything with this one, and has what a compiled one has besides; other values as is."""
    if not isinstance(value, nn.Module):
        return value
    kind = type(value)
    # A graph without nodes: programs draw it.
    extra: dict[str, Any] = {
        "graph": property(lambda module: internals.extension.Graph()),
        "inlined_graph": property(lambda module: internals.extension.Graph()),
        "code": "",
        "original_name": kind.__name__,
        "save": save,
    }
    added = {name: what for name, what in extra.items() if not hasattr(value, name)}
    added |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    made: Any = object.__new__(new_class(kind.__name__, (kind,), exec_body=lambda names: names.update(added)))
    vars(made).update(vars(value))
    return made
