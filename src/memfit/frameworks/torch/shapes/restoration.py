"""Puts back what a simulation moved: a user's own models come home with the values they had.

`model.to("cuda")` changes the model in place. In a process that goes on after the simulation, such as a notebook, it
must not be left without values.
"""

import random
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memfit.core.patching import Replacement
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.shapes.stand_in import map_tensors


class Restoration:
    """Remembers parameters and buffers as they were before they moved."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        self._buffers: dict[int, tuple[weakref.ref[torch.nn.Module], dict[str, Any]]] = {}
        self._optimizers: dict[int, tuple[weakref.ref[torch.optim.Optimizer], dict[Any, Any]]] = {}

    def replacements(self) -> list[Replacement]:
        """Puts this object in front of the function by which modules move."""
        plain: Callable[..., Any] = getattr(*internals.place("apply_to_module"))

        def apply(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            with internals.disable_torch_function():
                buffers = internals.buffers_of(module).items()
                real = {name: buffer for name, buffer in buffers if buffer is None or not buffer.is_meta}
            if real and id(module) not in self._buffers:
                self._buffers[id(module)] = (weakref.ref(module), real)
            return plain(module, *args, **kwargs)

        return [Replacement(*internals.place("apply_to_module"), apply)]

    def remember(self, tensor: torch.Tensor, before: torch.Tensor) -> None:
        """`tensor` was moved; `before` holds what it was. Only its first move counts."""
        known = self._tensors.get(id(tensor))
        if known is None or known[0]() is None:
            self._tensors[id(tensor)] = (weakref.ref(tensor), before)

    def remember_optimizer(self, optimizer: Any) -> None:
        """An optimizer is about to step. Only its first step counts."""
        if id(optimizer) not in self._optimizers and isinstance(optimizer, torch.optim.Optimizer):
            # Clones are safe from changes in place, and are none of the program's memory.
            with internals.disable_torch_function(), internals.disable_current_modes():
                state = {parameter: map_tensors(held, torch.clone) for parameter, held in optimizer.state.items()}
            self._optimizers[id(optimizer)] = (weakref.ref(optimizer), state)

    def restore(self) -> None:
        """Puts everything back that is still there."""
        for reference, before in self._tensors.values():
            tensor = reference()
            if tensor is not None:
                internals.swap_tensors(tensor, before)
        for owner, buffers in self._buffers.values():
            module = owner()
            if module is not None:
                now = internals.buffers_of(module)
                now.update({name: held for name, held in buffers.items() if name in now})
        for known, state in self._optimizers.values():
            optimizer = known()
            if optimizer is not None:
                optimizer.state.clear()
                optimizer.state.update(state)
        self._tensors.clear()
        self._buffers.clear()
        self._optimizers.clear()


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Leaves the random states of Python, NumPy and PyTorch as they were."""
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    numpy_random = sys.modules.get("numpy.random")
    numpy_state = numpy_random.get_state() if numpy_random is not None else None
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.set_rng_state(torch_state)
        if numpy_random is not None and numpy_state is not None:
            numpy_random.set_state(numpy_state)
