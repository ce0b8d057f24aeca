"""Which epoch of a dataset comes next, known to all processes of a loader.

A loader tells its workers nothing of epochs, and those that it starts anew for each epoch begin as copies of the
dataset as it was at first. So the dataset has a block of memory that all processes share, with the state that the next
epoch begins from. The first worker takes an epoch from it, and the others look up which one it took.
"""

import json
import os
import time
from typing import Any

import numpy as np
import torch

from memfit.core.errors import MemfitError

# How long workers wait for the first one to begin, which may have to load a large program.
_BEGIN_SECONDS = 600.0


class SharedEpochs:
    """What all processes know of a dataset: the state it was brought to, and which epochs were begun since.

    The memory is a tensor, which PyTorch shares with forked processes and with those that are started anew.
    """

    _SIZE = 2**15
    _NUM_GROUPS = 16
    # Numbers at the beginning: next epoch, whether it is kept, whether workers began one, how many they began, length
    # and version of the state; then of each group of workers its name, its iteration and the epoch that it took; then
    # the state as text.
    _NEXT, _IS_HELD, _IS_TAKEN, _NUM_TAKEN, _LENGTH, _VERSION, _GROUPS = range(7)
    _TEXT = (_GROUPS + 3 * _NUM_GROUPS) * 8

    def __init__(self) -> None:
        self._block = torch.zeros(self._SIZE, dtype=torch.uint8).share_memory_()

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy that wasn't made to start a process is a dataset of its own.
        self._block = state["_block"].share_memory_()

    @property
    def _numbers(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        numbers: np.ndarray[Any, np.dtype[np.int64]] = self._block[: self._TEXT].numpy().view(np.int64)
        return numbers

    @property
    def next_epoch(self) -> int:
        """The epoch that the next iteration takes."""
        return int(self._numbers[self._NEXT])

    @property
    def is_taken(self) -> bool:
        """Whether workers have begun an epoch since the position was last set."""
        return bool(self._numbers[self._IS_TAKEN])

    def set_next(self, epoch: int, *, is_held: bool = False) -> None:
        """The next iteration takes this epoch; with `is_held` it stays the next one."""
        numbers = self._numbers
        numbers[self._NEXT], numbers[self._IS_HELD], numbers[self._IS_TAKEN] = epoch, is_held, False

    @property
    def state(self) -> dict[str, Any]:
        """The state that the dataset was brought to."""
        numbers = self._numbers
        while True:
            version, length = int(numbers[self._VERSION]), int(numbers[self._LENGTH])
            text = self._block[self._TEXT : self._TEXT + length].numpy().tobytes()
            if version % 2 == 0 and version == numbers[self._VERSION]:
                state: dict[str, Any] = json.loads(text)
                return state
            time.sleep(0.001)  # it is being written

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        text = json.dumps(state).encode()
        assert len(text) <= self._SIZE - self._TEXT, "the state of a stream is small"
        numbers = self._numbers
        numbers[self._VERSION] += 1
        self._block[self._TEXT : self._TEXT + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        numbers[self._LENGTH] = len(text)
        numbers[self._VERSION] += 1

    def take(self, group: int | None = None, iteration: int = 0) -> int:
        """The epoch that begins now, in this process or, with `group`, in workers."""
        numbers = self._numbers
        epoch = int(numbers[self._NEXT])
        if not numbers[self._IS_HELD]:
            numbers[self._NEXT] = epoch + 1
        numbers[self._IS_TAKEN] = group is not None
        if group is None:
            return epoch
        place = self._GROUPS + 3 * int(numbers[self._NUM_TAKEN] % self._NUM_GROUPS)
        numbers[self._NUM_TAKEN] += 1
        # The name last: who finds it may read the rest.
        numbers[place] = -1
        numbers[place + 1 : place + 3] = iteration, epoch
        numbers[place] = group
        return epoch

    def taken_by(self, group: int, iteration: int) -> int:
        """The epoch that the first worker of a group took, when it has."""
        parent, deadline = os.getppid(), time.monotonic() + _BEGIN_SECONDS
        while time.monotonic() < deadline and os.getppid() == parent:
            rows = self._numbers[self._GROUPS :].reshape(-1, 3)
            taken = rows[(rows[:, 0] == group) & (rows[:, 1] == iteration)]
            if len(taken):
                return int(taken[0, 2])
            time.sleep(0.001)
        raise MemfitError(
            "the first worker of the DataLoader has not begun the epoch. If other threads of the program start "
            "processes at the same time, use `stream.loader(num_workers=...)`, which doesn't need to know them."
        )
