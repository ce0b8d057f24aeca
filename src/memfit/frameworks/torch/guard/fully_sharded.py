"""Processes that hold a part of each parameter: `torch.distributed.fsdp.fully_shard` (FSDP2).

Its forward and backward passes gather parameters and scatter gradients, so a process that runs out of memory in one
makes a stand-in pass to let the others through (`rank_exchange`). PyTorch's modules are in the middle of something
then, and are set back to the state between two steps first.
"""

import math
from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor

from memfit.frameworks.torch import internals
from memfit.frameworks.torch.guard.rank_exchange import ExchangingRanks


class FullySharded(ExchangingRanks):
    """The processes of a model that `fully_shard` was applied to, and nothing else."""

    communicates = True

    def __init__(self, model: torch.nn.Module) -> None:
        self._states = internals.fsdp_states(model)
        if any(
            parameter.is_dtensor for group in internals.fsdp_groups(self._states) for parameter in group.fsdp_params
        ):
            raise ValueError(
                "the guard was given a model whose parameters were distributed tensors before `fully_shard`, such as "
                "in tensor parallelism; it can follow the communication of `fully_shard` alone. Shard the model with "
                "`fully_shard` only, or train it without the guard."
            )
        super().__init__(model)

    def run(self, num_passes: int, run_part: Callable[[int], None], smallest: Callable[[], None]) -> None:
        """Runs the passes; what fails here is made up for, so that no other process waits."""
        self.run_collective(num_passes, run_part, smallest)

    def total(self, weight: float) -> float:
        """The sum of the weights of all processes; raises on all of them where one has failed since the passes."""
        self.together(lambda: None)
        return super().total(weight)

    def reduce_gradients(self) -> None:
        """The backward pass has summed the gradients and divided them by something; takes the division back."""
        with torch.no_grad():
            for group in internals.fsdp_groups(self._states):
                factor = internals.fsdp_divisor(group)
                for sharded in group.fsdp_params:
                    gradient = sharded.sharded_param.grad
                    if gradient is not None and factor != 1.0:
                        _local(gradient).mul_(factor)

    def clip_norm(self, parameters: list[torch.nn.Parameter], norm: float) -> None:
        """Clips by the norm of all parts, with one exchange; fails on all processes where one has no memory for it."""
        own = [0.0]

        def measure() -> None:
            # Of the gradients here; those that several processes have alike count in part.
            total = 0.0
            for parameter in parameters:
                gradient = parameter.grad
                if gradient is None:
                    continue
                num_alike = self.num_ranks
                if isinstance(gradient, DTensor):
                    sizes = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
                    num_alike = self.num_ranks // math.prod(size for placement, size in sizes if placement.is_shard())
                local = _local(gradient)
                precise = torch.promote_types(local.dtype, torch.float32)
                total += float(torch.linalg.vector_norm(local, dtype=precise)) ** 2 / num_alike
            own[0] = total

        self.together(measure)
        factor = norm / (math.sqrt(super().total(own[0])) + 1e-6)
        # A norm that is no number makes all gradients none, as PyTorch's own clipping does.
        if not factor >= 1.0:
            with torch.no_grad():
                for parameter in parameters:
                    if parameter.grad is not None:
                        _local(parameter.grad).mul_(factor)

    def ready(self) -> None:
        """Before a pass: brings the modules into the one state that all passes begin in.

        What a pass gathers depends on what earlier ones left: after an evaluation parameters of the outermost module
        stay whole, and PyTorch gathers ahead by the order of forward passes that no backward pass followed. A
        stand-in begins with nothing of that, so no pass may. What a failed backward pass had computed and not yet
        scattered goes as well: PyTorch's own recovery leaves it, and the next backward pass would add to it.
        """
        internals.reset_fsdp(self._states)

    def reset(self) -> None:
        """After a pass that failed: waits for what it left under way, and makes the modules ready."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        internals.recover_fsdp(self._states)
        self.ready()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
