"""How much memory a step has here, and what a finding about it depends on."""

from collections.abc import Iterator
from typing import Any

import torch

from memfit.adapters.torch.fitting.micro_batches import places
from memfit.adapters.torch.job import common_first_dimension
from memfit.adapters.torch.stand_in import tensors_in
from memfit.core.guarding import BatchSize
from memfit.core.own_memory import limits, read_sizes


def size_of(batch: Any) -> BatchSize:
    """Samples and elements of a batch."""
    num_samples = common_first_dimension(batch)
    elements = sum(tensor.numel() for tensor in tensors_in(batch))
    return BatchSize(num_samples or None, max(1.0, elements / max(1, num_samples or 1)))


def room_bytes(model: torch.nn.Module, optimizer: Any, host_bytes: int | None) -> int | None:
    """What model, gradients, optimizer state, activations and batch may take together; None where nobody knows.

    Args:
        model: the module.
        optimizer: over its parameters.
        host_bytes: memory that a process can have on this machine.
    """
    device = _device(model)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device))
    known = [size for size in (data_limit_bytes(), host_bytes) if size is not None]
    used = _data_bytes()
    if not known or used is None:
        return None
    return max(0, min(known) - used + held_bytes(model, optimizer))


def held_bytes(model: torch.nn.Module, optimizer: Any) -> int:
    """What parameters, gradients, buffers and the optimizer's state take now."""
    held: dict[int, int] = {}
    for tensor in _held(model, optimizer):
        if tensor.layout is torch.strided and not tensor.is_meta:
            storage = tensor.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


def _held(model: torch.nn.Module, optimizer: Any) -> Iterator[torch.Tensor]:
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from model.buffers()
    for state in getattr(optimizer, "state", {}).values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def data_limit_bytes() -> int | None:
    """The soft limit of this process's data segment, RLIMIT_DATA or the address space's; None where there is none."""
    return min((limit for limit in limits() if limit is not None), default=None)


def _data_bytes() -> int | None:
    """Private writable memory of this process, as RLIMIT_DATA counts it; None where the system doesn't tell."""
    sizes = read_sizes()
    return None if sizes is None else sizes[-1]


def identity(model: torch.nn.Module, optimizer: Any, batch: Any, host_bytes: int | None) -> list[object]:
    """Everything that a finding about memory depends on: model, optimizer, shapes of one sample, device, its memory."""
    device = _device(model)
    name, memory = "cpu", min(filter(None, (data_limit_bytes(), host_bytes)), default=None)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory = properties.name, properties.total_memory
    return [
        *((path, tuple(p.shape), p.dtype, p.requires_grad) for path, p in model.named_parameters()),
        type(optimizer).__qualname__,
        *((place, tuple(tensor.shape[1:]), tensor.dtype) for place, tensor in places(batch)),
        device.type,
        name,
        memory,
    ]


def _device(model: torch.nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
