"""Processes that hold a part of each parameter: `torch.distributed.fsdp.fully_shard` (FSDP2).

Its forward and backward passes gather parameters and scatter gradients, so a process that runs out of memory in one
makes a ghost pass to let the others through (see `ghost`). PyTorch's modules are in the middle of something then, and
are set back to the state between two steps first.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from memfit.adapters.torch.guarding.ghost import Accompanied
from memfit.adapters.torch.guarding.meeting import Meeting


class FullySharded:
    """The processes of a model that `fully_shard` was applied to.

    Args:
        model: the model; the outermost sharded module is it or inside of it.

    Raises:
        ValueError: the model is split over processes in another way as well.
    """

    communicates = True

    def __init__(self, model: torch.nn.Module) -> None:
        self._states = _states_of(model)
        if any(parameter.is_dtensor for group in self._groups() for parameter in group.fsdp_params):
            raise ValueError(
                "the guard was given a model whose parameters were distributed tensors before `fully_shard`, such as "
                "in tensor parallelism; it can follow the communication of `fully_shard` alone. Shard the model with "
                "`fully_shard` only, or train it without the guard."
            )
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._meeting = Meeting(None, device)
        self.num_ranks = self._meeting.num_ranks
        self.is_first = self._meeting.rank == 0
        self._accompanied = Accompanied(self._meeting, model, self.ready, self.reset)

    def begin(self) -> None:
        """Nothing is shared before a pass: `fully_shard` leaves buffers alone."""

    def run(self, num_passes: int, one: Callable[[int], None], smallest: Callable[[], None]) -> None:
        """Runs the passes; what fails here is made up for, so that no other process waits."""
        self._accompanied.run(num_passes, one, smallest)

    def vote(self, failed: bool) -> bool:
        """Whether any process failed."""
        return self._meeting.vote(failed)

    def agree(self, numbers: list[int]) -> list[int]:
        """The least of each number over all processes."""
        return self._meeting.least(numbers)

    def total(self, weight: float) -> float:
        """The sum of the weights of all processes; raises on all of them where one has failed since the passes."""
        self._meeting.together(lambda: None)
        return self._meeting.sum(weight)

    def reduce_gradients(self) -> None:
        """The backward pass has summed the gradients and divided them by something; takes the division back."""
        with torch.no_grad():
            for group in self._groups():
                factor = getattr(group, "gradient_divide_factor", None)
                factor = float(_num_sharing(group)) if factor is None else factor
                for sharded in group.fsdp_params:
                    gradient = sharded.sharded_param.grad
                    if gradient is not None and factor != 1.0:
                        _local(gradient).mul_(factor)

    def clip_norm(self, parameters: list[torch.nn.Parameter], norm: float) -> None:
        """Clips by the norm of all parts on all processes, with one exchange.

        Raises:
            torch.OutOfMemoryError: on all processes, where one has no memory for it.
        """
        own = [0.0]

        def measure() -> None:
            own[0] = self._sum_of_squares(parameters)

        self._meeting.together(measure)
        factor = norm / (math.sqrt(self._meeting.sum(own[0])) + 1e-6)
        # A norm that is no number makes all gradients none, as PyTorch's own clipping does.
        if not factor >= 1.0:
            with torch.no_grad():
                for parameter in parameters:
                    if parameter.grad is not None:
                        _local(parameter.grad).mul_(factor)

    def ready(self) -> None:
        """Before a pass: brings the modules into the one state that all passes begin in.

        What a pass gathers depends on what earlier ones left: after an evaluation parameters of the outermost module
        stay whole, and PyTorch gathers ahead by the order of forward passes that no backward pass followed. A ghost
        begins with nothing of that, so no pass may. What a failed backward pass had computed and not yet scattered
        goes as well: PyTorch's own recovery leaves it, and the next backward pass would add to it.
        """
        for state in self._states:
            _clear(state._state_ctx, iter_forward_root=None, post_backward_final_callback_queued=False)
            _clear(state._comm_ctx, all_gather_state=None, reduce_scatter_state=None)
            for name in ("post_forward_order", "reduce_scatter_states", "_last_post_reduce_events"):
                getattr(state._comm_ctx, name, []).clear()
            state._training_state = type(state._training_state).IDLE
            getattr(state, "_modules_to_run_forward", set()).clear()
        for group in self._groups():
            _reset_group(group)

    def reset(self) -> None:
        """After a pass that failed: waits for what it left under way, and makes the modules ready."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        for state in self._states:
            # Since 2.13.
            official = getattr(state, "_reset_iter_state", None)
            if official is not None and state._is_root:
                official()
        self.ready()

    def _groups(self) -> Iterator[Any]:
        for state in self._states:
            several = getattr(state, "_fsdp_param_groups", None)
            # Releases before 2.12 have one group for each module.
            yield from [state._fsdp_param_group] if several is None and state._fsdp_param_group else several or []

    def _sum_of_squares(self, parameters: list[torch.nn.Parameter]) -> float:
        """Of the gradients here; those that several processes have alike count in part."""
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
        return total


def _states_of(model: torch.nn.Module) -> list[Any]:
    """PyTorch's state of every sharded module, outer ones first."""
    found: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            found.setdefault(id(state), state)
    return list(found.values())


def _num_sharing(group: Any) -> int:
    """By how many processes PyTorch divides the gradients of a group."""
    mesh = group.mesh_info
    return int(getattr(mesh, "shard_mesh_size", 1)) * int(getattr(mesh, "replicate_mesh_size", 1))


def _reset_group(group: Any) -> None:
    work = getattr(group._all_gather_result, "all_gather_work", None)
    if work is not None:
        work.wait()
    _clear(
        group,
        _all_gather_result=None,
        _post_reduce_event=None,
        _all_reduce_state=None,
        _reshard_after_forward_event=None,
        _partial_reduce_output=None,
    )
    group._post_forward_indices.clear()
    group._training_state = type(group._training_state).IDLE
    sharded_state = type(group._sharded_state).SHARDED
    for parameter in group.fsdp_params:
        if parameter.sharded_state != sharded_state:
            parameter.to_sharded()
        else:
            parameter.free_unsharded_param()
        whole = getattr(parameter, "_unsharded_param", None)
        if whole is not None:
            whole.grad = None
        parameter.unsharded_accumulated_grad = None
    group._sharded_state = sharded_state


def _clear(holder: Any, **values: Any) -> None:
    """Sets those attributes that this release of PyTorch has, and has set up."""
    for name, value in values.items():
        if hasattr(holder, name):
            setattr(holder, name, value)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
