"""What a case of the zoo is, and the register that every module of the zoo adds to."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

OPTIMIZERS = ("sgd", "adam", "adamw")


@dataclass(frozen=True, slots=True)
class Case:
    """A model with a batch and a loss, built from code alone.

    Args:
        name: unique, as used on the command line.
        kind: family, such as "convnet" or "language"; "data-dependent" where shapes depend on values.
        build: makes the model, in training mode.
        batch: makes one batch.
        loss: forward pass up to a scalar.
        optimizers: names of those that can train it; Adam refuses sparse gradients.
    """

    name: str
    kind: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    optimizers: tuple[str, ...] = OPTIMIZERS


CASES: dict[str, Case] = {}


def add(
    name: str,
    kind: str,
    build: Callable[[], nn.Module],
    batch: Callable[[], Any],
    loss: Callable[..., Tensor],
    optimizers: tuple[str, ...] = OPTIMIZERS,
) -> None:
    """Put a case into `CASES`."""
    if name in CASES:
        raise ValueError(f"there already is a case named {name!r}")
    CASES[name] = Case(name, kind, build, batch, loss, optimizers)
