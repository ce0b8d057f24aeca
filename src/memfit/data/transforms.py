"""The user's transforms, with random numbers that depend on the sample alone.

Augmentation that draws from a generator shared by all samples gives other numbers with another number of workers, or
after a resume. Here each call finds generators that were seeded from (seed, epoch, sample): the one handed over as
`rng`, where the function asks for it, and the program's own (`random`, `numpy.random` and those that an adapter adds,
such as PyTorch's), which are set back afterwards.
"""

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from memfit.core.errors import BadInput
from memfit.data.order import BATCH, SAMPLE, random_generator, seed_sequence
from memfit.data.source import Array


class Randomness(Protocol):
    """Random numbers of one library: `random`, `numpy.random`, or a framework's."""

    def save(self) -> Any:
        """The state of now."""

    def restore(self, state: Any) -> None:
        """Back to a state."""

    def seed(self, number: int) -> None:
        """Begin at a number below 2**32."""


# Those of Python and NumPy, by their functions.
_OWN: tuple[Any, ...] = (
    SimpleNamespace(save=random.getstate, restore=random.setstate, seed=random.seed),
    SimpleNamespace(save=np.random.get_state, restore=np.random.set_state, seed=np.random.seed),
)


@dataclass(frozen=True, slots=True)
class _Call:
    """A function of the user's, and what it takes."""

    function: Callable[..., Any]
    takes_label: bool
    takes_generator: bool


class Transforms:
    """What is done to samples and to batches on their way.

    Args:
        sample: for each sample: takes its features, or features and label, and gives back the same; also `rng`.
        batch: for each batch, after it is put together.
        randomness: of libraries beside Python's and NumPy's.
    """

    def __init__(
        self,
        sample: Callable[..., Any] | None,
        batch: Callable[..., Any] | None,
        randomness: Sequence[Randomness] = (),
    ) -> None:
        self._sample = None if sample is None else _call_of(sample, "transform")
        self._batch = None if batch is None else _call_of(batch, "batch_transform")
        self._more_randomness = tuple(randomness)

    @property
    def _randomness(self) -> tuple[Any, ...]:
        # Not kept, since it can't be pickled.
        return (*_OWN, *self._more_randomness)

    @property
    def changes_samples(self) -> bool:
        """Whether samples have to be handed over one by one."""
        return self._sample is not None

    @property
    def takes_labels(self) -> bool:
        """Whether one of them can only be called with labels."""
        return any(call is not None and call.takes_label for call in (self._sample, self._batch))

    @contextmanager
    def own_randomness(self) -> Iterator[None]:
        """Whatever is drawn inside, the program's random numbers are as before afterwards."""
        if self._sample is None and self._batch is None:
            yield
            return
        states = [each.save() for each in self._randomness]
        try:
            yield
        finally:
            for each, state in zip(self._randomness, states, strict=True):
                each.restore(state)

    def on_sample(self, features: Any, label: Any, key: tuple[int, int, int]) -> tuple[Any, Any]:
        """The transformed sample; `key` is (seed, epoch, number of the sample)."""
        return self._apply(self._sample, features, label, (SAMPLE, *key))

    def on_batch(self, features: Any, label: Any, key: tuple[int, int, int]) -> tuple[Any, Any]:
        """The transformed batch; `key` is (seed, epoch, place of its first sample)."""
        return self._apply(self._batch, features, label, (BATCH, *key))

    def _apply(self, call: _Call | None, features: Any, label: Any, key: tuple[int, ...]) -> tuple[Any, Any]:
        if call is None:
            return features, label
        keywords = {"rng": random_generator(*key)} if call.takes_generator else {}
        # Also where it takes a generator: what it calls may draw from others.
        number = int(seed_sequence(*key).generate_state(1)[0])
        for each in self._randomness:
            each.seed(number)
        if not call.takes_label:
            return call.function(features, **keywords), label
        result = call.function(features, label, **keywords)
        if not isinstance(result, tuple) or len(result) != 2:
            raise BadInput(
                f"the transform takes features and a label and has to give back both, but gave {_kind(result)}. "
                "Return (features, label), or let it take the features alone."
            )
        return result


def stack(values: Sequence[Any], names: Callable[[int], str]) -> Array:
    """One array of samples that must agree in shape."""
    arrays = []
    for position, value in enumerate(values):
        reason = ""
        try:
            array = np.asarray(value)
        except (ValueError, TypeError, RuntimeError) as error:
            # Arrays of different shapes, or tensors that NumPy has no type for.
            array, reason = np.empty(0, object), f" ({error})"
        if array.dtype == object:
            raise BadInput(
                f"{names(position)} became {_kind(value)}, which is no array{reason}. A transform gives back arrays or "
                "numbers, or a dict of them."
            )
        arrays.append(array)
    first = arrays[0]
    # The type that holds all of them: in that of the first, fractions and the ends of texts could be lost.
    batch = np.empty((len(arrays), *first.shape), np.result_type(*{array.dtype for array in arrays}))
    for position, array in enumerate(arrays):
        if array.shape != first.shape:
            raise BadInput(
                f"samples of a batch differ in shape: {names(0)} is {list(first.shape)}, {names(position)} is "
                f"{list(array.shape)}. Give a transform that brings them to one shape, such as a resize or a crop."
            )
        batch[position] = array
    return batch


def _call_of(function: Callable[..., Any], name: str) -> _Call:
    if not callable(function):
        raise BadInput(f"{name} must be a function, but {_kind(function)} was given.")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return _Call(function, takes_label=False, takes_generator=False)
    positional = [
        each
        for each in parameters
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        and each.default is each.empty
        and each.name != "rng"
    ]
    takes_generator = any(each.name == "rng" for each in parameters)
    if len(positional) > 2:
        raise BadInput(
            f"{name} takes {len(positional)} arguments ({', '.join(each.name for each in positional)}); it is called "
            "with the features, or with features and label, and with rng=... where it asks for that."
        )
    return _Call(function, takes_label=len(positional) == 2, takes_generator=takes_generator)


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"[:80]
