"""What the loop around a step adds to it: outputs that it keeps, buckets of data parallelism, updates in hooks.

A job is a function of model and batch. The loop that calls it may hold more than the step does: a variable for the
model's outputs, `DistributedDataParallel` around the model, optimizers that hooks of the parameters call as soon as a
gradient is there.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memfit.core.device import Device
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.shapes.recorder import Recorder
from memfit.frameworks.torch.shapes.stand_in import ShapeCopies, tensors_in
from memfit.frameworks.torch.simulation.simulation import Simulation


@contextmanager
def outputs_kept(model: torch.nn.Module) -> Iterator[None]:
    """Holds what the model returns until it returns the next, as a loop's `outputs = model(...)` does."""
    kept: list[Any] = []

    def keep(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        kept[:] = [output]

    handle = model.register_forward_hook(keep)
    try:
        yield
    finally:
        handle.remove()
        kept.clear()


@contextmanager
def data_parallel(
    model: torch.nn.Module, count: int, simulation: Simulation, recorder: Recorder, device: Device
) -> Iterator[None]:
    """Gathers gradients in buckets for `count` devices, as `DistributedDataParallel` does with its defaults.

    The user's code goes on calling its own module.
    """
    # Most estimates do without.
    from memfit.frameworks.torch.apply.sharding import simulated_group

    with simulated_group(simulation, recorder, device, count):
        wrapper = torch.nn.parallel.DistributedDataParallel(model)
        wrapper.logger = _NoTimes()
        before, after = internals.around_data_parallel(wrapper)
        handles = (
            model.register_forward_pre_hook(lambda module, args, kwargs: before(*args, **kwargs), with_kwargs=True),
            model.register_forward_hook(lambda module, args, output: after(output)),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _NoTimes:
    """Keeps no statistics of times: PyTorch's own warns that it has no clock for shape-only tensors."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


class HookedUpdates:
    """Updates that hooks on parameters make in the backward pass.

    A hook knows its parameter as the key of a dictionary, and an optimizer holds it. So these parameters stay the same
    objects and take on shapes for the time, and the optimizers that are then called have an empty state.
    """

    def __init__(self) -> None:
        self._optimizers: list[tuple[torch.optim.Optimizer, Any]] = []
        self.present = False
        """Whether any parameter has such a hook."""

    @contextmanager
    def carried_over(self, model: torch.nn.Module, copies: ShapeCopies) -> Iterator[None]:
        """Carries hooks over to the shape-only parameters, before the model gets these from `copies`."""
        with ExitStack() as stack:
            for parameter in {id(each): each for each in model.parameters()}.values():
                # Where somebody else holds the parameter, so that it can't be exchanged, it gets a copy without hooks.
                with suppress(RuntimeError):
                    if internals.has_hooks(parameter, after_accumulation=True):
                        self._exchange(parameter, copies, stack)
                        self.present = True
            yield

    def _exchange(self, parameter: torch.nn.Parameter, copies: ShapeCopies, stack: ExitStack) -> None:
        shell = copies.of(parameter)
        internals.swap_tensors(parameter, shell)
        internals.renew_hooks_after_accumulation(parameter)
        stack.callback(internals.swap_tensors, parameter, shell)
        copies.replace(parameter, parameter)

    @contextmanager
    def emptied(self, own: Any) -> Iterator[None]:
        """Optimizers that are called in a hook have an empty state while this lasts; `own` is that of the step."""
        if not self.present:
            yield
            return

        def meet(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if optimizer is not own and all(optimizer is not known for known, _ in self._optimizers):
                self._optimizers.append((optimizer, optimizer.state))
                optimizer.state = defaultdict(dict)

        handle = register_optimizer_step_pre_hook(meet)
        try:
            yield
        finally:
            handle.remove()
            for optimizer, state in self._optimizers:
                optimizer.state = state

    def states(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(parameter, tensor of its state) of all optimizers that hooks have called."""
        for optimizer, _ in self._optimizers:
            for parameter, state in optimizer.state.items():
                for tensor in tensors_in(dict(state)):
                    yield parameter, tensor
