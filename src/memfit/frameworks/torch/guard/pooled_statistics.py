"""Batch norms under micro-batches: running statistics as if the batch had passed at once.

Each micro-batch is normalised by its own mean and variance; no running of parts one after the other can give all of
them those of the whole. What can be had is kept: a layer's running statistics are updated once, with the mean and the
variance of all that passed through it, put together from those of the parts.
"""

from collections import defaultdict
from types import TracebackType
from typing import Any

import torch

from memfit.frameworks.torch import internals
from memfit.frameworks.torch.shapes.stand_in import tensors_in


class PooledStatistics:
    """The norms of a model; entered around the passes of all parts of one batch."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._layers = [
            _Layer(part)
            for part in model.modules()
            if isinstance(part, internals.NormBase) and part.training and part.running_mean is not None
        ]

    def part(self) -> None:
        """Another part begins."""
        for layer in self._layers:
            layer.call = 0

    def __enter__(self) -> "PooledStatistics":
        for layer in self._layers:
            layer.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for layer in self._layers:
            layer.end(keep=error is None)


class _Layer:
    """One norm: what its calls have seen, by their order within a forward pass."""

    def __init__(self, norm: internals.NormBase) -> None:
        self._norm = norm
        self.call = 0
        self._seen: defaultdict[int, list[tuple[int, torch.Tensor, torch.Tensor]]] = defaultdict(list)

    def begin(self) -> None:
        norm, buffers = self._norm, internals.buffers_of(self._norm)
        self._own = {name: buffers[name] for name in ("running_mean", "running_var", "num_batches_tracked")}
        self._momentum = norm.momentum
        buffers.update({name: None if b is None else torch.zeros_like(b) for name, b in self._own.items()})
        self._scratch: Any = norm.running_mean
        # With this, what is left in the buffers after a call is the statistics of that call.
        norm.momentum = 1.0
        self._hook = norm.register_forward_hook(self._note)

    def _note(self, norm: Any, inputs: Any, output: Any) -> None:
        # A recomputation has copies of the buffers, and has been seen before.
        if norm.running_mean is not self._scratch or not norm.training:
            return
        tensor = next(iter(tensors_in(inputs)))
        count = tensor.numel() // max(1, norm.num_features)
        self._seen[self.call].append((count, norm.running_mean.clone(), norm.running_var.clone()))
        self.call += 1

    def end(self, *, keep: bool) -> None:
        norm = self._norm
        self._hook.remove()
        norm.momentum = self._momentum
        internals.buffers_of(norm).update(self._own)
        if not keep:
            return
        tracked = self._own["num_batches_tracked"]
        with torch.no_grad():
            for number in sorted(self._seen):
                if tracked is not None:
                    tracked.add_(1)
                self._update(*_pooled(self._seen[number], each=isinstance(norm, internals.InstanceNorm)))

    def _update(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        norm, tracked = self._norm, self._own["num_batches_tracked"]
        factor = norm.momentum
        if factor is None:
            # A plain average over all batches.
            factor = 1.0 / float(tracked) if tracked is not None else 0.0
        for name, value in (("running_mean", mean), ("running_var", variance)):
            held = self._own[name]
            assert held is not None
            held.mul_(1 - factor).add_(value.to(held.dtype), alpha=factor)


def _pooled(seen: list[tuple[int, torch.Tensor, torch.Tensor]], *, each: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, variance) of all elements from those of the parts; `each`: averages of statistics of single samples."""
    whole = sum(count for count, _, _ in seen)
    zero = torch.zeros((), dtype=torch.double)
    mean = sum((part.double() * (count / whole) for count, part, _ in seen), start=zero)
    if each:
        return mean, sum((variance.double() * (count / whole) for count, _, variance in seen), start=zero)
    squares = sum(
        (variance.double() * (count - 1) + (part.double() - mean).square() * count for count, part, variance in seen),
        start=zero,
    )
    return mean, squares / max(1, whole - 1)
