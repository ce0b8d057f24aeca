"""`torch.compile` without compiling: shape-only tensors have nothing to compile for.

Compiled code allocates other temporaries than eager code, usually fewer, so that this is said in the report.
"""

from collections.abc import Callable
from typing import Any

import torch

# Here, and not when a script first needs it: it keeps the functions that it finds at its first import.
import torch._dynamo

from memfit.adapters.torch.replacement import Replacement

COMPILED_AS_EAGER = "compiled-as-eager"
SCRIPT_NOT_SAVED = "script-not-saved"


def compilation_replacements(report: Callable[[str, str], None]) -> list[Replacement]:
    """`torch.compile`, as function and as decorator, and `Module.compile`.

    Args:
        report: takes (code, text), once.
    """
    reported = False

    def say_once() -> None:
        nonlocal reported
        if not reported:
            reported = True
            report(COMPILED_AS_EAGER, "torch.compile was treated as eager execution, which may need more memory")

    def compile(model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda function: compile(function, **options)
        say_once()
        if isinstance(model, torch.nn.Module):
            # Where programs look for the model they gave; past __setattr__, which would make it its own submodule.
            vars(model)["_orig_mod"] = model
        return model

    def compile_module(self: torch.nn.Module, *arguments: Any, **options: Any) -> None:
        say_once()

    def save_script(module: Any, file: Any, *arguments: Any, **options: Any) -> None:
        report(SCRIPT_NOT_SAVED, f"torch.jit.save wrote nothing to {file!r}: there is no compiled code to save")

    return [
        Replacement(torch, "compile", compile),
        Replacement(torch.nn.Module, "compile", compile_module),
        # It would look for the state of CUDA graphs.
        Replacement(torch._dynamo, "reset", lambda: None),
        Replacement(torch.jit, "save", save_script),
    ]
