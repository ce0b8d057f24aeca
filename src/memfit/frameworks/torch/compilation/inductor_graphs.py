"""Graphs of Inductor that run on shapes: their buffers are recorded, their kernels do nothing.

Inductor's code for a graph is a Python function: `buf0 = empty_strided_cuda(...)`, calls of kernels and of PyTorch's
operators, `buf2 = buf1; del buf1  # reuse`, `del buf0`. Run with tensors of shapes only, it says when each buffer
begins, ends, or goes on as another; operators such as matrix products meet the simulated device as any other does.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch

from memfit.core.patching import Replacement
from memfit.core.timeline import Category
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.compilation.fused_kernels import FusedKernel, Kernels
from memfit.frameworks.torch.shapes.interception import uninterrupted
from memfit.frameworks.torch.shapes.origin import HIDDEN_FOLDERS, OriginTracker
from memfit.frameworks.torch.shapes.recorder import Recorder

POOL_STREAM = 1_000
"""The stream that stands for the memory pool of CUDA graphs: what it frees serves nothing else."""
_MOST_NAMES = 4
_COPIED = "memfit_input"
_COPY = ("inductor.input_copy", ("", ""))
_IMPORTS = re.compile(
    r"(?m)^(import triton|from triton|from torch\._inductor\.(runtime|async_compile)|from torch\._C ).*$"
)
_TRACED_LINE = re.compile(r'File "([^"]+)", line (\d+)')
_PATH_PART = re.compile(r"\['?([^'\]]+)'?\]|\.(\w+)")
_NOT_IN_PATH = {"_modules", "_orig_mod"}


class GraphMemory:
    """Where the buffers of compiled graphs are recorded.

    Args:
        recorder: receives them.
        origin: knows where the user's code is.
        on_cuda: whether the device is a GPU.
        entered: called whenever a graph runs.
        ran: called with each kernel that a graph runs.
    """

    def __init__(
        self,
        recorder: Recorder,
        origin: OriginTracker,
        on_cuda: bool,
        entered: Callable[[], None] = lambda: None,
        ran: Callable[[FusedKernel], None] = lambda kernel: None,
    ) -> None:
        self.recorder = recorder
        self.origin = origin
        self.on_cuda = on_cuda
        self.entered = entered
        self.ran = ran
        self.kernels = Kernels()
        self.num_running = 0
        """How many graphs run at the moment, one inside of another."""
        self.in_cuda_graphs = False
        """Whether graphs that are compiled from now on are captured as CUDA graphs."""
        self._due: list[int] = []

    def take_at_next_run(self, size_bytes: int) -> None:
        """Bytes that a graph takes, and gives back, when it first runs."""
        self._due.append(size_bytes)

    def runnable(self, graph: Any) -> Any:
        """What Inductor takes for the compiled module of a lowered graph."""
        code, _ = graph.codegen()
        namespace: dict[str, Any] = {"__name__": __name__, **_stand_ins()}
        # The file's name hides its lines, so that operators it calls belong to the line that runs the graph.
        exec(compile(_without_imports(code.value), f"{HIDDEN_FOLDERS[0]}compiled_graph", "exec"), namespace)
        allocate = self._allocator({_COPIED: _COPY, **_labels(graph, self.origin)}, self.in_cuda_graphs)
        namespace |= dict.fromkeys(("empty_strided_cpu", "empty_strided_cuda"), lambda *args: allocate("", *args))
        namespace |= {name: _Unwritten(partial(self.ran, kernel)) for name, kernel in self.kernels.taken().items()}
        namespace["memfit_allocate"] = allocate
        namespace["assert_size_stride"] = namespace["assert_alignment"] = lambda *args: None
        plain = namespace["call"]
        due, self._due = self._due, []
        in_pool = self.in_cuda_graphs

        def call(args: Any) -> Any:
            self.entered()
            if in_pool:
                args[:] = [self._in_pool(value, allocate) for value in args]
            while due:
                self.recorder.add_inside([due.pop()], "inductor.autotuning", Category.WORKSPACE)
            self.num_running += 1
            try:
                with uninterrupted():
                    return plain(args)
            finally:
                self.num_running -= 1

        return SimpleNamespace(
            call=call, runner=namespace.get("runner"), __file__="compiled_graph", __name__="compiled_graph"
        )

    def _in_pool(self, value: Any, allocate: Callable[..., torch.Tensor]) -> Any:
        """The input of a captured graph: copied, unless it never moves or is in the pool already.

        See `_allocate_and_copy_recording_inputs` in torch/_inductor/cudagraph_trees.py.
        """
        if not isinstance(value, torch.Tensor):
            return value
        # Tensors are to be seen as what they are.
        with internals.disable_torch_function():
            index = self.recorder.block_of(value)
            if index is None or self.recorder.stream_of(index) == POOL_STREAM:
                return value
            if self.recorder.categories[index] in (Category.PARAMETER, Category.BUFFER):
                return value
            return allocate(_COPIED, value.size(), value.stride(), value.dtype)

    def _allocator(self, labels: dict[str, tuple[str, tuple[str, str]]], in_pool: bool) -> Callable[..., torch.Tensor]:
        recorder, origin = self.recorder, self.origin
        meta = torch.device("meta")

        def allocate(name: str, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
            with internals.disable_torch_function(), internals.disable_torch_dispatch():
                tensor = torch.empty_strided(size, stride, dtype=dtype, device=meta)
            outer, line = origin.current()
            op, (path, source) = labels.get(name, ("inductor", ("", "")))
            path = f"{outer}.{path}" if outer and path else path or outer
            recorder.add_named(tensor, op, None, (path, source or line), stream=POOL_STREAM if in_pool else 0)
            return tensor

        return allocate


def _labels(graph: Any, origin: OriginTracker) -> dict[str, tuple[str, tuple[str, str]]]:
    """For each buffer of a graph the kernel that makes it, and the module and line that it comes from."""
    scheduler = graph.scheduler
    labels = {}
    names: dict[int, str] = {}
    for name, buffer in scheduler.name_to_buf.items():
        defining = buffer.defining_op
        fused = scheduler.name_to_fused_node.get(defining.get_name(), defining) if defining is not None else None
        if fused is not None and id(fused) not in names:
            names[id(fused)] = _kernel_name(fused)
        labels[name] = (names.get(id(fused), "inductor"), _place(buffer.node, origin))
    return labels


def _kernel_name(node: Any) -> str:
    """What a kernel computes, by the operators that were fused into it."""
    operators: dict[str, None] = {}
    for part in node.get_nodes():
        for traced in getattr(part.node, "origins", None) or ():
            operator = traced.meta.get("original_aten")
            if operator is not None:
                operators[str(operator).removeprefix("aten.").partition(".")[0]] = None
    listed = sorted(operators)
    more = f" and {len(listed) - _MOST_NAMES} more" if len(listed) > _MOST_NAMES else ""
    return f"inductor.{'+'.join(listed[:_MOST_NAMES])}{more}" if listed else "inductor"


def _place(buffer: Any, origin: OriginTracker) -> tuple[str, str]:
    """(module path, source line) of the node of the traced graph that a buffer was last made of."""
    for traced in reversed(list(getattr(buffer, "origins", None) or ())):
        meta = traced.meta
        stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack")
        trace = meta.get("stack_trace") or ""
        if stack or trace:
            path = _module_path(str(next(reversed(stack.values()))[0])) if stack else ""
            lines = [found for found in _TRACED_LINE.findall(trace) if not found[0].startswith(HIDDEN_FOLDERS)]
            return path, f"{origin.short(lines[-1][0])}:{lines[-1][1]}" if lines else ""
    return "", ""


@cache
def _module_path(name: str) -> str:
    """The path of a module, which Dynamo calls `L['self']._modules['layers']._modules['0']`.

    >>> _module_path("L['self']._modules['layers']._modules['0'].norm")
    'layers.0.norm'
    """
    parts = [first or second for first, second in _PATH_PART.findall(name)]
    # The first is the variable that holds the outermost module.
    return ".".join(part for part in parts[1:] if part not in _NOT_IN_PATH)


def _without_imports(code: str) -> str:
    """Inductor's code for a graph without the lines that import compilers of kernels and drivers."""
    return _IMPORTS.sub("", code)


class _Unwritten:
    """In the place of a kernel, which is called or run: it does nothing but say so."""

    def __init__(self, ran: Callable[[], None]) -> None:
        self._ran = ran

    def __call__(self, *arguments: Any, **options: Any) -> None:
        self._ran()

    run = __call__


class _NoKernels:
    """In the place of what compiles kernels of the user's own."""

    def __getattr__(self, name: str) -> Callable[..., _Unwritten]:
        return lambda *arguments, **options: _Unwritten(lambda: None)


def _stand_ins() -> dict[str, Any]:
    return {
        "AsyncCompile": _NoKernels,
        "nullcontext": nullcontext,
        "get_raw_stream": lambda index: 0,
        "copy_if_misaligned": lambda tensor: tensor,
    }


def compiler_replacements(memory: GraphMemory) -> list[Replacement]:
    """What stands in front of Inductor, so that it writes no kernels and its graphs run on shapes."""
    wrapper: Any = internals.InductorWrapper
    plain_allocation = wrapper.make_allocation
    cpu = torch.device("cpu")

    def make_allocation(
        self: Any, name: str, device: Any, dtype: Any, shape: Any, stride: Any, *a: Any, **k: Any
    ) -> Any:
        line: str = plain_allocation(self, name, device, dtype, shape, stride, *a, **k)
        # Of a tensor that is on the host beside a GPU, such as a number, nothing is recorded.
        if memory.on_cuda and device.type == "cpu":
            return line.replace("empty_strided_cpu(", "torch.empty_strided(", 1)
        return re.sub(r"= empty_strided_\w+\(", f"= memfit_allocate({name!r}, ", line, count=1)

    def write_no_kernel(self: Any, name: str | None = None) -> str:
        self.inductor_meta, self.triton_meta = {}, {}
        return ""

    def initialize(plain: Callable[..., Any]) -> Callable[..., Any]:
        # Patterns are made on the host: those of a device that isn't there can't be traced, and look the same.
        return lambda *devices: plain(*(cpu for _ in devices[:1]))

    joint = internals.joint_graph_module
    replacements = [
        Replacement(internals.GraphLowering, "compile_to_module", lambda graph: memory.runnable(graph)),
        Replacement(internals.cpu_vec_isa_module, "pick_vec_isa", lambda: internals.cpu_vec_isa_module.invalid_vec_isa),
        Replacement(wrapper, "make_allocation", make_allocation),
        *memory.kernels.replacements(),
    ]
    if memory.on_cuda:
        replacements += [
            Replacement(internals.triton_module.TritonKernel, "codegen_kernel", write_no_kernel),
            Replacement(internals.inductor_scheduler_module, "has_triton", lambda *args: True),
            Replacement(joint, "lazy_init", initialize(joint.lazy_init)),
            *_device_lines(),
        ]
    return replacements


def _device_lines() -> Iterator[Replacement]:
    """The lines of a graph's code that speak to CUDA."""
    overrides: Any = type(internals.device_op_overrides("cuda"))
    lines: dict[str, Callable[..., str]] = {
        "device_guard": lambda self, index: "nullcontext()",
        "set_device": lambda self, index: "pass",
        "synchronize": lambda self: "pass",
        "import_get_raw_stream_as": lambda self, name: "",
    }
    return (Replacement(overrides, name, line) for name, line in lines.items())
