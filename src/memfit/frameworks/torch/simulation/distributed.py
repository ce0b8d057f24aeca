"""Distributed training, seen from one rank: the process group is PyTorch's fake one, which talks to nobody.

Collectives allocate what they allocate and return at once. What other ranks would have sent is not there: reduced
tensors keep the rank's own values, gathered objects are copies of its own. `DistributedDataParallel` and `fully_shard`
run as they are, with their own buckets and unsharded parameters.
"""

import copy
import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

from memfit.core.patching import Replacement
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.cuda.devices import CudaDevices

# As they are without a stand-in.
_SPAWN: Callable[..., Any] = torch.multiprocessing.spawn  # type: ignore[attr-defined]
_START_PROCESSES: Callable[..., Any] = torch.multiprocessing.start_processes  # type: ignore[attr-defined]
SPAWNED = "processes-not-spawned"
SIMULATED_RANK = "one-rank"


def environment(count: int) -> dict[str, str]:
    """What `torchrun --nproc-per-node=count` would tell the process of rank 0."""
    if count == 1:
        return {}
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
    }


def distributed_replacements(
    count: int,
    report: Callable[[str, str], None],
    has_gradients: Callable[[torch.Tensor], None] = lambda bucket: None,
) -> list[Replacement]:
    """What stands in for the parts of `torch.distributed` that would talk to other processes.

    There are `count` of them where the program doesn't say; `has_gradients` is called with each buffer in which
    gradients are gathered for the other ranks.
    """
    if not dist.is_available():
        return spawn_replacements(report)
    # Meshes of devices have copies of their own.
    owners = (dist, dist.distributed_c10d, dist.device_mesh)
    plain_new_group = dist.new_group

    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, **options: Any) -> Any:
        return plain_new_group(ranks, timeout, None, **{k: v for k, v in options.items() if k != "device_id"})

    stand_ins = {
        "init_process_group": _init_process_group(count, report),
        "new_group": new_group,
        "barrier": nothing,
        "monitored_barrier": nothing,
        "all_gather_object": _all_gather_object,
        "gather_object": _gather_object,
        "broadcast_object_list": nothing,
        "scatter_object_list": _scatter_object_list,
        "is_nccl_available": lambda: True,
    }
    return [
        *(
            Replacement(home, name, value)
            for home in owners
            for name, value in stand_ins.items()
            if hasattr(home, name)
        ),
        *spawn_replacements(report),
        Replacement(torch.nn.parallel.distributed, "_verify_param_shape_across_processes", nothing),
        Replacement(dist.ProcessGroup, "monitored_barrier", nothing),
        Replacement(DistributedDataParallel, "__init__", _init_data_parallel(has_gradients)),
        Replacement(DistributedDataParallel, "register_comm_hook", nothing),
    ]


def _init_process_group(count: int, report: Callable[[str, str], None]) -> Callable[..., None]:
    plain = dist.init_process_group

    def init_process_group(
        backend: Any = None,
        init_method: Any = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        group_name: str = "",
        pg_options: Any = None,
        device_id: Any = None,
        **_: Any,
    ) -> None:
        size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", count))
        own = rank if rank >= 0 else int(os.environ.get("RANK", 0))
        # The module of the store registers the backend called "fake".
        plain("fake", store=internals.FakeStore(), rank=own, world_size=size)
        report(SIMULATED_RANK, f"the memory is that of rank {own} of {size}; its collectives send nothing")

    return init_process_group


def _all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    object_list[:] = [copy.copy(obj) for _ in object_list]


def _gather_object(obj: Any, object_gather_list: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
    if object_gather_list is not None:
        _all_gather_object(object_gather_list, obj)


def _scatter_object_list(
    scatter_object_output_list: list[Any], scatter_object_input_list: list[Any] | None = None, *args: Any, **_: Any
) -> None:
    if scatter_object_input_list:
        scatter_object_output_list[0] = scatter_object_input_list[0]


def _init_data_parallel(has_gradients: Callable[[torch.Tensor], None]) -> Callable[..., None]:
    plain = DistributedDataParallel.__init__
    plain_register = DistributedDataParallel.register_comm_hook

    def keep(bucket: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """What the other ranks make of these gradients: nothing."""
        has_gradients(bucket)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket)
        return done

    def __init__(self: Any, /, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        # The fake group's work has no result, which the reducer would ask for.
        # A lambda, because PyTorch reads the annotations of a function.
        plain_register(self, None, lambda state, bucket: keep(bucket.buffer()))

    return __init__


class _Finished:
    """The processes that were not started, all done."""

    processes: tuple[Any, ...] = ()

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """True: there is nothing to wait for."""
        return True


def spawn_replacements(report: Callable[[str, str], None], devices: CudaDevices | None = None) -> list[Replacement]:
    """The ways in which a program starts a process for each device: the first is run, in this one.

    Of more processes than `devices` several share a device: they are started, unless they form a process group, for
    which each needs a device of its own. None: none is ever started.
    """

    def start(fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, *_: Any, **__: Any) -> _Finished | None:
        report(SPAWNED, f"of {nprocs} spawned processes only the first was run, in this process")
        fn(0, *args)
        return None if join else _Finished()

    def starting(plain: Callable[..., Any]) -> Callable[..., Any]:
        if devices is None:
            return start

        @functools.wraps(plain)
        def start_or_run(fn: Any, args: Any = (), nprocs: int = 1, *rest: Any, **options: Any) -> Any:
            shares = nprocs > devices.count and not _forms_group(fn)
            return (plain if shares else start)(fn, args, nprocs, *rest, **options)

        return start_or_run

    return [
        Replacement(torch.multiprocessing, "spawn", starting(_SPAWN)),
        Replacement(torch.multiprocessing, "start_processes", starting(_START_PROCESSES)),
    ]


def _forms_group(function: Any) -> bool:
    """Whether what is to be spawned makes a process group, told from its module's text; True where there is none."""
    try:
        text = inspect.getsource(inspect.getmodule(function))  # type: ignore[arg-type]
    except (OSError, TypeError):
        return True
    return not inspect.isfunction(function) or "init_process_group" in text
