"""The processes that train one model together, as the guard of one of them sees them.

Where one process runs out of memory, all must replay the step, and none may wait for another in a collective operation
that the other never reaches. So passes are run in a way that lets each process fail alone, and all of them exchange
afterwards whether one did.
"""

from collections.abc import Callable

import torch

from memfit.core import adapter


class TrainingRanks(adapter.Ranks):
    """What the transaction of a step asks of the other processes; this class is a process on its own.

    Every method is called by all processes in one order. A failed pass is followed by `any`, never by another
    collective operation. `reduce_gradients`, `total` and `clip_norm` raise on all processes or on none.
    """

    communicates = False
    """Whether passes contain collective operations, so that no process can run one outside of `run`."""

    def begin(self) -> None:
        """A step begins: what the processes share before a forward pass is brought together, such as buffers."""

    def run(self, num_passes: int, run_part: Callable[[int], None], smallest: Callable[[], None]) -> None:
        """Runs `run_part(0)` to `run_part(num_passes - 1)`, each a forward and a backward pass of a part of a batch.

        `smallest` is a forward and a backward pass of the smallest part that there is, whose gradients are zero. It
        takes the place of a pass that failed here, or that this process has not and others have, where passes contain
        collective operations. What a pass raises is raised once no other process waits for this one any more; without
        an exception, passes may be left out, because another process failed: `any` follows in any case.
        """
        for index in range(num_passes):
            run_part(index)

    def clip_norm(self, parameters: list[torch.nn.Parameter], norm: float) -> None:
        """Clips the gradients, after `reduce_gradients`, to this norm of all of them together."""
        torch.nn.utils.clip_grad_norm_(parameters, norm)

    def reduce_gradients(self) -> None:
        """Makes the gradients here the sum of those of all processes."""

    def total(self, weight: float) -> float:
        """The sum of the weights of all processes."""
        return weight


def ranks_of(model: torch.nn.Module) -> TrainingRanks:
    """How the processes that train this model work together."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        from memfit.frameworks.torch.guard.data_parallel import DataParallel

        return DataParallel(model)
    if any("FSDPModule" in (base.__name__ for base in type(part).__mro__) for part in model.modules()):
        from memfit.frameworks.torch.guard.fully_sharded import FullySharded

        return FullySharded(model)
    return TrainingRanks()
