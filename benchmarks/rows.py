"""Rows of measured runs, and the training steps they describe.

The measurements were made by others on real GPUs and are not part of this repository: by default they are read from
../shared/data beside it. Nothing here knows a single row: any CSV file with the same columns will do.
"""

import csv
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.reporting import ROOT
from memfit.frameworks.torch.kernels.torchvision_operators import define_missing_operators

# transformers and timm import torchvision, which may not match this build of PyTorch.
define_missing_operators()

DATA = ROOT.parent / "shared" / "data"

Row = dict[str, str]


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file, by column."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def keep(loss: Tensor, *outputs: Any) -> Tensor:
    """`loss`, with the outputs alive as long as it is.

    A training step is a function, or a loop's body, in which the model's output has a name: it lives until the step
    returns or the next output takes its place. Only tensors beside the loss may be kept: an output object that refers
    to the loss itself would make a cycle, which nothing frees.
    """
    loss.kept = outputs  # type: ignore[attr-defined]
    return loss


def classify(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of an image classifier; of several outputs the first is the prediction."""
    images, labels = batch
    output = model(images)
    output = getattr(output, "logits", output)
    logits = output[0] if isinstance(output, list | tuple) else output
    return keep(torch.nn.functional.cross_entropy(logits, labels), output)


def images(size: int, *, channels_last: bool = False) -> Callable[[int], tuple[Tensor, Tensor]]:
    """A maker of image batches, as shapes."""
    layout = torch.channels_last if channels_last else torch.contiguous_format

    def make(count: int) -> tuple[Tensor, Tensor]:
        pictures = torch.empty(count, 3, size, size, device="meta").contiguous(memory_format=layout)
        return pictures, torch.empty(count, dtype=torch.int64, device="meta")

    return make


def optimizer_named(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    """A maker of the optimizer that `torch.optim` calls `name`, in any case, with its own defaults."""
    classes = {key.lower(): value for key, value in vars(torch.optim).items() if isinstance(value, type)}
    chosen = classes.get(name.lower())
    if chosen is None:
        raise ValueError(f"torch.optim has no optimizer called {name!r}.")
    # The rate is given because old versions of SGD have no default; it changes no memory.
    return lambda parameters: chosen(parameters, lr=1e-3)


@contextmanager
def quietly() -> Iterator[None]:
    """Without the warnings that model libraries give for old names and settings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
