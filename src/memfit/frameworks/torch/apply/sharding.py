"""Parameters, gradients and optimizer state, sharded over several devices (PyTorch's FSDP2).

Each repeated block of the model is one unit: its parameters are gathered when it runs and let go afterwards. What is
outside of the blocks makes one more unit, which stays gathered from the forward to the backward pass.

The same call runs in two worlds. In a program started by torchrun it shards over the processes of that run. In a trace
it shards over PyTorch's fake process group (`simulated_group`), which talks to nobody and allocates what a real one
would.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from memfit.allocator.live import LiveAllocator
from memfit.core.device import Device
from memfit.core.errors import BadInput
from memfit.core.patching import Replacement, replaced
from memfit.core.replay import AllocatorOptions
from memfit.core.timeline import Category
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.apply.tensor_memory import simulated
from memfit.frameworks.torch.cuda.devices import CudaDevices
from memfit.frameworks.torch.cuda.libraries import cuda_replacements
from memfit.frameworks.torch.shapes.recorder import Recorder
from memfit.frameworks.torch.shapes.stand_in import tensors_in
from memfit.frameworks.torch.simulation.distributed import distributed_replacements
from memfit.frameworks.torch.simulation.simulation import Simulation

_CONTAINERS = (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict)


class Sharded:
    """What undoes the sharding of a model, and of the state of its optimizer, if any: call it."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, *, offload: bool) -> None:
        self._model = model
        self._optimizer = optimizer
        self._offload = offload
        self._kinds = [(module, type(module)) for module in model.modules()]
        self._places = [
            (module, name, parameter)
            for module in model.modules()
            for name, parameter in internals.parameters_of(module).items()
            if parameter is not None
        ]
        self._host_bytes = 0

    @property
    def host_bytes(self) -> int:
        """The most that waits in host memory: parameters, gradients and optimizer state."""
        if self._offload and self._places:
            parameters = list(self._model.parameters())
            gradients = [parameter for parameter in parameters if parameter.requires_grad]
            state = [] if self._optimizer is None else tensors_in(list(self._optimizer.state.values()))
            local = [t.to_local() if hasattr(t, "to_local") else t for t in (*parameters, *gradients, *state)]
            self._host_bytes = max(self._host_bytes, sum(t.numel() * t.element_size() for t in local))
        return self._host_bytes

    def replace(self) -> None:
        """Has the optimizer train the shards, and lets go of the whole parameters, which nobody reads meanwhile."""
        now = {id(old): internals.parameters_of(module)[name] for module, name, old in self._places}
        _exchange(self._optimizer, now, _shard_of)
        for _, _, parameter in self._places:
            parameter.data = parameter.data.new_empty(0)

    def __call__(self) -> None:
        """Gathers the parameters into the objects they were before, and the optimizer's state with them."""
        if not self._places:
            return
        _ = self.host_bytes
        for module in self._model.modules():
            if isinstance(module, torch.distributed.fsdp.FSDPModule):
                module.reshard()
        back: dict[int, Any] = {}
        for module, name, old in self._places:
            shard: Any = internals.parameters_of(module)[name]
            if id(shard) not in back:
                back[id(shard)] = old
                gradient = None if shard.grad is None else _whole(shard.grad, old.device)
                old.data = _whole(shard.data, old.device)
                old.grad = gradient
        _exchange(self._optimizer, back, lambda tensor, shard, old: _whole(tensor, old.device))
        for module, name, old in self._places:
            internals.parameters_of(module)[name] = old
        for module, kind in self._kinds:
            if isinstance(module, torch.distributed.fsdp.FSDPModule):
                internals.forget_sharding(module)
                module.__class__ = kind  # type: ignore[assignment]
        self._places = []


def shard(model: torch.nn.Module, num_devices: int, *, offload: bool = False, optimizer: Any = None) -> Sharded:
    """Shards `model`, and the state of `optimizer`, over all processes; returns what undoes it.

    From now on the optimizer has the shards, which wait in host memory with `offload`.
    """
    how = f"Start the program with `torchrun --nproc-per-node {num_devices} train.py` and call init_process_group first"
    if not dist.is_available() or not dist.is_initialized():
        raise BadInput(
            f"the plan shards the model over {num_devices} devices, but torch.distributed isn't initialised. {how}."
        )
    if dist.get_world_size() != num_devices:
        raise BadInput(
            f"the plan shards the model over {num_devices} devices, but there are {dist.get_world_size()} processes. "
            f"{how}, or plan for {dist.get_world_size()} devices."
        )
    if next(model.parameters(), None) is None:
        raise BadInput("a model without parameters can't be sharded. Plan for one device.")
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise BadInput(
                f"parameter {name!r} is a single number, which can't be sharded. Give it one dimension, or "
                "plan for one device."
            )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    first = next(model.parameters())
    device_type = first.device.type
    if device_type == "cpu" and torch.cuda.is_available():
        # FSDP itself moves what it shards.
        device_type = "cuda"
    mesh = init_device_mesh(device_type, (num_devices,))
    sharded = Sharded(model, optimizer, offload=offload)
    # There is nothing to pin on the host, nor where there are only shapes.
    pinned = device_type != "cpu" and not simulated(first)
    policy = CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy()
    for unit in units(model):
        fully_shard(unit, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    sharded.replace()
    return sharded


def units(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The repeated blocks: outermost members of lists, but not those that share parameters with others."""
    holders: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), set()).add(id(module))
    found: list[torch.nn.Module] = []

    def visit(module: torch.nn.Module) -> None:
        for child in module.children():
            within = {id(part) for part in child.modules()}
            own = all(holders[id(parameter)] <= within for parameter in child.parameters())
            if isinstance(module, _CONTAINERS) and not isinstance(child, _CONTAINERS):
                if own and child not in found and next(child.parameters(), None) is not None:
                    found.append(child)
            else:
                visit(child)

    visit(model)
    return found


def _whole(tensor: Any, device: torch.device) -> Any:
    """The whole of a sharded tensor, gathered from all processes."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    if tensor.device_mesh.device_type != tensor.to_local().device.type:
        # Collectives of the mesh work on its own devices.
        tensor = tensor.to(tensor.device_mesh.device_type)
    return tensor.full_tensor().detach().to(device)


def _shard_of(tensor: Any, old: torch.Tensor, new: Any) -> Any:
    """This process' part of a tensor of the optimizer's state, sharded as its parameter is."""
    if tensor.shape != old.shape or tensor.dim() == 0:
        return tensor
    from torch.distributed.tensor import DTensor

    parts = tensor.chunk(new.device_mesh.size())
    rank = new.device_mesh.get_local_rank()
    part = parts[rank] if rank < len(parts) else tensor[:0]
    local = part.clone().to(new.to_local().device)
    return DTensor.from_local(
        local, new.device_mesh, new.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _exchange(optimizer: Any, new: dict[int, Any], change: Callable[[Any, Any, Any], Any]) -> None:
    """Puts other parameters, by the ids of the old ones, into an optimizer, and its state with them.

    `change` takes (tensor of the state, old parameter, new parameter).
    """
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        group["params"] = [new.get(id(parameter), parameter) for parameter in group["params"]]
    for old in list(optimizer.state):
        if id(old) in new:
            parameter, state = new[id(old)], optimizer.state.pop(old)
            optimizer.state[parameter] = {
                name: change(value, old, parameter) if isinstance(value, torch.Tensor) else value
                for name, value in state.items()
            }


@contextmanager
def simulated_group(simulation: Simulation, recorder: Recorder, device: Device, count: int) -> Iterator[None]:
    """Gives a running simulation `count` devices and a process group that talks to nobody, for `shard`.

    The recorder follows parameters that are gathered and let go.
    """
    if count == 1:
        yield
        return
    if dist.is_initialized():
        raise BadInput(
            f"sharding over {count} devices can't be simulated in a program that has initialised torch.distributed. "
            "Make the plan first, by `memfit plan`, and load it."
        )
    plain = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = plain(storage, size)
        if storage.device.type == "meta" and not simulation.labels.has(storage):
            recorder.resized(storage, "resize_")
        return result

    report = simulation.notes.report

    def gathered(bucket: torch.Tensor) -> None:
        recorder.classify(bucket, Category.GRADIENT, "")

    given = [*distributed_replacements(count, report, gathered), Replacement(torch.UntypedStorage, "resize_", resize)]
    # PyTorch's own, which names the rank, would stay.
    given.append(Replacement(sys, "excepthook", sys.excepthook))
    if simulation.on_cuda:
        # Nobody asks for its statistics: the trace has its own record.
        memory = LiveAllocator(AllocatorOptions(), None)
        devices = CudaDevices(device, count)
        given += cuda_replacements(devices, memory, report, simulation.device_view)
        recorder.current_stream = lambda: devices.current_stream()
    simulation.device_view.know_host()
    with replaced(given), warnings.catch_warnings():
        # Hooks on views matter to values, and there are none: whoever runs the step is told by PyTorch.
        warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
        dist.init_process_group("nccl", world_size=count, rank=0)
        try:
            yield
        finally:
            dist.destroy_process_group()
