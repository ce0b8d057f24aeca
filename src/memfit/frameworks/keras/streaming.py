"""Streams in Keras: `model.fit`, `evaluate` and `predict` on TensorFlow, JAX and PyTorch.

Keras asks a data set for batches by number, in a shuffled order of its own, and a stream gives them one after the other
in an order that it can resume. So a number is taken as "the next one": each pass of Keras over the data, which is one
generator in Keras, gets the batches of an epoch in the stream's order.

Keras also takes batches that it doesn't train on: TensorFlow's backend asks for two to learn their types, others take
one to build the model with, and TensorFlow fetches ahead. None of these may be missing from the epoch. Batches that
are asked for outside of a generator are therefore only looked at; a pass that Keras takes back (`EpochIterator.reset`,
which ends it as the end of an epoch does) begins again where it began; and each generator has a pass of its own, so
that one that was left and still fetches takes nothing away from the next. Keras doesn't say which of these it is about:
the frame that calls does.
"""

import contextlib
import inspect
import sys
import threading
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any

import keras

from memfit.core.streams import BatchStream

# Generators that are remembered: the one of this epoch, and those that were left and may still be fetching.
_NUM_PASSES = 3
_MAX_QUEUE = 10


class KerasStream(keras.utils.PyDataset):  # type: ignore[misc,unused-ignore]
    """A stream as the data of `fit`, `evaluate` and `predict`.

    Every epoch of Keras is an epoch of the stream, each sample once, in the stream's own order, whether or not `fit`
    shuffles. With `steps_per_epoch` an epoch of Keras is a part of one of the stream, and the next one goes on there,
    also in a later call of `fit`.

    After `load_state_dict` in the middle of an epoch, `num_batches` is what is left of it. Keras asks for that number
    once in a call of `fit`, so train the rest in a call of its own:

        data.load_state_dict(state)
        model.fit(data, initial_epoch=data.epoch, epochs=data.epoch + 1)
        model.fit(data, initial_epoch=data.epoch, epochs=10)

    On TensorFlow, Keras has batches fetched ahead as TensorFlow sees fit, beside the stream's memory: some, and more
    where the speed of training changes much. `as_tf_dataset` holds it to one.

    Args:
        stream: to read; its position moves on with the epochs.
        num_workers: processes that read and transform; by default that happens in this process.
    """

    def __init__(self, stream: BatchStream, num_workers: int = 0) -> None:
        # Keras would copy the data set into its own workers, each of which then believes to be the only one.
        queue = max(1, min(_MAX_QUEUE, stream.in_flight_bytes // max(1, stream.batch_bytes)))
        super().__init__(workers=1, use_multiprocessing=False, max_queue_size=queue)
        self.stream = stream
        self._num_workers = num_workers
        self._lock = threading.RLock()
        self._passes: list[_Pass] = []
        self._num_promised = 0
        """What Keras was told last that an epoch has."""
        self._is_followed = False
        self._num_passed_over = 0
        self._stand_in: Any = None

    # What Keras calls.

    @property
    def num_batches(self) -> int:
        """Batches that are left of the epoch."""
        self._num_promised = self.stream.num_batches_left
        return self._num_promised

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return len(self.stream)

    def __getitem__(self, index: int) -> Any:
        """The next batch, where a generator asks; otherwise a look at one of those that are left of the epoch."""
        caller = sys._getframe(1)
        if not caller.f_code.co_flags & inspect.CO_GENERATOR:
            return self._look(index)
        with self._lock:
            current = self._pass_of(caller)
            if current.num_given < self._num_passed_over:
                current.num_given += 1
                current.is_begun = True
                if self._stand_in is None:
                    self._stand_in = self._look(0)
                return self._stand_in
            self._num_passed_over, self._stand_in = 0, None
            return current.take()

    def __iter__(self) -> Iterator[Any]:
        """What is left of the epoch; the next iteration is the next epoch."""
        for index in range(self.stream.num_batches_left):
            yield self[index]
        self.on_epoch_end()

    def on_epoch_begin(self) -> None:
        """Called by Keras."""
        left = self.stream.num_batches_left
        if 0 < self._num_promised < left and not (self._passes and self._passes[-1].is_begun):
            warnings.warn(
                f"this call of fit began in the middle of an epoch, when {self._num_promised} batches were left of it, "
                f"and Keras keeps to that number, though {left} batches come now. Train the rest of an epoch in a call "
                "of its own: fit(data, initial_epoch=data.epoch, epochs=data.epoch + 1).",
                stacklevel=2,
            )

    def on_epoch_end(self) -> None:
        """Called by Keras: after an epoch, and when it takes back what it has looked at."""
        # By itself, or through Keras's adapter of data sets.
        caller = sys._getframe(1)
        is_taken_back = any(frame and frame.f_code.co_name == "reset" for frame in (caller, caller.f_back))
        with self._lock:
            if is_taken_back:
                self._leave()
            elif self._passes:
                latest = self._passes[-1]
                self.stream.load_state_dict(self._state_of(latest))
                latest.is_begun = False
                # Keras asks the same generator again where `steps_per_epoch` ended before the data did; it costs
                # little to open it then, and otherwise nothing stays open.
                latest.close()

    # Positions.

    @property
    def epoch(self) -> int:
        """The stream's epoch, counted from 0."""
        return self.stream.epoch

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain data.

        With `StreamPosition` among the callbacks it lies after the last batch that was trained on. Without it, it lies
        after the last one that was given to Keras, which on TensorFlow and on accelerators is some batches ahead.
        """
        with self._lock:
            if not self._passes or not self._passes[-1].is_begun:
                return self.stream.state_dict()
            return self._state_of(self._passes[-1])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next epoch begins where `state` was taken."""
        with self._lock:
            self._leave()
            self.stream.load_state_dict(state)
            if self.stream.num_batches_left == 0:
                self.stream.set_epoch(self.stream.epoch + 1)

    def pass_over(self, num_batches: int) -> None:
        """In place of the first batches of the next pass, which were trained on, one and the same is given.

        For a `fit` that is resumed in the middle of an epoch and doesn't train on these.
        """
        with self._lock:
            self._num_passed_over = num_batches

    def close(self) -> None:
        """Ends the reading ahead of an epoch that was left, by an error for example; the next one begins it again."""
        with self._lock:
            self._leave()

    def follow(self, is_followed: bool) -> None:
        """Whether `count` is called for each batch that was trained on."""
        with self._lock:
            self._is_followed = is_followed

    def count(self, num_batches: int) -> None:
        """Some more batches were trained on."""
        with self._lock:
            if self._passes:
                latest = self._passes[-1]
                latest.num_trained = min(latest.num_trained + num_batches, latest.num_given)

    def _state_of(self, latest: "_Pass") -> dict[str, Any]:
        """The position of the stream after what a pass was given, or has trained on where that is counted."""
        num_done = latest.num_trained if self._is_followed else latest.num_given
        if num_done < latest.total:
            return latest.start.state_after(num_done)
        twin = latest.start.copy()
        twin.set_epoch(twin.epoch + 1)
        return twin.state_dict()

    def _pass_of(self, caller: FrameType) -> "_Pass":
        for known in self._passes:
            if known.caller is caller:
                if known is not self._passes[-1]:
                    self._passes[-1].close()
                    self._passes.remove(known)
                    self._passes.append(known)
                return known
        for known in self._passes:
            known.close()
        self._passes = [*self._passes[1 - _NUM_PASSES :], _Pass(caller, self.stream.copy(), self._num_workers)]
        return self._passes[-1]

    def _leave(self) -> None:
        for known in self._passes:
            known.close()
        if self._passes:
            # It stays known, so that its generator, should it still fetch, isn't taken for a new one.
            self._passes[-1].is_begun = False

    def _look(self, index: int) -> Any:
        left = self.stream.num_batches_left
        if not 0 <= index < left:
            raise IndexError(f"batch {index} was asked for, and {left} are left of the epoch")
        twin = self.stream.copy()
        if index:
            twin.load_state_dict(twin.state_after(index))
        with contextlib.closing(twin.part(0, 1)) as batches:
            return next(batches)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lock": None, "_passes": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()

    def __del__(self) -> None:
        # Missing where the constructor raised.
        for known in getattr(self, "_passes", ()):
            known.close()


class _Pass:
    """What one generator of Keras, known by its frame, has been given since a position of the stream."""

    def __init__(self, caller: FrameType, start: BatchStream, num_workers: int) -> None:
        self.caller = caller
        self.start = start
        self.num_given = 0
        self.num_trained = 0  # where that is counted
        self.is_begun = True  # asked since the stream's position was last set
        self.total = start.num_batches_left
        self._num_workers = num_workers
        self._open: Any = None

    def take(self) -> Any:
        if self.num_given >= self.total:
            # The generator asks for more than an epoch: the next one follows.
            self.close()
            self.start = self.start.copy()
            self.start.set_epoch(self.start.epoch + 1)
            self.num_given = self.num_trained = 0
            self.total = self.start.num_batches_left
        self.is_begun = True
        if self._open is None:
            here = self.start.copy()
            if self.num_given:
                here.load_state_dict(here.state_after(self.num_given))
            self._open = here.parallel(self._num_workers) if self._num_workers else here.part(0, 1)
        try:
            batch = next(self._open)
        except BaseException as error:
            self.close()
            if isinstance(error, StopIteration):
                raise RuntimeError(
                    f"the stream ended after {self.num_given} of {self.total} batches; were its files changed?"
                ) from None
            raise
        self.num_given += 1
        if self.num_given == self.total:
            # Nobody asks for a batch after the last one, which would let go of the memory.
            self.close()
        return batch

    def close(self) -> None:
        batches, self._open = self._open, None
        if batches is not None:
            batches.close()


class StreamPosition(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
    """Tells a KerasStream which batches were trained on, so that its position is exact whatever Keras fetches ahead.

    Put it before callbacks that save the position: `callbacks=[StreamPosition(data), checkpoint]`.

    Args:
        data: what `fit` is given.
    """

    def __init__(self, data: KerasStream) -> None:
        super().__init__()
        self._data = data
        self._last = -1

    def on_train_begin(self, logs: Any = None) -> None:
        """Called by Keras."""
        self._data.follow(True)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        self._last = -1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Called by Keras, once for all batches of an execution where `steps_per_execution` is more than one."""
        self._data.count(batch - self._last)
        self._last = batch

    def on_train_end(self, logs: Any = None) -> None:
        """Called by Keras."""
        self._data.follow(False)
