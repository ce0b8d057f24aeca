"""The optimizer's state and its update in host memory.

Each parameter has a copy in host memory, the optimizer's state is there, and so is the update: a gradient goes down,
the new values come up. The device holds nothing for the optimizer, not even for a moment. Where the device is the
host, nothing is copied and the update runs in place.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memfit.adapters.torch.fitting.single_updates import Groups, SingleUpdates
from memfit.adapters.torch.fitting.tensor_memory import simulated

_HOST = torch.device("cpu")


class HostUpdates:
    """Updates parameters in host memory.

    Args:
        optimizer: the user's; its state moves to host memory parameter by parameter, as they are updated.
        copies: whether parameters are copied although they are in host memory already.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, copies: bool = False) -> None:
        self._optimizer = optimizer
        self._single = SingleUpdates(optimizer)
        self._copies_always = copies
        self._last_bytes = 0
        self._copies: dict[torch.Tensor, _Copy] = {}
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
            held = self._copies[parameter] = _Copy(parameter)
        held.fetch(parameter)
        # A state that was loaded meanwhile is on the parameter's device.
        _move(self._optimizer.state[parameter], _HOST)
        self._single.update(parameter, held.values)
        held.send(parameter)

    @property
    def host_bytes(self) -> int:
        """Bytes of parameters' copies and of their state, at last; 0 where these are in host memory anyway."""
        held_bytes = sum(
            tensor.numel() * tensor.element_size()
            for parameter, held in self._copies.items()
            for tensor in (held.values, *self._optimizer.state[parameter].values())
            if isinstance(tensor, torch.Tensor)
        )
        return held_bytes or self._last_bytes

    def _simulate(self, parameter: torch.nn.Parameter) -> None:
        """Makes the copy and the state of a simulated parameter, on nobody's account: the device holds none of it."""
        if parameter in self._copies:
            return
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            held = self._copies[parameter] = _Copy(parameter)
            held.values.grad = torch.empty_like(held.values)
            # A fused kernel insists on a real device.
            options = {"fused": False} if "fused" in self._optimizer.defaults else {}
            self._single.update(parameter, held.values, **options)
            held.values.grad = None

    def close(self) -> None:
        """Moves the state back to where the parameters are."""
        self._last_bytes = self.host_bytes
        self._single.close()
        groups = Groups(self._optimizer)
        for parameter, state in self._optimizer.state.items():
            group = groups.of(parameter)
            counters_too = bool(group.get("fused") or group.get("capturable"))
            _move(state, parameter.device, counters=counters_too)
        self._copies.clear()


class _Copy:
    """A parameter's values in host memory."""

    __slots__ = ("values",)

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        values = parameter.detach()
        self.values = torch.nn.Parameter(torch.empty_like(values) if values.is_meta else _on_host(values))

    def fetch(self, parameter: torch.nn.Parameter) -> None:
        """Takes the gradient and the values, which may be others than at the last update: loaded, clamped, averaged."""
        gradient = parameter.grad
        assert gradient is not None
        # Always: no version tells of a change through `.data`.
        with torch.no_grad():
            self.values.copy_(parameter)
        self.values.grad = _on_host(gradient)

    def send(self, parameter: torch.nn.Parameter) -> None:
        """Gives the new values."""
        self.values.grad = None
        with torch.no_grad():
            parameter.copy_(self.values)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return tensor.to(_HOST)
    # Transfers from pinned memory are several times faster.
    return torch.empty_like(tensor, device=_HOST, pin_memory=tensor.is_cuda).copy_(tensor)


def _move(state: dict[str, Any], device: torch.device, *, counters: bool = True) -> None:
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.device != device and (counters or value.dim()):
            state[name] = value.to(device)
