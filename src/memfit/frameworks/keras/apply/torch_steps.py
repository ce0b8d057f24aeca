"""The split training step on PyTorch: a backward pass for each part, whose gradients PyTorch itself adds up."""

import gc
from collections.abc import Sequence
from typing import Any

import keras
import torch

from memfit.frameworks.keras import internals
from memfit.frameworks.keras.apply.split_step import SplitStep
from memfit.frameworks.keras.batch import leaves


class BackendSplitStep(SplitStep):
    """A `train_step(data)`; arguments as for `SplitStep`."""

    concrete = staticmethod(torch.no_grad)

    def __call__(self, data: Any) -> Any:
        """Trains on a batch."""
        *opened, num_samples = self.open(data)
        size = self.settings.part_size(num_samples)
        if num_samples is None or num_samples <= size or not self.model.trainable_weights:
            return self.plain(data)
        parts = [
            keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[at : at + size], tuple(opened))  # noqa: B023
            for at in range(0, num_samples, size)
        ]
        self.model.zero_grad()
        share, values, last = self.weighed(
            lambda: self._counted(parts), lambda weights: self._backward(parts, weights, num_samples)
        )
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
            found, total, y_pred = self.part_loss(data, int(leaves(data)[0].shape[0]), num_samples, weights)
            _collect()
            total.backward()
            with torch.no_grad():
                share = share + found.total.detach()
                added = [value.detach() for value in found.values]
                values = [one + other for one, other in zip(values, added, strict=True)] if values else added
                y_pred = keras.tree.map_structure(_detached, y_pred)
                last = self.model.compute_metrics(data[0], data[1], y_pred, sample_weight=data[2])
            # The next part's forward pass begins with nothing of this one.
            del y_pred, found, total
            _collect()
        return share, values, last

    def numbers_of(self, variables: Sequence[Any]) -> list[Any]:
        """The variables' own."""
        return [variable.value for variable in variables]

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
    Python frees them when its collector runs, which it does by the number of objects, not by bytes.
    """
    gc.collect(1)


def _detached(tensor: Any) -> Any:
    """The tensor without its graph; its mask, which metrics read, stays."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    found = tensor.detach()
    mask = internals.get_mask(tensor)
    if mask is not None:
        internals.set_mask(found, mask)
    return found
