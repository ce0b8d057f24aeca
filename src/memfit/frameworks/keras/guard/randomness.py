"""The random generators that Keras and data sets draw from beside Keras's own seeds: Python's, numpy's, PyTorch's.

Keras shuffles arrays with numpy's generator on JAX and with PyTorch's on PyTorch, and data sets with Python's. With the
states that they had when a pass over the data began, the pass has the same order again.
"""

import hashlib
import itertools
import random
import sys
from typing import Any

import numpy

_count = itertools.count()


def states() -> dict[str, Any]:
    """The states now, as plain data and arrays."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    found: dict[str, Any] = {
        "python": [version, numpy.array(numbers, numpy.uint64), gauss],
        "numpy": [name, numpy.array(keys), int(position), int(has_gauss), float(cached)],
    }
    if "torch" in sys.modules:
        import torch

        found["torch"] = torch.get_rng_state().numpy().copy()
    return found


def check(found: dict[str, Any]) -> None:
    """Fails where `restore` would, without changing anything."""
    version, numbers, gauss = found["python"]
    random.Random(0).setstate((version, tuple(int(number) for number in numbers), gauss))
    name, keys, position, has_gauss, cached = found["numpy"]
    numpy.random.RandomState(0).set_state((name, keys, position, has_gauss, cached))
    if "torch" in found and "torch" in sys.modules:
        import torch

        torch.Generator().set_state(torch.from_numpy(numpy.ascontiguousarray(found["torch"])))


def restore(found: dict[str, Any]) -> None:
    """Goes back to the states that `states` gave."""
    version, numbers, gauss = found["python"]
    random.setstate((version, tuple(int(number) for number in numbers), gauss))
    name, keys, position, has_gauss, cached = found["numpy"]
    numpy.random.set_state((name, keys, position, has_gauss, cached))
    restore_torch(found)


def restore_torch(found: dict[str, Any]) -> None:
    """PyTorch's state alone, from which layers draw there."""
    if "torch" in found and "torch" in sys.modules:
        import torch

        torch.set_rng_state(torch.from_numpy(numpy.ascontiguousarray(found["torch"])))


def seed() -> int:
    """A seed for an order of our own, another one for each call.

    It is the same in every run of a script that seeds Python and numpy, as Keras's `set_random_seed` does. Nothing is
    drawn for it: the script's own numbers stay the same.
    """
    version, numbers, gauss = random.getstate()
    name, keys, position, *rest = numpy.random.get_state(legacy=True)
    text = repr((next(_count), version, numbers, gauss, name, position, rest))
    digest = hashlib.sha256(text.encode() + numpy.asarray(keys).tobytes()).digest()
    return int.from_bytes(digest[:7], "big")
