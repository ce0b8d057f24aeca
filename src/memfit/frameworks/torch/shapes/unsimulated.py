"""Parts of PyTorch that can't run on shapes: refused with a reason, or replaced by what takes the same memory."""

from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch

from memfit.core.patching import Replacement
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.shapes.scripted import script_replacements

EXTENSIONS = "torch.utils.cpp_extension"
# Loads the compiler here, not when a script first needs it: it keeps the functions that it finds at its first import.
_RESET_COMPILER = internals.place("reset_compiler")


def extension_replacements(module: ModuleType) -> list[Replacement]:
    """CUDA sources are not compiled: a script that has another way can take it at once."""
    plain_load: Callable[..., Any] = module.load
    plain_inline: Callable[..., Any] = module.load_inline

    def load(name: str, sources: str | Sequence[str], *args: Any, **kwargs: Any) -> Any:
        given = [sources] if isinstance(sources, str) else sources
        if kwargs.get("with_cuda") or any(str(source).endswith((".cu", ".cuh")) for source in given):
            raise _refusal(name)
        return plain_load(name, sources, *args, **kwargs)

    def load_inline(name: str, cpp_sources: Any, cuda_sources: Any = None, *args: Any, **kwargs: Any) -> Any:
        if cuda_sources or kwargs.get("with_cuda"):
            raise _refusal(name)
        return plain_inline(name, cpp_sources, cuda_sources, *args, **kwargs)

    return [Replacement(module, "load", load), Replacement(module, "load_inline", load_inline)]


def _refusal(name: str) -> ImportError:
    return ImportError(
        f"{name!r} is a CUDA extension of the script's own: its kernels can't be run without a GPU. "
        "Let the script take its plain PyTorch path in a dry run."
    )


COMPILED_AS_EAGER = "compiled-as-eager"
AS_EAGER = "torch.compile was treated as eager execution, which may need more memory"


def compilation_replacements(report: Callable[[str, str], None], *, compiles: bool = False) -> list[Replacement]:
    """Saved scripts, and where not `compiles`, `torch.compile`, as function and decorator, and `Module.compile`."""

    @cache
    def say_once() -> None:
        report(COMPILED_AS_EAGER, AS_EAGER)

    def compile(model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda function: compile(function, **options)
        if internals.checks_program(model):
            return model
        say_once()
        if isinstance(model, torch.nn.Module):
            # Where programs look for the model they gave; past __setattr__, which would make it its own submodule.
            vars(model)["_orig_mod"] = model
        return model

    def compile_module(self: torch.nn.Module, *arguments: Any, **options: Any) -> None:
        say_once()

    eager = [Replacement(torch, "compile", compile), Replacement(torch.nn.Module, "compile", compile_module)]
    return [
        *([] if compiles else eager),
        # It would look for the state of CUDA graphs.
        Replacement(*_RESET_COMPILER, lambda: None),
        # They have no steps here, and their module needs a build with CUDA.
        Replacement(torch.compiler, "cudagraph_mark_step_begin", lambda: None),
        *script_replacements(report),
    ]


MODULE = "keras.src.optimizers.base_optimizer"


def update_replacements(
    module: ModuleType, begin: Callable[[Any], None], end: Callable[[Any], None]
) -> list[Replacement]:
    """What stands in front of the update of every Keras optimizer, of Keras's module of that name, just imported."""
    plain: Callable[..., Any] = module.BaseOptimizer.apply

    def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        begin(optimizer)
        result = plain(optimizer, grads, trainable_variables)
        end(optimizer)
        return result

    return [Replacement(module.BaseOptimizer, "apply", apply)]


def state_of(optimizer: Any) -> list[Any]:
    """The tensors that a Keras optimizer keeps from step to step."""
    return [variable.value for variable in optimizer.variables]
