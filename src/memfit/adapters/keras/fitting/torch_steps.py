"""The split training step on PyTorch: a backward pass for each part, whose gradients PyTorch itself adds up."""

import gc
from collections.abc import Callable
from typing import Any

import keras
import torch

from memfit.adapters.keras.fitting.accumulation import part_size
from memfit.adapters.keras.fitting.split_step import SplitStep
from memfit.adapters.keras.fitting.weights import NeedsWeights, Part
from memfit.core.settings import Settings


def make(settings: Settings, model: Any, plain: Callable[..., Any], approximate: bool) -> Callable[..., Any]:
    """A `train_step(data)` for the model.

    Args:
        settings: into how many parts, or how large ones.
        model: compiled.
        plain: the model's own step, which batches of one part are given to.
        approximate: whether losses that don't add up are weighed by samples.
    """
    step = _Step(settings, model, torch.no_grad, approximate)

    def train_step(data: Any) -> Any:
        return step.run(data, plain)

    return train_step


class _Step(SplitStep):
    def run(self, data: Any, plain: Callable[..., Any]) -> Any:
        x, y, sample_weight, num_samples = self.open(data)
        size = part_size(self.settings, num_samples)
        if num_samples is None or num_samples <= size or not self.model.trainable_weights:
            return plain(data)
        parts = [_rows((x, y, sample_weight), at, at + size) for at in range(0, num_samples, size)]
        self.model.zero_grad()
        try:
            weights = self._counted(parts) if self.is_counted else None
            share, values, last = self._backward(parts, weights, num_samples)
        except NeedsWeights:
            # Raised by the first part, before anything was added up.
            self.is_counted = True
            share, values, last = self._backward(parts, self._counted(parts), num_samples)
        trainable = self.model.trainable_weights[:]
        with torch.no_grad():
            self.model.optimizer.apply([variable.value.grad for variable in trainable], trainable)
            self.finish_metrics(share, values, num_samples, num_samples)
        return self.logs(last)

    def _backward(self, parts: list[Any], weights: Any, num_samples: int) -> tuple[Any, list[Any], Any]:
        share: Any = 0.0
        values: list[Any] = []
        last = None
        for data in parts:
            y_pred = self.call(data[0])
            losses = [] if self.has_own_loss else self.model.losses
            self._prepare(data, losses)
            found = self.share(Part(_length(data), num_samples, weights), data, y_pred, losses)
            total = found.total
            if self.model.optimizer is not None:
                total = self.model.optimizer.scale_loss(total)
            _collect()
            total.backward()
            with torch.no_grad():
                share = share + found.total.detach()
                added = [value.detach() for value in found.values]
                values = [one + other for one, other in zip(values, added, strict=True)] if values else added
                y_pred = keras.tree.map_structure(_detached, y_pred)
                last = self.model.compute_metrics(data[0], data[1], y_pred, sample_weight=data[2])
            # The next part's forward pass begins with nothing of this one.
            del y_pred, losses, found, total
            _collect()
        return share, values, last

    def _prepare(self, data: tuple[Any, Any, Any], losses: list[Any]) -> None:
        if self.has_own_loss or self.num_added(losses) > 0:
            values = (
                [variable.value for variable in self.model.trainable_variables],
                [variable.value for variable in self.model.non_trainable_variables],
            )
            self.prepare(values, data, self.num_added(losses) if losses else 0)

    def _counted(self, parts: list[Any]) -> list[Any]:
        sums: list[Any] = []
        with torch.no_grad():
            for x, y, sample_weight in parts:
                counts = self.loss.count(y, self.call(x, training=False), sample_weight)
                sums = [one + other for one, other in zip(sums, counts, strict=True)] if sums else counts
                _collect()
        return sums


def _collect() -> None:
    """Lets go of tensors that only young garbage holds.

    Keras calls each layer through PyTorch's trees, whose functions refer to themselves and hold the layer's inputs.
    They go when Python looks for such cycles, which it does after so many objects, not bytes.
    """
    gc.collect(1)


def _rows(data: Any, start: int, stop: int) -> Any:
    return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[start:stop], data)


def _length(data: Any) -> int:
    return int(next(leaf for leaf in keras.tree.flatten(data) if leaf is not None).shape[0])


def _detached(tensor: Any) -> Any:
    """The tensor without its graph; its mask, which metrics read, stays."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    found = tensor.detach()
    mask = keras.src.backend.get_keras_mask(tensor)
    if mask is not None:
        keras.src.backend.set_keras_mask(found, mask)
    return found
