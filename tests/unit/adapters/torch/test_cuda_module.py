"""All of it together: how libraries and old scripts meet the device, and that PyTorch is itself afterwards."""

import os
import subprocess
import sys

import torch
from torch import nn

from memfit.adapters.torch.cuda_devices import CudaDevices
from memfit.adapters.torch.cuda_module import cuda_replacements
from memfit.adapters.torch.replacement import Replacement
from memfit.allocator import LiveAllocator
from memfit.core.replay import AllocatorOptions
from tests.unit.adapters.torch.machines import T4, machine


def listed() -> list[Replacement]:
    return cuda_replacements(CudaDevices(T4, 1), LiveAllocator(AllocatorOptions(), None), lambda code, text: None)


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
from memfit._api import mend_torchvision
from tests.unit.adapters.torch.machines import machine

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
