"""The optimizer's state and its update in host memory.

Each parameter has a copy in host memory, the optimizer's state is there, and so is the update: a gradient goes down,
the new values come up. The device holds nothing for the optimizer, not even for a moment. Where the device is the
host, nothing is copied and the update runs in place.
"""

from typing import Any

import torch

from memfit.frameworks.torch import internals
from memfit.frameworks.torch.apply.single_updates import Groups, SingleUpdates, counts_on_device
from memfit.frameworks.torch.apply.tensor_memory import simulated

_HOST = torch.device("cpu")


class HostUpdates:
    """Updates parameters in host memory, where the optimizer's state goes parameter by parameter.

    With `copies`, parameters that are there already are copied as well.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, copies: bool = False) -> None:
        self._optimizer = optimizer
        self._single = SingleUpdates(optimizer)
        self._copies_always = copies
        self._last_bytes = 0
        self._copies: dict[torch.Tensor, torch.nn.Parameter] = {}
        for parameter, state in optimizer.state.items():
            if not simulated(parameter):
                _move(state, _HOST)

    def update(self, parameter: torch.nn.Parameter) -> None:
        """Updates `parameter` from its gradient."""
        if parameter.device.type == "cpu" and not self._copies_always:
            self._single.update(parameter)
            return
        if simulated(parameter):
            self._simulate(parameter)
            return
        held = self._copies.get(parameter)
        if held is None:
            held = self._copies[parameter] = torch.nn.Parameter(_on_host(parameter.detach()))
        assert parameter.grad is not None
        with torch.no_grad():
            # Always: no version tells of a change through `.data`, by what was loaded, clamped or averaged.
            held.copy_(parameter)
        held.grad = _on_host(parameter.grad)
        # A state that was loaded meanwhile is on the parameter's device.
        _move(self._optimizer.state[parameter], _HOST)
        self._single.update(parameter, held)
        held.grad = None
        with torch.no_grad():
            parameter.copy_(held)

    @property
    def host_bytes(self) -> int:
        """Bytes of parameters' copies and of their state, at last; 0 where these are in host memory anyway."""
        held_bytes = sum(
            tensor.numel() * tensor.element_size()
            for parameter, held in self._copies.items()
            for tensor in (held, *self._optimizer.state[parameter].values())
            if isinstance(tensor, torch.Tensor)
        )
        return held_bytes or self._last_bytes

    def _simulate(self, parameter: torch.nn.Parameter) -> None:
        """Makes the copy and the state of a simulated parameter, on nobody's account: the device holds none of it."""
        if parameter in self._copies:
            return
        with internals.outside_simulation():
            held = self._copies[parameter] = torch.nn.Parameter(torch.empty_like(parameter.detach()))
            held.grad = torch.empty_like(held)
            # A fused kernel insists on a real device.
            options = {"fused": False} if "fused" in self._optimizer.defaults else {}
            self._single.update(parameter, held, **options)
            held.grad = None

    def close(self) -> None:
        """Moves the state back to where the parameters are."""
        self._last_bytes = self.host_bytes
        self._single.close()
        groups = Groups(self._optimizer)
        for parameter, state in self._optimizer.state.items():
            _move(state, parameter.device, counters=counts_on_device(groups.of(parameter)))
        self._copies.clear()


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return tensor.to(_HOST)
    # Transfers from pinned memory are several times faster.
    return torch.empty_like(tensor, device=_HOST, pin_memory=tensor.is_cuda).copy_(tensor)


def _move(state: dict[str, Any], device: torch.device, *, counters: bool = True) -> None:
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.device != device and (counters or value.dim()):
            state[name] = value.to(device)
