"""Kernels of Triton on a simulated device: launches that do nothing, since the memory is all Python's.

A kernel of Triton works in tensors that its caller has made; it allocates nothing and gives nothing back. So the
caller's Python code runs as it is, and a launch is left out. What a search for the best configuration takes while it
measures is counted: the buffer that clears the device's cache (`triton/backends/nvidia/driver.py`, 256 MiB).

Where Triton isn't installed, as on a laptop without Linux, a script finds a stand-in with the same names, as far as the
code around kernels needs them.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from memfit.core.device import Device
from memfit.core.patching import Replacement, around, replaced
from memfit.core.timeline import Category
from memfit.core.units import MIB
from memfit.frameworks.torch.cuda.devices import DeviceProperties
from memfit.frameworks.torch.shapes.imports import on_import
from memfit.frameworks.torch.shapes.recorder import Recorder
from memfit.frameworks.torch.shapes.shapes import tensors
from memfit.frameworks.torch.simulation.stand_ins import Package

LIBRARY = "triton"
_CLEARED_BYTES = 256 * MIB
# What stands in for an installed release: newer than what libraries ask for.
_VERSION = "3.5.0"


class TritonKernels:
    """Triton while it is simulated on `device`.

    Args:
        device: the target.
        recorder: receives what a search for a configuration takes.
        is_on: whether this thread is simulated.
        forget: called with each tensor that a kernel may have written to.
    """

    def __init__(
        self,
        device: Device,
        recorder: Recorder,
        is_on: Callable[[], bool],
        forget: Callable[[torch.Tensor], None],
    ) -> None:
        self._recorder = recorder
        self._is_on = is_on
        self._forget = forget
        self._searched: set[int] = set()
        self._driver = _driver_of(device)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Leaves launches out while this lasts, however late the library is imported."""
        with ExitStack() as stack:

            def equip(*made: Replacement) -> None:
                stack.enter_context(replaced(made))

            def launches(module: Any) -> None:
                equip(around(module.JITFunction, "run", self._run, self._is_on))

            def searches(module: Any) -> None:
                equip(around(module.Autotuner, "run", self._search, self._is_on))

            def driver(module: Any) -> None:
                equip(_active_driver(module, self._driver, self._is_on))

            late = {"jit": launches, "autotuner": searches, "driver": driver}
            late = {f"{LIBRARY}.runtime.{name}": equipped for name, equipped in late.items()}
            stack.enter_context(on_import({}, late))
            yield

    def package(self) -> Package:
        """The stand-in for Triton, whose launches are these."""
        return _stand_in(self._launch, self._driver)

    def _run(self, plain: Any, kernel: Any, *args: Any, **kwargs: Any) -> None:
        self._launch(kernel, args, kwargs, 1)

    def _search(self, plain: Any, kernel: Any, *args: Any, **kwargs: Any) -> None:
        self._launch(kernel, args, kwargs, len(kernel.configs))

    def _launch(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], num_configurations: int) -> None:
        if num_configurations > 1 and id(kernel) not in self._searched:
            self._searched.add(id(kernel))
            self._recorder.add_inside([_CLEARED_BYTES], "triton.autotune", Category.WORKSPACE)
        for tensor in tensors((*args, *kwargs.values())):
            self._forget(tensor)


def _driver_of(device: Device) -> SimpleNamespace:
    """What code around kernels asks a driver of Triton."""
    shown = DeviceProperties(device, 0)
    capability = shown.major, shown.minor
    properties = {
        "multiprocessor_count": shown.multi_processor_count,
        "max_shared_mem": shown.shared_memory_per_block_optin,
        "max_num_regs": shown.regs_per_multiprocessor,
        "warpSize": shown.warp_size,
    }
    target = SimpleNamespace(backend="cuda", arch=10 * shown.major + shown.minor, warp_size=shown.warp_size)
    return SimpleNamespace(
        utils=SimpleNamespace(get_device_properties=lambda index=0: properties),
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0,
        set_current_device=lambda device: None,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_device_interface=lambda: torch.cuda,
        get_device_capability=lambda device=None: capability,
        get_empty_cache_for_benchmark=lambda: None,
    )


def _active_driver(module: Any, driver: Any, is_on: Callable[[], bool]) -> Replacement:
    """The simulated driver where a thread is simulated; the machine's own would look for a GPU."""
    owner = type(module.driver)
    plain = vars(owner).get("active")
    if plain is None:
        return Replacement(module.driver, "active", driver)
    return Replacement(owner, "active", property(lambda self: driver if is_on() else plain.__get__(self)))


class _Kernel:
    """A function that would be compiled for the device."""

    def __init__(self, function: Any, launch: Callable[..., None], num_configurations: int = 1) -> None:
        self.fn = function
        self.__name__ = getattr(function, "__name__", "kernel")
        self.__doc__ = getattr(function, "__doc__", None)
        self._launch = launch
        self._num_configurations = num_configurations

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: self._launch(self, args, kwargs, self._num_configurations)

    def run(self, *args: Any, **kwargs: Any) -> None:
        """A launch in the way of Triton's own callers."""
        self._launch(self, args, kwargs, self._num_configurations)

    warmup = run


class _Name:
    """Anything that a kernel's own code names: types, functions, constants. None of it is ever computed with."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __repr__(self) -> str:
        return self._path

    def __getattr__(self, name: str) -> "_Name":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{self._path}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # As a decorator it leaves a function as it is; a constant is its value.
        return args[0] if len(args) == 1 and not kwargs else self

    def __getitem__(self, key: Any) -> "_Name":
        return self

    def __iter__(self) -> Iterator[Any]:
        # Without it, Python would take items until one is missing, and none is.
        return iter(())

    def __or__(self, other: Any) -> "_Name":
        return self

    __ror__ = __or__


@dataclass(frozen=True, slots=True)
class _Constant:
    """A value that is known when a kernel is compiled."""

    value: Any = None


class _Configuration:
    """One of the configurations that a search measures."""

    def __init__(self, kwargs: Any = None, **options: Any) -> None:
        self.kwargs = kwargs or {}
        self.num_warps, self.num_stages = options.get("num_warps", 4), options.get("num_stages", 2)
        self.pre_hook = options.get("pre_hook")

    def all_kwargs(self) -> dict[str, Any]:
        """What a launch is given."""
        return {**self.kwargs, "num_warps": self.num_warps, "num_stages": self.num_stages}


def _next_power_of_2(number: int) -> int:
    return 1 << max(0, int(number) - 1).bit_length()


def _stand_in(launch: Callable[..., None], driver: Any) -> Package:
    """Triton's names, for everybody but PyTorch, which would compile with it."""

    def jit(function: Any = None, **options: Any) -> Any:
        return _Kernel(function, launch) if function is not None else jit

    def autotune(configs: Any = (), *args: Any, **options: Any) -> Callable[[Any], _Kernel]:
        return lambda kernel: _Kernel(kernel, launch, len(configs))

    def heuristics(*args: Any, **options: Any) -> Callable[[Any], Any]:
        return lambda kernel: kernel

    common = {"jit": jit, "autotune": autotune, "heuristics": heuristics, "Config": _Configuration}
    active = SimpleNamespace(active=driver)
    modules: dict[str, dict[str, Any]] = {
        LIBRARY: {
            **common,
            "cdiv": lambda number, divisor: -(-number // divisor),
            "next_power_of_2": _next_power_of_2,
        },
        f"{LIBRARY}.language": {"constexpr": _Constant},
        f"{LIBRARY}.runtime": {**common, "JITFunction": _Kernel, "driver": active},
        f"{LIBRARY}.runtime.jit": {"jit": jit, "JITFunction": _Kernel, "KernelInterface": _Kernel},
        f"{LIBRARY}.runtime.autotuner": {"Autotuner": _Kernel, **common},
        f"{LIBRARY}.runtime.driver": {"driver": active, "active": driver},
    }
    return Package(LIBRARY, _VERSION, modules, other=_Name)
