"""The few numbers that processes exchange around a step: who failed, what fits everywhere, what was counted.

They are exchanged at moments when memory may be short, so everything that an exchange needs is allocated once, in the
beginning. They lie in host memory where the processes can exchange that: a vote then doesn't wait for the device.
"""

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from memfit.core.oom import clear_frames, recognise
from memfit.frameworks.torch import internals, oom
from memfit.frameworks.torch.guard.ranks import Ranks

# Taken here, because the passes of a sharded model run with the functions of `torch.distributed` replaced.
_all_reduce = dist.all_reduce
_ATTEMPTS = 3


class OtherRankOutOfMemory(torch.OutOfMemoryError):
    """Raised where this process has to give up because another one ran out of memory."""

    def __init__(self) -> None:
        super().__init__("another process ran out of memory")


def num_begun(group: Any) -> int:
    """How many collective operations a group has begun; None: the group of all processes."""
    return internals.num_collectives(dist.group.WORLD if group is None else group)


def surely(collective: Callable[[], Any], group: Any) -> None:
    """Runs one collective operation; tries again where it found no memory and had not begun."""
    for attempt in range(_ATTEMPTS):
        number = num_begun(group)
        try:
            collective()
            return
        except Exception as error:
            has_begun = num_begun(group) != number
            if has_begun or attempt == _ATTEMPTS - 1 or recognise(error) is None:
                raise
            clear_frames(error)
        oom.release()


class Exchange:
    """Exchanges numbers with all processes of a group; each method is called by all of them.

    Args:
        group: the processes; None: all.
        device: where the model is.
        most: how many numbers are exchanged at once, at most.
    """

    def __init__(self, group: Any, device: torch.device, most: int = 64) -> None:
        self.group = group
        reaches_host = internals.reaches_host(dist.group.WORLD if group is None else group)
        place = torch.device("cpu") if reaches_host else device
        # Python writes to and reads from the same memory as the tensor on the host, with no operation in between.
        self._values = array("q", bytes(8 * most))
        self._host = torch.frombuffer(self._values, dtype=torch.int64)
        self._numbers = self._host if place.type == "cpu" else torch.zeros(most, dtype=torch.int64, device=place)
        # A device such as MPS has no float64.
        precise = torch.float32 if place.type == "mps" else torch.float64
        self._weights = torch.zeros(1, dtype=precise, device=place)
        self._is_decided = False  # whether a check has told all processes that the next vote is lost
        self.num_ranks = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def check(self, failed: bool, has_more: bool = False) -> tuple[bool, bool]:
        """(whether any process failed, whether any has more to do), on the way to a vote.

        Where one failed, all know it by now, so the vote that follows is over before it has begun. A process that
        fails on the way goes straight to the vote, which is the same exchange as the next check of the others. So
        wherever a process fails between two exchanges, all of them come out of the vote together.
        """
        someone_failed, someone_has_more = map(bool, self._exchange([failed, has_more], dist.ReduceOp.MAX))
        self._is_decided = someone_failed
        return someone_failed, someone_has_more

    def vote(self, failed: bool) -> bool:
        """True if any process failed since the last vote."""
        someone_failed = self._is_decided or self.check(failed)[0]
        self._is_decided = False
        return someone_failed

    def together(self, action: Callable[[], None]) -> None:
        """Does something that may fail here, and raises on all processes where it fails on any."""
        failure: Exception | None = None
        try:
            action()
        except Exception as error:
            failure = error
        someone_failed, _ = self.check(failure is not None)
        if failure is not None:
            raise failure
        if someone_failed:
            raise OtherRankOutOfMemory

    def least(self, numbers: list[int]) -> list[int]:
        """The least of each number."""
        return self._exchange(numbers, dist.ReduceOp.MIN)

    def sum(self, weight: float) -> float:
        """The sum of a number over all processes."""
        self._weights.fill_(weight)
        surely(partial(_all_reduce, self._weights, dist.ReduceOp.SUM, group=self.group), self.group)
        return float(self._weights.item())

    def _exchange(self, numbers: Sequence[int], operation: Any) -> list[int]:
        results: list[int] = []
        for start in range(0, len(numbers), len(self._values)):
            some = numbers[start : start + len(self._values)]
            self._values[: len(some)] = array("q", some)
            view = self._numbers[: len(some)]
            if self._numbers is not self._host:
                view.copy_(self._host[: len(some)])
            surely(partial(_all_reduce, view, operation, group=self.group), self.group)
            if self._numbers is not self._host:
                self._host[: len(some)].copy_(view)
            results += self._values[: len(some)]
        return results


class ExchangingRanks(Ranks):
    """Several processes that train one model together."""

    def __init__(self, group: Any, device: torch.device, most: int = 64) -> None:
        self.exchange = Exchange(group, device, most)
        self.num_ranks = self.exchange.num_ranks
        self.is_first = self.exchange.rank == 0

    def vote(self, failed: bool) -> bool:
        """True if any process failed."""
        return self.exchange.vote(failed)

    def agree(self, numbers: list[int]) -> list[int]:
        """The least of each number over all processes."""
        return self.exchange.least(numbers)

    def total(self, weight: float) -> float:
        """The sum of the weights of all processes."""
        return self.exchange.sum(weight)
