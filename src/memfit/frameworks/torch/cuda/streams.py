"""Streams, events and graphs of a device on which everything is done at once.

There is one queue, so that an event has always happened, and a graph is what ran while it was captured. A stream is a
name for memory: what is allocated while it is the current one comes from its own pools, as on a real device. Blocks
that a second stream uses (`record_stream`) return later there.
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memfit.core.patching import Replacement, in_owner
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.cuda.devices import CudaDevices
from memfit.frameworks.torch.shapes.patching import in_extension

GRAPH_AS_EAGER = "graph-as-eager"
# The time between any two events.
_ELAPSED_MILLISECONDS = 1.0
# c10::DeviceType::CUDA
_CUDA = 1
# Streams of each priority are taken from so many, in turn (c10/cuda/CUDAStream.cpp).
_STREAMS_PER_POOL = 32


def _nothing(*arguments: Any, **options: Any) -> None:
    """There is nothing to wait for and nothing left to do."""


def _true(*arguments: Any) -> bool:
    return True


def _false(*arguments: Any) -> bool:
    return False


class _Stream:
    """A queue of work, as `torch.cuda.Stream` and `torch.Stream` show it; its priority has no effect."""

    _devices: CudaDevices
    _current: "_CurrentStreams"
    _event: "type[_Event]"
    _made: "tuple[itertools.count[int], itertools.count[int]]"

    def __init__(
        self,
        device: Any = None,
        priority: int = 0,
        *,
        stream_id: int | None = None,
        device_index: int | None = None,
        device_type: int = _CUDA,
        stream_ptr: int = 0,
    ) -> None:
        if device_index is None:
            device_index = _index_of(self._devices, device)
        self._devices.check(device_index)
        if stream_id is None:
            first = 1 if priority >= 0 else 1 + _STREAMS_PER_POOL
            stream_id = stream_ptr or first + next(self._made[priority >= 0]) % _STREAMS_PER_POOL
        self.stream_id = self.cuda_stream = self.native_handle = stream_id
        self.device_index = device_index
        self.device_type = device_type
        self.device = torch.device("cuda", device_index)
        self.priority = priority

    synchronize = wait_event = wait_stream = _nothing
    query = _true
    # What would be captured is run.
    is_capturing = _false
    priority_range = staticmethod(lambda: (0, -5))

    def record_event(self, event: Any = None) -> Any:
        event = self._event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> "_Stream":
        self._current.enter(self)
        return self

    def __exit__(self, *details: object) -> None:
        self._current.leave(self._devices)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream) and hash(self) == hash(other)

    def __hash__(self) -> int:
        return hash((self.stream_id, self.device_index))

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.cuda_stream


class _Event:
    """A moment, as `torch.cuda.Event` and `torch.Event` show it; only `enable_timing` has an effect."""

    _devices: CudaDevices
    _numbers: "itertools.count[int]"

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        self.enable_timing = enable_timing
        self.cuda_event = self.event_id = 0
        self.device = torch.device("cuda", self._devices.current)

    wait = synchronize = _nothing
    query = _true

    def record(self, stream: Any = None) -> None:
        self.cuda_event = self.event_id = next(self._numbers)

    def elapsed_time(self, end_event: Any) -> float:
        if not (self.enable_timing and end_event.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self.cuda_event and end_event.cuda_event):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return _ELAPSED_MILLISECONDS

    def ipc_handle(self) -> bytes:
        raise RuntimeError("events of a simulated device can't be shared with other processes.")

    def __repr__(self) -> str:
        return f"<torch.cuda.Event {self.cuda_event:#x}>" if self.cuda_event else "<torch.cuda.Event uninitialized>"


class _Graph:
    """A CUDA graph whose work ran, as ordinary operators, when it was captured; `replay` does nothing more."""

    _report: Callable[[str, str], None]
    _pools = itertools.count(1)

    def __init__(self, keep_graph: bool = False, **options: Any) -> None:
        self._pool = (0, next(self._pools))

    capture_end = instantiate = replay = reset = __exit__ = _nothing
    enable_debug_mode = debug_dump = register_generator_state = _nothing

    def capture_begin(self, *arguments: Any, **options: Any) -> None:
        text = "work captured in a CUDA graph was run as ordinary operators, without its own pool"
        self._report(GRAPH_AS_EAGER, text)

    __enter__ = capture_begin

    def pool(self) -> tuple[int, int]:
        return self._pool


class _CurrentStreams(threading.local):
    """The current stream of each device, in this thread."""

    def __init__(self) -> None:
        self.ids: dict[int, int] = {}
        self._before: list[tuple[int, int, int]] = []

    def get(self, index: int) -> int:
        return self.ids.get(index, 0)

    def enter(self, stream: _Stream) -> None:
        index = stream.device_index
        self._before.append((stream._devices.exchange(index), index, self.get(index)))
        self.ids[index] = stream.stream_id

    def leave(self, devices: CudaDevices) -> None:
        device, index, stream_id = self._before.pop()
        self.ids[index] = stream_id
        devices.select(device)


def _index_of(devices: CudaDevices, device: Any) -> int:
    index = device if device is None or isinstance(device, int) else torch.device(device).index
    return devices.current if index is None or index < 0 else index


def _either(plain: type, base: type, make: Callable[..., Any]) -> type:
    """A class in the place of `plain` that makes its objects or, on CUDA, ours, and recognises both."""

    def on_cuda(device: Any = None, *rest: Any, **options: Any) -> bool:
        if "device_type" in options:
            return bool(options["device_type"] == _CUDA)
        return device is None or isinstance(device, int) or torch.device(device).type == "cuda"

    class Either(type):
        def __call__(cls, *arguments: Any, **options: Any) -> Any:
            return (make if on_cuda(*arguments, **options) else plain)(*arguments, **options)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, (plain, base))

        def __subclasscheck__(cls, other: type) -> bool:
            return issubclass(other, (plain, base))

    return Either(plain.__name__, (), {"__module__": "torch", "__doc__": plain.__doc__})


def stream_replacements(devices: CudaDevices, report: Callable[[str, str], None]) -> list[Replacement]:
    """Everything about streams, events and graphs that PyTorch lacks without a device."""
    current, numbers = _CurrentStreams(), itertools.count(1)
    devices.current_stream = lambda: current.get(devices.current)
    event: Any = type("Event", (_Event,), {"_devices": devices, "_numbers": numbers})
    made = itertools.count(), itertools.count()
    shared = {"_devices": devices, "_made": made, "_current": current, "_event": event}
    stream: Any = type("Stream", (_Stream,), shared)
    external: Any = type(
        "ExternalStream",
        (stream,),
        {"__init__": lambda self, stream_ptr, device=None: stream.__init__(self, device, stream_ptr=stream_ptr)},
    )

    class CudaEvent(event):  # type: ignore[misc]
        """`torch.Event`, which takes a device first."""

        def __init__(self, device: Any = None, **options: Any) -> None:
            super().__init__(**options)
            self.device = torch.device("cuda", _index_of(devices, device))

    def describe(stream_id: int, index: int) -> tuple[int, int, int]:
        devices.check(index)
        return stream_id, index, _CUDA

    def set_stream(chosen: Any) -> None:
        devices.select(chosen.device_index)
        current.ids[chosen.device_index] = chosen.stream_id

    low = {
        "_cuda_getCurrentStream": lambda index: describe(current.get(index), index),
        "_cuda_getDefaultStream": lambda index: describe(0, index),
        "_cuda_getStreamFromExternal": describe,
        "_cuda_getCurrentRawStream": current.get,
        "_cuda_setStream": lambda stream_id, device_index, device_type: current.ids.update({device_index: stream_id}),
        "_cuda_isCurrentStreamCapturing": _false,
        "_accelerator_getStream": lambda index: stream(stream_id=current.get(index), device_index=index),
        "_accelerator_setStream": set_stream,
    }
    types = {"Stream": stream, "ExternalStream": external, "Event": event}
    graphs = _graph_functions(report)
    cuda: Any = torch.cuda
    accelerator = {"Graph": graphs["CUDAGraph"]} if hasattr(torch.accelerator, "Graph") else {}
    return [
        *in_extension(low),
        *in_owner(cuda, types | graphs),
        *in_owner(cuda.streams, types),
        *in_owner(cuda.graphs, graphs | {"_cuda_isCurrentStreamCapturing": _false}),
        *in_owner(torch.accelerator, accelerator),
        Replacement(torch, "Stream", _either(torch.Stream, _Stream, stream)),
        Replacement(torch, "Event", _either(torch.Event, _Event, CudaEvent)),
        # PyTorch's own refuses any other stream than its own before a function mode can see the call.
        Replacement(torch.Tensor, "record_stream", _nothing),
        # A list of streams that scattering keeps for the next time.
        Replacement(internals.parallel_functions, "_streams", None),
    ]


def _graph_functions(report: Callable[[str, str], None]) -> dict[str, Any]:
    pools = itertools.count(1)
    graph: Any = type("CUDAGraph", (_Graph,), {"_report": staticmethod(report)})

    @contextmanager
    def capturing(cuda_graph: Any, *arguments: Any, **options: Any) -> Iterator[None]:
        # PyTorch's own would keep a stream after the simulation.
        with cuda_graph:
            yield

    def make_graphed_callables(callables: Any, sample_args: Any, *arguments: Any, **options: Any) -> Any:
        graph().capture_begin()
        return callables

    return {
        "CUDAGraph": graph,
        "graph": capturing,
        "make_graphed_callables": make_graphed_callables,
        "graph_pool_handle": lambda: (0, next(pools)),
        "is_current_stream_capturing": _false,
    }
