"""A batch in parts along its first dimension: how large parts are, and which batches can be split."""

from typing import Any

import keras

from memfit.core.errors import BadBatch
from memfit.core.settings import Settings


def splits(settings: Settings) -> bool:
    """Whether the settings ask for more than one part."""
    return settings.micro_batches > 1 or settings.micro_batch_size > 0


def part_size(settings: Settings, num_samples: Any) -> Any:
    """Samples of all parts but the last, which has what is left; a tensor where a graph only knows when it runs."""
    if settings.micro_batch_size > 0:
        return settings.micro_batch_size
    # At least one sample: a batch smaller than the number of parts is split into as many parts as it has samples.
    return (num_samples + settings.micro_batches - 1) // settings.micro_batches


def leaves(data: Any) -> list[Any]:
    """The arrays of a batch."""
    return [leaf for leaf in keras.tree.flatten(data) if leaf is not None]


def check_first_dimensions(data: Any) -> int | None:
    """The batch's samples, None where they are only known when it runs; refuses arrays that disagree."""
    sizes: dict[int, tuple[Any, ...]] = {}
    for leaf in leaves(data):
        shape = tuple(leaf.shape)
        if not shape:
            raise BadBatch(
                "the batch holds a number without dimensions, which can't be split into micro-batches. "
                "Give arrays that all have one row for each sample."
            )
        if shape[0] is not None:
            sizes.setdefault(int(shape[0]), shape)
    if len(sizes) > 1:
        shapes = ", ".join(map(str, sizes.values()))
        raise BadBatch(
            f"the arrays of the batch differ in their first dimension, which can't be split into micro-batches: "
            f"shapes {shapes}. Give arrays that all have one row for each sample."
        )
    return next(iter(sizes), None)
