"""Processes that train one model together: what they exchange around a step, and passes in which they communicate.

Numbers (who failed, what fits everywhere, what was counted) are exchanged at moments when memory may be short, so
everything that an exchange needs is allocated once, in the beginning. They lie in host memory where the processes can
exchange that: a vote then doesn't wait for the device.

The forward and backward pass of a sharded model gather parameters and scatter gradients: each is an operation that all
processes take part in. They come in one order, which depends on the model and not on the size of the batch. So they
are counted as they pass. A process that runs out of memory after `n` of them frees what it holds and makes a stand-in
pass over the smallest part of a batch that there is, in which the first `n` are skipped and the others really happen:
the other processes can finish their own pass. What a stand-in computes is of no use, and doesn't have to be: all
processes are told before their next pass, roll back, and run the step again.
"""

from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from memfit.core.guarding import MemoryFailure
from memfit.core.oom import clear_frames, recognise
from memfit.core.patching import Replacement, replaced
from memfit.frameworks.torch import internals, oom
from memfit.frameworks.torch.guard.ranks import TrainingRanks
from memfit.frameworks.torch.rescue.retry import rerun

# Functions of `torch.distributed` that are counted; releases before 2.13 lack the `single` ones.
_COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_reduce", "all_to_all", "all_to_all_single"),
    *("barrier", "broadcast", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
)
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
    number = num_begun(group)

    def make_room(failure: MemoryFailure, num_failures: int, name: str) -> bool:
        if num_begun(group) != number or num_failures == _ATTEMPTS - 1:
            return False
        oom.release()
        return True

    rerun(collective, make_room)


class Done:
    """The handle of a collective operation that was skipped: there is nothing to wait for."""

    def wait(self, *_: Any) -> bool:
        """True, at once."""
        return True

    is_completed = wait


@dataclass(slots=True)
class Counter:
    """Counts the collective operations of one pass."""

    num_skipped: int = 0
    num_done: int = 0

    def counting(self) -> AbstractContextManager[None]:
        """A context in which operations are counted, on whatever thread they are."""
        present = [name for name in _COLLECTIVES if hasattr(dist, name)]
        return replaced([Replacement(dist, name, self._counted(getattr(dist, name))) for name in present])

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.num_done < self.num_skipped:
                self.num_done += 1
                # Clears the output of a skipped operation, so that code that checks its numbers finds nothing odd.
                # The output comes first in all of them.
                output = args[0] if args else kwargs.get("output_tensor", kwargs.get("output", kwargs.get("tensor")))
                for tensor in output if isinstance(output, list) else [output]:
                    if isinstance(tensor, torch.Tensor):
                        tensor.detach().zero_()
                return Done() if kwargs.get("async_op") else None
            arguments = (*args, *kwargs.values())
            group = next((value for value in arguments if isinstance(value, dist.ProcessGroup)), None)
            number = num_begun(group)
            try:
                return function(*args, **kwargs)
            finally:
                # One that could not even begin has to be made up for; one that failed afterwards has not.
                self.num_done += number != num_begun(group)

        return counted


class ExchangingRanks(TrainingRanks):
    """Several processes that train one model together; each method is called by all of them.

    A group of None is all processes; `most` numbers are exchanged at once.
    """

    def __init__(self, model: torch.nn.Module, group: Any = None, most: int = 64) -> None:
        self._model = model
        self.group = group
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
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
        self.is_first = self.rank == 0

    def check(self, failed: bool, has_more: bool = False) -> tuple[bool, bool]:
        """(whether any process failed, whether any has more to do), on the way to a vote.

        Where one failed, all know it by now, so the vote that follows is over before it has begun. A process that
        fails on the way goes straight to the vote, which is the same exchange as the next check of the others. So
        wherever a process fails between two exchanges, all of them come out of the vote together.
        """
        someone_failed, someone_has_more = map(bool, self._exchange([failed, has_more], dist.ReduceOp.MAX))
        self._is_decided = someone_failed
        return someone_failed, someone_has_more

    def any(self, value: bool) -> bool:
        """A vote: True if true on any process since the last one, such as that it failed."""
        someone_failed = self._is_decided or self.check(value)[0]
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

    def agree(self, numbers: list[int]) -> list[int]:
        """The least of each number over all processes."""
        return self._exchange(numbers, dist.ReduceOp.MIN)

    def agreed(self, value: bool) -> bool:
        """True if true on all processes."""
        return bool(self.agree([int(value)])[0])

    def share(self, text: str) -> str:
        """The text of the first process."""
        shared = [text]
        if self.num_ranks > 1:
            dist.broadcast_object_list(shared, src=0)
        return shared[0]

    def total(self, weight: float) -> float:
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

    # Passes that contain collective operations.

    def ready(self) -> None:
        """Called before each such pass; afterwards the model is in the same state before all of them."""

    def reset(self) -> None:
        """Makes ready for the next pass after one that failed."""

    def run_collective(self, num_passes: int, run_part: Callable[[int], None], smallest: Callable[[], None]) -> None:
        """Runs passes, of which one process may fail without leaving the others waiting.

        Processes that have fewer passes than others run `smallest` instead.

        Raises:
            Exception: what a pass here raised, after the others were let through. Ordinary exceptions at once: such a
                process ends, and its launcher ends the others.
        """
        index, failure = 0, None
        while True:
            someone_failed, someone_has_more = self.check(failure is not None, index < num_passes)
            if someone_failed or not someone_has_more:
                break
            counter = Counter()
            self.ready()
            try:
                with counter.counting():
                    if index < num_passes:
                        run_part(index)
                    else:
                        self._run_smallest(smallest)
            except Exception as error:
                if recognise(error) is None:
                    raise
                failure = error
            if failure is not None:
                # The frames of the exception hold the tensors of the failed pass.
                clear_frames(failure)
                self._make_up(counter.num_done, smallest)
            index += 1
        if failure is not None:
            raise failure

    def _make_up(self, num_done: int, smallest: Callable[[], None]) -> None:
        """The rest of the collective operations of a pass of which some are done."""
        counter = Counter(num_done=num_done)

        def make_up() -> None:
            nonlocal counter
            self.reset()
            oom.release()
            counter = Counter(num_skipped=max(num_done, counter.num_done))
            with counter.counting():
                self._run_smallest(smallest)
            self.reset()

        try:
            rerun(make_up, lambda failure, num_failures, name: num_failures < _ATTEMPTS - 1)
        except Exception as error:
            error.add_note(
                "This process ran out of memory, and could not run the smallest part of its batch in order to let the "
                "other processes go on. The job ends here; resume from the last checkpoint."
            )
            raise

    def _run_smallest(self, smallest: Callable[[], None]) -> None:
        # One sample has no statistics, and they are not to count.
        norms = [
            module
            for module in self._model.modules()
            if isinstance(module, internals.NormBase)
            and module.training
            and not isinstance(module, torch.nn.SyncBatchNorm)
        ]
        try:
            for norm in norms:
                norm.training = False
            smallest()
        finally:
            for norm in norms:
                norm.training = True
