"""Settings put into practice on a program that knows nothing of them.

A script makes its own models, optimizers and loops. What of a plan needs no word in the script is done here while it
runs on a simulated device: modules are recomputed from their first call on, optimizers get other kernels before their
first step and drop gradients after each, and autocast is on from the call of a model to the backward pass, which is
where the script would have it around model and loss. Micro-batches are made by splitting what the script's loader gives
and letting through one of so many updates: all of it but the scale of the loss, which no memory depends on.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any

import torch

from memfit.core.patching import Replacement
from memfit.core.settings import OptimizerKernels, Settings
from memfit.frameworks.torch.apply.recomputation import recompute
from memfit.frameworks.torch.shapes.tensor_types import AUTOCAST


class ScriptSettings:
    """Fits what a program makes as it goes, as far as that takes no help of the script.

    That goes for micro_batches, checkpoint, precision, kernels, set_to_none and expandable_segments.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.recomputed: set[str] = set()
        """Modules that have been computed again so far, of those that are to be."""
        self._fitted: set[int] = set()
        self._autocast: torch.autocast | None = None
        self._num_calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def replacements(self) -> list[Replacement]:
        """Keeps `Module.zero_grad` from dropping what is being accumulated."""
        plain: Callable[..., None] = torch.nn.Module.zero_grad
        num_calls, count = self._num_calls, self._settings.micro_batches

        def zero_grad(self: torch.nn.Module, set_to_none: bool = True) -> None:
            if not any(calls % count for calls in num_calls.values()):
                plain(self, set_to_none)

        return [Replacement(torch.nn.Module, "zero_grad", zero_grad)] if self._settings.micro_batches > 1 else []

    def made(self, optimizer: Any) -> None:
        """An optimizer was made: of the updates that the script asks for, one for all micro-batches gets through."""
        if self._settings.micro_batches == 1:
            return
        count, calls = self._settings.micro_batches, self._num_calls
        step, zero_grad = optimizer.step, optimizer.zero_grad

        def rare_step(self: Any, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
            calls[self] = calls.get(self, 0) + 1
            if calls[self] % count == 0:
                return step(*(() if closure is None else (closure,)), *args, **kwargs)
            if closure is None:
                return None
            with torch.enable_grad():
                return closure()

        def rare_zero_grad(self: Any, set_to_none: bool = True) -> None:
            if calls.get(self, 0) % count == 0:
                zero_grad(set_to_none)

        # Schedulers ask for the function behind the method.
        optimizer.step, optimizer.zero_grad = MethodType(rare_step, optimizer), MethodType(rare_zero_grad, optimizer)

    def met(self, model: torch.nn.Module, name: str) -> None:
        """A model is about to be called for the first time; its parts have paths that begin with `name`."""
        prefix = f"{name}." if name else ""
        known = {path for path, _ in model.named_modules()}
        wanted = [path.removeprefix(prefix) for path in self._settings.checkpoint if path.startswith(prefix)]
        recompute(model, [path for path in wanted if path in known], lambda path: self._noted(prefix + path))

    def _noted(self, path: str) -> AbstractContextManager[None]:
        self.recomputed.add(path)
        return nullcontext()

    def entered(self) -> None:
        """A model is about to be called."""
        dtype = AUTOCAST.get(self._settings.precision or "")
        if dtype is None or self._autocast is not None or torch.is_autocast_enabled("cuda"):
            return
        self._autocast = torch.autocast("cuda", dtype=dtype)
        self._autocast.__enter__()

    def left(self) -> None:
        """The forward pass and the loss are done."""
        if self._autocast is not None:
            self._autocast.__exit__(None, None, None)
            self._autocast = None

    def updating(self, optimizer: Any) -> None:
        """An optimizer is about to step."""
        self.left()
        kernels = self._settings.kernels
        if kernels is OptimizerKernels.KEEP or id(optimizer) in self._fitted:
            return
        self._fitted.add(id(optimizer))
        for group in getattr(optimizer, "param_groups", ()):
            if kernels is OptimizerKernels.FUSED and "fused" in group:
                group["fused"], group["foreach"] = True, False
            elif "foreach" in group:
                group["foreach"] = False

    def updated(self, optimizer: Any) -> None:
        """An optimizer has stepped."""
        if self._settings.set_to_none and isinstance(optimizer, torch.optim.Optimizer):
            optimizer.zero_grad(set_to_none=True)


def has_fused_kernel(optimizer: Any) -> bool:
    """Whether an optimizer takes `fused=True`."""
    groups = getattr(optimizer, "param_groups", ())
    return bool(groups) and all("fused" in group for group in groups)
