"""Passes that contain collective operations, of which one process may fail without leaving the others waiting.

The forward and backward pass of a sharded model gather parameters and scatter gradients: each is an operation that all
processes take part in. They come in one order, which depends on the model and not on the size of the batch. So they
are counted as they pass. A process that runs out of memory after `n` of them frees what it holds and makes a stand-in
pass over the smallest part of a batch that there is, in which the first `n` are skipped and the others really happen:
the other processes can finish their own pass. What a stand-in computes is of no use, and doesn't have to be: all
processes are told before their next pass, roll back, and run the step again.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from memfit.core.oom import clear_frames, recognise
from memfit.frameworks.torch import internals, oom
from memfit.frameworks.torch.guard.rank_exchange import Exchange, num_begun

_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
)
"""Functions of `torch.distributed` that are counted; releases before 2.13 lack the `single` ones."""

_ATTEMPTS = 3


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

    @contextmanager
    def counting(self) -> Iterator[None]:
        """In this context operations are counted, on whatever thread they are."""
        with ExitStack() as stack:
            for name in _COLLECTIVES:
                function = getattr(dist, name, None)
                if function is not None:
                    stack.enter_context(mock.patch.object(dist, name, self._counted(function)))
            yield

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.num_done < self.num_skipped:
                self.num_done += 1
                _make_finite(args, kwargs)
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


def _make_finite(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Clears the output of a skipped operation, so that code that checks its numbers finds nothing odd."""
    # The output comes first in all of them.
    output = args[0] if args else kwargs.get("output_tensor", kwargs.get("output", kwargs.get("tensor")))
    for tensor in output if isinstance(output, list) else [output]:
        if isinstance(tensor, torch.Tensor):
            tensor.detach().zero_()


class CollectivePasses:
    """Runs passes that contain collective operations.

    Args:
        exchange: with the other processes.
        model: what is run.
        ready: called before each pass; afterwards the model is in the same state before all of them.
        reset: the same after a pass that failed.
    """

    def __init__(
        self,
        exchange: Exchange,
        model: torch.nn.Module,
        ready: Callable[[], None] = lambda: None,
        reset: Callable[[], None] = lambda: None,
    ) -> None:
        self._exchange = exchange
        self._model = model
        self._ready = ready
        self._reset = reset

    def run(self, num_passes: int, one: Callable[[int], None], smallest: Callable[[], None]) -> None:
        """Runs the passes; processes that have fewer than others run `smallest` instead.

        Raises:
            Exception: what a pass here raised, after the others were let through. Ordinary exceptions at once: such a
                process ends, and its launcher ends the others.
        """
        index, failure = 0, None
        while True:
            someone_failed, someone_has_more = self._exchange.check(failure is not None, index < num_passes)
            if someone_failed or not someone_has_more:
                break
            counter = Counter()
            self._ready()
            try:
                with counter.counting():
                    if index < num_passes:
                        one(index)
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
        for attempt in range(_ATTEMPTS):
            self._reset()
            oom.release()
            counter = Counter(num_skipped=num_done)
            try:
                with counter.counting():
                    self._run_smallest(smallest)
                self._reset()
                return
            except Exception as error:
                if recognise(error) is None or attempt == _ATTEMPTS - 1:
                    error.add_note(
                        "This process ran out of memory, and could not run the smallest part of its batch in order to "
                        "let the other processes go on. The job ends here; resume from the last checkpoint."
                    )
                    raise
                clear_frames(error)
                num_done = max(num_done, counter.num_done)

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
