import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils import collect_env

from memfit.allocator import LiveAllocator
from memfit.core.patching import Replacement
from memfit.core.replay import AllocatorOptions
from memfit.frameworks.torch.cuda.devices import CudaDevices
from memfit.frameworks.torch.cuda.libraries import cuda_replacements
from tests.unit.frameworks.torch.machines import T4, Shapes, machine


def test_cudnn_is_there_and_its_flags_can_be_set():
    before = torch.backends.cudnn.benchmark

    with machine():
        assert torch.backends.cudnn.is_available()
        assert torch.backends.cudnn.version() >= 90000
        torch.backends.cudnn.benchmark = True
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
            assert not torch.backends.cudnn.benchmark
        assert torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = before

    assert torch.backends.cudnn.version() is None
    assert not torch.backends.cudnn.is_available()


def test_older_devices_get_the_last_cudnn_for_them():
    with machine(replace(T4, capability=(6, 0))):
        assert torch.backends.cudnn.version() < 91100


def test_recurrent_layers_leave_their_weights_alone():
    with machine():
        assert not torch.backends.cudnn.is_acceptable(torch.zeros(1))
        torch.nn.LSTM(2, 2).flatten_parameters()


def test_mixed_precision_is_available():
    with machine():
        assert torch.amp.GradScaler("cuda").is_enabled()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert torch.is_autocast_enabled("cuda")


def test_the_runtime_answers():
    with machine():
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaProfilerStart())
        torch.cuda.check_error(runtime.cudaHostRegister(0, 0, 0))
        assert runtime.cudaMemGetInfo(0) == torch.cuda.mem_get_info()
        with torch.cuda.profiler.profile():
            pass
        with pytest.raises(torch.cuda.CudaError, match="error 2 of a simulated device"):
            torch.cuda.check_error(2)


def test_ranges_of_a_profiler_nest():
    with machine():
        assert torch.cuda.nvtx.range_push("outer") == 0
        assert torch.cuda.nvtx.range_push("inner") == 1
        assert torch.cuda.nvtx.range_pop() == 1
        assert torch.cuda.nvtx.range_pop() == 0
        first = torch.cuda.nvtx.range_start("threads")
        assert torch.cuda.nvtx.range_start("threads") != first
        torch.cuda.nvtx.range_end(first)
        torch.cuda.nvtx.mark("here")
        with torch.cuda.nvtx.range("body"):
            pass


@pytest.mark.parametrize(
    "open_profiler",
    [
        lambda: profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]),
        lambda: torch.autograd.profiler.profile(use_device="cuda"),
        lambda: torch.autograd.profiler.profile(),
    ],
)
def test_the_profiler_runs_without_cuda(open_profiler, capfd):
    with machine(), open_profiler() as profiler:
        torch.zeros(2).sum()

    assert len(profiler.key_averages()) > 0
    assert "Failed to record CUDA event" not in capfd.readouterr().err


def test_versions_of_libraries():
    with machine():
        assert torch.cuda.nccl.version() > (2, 0, 0)
        assert torch.backends.cuda.is_flash_attention_available()
        assert torch.cuda.current_blas_handle()
        assert torch.cuda.current_solver_handle()
        torch._C._cuda_clearCublasWorkspaces()
        with pytest.raises(RuntimeError, match=r"use torch\.distributed"):
            torch._C._nccl_all_reduce()


def test_the_environment_can_be_described():
    with machine():
        assert "Is CUDA available: True" in collect_env.get_pretty_env_info()


def on_device(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, device="cuda")


def test_tensors_are_scattered_and_gathered():
    with machine(count=2), Shapes():
        (whole,) = torch.nn.parallel.comm.scatter(torch.zeros(6, 2), [0])
        chunks = torch.nn.parallel.comm.scatter(torch.zeros(6, 2), [0, 1])
        uneven = torch.nn.parallel.comm.scatter(torch.zeros(6, 2), [0, 1], chunk_sizes=[4, 2])
        into = torch.nn.parallel.comm.scatter(torch.zeros(6, 2), out=[on_device(4, 2), on_device(2, 2)])

        assert (whole.shape, whole.is_cuda) == ((6, 2), True)
        for parts, sizes in ((chunks, [3, 3]), (uneven, [4, 2]), (into, [4, 2])):
            assert [len(part) for part in parts] == sizes
            assert all(part.is_cuda for part in parts)
        gathered = torch.nn.parallel.comm.gather(chunks, dim=0, destination=torch.device("cuda", 0))
        assert gathered.shape == torch.nn.parallel.comm.gather(uneven, out=on_device(6, 2)).shape == (6, 2)
        assert torch._C._gather([torch.zeros(1)], 0, -1).is_cpu


def test_tensors_are_sent_to_all_and_summed():
    with machine(count=2), Shapes():
        one, other = torch.nn.parallel.comm.broadcast(on_device(3), [0, 1])
        torch.nn.parallel.comm.broadcast(on_device(3), out=[one, other])
        copies = torch.nn.parallel.comm.broadcast_coalesced([on_device(3), on_device(2)], [0, 1])

        assert one.shape == other.shape == (3,)
        assert [[tensor.shape[0] for tensor in group] for group in copies] == [[3, 2], [3, 2]]

    # On the host, to see the sum.
    with machine():
        out = torch.empty(2)
        torch._C._nccl_reduce([torch.ones(2), torch.ones(2), torch.ones(2)], out, 0, 0, None, None)
        assert out.tolist() == [3.0, 3.0]


def listed() -> list[Replacement]:
    memory = LiveAllocator(AllocatorOptions(), None)
    return cuda_replacements(CudaDevices(T4, 1), memory, lambda code, text: None, SimpleNamespace())


def test_nothing_is_replaced_by_asking_for_the_list():
    before = dict(vars(torch.cuda))

    assert listed()
    assert dict(vars(torch.cuda)) == before


def test_each_attribute_is_replaced_once():
    places = [(id(owner), name) for owner, name, _ in listed()]

    assert len(places) == len(set(places))


def test_every_function_without_arguments_answers():
    # Those that need the driver's library raise as they would without it.
    expected_to_raise = {"utilization", "temperature", "power_draw", "clock_rate", "memory_usage", "device_memory_used"}
    # Old names that warn, and constructors.
    skipped = {"memory_cached", "max_memory_cached", "reset_max_memory_allocated", "reset_max_memory_cached"}
    failed = {}

    with machine():
        for name in torch.cuda.__all__:
            function = getattr(torch.cuda, name)
            if name in skipped or isinstance(function, type) or not callable(function):
                continue
            try:
                function()
            except TypeError as error:
                assert "missing" in str(error), name
            except (ModuleNotFoundError, RuntimeError) as error:
                failed[name] = str(error)

    assert set(failed) == expected_to_raise


def test_a_step_on_the_host_is_what_it_was():
    def step() -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.rand(3, 4)).sum().backward()
        optimizer.step()
        return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]

    before = step()
    with machine():
        during = step()

    assert before == during == step()


LIBRARIES = """
import torch
from memfit.api.jobs import mend_torchvision
from tests.unit.frameworks.torch.machines import machine

mend_torchvision()
with machine():
    from accelerate import Accelerator
    accelerator = Accelerator(mixed_precision="fp16")
    assert accelerator.device.type == "cuda", accelerator.device
    import lightning
    trainer = lightning.Trainer(
        accelerator="gpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    assert trainer.strategy.root_device == torch.device("cuda", 0)
    assert trainer.accelerator.get_device_stats(torch.device("cuda", 0))["allocation.all.current"] == 0
    lightning.seed_everything(1)
print("done")
"""


def test_libraries_find_the_device():
    # In a process of their own: they remember what they found.
    done = subprocess.run([sys.executable, "-c", LIBRARIES], capture_output=True, text=True, env=_environment())

    assert done.stdout.endswith("done\n"), done.stderr


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
