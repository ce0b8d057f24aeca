"""Lightning's automatic optimization under a guard.

Lightning puts forward and backward pass of a batch into a closure, which it calls by itself in the middle of an
accumulation window, and has the optimizer call at its end. The closure is where parts of the batch can be run in place
of the whole, and undone; it is therefore run before the optimizer's step rather than inside of it, and the step, with
clipping, gets its result. Values that `self.log` and metrics have gathered are put back with everything else.
"""

import functools
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memfit.core import run_events
from memfit.frameworks.torch.guard.library_steps import (
    LibraryLoop,
    MakeGuard,
    StepGuard,
    copied,
    last_checkpoint,
    weighed,
)

_log = logging.getLogger("memfit")

# Strategies whose engines keep parameters, gradients or updates to themselves.
_ENGINES = ("DeepSpeed", "FSDP", "ModelParallel", "XLA")


class LightningLoop(LibraryLoop):
    """Guards the training of one trainer of `lightning.pytorch` or `pytorch_lightning`."""

    def __init__(self, trainer: Any, make_guard: MakeGuard) -> None:
        super().__init__(trainer, make_guard)
        self._metrics = Metrics(trainer)

    def attach(self) -> None:
        """Training begins: model and optimizer are in place."""
        trainer = self._trainer
        reason = _why_not(trainer)
        if reason:
            _log.warning("the training is not guarded: %s", reason)
            return
        plugin = trainer.strategy.precision_plugin
        guard = self._make_guard(trainer.strategy.model, trainer.optimizers[0], scaler=getattr(plugin, "scaler", None))
        guard.put_back(self._metrics)
        self._guard = guard
        automatic = trainer.fit_loop.epoch_loop.automatic_optimization
        make_closure = automatic._make_closure

        def make_guarded(kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
            closure = make_closure(kwargs, optimizer, batch_idx)
            if "batch" in kwargs and closure._backward_fn is not None:
                closure.closure = functools.partial(self._run_closure, guard, automatic, closure, kwargs)
            return closure

        self.replace(automatic, "_make_closure", make_guarded)
        optimizer_step = plugin.optimizer_step

        def guarded_step(optimizer: Any, model: Any, closure: Callable[[], Any], **named: Any) -> Any:
            return _step(guard, functools.partial(optimizer_step, optimizer, model=model, **named), closure)

        self.replace(plugin, "optimizer_step", guarded_step)
        self.replace(trainer, "save_checkpoint", _noting(trainer, trainer.save_checkpoint))

    def _run_closure(self, guard: StepGuard, automatic: Any, closure: Any, kwargs: Any, *_: Any, **__: Any) -> Any:
        """What `Closure.closure` does, with the parts of the batch."""
        results: list[Any] = []

        def of(batch: Any) -> Any:
            changed = OrderedDict(kwargs)
            changed["batch"] = copied(batch)
            return automatic._training_step(changed)

        def loss(plain: Any, batch: Any) -> Any:
            with self._metrics.kept():
                return of(batch).closure_loss

        def run(part: Any, factor: float) -> Any:
            result = of(part)
            if result.closure_loss is None:
                # The user's own wish to leave the batch out.
                closure.warning_cache.warn(
                    "`training_step` returned `None`. If this was on purpose, ignore this warning..."
                )
                results[:] = [result]
                return torch.zeros(())
            value = result.closure_loss.detach()
            loss_of_part, result.closure_loss = result.closure_loss, None
            closure._backward_fn(weighed(loss_of_part, factor))
            results[:] = [result]
            return value

        if closure._zero_grad_fn is not None:
            # The hooks before it see the gradients of the last window, as always.
            closure._zero_grad_fn()
            guard.forget()
        with torch.enable_grad():
            value = guard.passes(loss, kwargs["batch"], run, is_last=not self._trainer.fit_loop._should_accumulate())
        result = results[-1]
        if result.loss is not None and value is not None:
            result.loss = value
        return result


def _step(guard: StepGuard, step: Callable[..., Any], closure: Callable[[], Any]) -> Any:
    """The optimizer's step, after the closure rather than around it."""
    first = closure()
    outcome: list[Any] = []
    calls = 0

    def result_of_closure() -> Any:
        nonlocal calls
        calls += 1
        # Optimizers that want the loss at another point compute it there, as without a guard.
        return first if calls == 1 else closure()

    def update() -> None:
        nonlocal calls
        calls = 0
        outcome[:] = [step(closure=result_of_closure)]

    guard.update(update, replay=True)
    return outcome[0]


def _noting(trainer: Any, save_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save_checkpoint)
    def save_and_note(filepath: Any, weights_only: Any = False, *arguments: Any, **named: Any) -> Any:
        result = save_checkpoint(filepath, weights_only, *arguments, **named)
        if not weights_only:
            step = trainer.global_step
            run_events.note("checkpoint", step=step, update=step, path=os.path.abspath(filepath))
        return result

    return save_and_note


def _why_not(trainer: Any) -> str:
    """Why this training can't be guarded, or ""."""
    if not trainer.lightning_module.automatic_optimization:
        return "its LightningModule optimizes by itself (automatic_optimization is False); use memfit.Guard in it."
    name = type(trainer.strategy).__name__
    if any(name.startswith(engine) for engine in _ENGINES):
        return f"{name} runs passes and updates by itself."
    if len(trainer.optimizers) != 1:
        return f"it has {len(trainer.optimizers)} optimizers."
    if isinstance(trainer.optimizers[0], torch.optim.LBFGS):
        return "LBFGS computes the loss several times in one update."
    return ""


def resumed(ckpt_path: Any) -> Any:
    """Where `fit` goes on: at the last checkpoint of an earlier attempt of a supervised run, or as the script says."""
    if ckpt_path is not None:
        return ckpt_path
    return last_checkpoint("Lightning", "Add a ModelCheckpoint with every_n_train_steps to lose less.")


class Metrics:
    """What `self.log` and the metrics of a LightningModule have gathered, to be put back where a step is undone."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._kept: list[tuple[Any, dict[str, Any]]] = []
        self._names: set[Any] = set()

    def remember(self) -> None:
        """A window begins."""
        results = self._trainer._results
        self._names = set(results or ())
        self._kept = [(metric, _state(metric)) for metric in self._metrics(results)]

    def restore(self) -> None:
        """Everything is as it was then."""
        results = self._trainer._results
        for name in set(results or ()) - self._names:
            del results[name]
        for metric, state in self._kept:
            for name, value in state.items():
                # It may be put back again: a window can be undone several times.
                object.__setattr__(metric, name, _copy(value))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """In this context metrics change for nobody else."""
        before = Metrics(self._trainer)
        before.remember()
        try:
            yield
        finally:
            before.restore()

    def _metrics(self, results: Any) -> Iterator[Any]:
        yield from (results or {}).values()
        for module in self._trainer.lightning_module.modules():
            # The metrics of torchmetrics are modules whose states are no buffers.
            if isinstance(getattr(module, "_defaults", None), dict) and hasattr(module, "_update_count"):
                yield module


def _state(metric: Any) -> dict[str, Any]:
    names = [*metric._defaults, "_update_count", "_computed", "_forward_cache", "value", "has_reset"]
    return {name: _copy(getattr(metric, name)) for name in names if hasattr(metric, name)}


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value
