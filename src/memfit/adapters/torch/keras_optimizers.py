"""Keras's own optimizers, which are none of PyTorch's: their updates are steps and their variables state too."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from memfit.adapters.torch.replacement import Replacement

MODULE = "keras.src.optimizers.base_optimizer"


def update_replacements(
    module: ModuleType, begin: Callable[[Any], None], end: Callable[[Any], None]
) -> list[Replacement]:
    """What stands in front of the update of every Keras optimizer.

    Args:
        module: Keras's module of that name, just imported.
        begin: called with the optimizer before its update.
        end: called with the optimizer after it.
    """
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
