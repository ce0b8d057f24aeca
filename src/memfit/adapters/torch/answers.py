"""Functions of PyTorch that answer for the simulated device in every simulation.

The function mode that shows the device is off while a function of PyTorch runs. That is right for PyTorch's own code,
which must see shape-only tensors as what they are, but not for code of the user's that it calls in turn (hooks, the
recomputation of a checkpoint), nor for what it tells the user's code about devices.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from memfit.adapters.torch.autocast import Autocast
from memfit.adapters.torch.look import Look
from memfit.adapters.torch.places import Places
from memfit.adapters.torch.replacement import Replacement
from memfit.adapters.torch.shapes import META


def autocast_answers(autocast: Autocast) -> list[Replacement]:
    """Autocast for CUDA on a machine without CUDA.

    cuDNN is declared unfit for single tensors, so that recurrent layers leave their shape-only weights as they are.
    """
    plain_clear = torch.clear_autocast_cache

    def clear() -> None:
        autocast.clear_cache()
        plain_clear()

    return [
        Replacement(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        Replacement(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True),
        Replacement(torch, "clear_autocast_cache", clear),
        Replacement(torch.backends.cudnn, "is_acceptable", lambda tensor: False),
    ]


def look_answers(
    look: Look,
    places: Places,
    is_on: Callable[[], bool] = lambda: True,
    around_backward: Callable[[bool], AbstractContextManager[None]] = lambda accumulates: nullcontext(),
) -> list[Replacement]:
    """The device as the user's code is to see it, also where PyTorch calls that code or answers it in C++.

    Args:
        look: shows the device.
        places: where shape-only tensors are.
        is_on: whether the thread that runs is simulated.
        around_backward: entered for each run of the autograd engine; told whether it accumulates gradients.
    """
    return [*_around_callbacks(look, is_on, around_backward), *_about_devices(look, places)]


def _around_callbacks(
    look: Look, is_on: Callable[[], bool], around_backward: Callable[[bool], AbstractContextManager[None]]
) -> list[Replacement]:
    plain_backward = torch.autograd.graph._engine_run_backward
    plain_hooks = torch.autograd.graph.saved_tensors_hooks.__init__

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        if not is_on():
            return plain_backward(*args, **kwargs)
        with around_backward(bool(kwargs.get("accumulate_grad"))), look.again():
            return plain_backward(*args, **kwargs)

    def with_look(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(value: Any) -> Any:
            if not is_on():
                return hook(value)
            with look.again():
                return hook(value)

        return call

    def saved_tensors_hooks(self: Any, /, pack_hook: Any, unpack_hook: Any) -> None:
        plain_hooks(self, with_look(pack_hook), with_look(unpack_hook))

    return [
        Replacement(torch.autograd, "_engine_run_backward", run_backward),
        Replacement(torch.autograd.graph, "_engine_run_backward", run_backward),
        Replacement(torch.autograd.graph.saved_tensors_hooks, "__init__", saved_tensors_hooks),
    ]


def _by_place(tensors: list[Any], places: Places) -> dict[torch.device, list[int]]:
    """The places of shape-only tensors, each with the positions of those that are there."""
    found: dict[torch.device, list[int]] = {}
    with torch._C.DisableTorchFunction():
        for position, tensor in enumerate(tensors):
            found.setdefault(places.of(tensor), []).append(position)
    return found


def _about_devices(look: Look, places: Places) -> list[Replacement]:
    plain_group = torch._C._group_tensors_by_device_and_dtype
    plain_wrapper = torch.Tensor._make_wrapper_subclass
    plain_compatible = torch._has_compatible_shallow_copy_type

    def group(tensorlistlist: Any, with_indices: bool = False) -> Any:
        groups: dict[Any, Any] = {}
        for (device, dtype), (lists, indices) in plain_group(tensorlistlist, with_indices).items():
            if device is None or device.type != "meta":
                groups[device, dtype] = (lists, indices)
                continue
            for place, members in _by_place(lists[0], places).items():
                chosen = [[held[i] for i in members] if held else held for held in lists]
                groups[place, dtype] = (chosen, [indices[i] for i in members] if indices else indices)
        return groups

    def make_wrapper_subclass(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None and look.place(kwargs["device"]) is not None:
            kwargs = {**kwargs, "device": META}
        return plain_wrapper(*args, **kwargs)

    def compatible(tensor: torch.Tensor, other: torch.Tensor) -> bool:
        # As between CPU and CUDA: a parameter stays the same object when its module moves (`Look._set_data`).
        with torch._C.DisableTorchFunction():
            moves = tensor.is_meta != other.is_meta
        return moves or bool(plain_compatible(tensor, other))

    return [
        Replacement(torch, "_has_compatible_shallow_copy_type", compatible),
        # Other ways in which a module may move: with these, its parameters would not be the same objects afterwards.
        Replacement(torch.__future__, "get_swap_module_params_on_conversion", lambda: False),
        Replacement(torch.__future__, "get_overwrite_module_params_on_conversion", lambda: False),
        Replacement(torch.Tensor, "_make_wrapper_subclass", staticmethod(make_wrapper_subclass)),
        Replacement(torch._C, "_group_tensors_by_device_and_dtype", group),
    ]
