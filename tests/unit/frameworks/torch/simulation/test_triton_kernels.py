"""Launches of Triton's kernels: with the stand-in, and with a package that looks for a GPU as the real one does."""

import importlib.util
import sys
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import memfit
from memfit.core.units import MIB

installed = importlib.util.find_spec("triton") is not None
without_triton = pytest.mark.skipif(installed, reason="Triton is installed: the stand-in gives way to it")


@contextmanager
def simulated(device="a100-40gb", **options):
    """A device as the process of a script sees it."""
    with memfit.simulate(device, **options) as shown, shown._session.simulation.with_stand_ins():
        yield shown


# The parts of Triton's runtime that a launch goes through (triton/runtime of 3.9).
PACKAGE = {
    "__init__.py": "from .runtime.autotuner import autotune\nfrom .runtime.jit import jit\n",
    "runtime/__init__.py": "from .driver import driver\n",
    "runtime/driver.py": """
class DriverConfig:
    @property
    def active(self):
        raise RuntimeError("0 active drivers ([]). There should only be one.")

driver = DriverConfig()
""",
    "runtime/jit.py": """
from .driver import driver

class JITFunction:
    def __init__(self, fn):
        self.fn = fn
    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.run(grid=grid, warmup=False, *args, **kwargs)
    def run(self, *args, grid, warmup, **kwargs):
        return driver.active.get_current_device()

jit = JITFunction
""",
    "runtime/autotuner.py": """
from .jit import JITFunction

class Autotuner(JITFunction):
    def __init__(self, fn, configs):
        self.fn, self.configs = fn, configs
    def run(self, *args, **kwargs):
        return self.fn.run(*args, **kwargs)

def autotune(configs):
    return lambda fn: Autotuner(fn, configs)
""",
}


def kernels():
    """What a library of kernels does when it is imported."""
    import triton
    import triton.language as tl
    from triton.language.extra.cuda.libdevice import tanh

    BLOCK = tl.constexpr(1024)

    @triton.jit
    def double(source, target, size, BLOCK_SIZE: tl.constexpr = BLOCK):
        offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        tl.store(target + offsets, 2 * tanh(tl.load(source + offsets)))

    searched = triton.autotune([triton.Config({"BLOCK_SIZE": 2**n}, num_warps=4) for n in (8, 9)], key=["size"])(double)
    assert triton.cdiv(10, 4) == 3
    assert triton.next_power_of_2(1000) == 1024
    assert BLOCK.value == 1024
    return double, searched, triton


def launched(kernel, source):
    target = torch.empty_like(source)
    kernel[(4,)](source, target, source.numel())
    return target


@without_triton
def test_a_launch_takes_no_memory():
    with simulated() as device:
        double, _, triton = kernels()
        source = torch.zeros(MIB, device="cuda")
        target = launched(double, source)
        assert target.shape == source.shape
        assert triton.runtime.driver.active.utils.get_device_properties(0)["multiprocessor_count"] == 108

    assert device.estimate().replay.allocated_peak_bytes == 2 * 4 * MIB


@without_triton
def test_a_search_clears_the_cache_of_the_device_once():
    with simulated() as device:
        _, searched, _ = kernels()
        source = torch.zeros(MIB, device="cuda")
        launched(searched, source)
        launched(searched, source)

    made = [block for block in device.estimate().timeline.blocks if block.op == "triton.autotune"]
    assert [block.size_bytes for block in made] == [256 * MIB]


@without_triton
def test_what_a_kernel_wrote_is_not_known():
    with simulated() as device:
        double, _, _ = kernels()
        values = torch.full((4,), 7, device="cuda")
        assert int(values[0]) == 7
        launched(double, values)
        int(values[0])

    assert "stand-in-value" in {note.code for note in device.estimate().notes}


@without_triton
def test_a_simulated_device_of_a_notebook_leaves_triton_missing():
    with memfit.simulate("a100-40gb"), pytest.raises(ModuleNotFoundError):
        kernels()


@without_triton
def test_names_of_kernels_hold_nothing():
    with simulated():
        kernels()
        language = sys.modules["triton.language"]
        assert "fp8e5" not in language.dtype.SINT_TYPES
        assert list(language.dtype.FP_TYPES) == []


def test_one_of_several_devices_is_current_in_a_script():
    with memfit.simulate("a100-40gb", count=2):
        torch.cuda.set_device(1)
        assert torch.cuda.current_device() == 1
        with torch.cuda.device(0):
            assert torch.cuda.current_device() == 0
        assert torch.cuda.current_device() == 1


@without_triton
def test_the_stand_in_goes_with_the_simulation():
    with simulated():
        kernels()
        assert "triton" in sys.modules

    assert not [name for name in sys.modules if name.partition(".")[0] == "triton"]
    with pytest.raises(ModuleNotFoundError):
        kernels()


@pytest.fixture
def package(tmp_path, monkeypatch):
    for name, text in PACKAGE.items():
        path = tmp_path / "triton" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "triton"}
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        del sys.modules[name]
    sys.modules.update(before)


class Doubled(torch.autograd.Function):
    """A layer around a kernel, as libraries write them."""

    @staticmethod
    def forward(ctx, kernel, source):
        with torch.cuda.device(source.device):
            return launched(kernel, source)

    @staticmethod
    def backward(ctx, gradient):
        count = torch.cuda.get_device_properties(gradient.device).multi_processor_count
        return None, gradient.new_empty(count, gradient.shape[-1]).sum(0).expand_as(gradient) * 2


class Layer(nn.Module):
    def __init__(self, kernel):
        super().__init__()
        self.linear = nn.Linear(256, 256)
        self.kernel = kernel

    def forward(self, batch):
        return Doubled.apply(self.kernel, self.linear(batch)).sum()


@pytest.mark.parametrize("configurations", [None, 1, 2])
def test_an_installed_triton_is_not_asked_for_a_gpu(package, configurations):
    import triton

    kernel = triton.jit(lambda *args: None)
    if configurations:
        kernel = triton.autotune([None] * configurations)(kernel)

    estimate = memfit.estimate(
        Layer(kernel), lambda model, batch: model(batch), torch.zeros(8, 256), device="a100-40gb"
    )

    # The partial sums of the backward pass have a row for each multiprocessor.
    sizes = [block.size_bytes for block in estimate.timeline.blocks]
    assert 108 * 256 * 4 in sizes
    assert (256 * MIB in sizes) == (configurations == 2)
    # Outside of a simulation it is what it was.
    with pytest.raises(RuntimeError, match="0 active drivers"):
        kernel[(1,)]()
    with pytest.raises(RuntimeError, match="0 active drivers"):
        triton.runtime.driver.active  # noqa: B018
