"""Batches of scripts without a data loader: what their training loop copies to the device.

A loop that draws its own batches (`x[indices].to("cuda")`) copies them at the same lines in every step, and all of them
have as many samples. One run finds these lines; in another, what is copied there is cut down to the first
micro-batch, as if the script had drawn fewer samples.
"""

from collections.abc import Callable

import torch


class Arrivals:
    """Hears of every tensor that is copied from the host to the device.

    Args:
        line: the line of the user's code that runs.
        num_steps: how many optimizer steps have been taken.
        parts: micro-batches to a batch.
        split_at: lines at which batches are copied that are to be cut down.
        batch_size: samples of such a batch.
    """

    def __init__(
        self,
        line: Callable[[], str],
        num_steps: Callable[[], int],
        *,
        parts: int = 1,
        split_at: tuple[str, ...] = (),
        batch_size: int | None = None,
    ) -> None:
        self._line = line
        self._num_steps = num_steps
        self._parts = parts
        self._split_at = frozenset(split_at)
        self._given_size = batch_size
        self._sizes: dict[str, set[int]] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or its first micro-batch."""
        if isinstance(tensor, torch.nn.Parameter) or not tensor.dim() or tensor.layout is not torch.strided:
            return tensor
        size = tensor.shape[0]
        if self._parts > 1 and size == self._given_size and self._line() in self._split_at:
            return tensor[: -(-size // self._parts)]
        # What is copied before the first update may be the model, or data that all steps share.
        if self._num_steps() and tensor.numel() > 1:
            self._sizes.setdefault(self._line(), set()).add(size)
        return tensor

    @property
    def batch_size(self) -> int | None:
        """The number of samples that all of the loop's batches have; None where they differ or there are none."""
        sizes = set().union(*self._sizes.values())
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def lines(self) -> tuple[str, ...]:
        """Where batches are copied; empty where they don't share a size."""
        return () if self.batch_size is None else tuple(sorted(filter(None, self._sizes)))
