"""Guarded steps of Keras on PyTorch.

The forward pass changes statistics of batch norms, seeds and metrics in place, which are small and copied before each
batch; gradients are in tensors of their own. Trainable variables and the optimizer's state change only in the
optimizer, in place, and are too large to copy for each batch: before it begins, the room that it needs is asked for and
given back, so that it doesn't run out halfway. Steps of the user's own may update in other ways, and there everything
is copied.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memfit.frameworks.keras import internals
from memfit.frameworks.keras.guard.steps import Each, Steps
from memfit.frameworks.keras.model import has_own_step


class BackendSteps(Steps):
    """See the module."""

    def __init__(self, model: Any, each: Each) -> None:
        super().__init__(model, each)
        self._kept: list[tuple[Any, torch.Tensor]] = []
        self._room_bytes: int | None = None
        self._device = torch.device("cpu")

    def over(self, *arguments: Any) -> Any:
        """One batch, in a list."""
        (data,) = arguments
        return self._each(data[0])

    def begin(self, batch: Any) -> None:
        """Copies what the forward pass changes."""
        self.in_update = False
        changing = self.changing(everything=has_own_step(self.model))
        self._kept = [(variable, variable.value.detach().clone()) for variable in changing]

    def run(self, batch: Any) -> Any:
        """Keras's own function, or that of a fitted step."""
        return self._function([batch])

    def roll_back(self) -> None:
        """Puts the copies back; gradients go, and what a call that failed has left in layers."""
        if self.in_update and not has_own_step(self.model):
            raise self.broken()
        with torch.no_grad():
            for variable, value in self._kept:
                variable.value.detach().copy_(value)
        for variable in self.model.trainable_variables:
            variable.value.grad = None
        internals.forget_call(self.model, [])

    def rebuild(self) -> None:
        """Other settings may come with other variables."""
        self._room_bytes = None
        super().rebuild()

    def forget(self) -> None:
        """Drops the copies."""
        self._kept = []

    @contextmanager
    def updating(self, gradients: list[Any]) -> Iterator[list[Any]]:
        """Asks for the room that the update needs before it begins."""
        if self._room_bytes is None:
            self._room_bytes = self.room_bytes()
            self._device = next((value.device for value in gradients if value is not None), self._device)
        torch.empty(self._room_bytes, dtype=torch.uint8, device=self._device)
        self.in_update = True
        yield gradients
