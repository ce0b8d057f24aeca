"""The data of a `fit` in progress: where its order comes from, and how to come back to a position in it.

Keras makes an iterator for each pass over the data and tells nobody. It is found in the frame of `fit`, from which the
callback is called, and asked to announce each pass. A pass begins with the states that the random generators had when
it first began, and what was drawn in earlier epochs is dropped; the batches of the epoch in progress that were trained
on are then drawn once more and passed over, so that callbacks see the numbers that they know. TensorFlow shuffles
arrays inside of its own graph, where nothing can be restored; there a data set takes its place whose order follows from
a number and the epoch. A stream of memfit is asked for nothing that was trained on.
"""

import hashlib
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy

from memfit.frameworks.keras import internals
from memfit.frameworks.keras.streaming import KerasStream

_count = itertools.count()


class Data:
    """The data of one call of `fit`; `is_ordered`: the order has to be one that can be come back to."""

    def __init__(self, iterator: Any, *, is_ordered: bool) -> None:
        self._iterator = iterator
        self._adapter = getattr(iterator, "data_adapter", None)
        found = getattr(self._adapter, "py_dataset", None)
        self.stream: KerasStream | None = found if isinstance(found, KerasStream) else None
        self._stream_at: Any = None
        self._seed = self._epoch = self._num_done = self._left_to_count = 0
        self._shuffle = ""
        # The pass in progress: random states and epoch at its beginning, batches of earlier epochs. Keras begins the
        # next pass before the epoch ends that ends the last one: until then the number is below zero.
        self._pass: dict[str, Any] = {"random": None, "epoch": 0, "position": 0}
        self._resumed: dict[str, Any] | None = None
        # Whether the resumed position is between two epochs: nothing is passed over that `caught_up` would follow.
        self._is_boundary = False
        if iterator is not None and is_ordered:
            self._seed = order_seed()
            self._follow(iterator)

    @property
    def is_generator(self) -> bool:
        """Whether it can't be begun again."""
        return type(self._adapter).__name__ == "GeneratorDataAdapter"

    @property
    def is_tf_dataset(self) -> bool:
        """Whether TensorFlow makes it, in an order that it doesn't tell."""
        return type(self._adapter).__name__ == "TFDatasetAdapter"

    @property
    def goes_on(self) -> bool:
        """Whether an epoch goes on where the last one ended."""
        return self._iterator is not None and (self._iterator.steps_per_epoch is not None or self.is_generator)

    def begin_epoch(self, epoch: int) -> None:
        """An epoch begins, before Keras asks for its first batch."""
        self._epoch = epoch
        self._num_done = 0
        if self.stream is not None:
            self.stream.follow(True)
            self._stream_at = self.stream.state_dict()

    def count(self, num_batches: int = 1) -> None:
        """Batches were trained on or passed over."""
        self._num_done += num_batches
        if self.stream is not None:
            self.stream.count(num_batches)
        if self._left_to_count and self._iterator is not None:
            # Keras counts what was drawn from a pass, and this one began later than it knows.
            internals.count_steps(self._iterator, self._left_to_count)
            self._left_to_count = 0

    def end_epoch(self) -> None:
        """An epoch is over."""
        if self.goes_on:
            self._pass["position"] += self._num_done

    def close(self) -> None:
        """The fit is over."""
        if self.stream is not None:
            self.stream.follow(False)

    def position(self, *, at_end: bool) -> dict[str, Any]:
        """What `go_to` needs; `at_end`: the next batch is the first of an epoch."""
        now = random_states()
        is_new = at_end and not self.goes_on
        return {
            "seed": self._seed,
            "random": now if is_new or self._pass["random"] is None else self._pass["random"],
            "now": now,
            "epoch": self._epoch + 1 if is_new else self._pass["epoch"],
            "position": 0 if is_new else self._pass["position"],
            "stream": None if self.stream is None else self.stream.state_dict() if at_end else self._stream_at,
        }

    def go_to(self, position: dict[str, Any], num_done: int) -> None:
        """The next pass is the one that was in progress there, `num_done` batches of its epoch trained on."""
        self._resumed = position
        self._is_boundary = num_done == 0
        self._seed = int(position["seed"])
        if self.stream is not None and position["stream"] is not None:
            self.stream.load_state_dict(position["stream"])
            self.stream.pass_over(num_done)

    def caught_up(self, position: dict[str, Any]) -> None:
        """What was trained on has been passed over."""
        if keras.backend.backend() != "tensorflow":
            # TensorFlow draws ahead, as far as it likes, so that these would be drawn twice.
            restore_random(position["now"])

    def go_on(self, position: dict[str, Any]) -> None:
        """A loop of the user's own is where it was: layers draw what they would have, the loop's own draws stay."""
        restore_torch(position["now"])

    def _follow(self, iterator: Any) -> None:
        plain: Callable[[], Any] = getattr(iterator, internals.GET_ITERATOR)
        if keras.backend.backend() == "tensorflow" and type(self._adapter).__name__ == "ArrayDataAdapter":
            shuffle = getattr(self._adapter, "_shuffle", False)
            if shuffle:
                self._shuffle = "batch" if shuffle == "batch" else "all"
                setattr(iterator, internals.DISTRIBUTED_DATASET, ordered(self._adapter, self._order))

        def get_iterator() -> Any:
            dropped, resumed = 0, {}
            if self._resumed is not None:
                resumed, self._resumed = self._resumed, None
                restore_random(resumed["random"])
                self._pass = {name: resumed[name] for name in ("random", "epoch", "position")}
                if self.stream is None:
                    dropped = self._left_to_count = int(resumed["position"])
            else:
                epoch = self._epoch + 1 if self._num_done else self._epoch
                self._pass = {"random": random_states(), "epoch": epoch, "position": -self._num_done}
            found = plain()
            if hasattr(found, "skip"):
                return found.skip(dropped) if dropped else found
            goes_on_in = self.goes_on and bool(resumed)
            return self._after(found, dropped, resumed) if dropped or goes_on_in else found

        setattr(iterator, internals.GET_ITERATOR, get_iterator)

    def _after(self, batches: Any, dropped: int, resumed: dict[str, Any]) -> Iterator[Any]:
        """What follows so many batches, which are drawn: what is random in the model goes on as it would have."""
        left = iter(batches)
        for _ in itertools.islice(left, dropped):
            pass
        if self._is_boundary:
            self.caught_up(resumed)
        yield from left

    def _order(self, num_samples: int, batch_size: int) -> Any:
        """The order of arrays in the pass in progress."""
        generator = numpy.random.default_rng([self._seed, int(self._pass["epoch"])])
        if self._shuffle == "all":
            return generator.permutation(num_samples)
        order = numpy.arange(num_samples)
        for start in range(0, num_samples, batch_size):
            generator.shuffle(order[start : start + batch_size])
        return order


def found_in_fit() -> tuple[Any, list[Any]]:
    """Keras's iterator of epochs and the callbacks of the `fit` that calls; (None, []) where none does."""
    frame = sys._getframe(1)
    while frame is not None:
        names = frame.f_locals if frame.f_code.co_name == "fit" else {}
        if hasattr(names.get("epoch_iterator"), internals.GET_ITERATOR):
            return names["epoch_iterator"], list(getattr(names.get("callbacks"), "callbacks", []))
        frame = frame.f_back  # type: ignore[assignment]
    return None, []


def ordered(adapter: Any, order: Callable[[int, int], Any]) -> Any:
    """The batches of Keras's adapter of arrays, in an order of our own.

    `order` gives the numbers of all samples for the next pass, from their count and the size of a batch.
    """
    import tensorflow as tf

    num_samples, given = internals.arrays_of(adapter)
    size = int(adapter.batch_size)
    arrays = [None if one is None else tf.convert_to_tensor(one) for one in keras.tree.flatten(given)]
    whole = num_samples % size == 0

    def batches(_: Any) -> Any:
        numbers = tf.numpy_function(
            lambda: numpy.asarray(order(num_samples, size), numpy.int64), [], tf.int64, stateful=True
        )
        numbers.set_shape([num_samples])

        def batch(start: Any) -> Any:
            chosen = numbers[start : start + size]
            if whole:
                # Keras's own says so, too, and steps are traced for what is known of a batch.
                chosen.set_shape([size])
            parts = [None if one is None else tf.gather(one, chosen, axis=0) for one in arrays]
            return keras.tree.lists_to_tuples(keras.tree.pack_sequence_as(given, parts))

        return tf.data.Dataset.range(0, num_samples, size).map(batch, num_parallel_calls=tf.data.AUTOTUNE)

    return tf.data.Dataset.range(1).flat_map(batches).prefetch(tf.data.AUTOTUNE)


def random_states() -> dict[str, Any]:
    """States of the generators that Keras and data sets draw from beside Keras's own seeds, as data and arrays.

    Keras shuffles arrays with numpy's generator on JAX and with PyTorch's on PyTorch, and data sets with Python's. With
    the states that they had when a pass over the data began, the pass has the same order again.
    """
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


def restore_random(found: dict[str, Any], *, rehearse: bool = False) -> None:
    """Goes back to the states that `random_states` gave; with `rehearse` only fails where that would fail."""
    python: Any = random.Random(0) if rehearse else random
    arrays: Any = numpy.random.RandomState(0) if rehearse else numpy.random
    version, numbers, gauss = found["python"]
    python.setstate((version, tuple(int(number) for number in numbers), gauss))
    name, keys, position, has_gauss, cached = found["numpy"]
    arrays.set_state((name, keys, position, has_gauss, cached))
    restore_torch(found, rehearse=rehearse)


def restore_torch(found: dict[str, Any], *, rehearse: bool = False) -> None:
    """PyTorch's state alone, from which layers draw there."""
    if "torch" in found and "torch" in sys.modules:
        import torch

        generator = torch.Generator() if rehearse else torch.default_generator
        generator.set_state(torch.from_numpy(numpy.ascontiguousarray(found["torch"])))


def order_seed() -> int:
    """A seed for an order of our own, another one for each call.

    It is the same in every run of a script that seeds Python and numpy, as Keras's `set_random_seed` does. Nothing is
    drawn for it: the script's own numbers stay the same.
    """
    version, numbers, gauss = random.getstate()
    name, keys, position, *rest = numpy.random.get_state(legacy=True)
    text = repr((next(_count), version, numbers, gauss, name, position, rest))
    digest = hashlib.sha256(text.encode() + numpy.asarray(keys).tobytes()).digest()
    return int.from_bytes(digest[:7], "big")
