"""What of a Keras model can be recomputed in the backward pass, and what each part would save and cost."""

from dataclasses import dataclass
from typing import Any

import keras


@dataclass(frozen=True, slots=True)
class Unit:
    """A part of a model that can be computed again as one.

    Args:
        path: as in `Settings.checkpoint`: the dotted path of a layer, or "first:last", a run of layers of a Functional
            or Sequential model in the order of execution; both ends have full paths.
        kept_bytes_per_sample: what the plain step keeps inside of it for the backward pass.
        boundary_bytes_per_sample: what it takes as input, which stays kept.
        num_parameters: of the layers in it.
        flops_per_sample: of its forward pass; 0 where unknown.
    """

    path: str
    kept_bytes_per_sample: int
    boundary_bytes_per_sample: int
    num_parameters: int
    flops_per_sample: int


def units(model: keras.Model, inputs: Any = None) -> tuple[Unit, ...]:
    """What can be recomputed, in the order of execution; no two overlap.

    Args:
        model: built.
        inputs: a batch of inputs (arrays, or anything with `shape` and `dtype`), for subclassed models and unknown
            sizes; by default what the model was built for.
    """
    raise NotImplementedError
