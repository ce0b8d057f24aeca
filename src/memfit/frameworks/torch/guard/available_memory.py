"""How much memory a step has here, and what a finding about it depends on."""

import itertools
from collections.abc import Iterable
from typing import Any

import torch

from memfit.core.guarding import BatchSize
from memfit.core.own_memory import limits, read_sizes
from memfit.frameworks.torch.apply.micro_batches import places
from memfit.frameworks.torch.guard.parameters import device_of
from memfit.frameworks.torch.shapes.batch import common_first_dimension
from memfit.frameworks.torch.shapes.stand_in import tensors_in


def size_of(batch: Any) -> BatchSize:
    """Samples and elements of a batch."""
    num_samples = common_first_dimension(batch)
    elements = sum(tensor.numel() for tensor in tensors_in(batch))
    return BatchSize(num_samples or None, max(1.0, elements / max(1, num_samples or 1)))


def room_bytes(model: torch.nn.Module, optimizer: Any, host_bytes: int | None) -> int | None:
    """What model, gradients, optimizer state, activations and batch may take together; None where nobody knows."""
    device = device_of(model)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device))
    known = [size for size in (data_limit_bytes(), host_bytes) if size is not None]
    sizes = read_sizes()
    if not known or sizes is None:
        return None
    # Private writable memory of this process, as RLIMIT_DATA counts it.
    return max(0, min(known) - sizes[-1] + held_bytes(model, optimizer))


def held_bytes(model: torch.nn.Module, optimizer: Any) -> int:
    """What parameters, gradients, buffers and the optimizer's state take now."""
    states = getattr(optimizer, "state", {}).values()
    gradients = (parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    kept = (value for state in states for value in state.values() if isinstance(value, torch.Tensor))
    return storage_bytes(itertools.chain(model.parameters(), gradients, model.buffers(), kept))


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """What dense tensors take together; what they share counts once."""
    dense = (tensor for tensor in tensors if tensor.layout is torch.strided and not tensor.is_meta)
    storages = (tensor.untyped_storage() for tensor in dense)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def data_limit_bytes() -> int | None:
    """The soft limit of this process's data segment, RLIMIT_DATA or the address space's; None where there is none."""
    return min((limit for limit in limits() if limit is not None), default=None)


def identity(model: torch.nn.Module, optimizer: Any, batch: Any, host_bytes: int | None) -> list[object]:
    """Everything that a finding about memory depends on: model, optimizer, shapes of one sample, device, its memory."""
    device = device_of(model)
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
