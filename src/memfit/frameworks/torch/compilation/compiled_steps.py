"""Compiled parts of a simulated step: PyTorch's own compiler runs, on shapes, and only kernels are left out.

Dynamo traces the user's code, AOTAutograd makes the joint graph, its partitioner chooses what is saved, and Inductor
lowers, fuses and plans buffers. Its scheduler decides which buffers there are, which are written in place and which
are given to later ones; what it then prints is a Python function that allocates, calls kernels and frees. That function
runs here, too: on shapes, with kernels that do nothing (`inductor_graphs`). So nothing of the plan is modelled anew.

The compiler must take the simulated device for a real one. On the host its fake tensors are made for the CPU. For CUDA
they stay what they are underneath, shape-only, because autograd asks the driver about anything else; only PyTorch's
Python code is told that they are on the device.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from memfit.core.device import Device, Kind
from memfit.core.estimate import NOT_COMPILED
from memfit.core.patching import Replacement, around, in_owner, replaced
from memfit.core.units import format_size
from memfit.core.user_code import PACKAGE_FOLDER
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.compilation.fused_kernels import FusedKernel
from memfit.frameworks.torch.compilation.inductor_graphs import GraphMemory, compiler_replacements
from memfit.frameworks.torch.compilation.unwritten_kernels import leaves_out
from memfit.frameworks.torch.cuda.devices import DeviceProperties
from memfit.frameworks.torch.kernels.convolution_layout import channels_last_format
from memfit.frameworks.torch.shapes.interception import uninterrupted
from memfit.frameworks.torch.shapes.origin import OriginTracker
from memfit.frameworks.torch.shapes.patching import in_extension
from memfit.frameworks.torch.shapes.recorder import Recorder

AUTOTUNING = "autotuning"
CUDA_GRAPHS = "cuda-graphs"

# Settings of Inductor that choose between kernels by running them, and what is done with its graphs afterwards.
_CHOOSING = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning")
_LEFT_OUT: dict[str, Any] = {
    **dict.fromkeys(_CHOOSING, False),
    "triton.cudagraphs": False,
    "force_disable_caches": True,
    "cpp_wrapper": False,
    # No processes that compile kernels.
    "compile_threads": 1,
}
_HOST = torch.device("cpu")
# Compute capability; Inductor leaves code with bfloat16 uncompiled on others.
_FIRST_WITH_BFLOAT16 = (8, 0)
# What Triton's benchmark of a kernel overwrites between runs, to empty the cache.
_FLUSHED_BYTES = 256 * 1024**2


def not_compiled(error: BaseException) -> str:
    """What is said about code that is counted as eager, because its compilation failed."""
    while getattr(error, "inner_exception", None) is not None:
        error = error.inner_exception  # type: ignore[attr-defined]
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"torch.compile failed on shapes, so it is counted as eager: {type(error).__name__}: {reason}"


class CompiledSteps:
    """Compiles, on shapes, whatever `torch.compile` was asked to compile, while a simulation runs.

    Args:
        device: the simulated device.
        recorder: receives the buffers.
        origin: knows where the user's code is.
        is_on: whether this thread is simulated.
        away: a context in which nothing is simulated in this thread.
        report: takes (code, text) of each assumption made.
        met: takes the frame of each function that is about to be compiled; False leaves it uncompiled.
        entered: called whenever a compiled graph runs.
        ran: called with each kernel that a compiled graph runs.
    """

    def __init__(
        self,
        device: Device,
        recorder: Recorder,
        origin: OriginTracker,
        is_on: Callable[[], bool],
        away: Callable[[], AbstractContextManager[None]],
        report: Callable[[str, str], None],
        *,
        met: Callable[[Any], bool] = lambda frame: True,
        entered: Callable[[], None] = lambda: None,
        ran: Callable[[FusedKernel], None] = lambda kernel: None,
    ) -> None:
        self._device = device
        self._on_cuda = device.kind is Kind.CUDA
        self._is_on = is_on
        self._away = away
        self._report = report
        self._met = met
        self._memory = GraphMemory(recorder, origin, self._on_cuda, entered, ran)
        self._compiler = ExitStack()
        self._is_open = False
        self._is_compiling = False
        self._codes: dict[Any, None] = {}
        self._is_unanswered = False  # whether something was to be compiled, and neither a graph nor an error came of it
        self.num_graphs = 0
        """How many graphs have been compiled."""

    @property
    def has_begun(self) -> bool:
        """Whether anything was to be compiled."""
        return bool(self._codes)

    @property
    def is_running(self) -> bool:
        """Whether a compiled graph runs at the moment."""
        return self._memory.num_running > 0

    @contextmanager
    def running(self, *, shapes_vary: bool) -> Iterator[None]:
        """Compiles while it lasts. Where not `shapes_vary`, other sizes don't make a graph one of any size."""
        dynamo = internals.compiler()
        settings: dict[str, Any] = {} if shapes_vary else {"automatic_dynamic_shapes": False}
        try:
            with (
                dynamo.config.patch(**settings),
                replaced(
                    [
                        around(internals.CompilerCallback, "__call__", self._convert, self._is_on),
                        around(internals.OptimizedModule, "_initialize", self._take_module, self._is_on),
                        # Graphs are broken here where PyTorch breaks none, and code is left out that it compiles.
                        Replacement(internals.CompilerContext, "fullgraph", internals.fullgraph_unless(self._is_on)),
                    ]
                ),
            ):
                yield
            if self._is_unanswered:
                text = (
                    f"torch.compile of PyTorch {torch.__version__} made no graph on shapes, so it is counted as eager"
                )
                self._report(NOT_COMPILED, text)
        finally:
            self._compiler.close()
            # Nothing compiled here may ever run on real tensors.
            for code in self._codes:
                internals.reset_code(code)

    def _take_module(self, plain: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """A module is to be compiled: it keeps the call of modules as it is now, which must be PyTorch's own."""
        with self._away():
            plain(*arguments, **options)

    def _convert(self, plain: Callable[..., Any], callback: Any, frame: Any, *arguments: Any) -> Any:
        """A frame of the user's code, compiled; uncompiled where that fails."""
        if frame.f_code.co_filename.startswith(PACKAGE_FOLDER):
            # Modules are called through it, also by code that compilation was broken off in.
            return internals.uncompiled_frame(alone=frame.f_code.co_qualname.startswith(OriginTracker.__name__))
        self._codes[frame.f_code] = None
        # That operator has no rule for shapes: it is simulated as the fused kernel that it becomes.
        if not self._met(frame) or frame.f_code is internals.flex_attention.__code__:
            return internals.uncompiled_frame()
        with self._compiling():
            self._is_unanswered = self._is_unanswered or not self.num_graphs
            try:
                self._open()
                with internals.breaks_allowed(callback):
                    return plain(callback, frame, *arguments)
            except Exception as error:
                self._is_unanswered = False
                self._report(NOT_COMPILED, not_compiled(error))
                return internals.uncompiled_frame()

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        before, self._is_compiling = self._is_compiling, True
        try:
            with self._away(), warnings.catch_warnings():
                # The compiler's own, about parts of PyTorch that it loads.
                warnings.simplefilter("ignore")
                yield
        finally:
            self._is_compiling = before

    def _open(self) -> None:
        """Stands in front of the compiler, which is loaded when it is first needed."""
        if not self._is_open:
            self._is_open = True
            compile_fx = internals.compile_fx_module
            # Where the backward graph can't be compiled, nothing is: it isn't found out in the middle of a step.
            self._compiler.enter_context(internals.backward_compiled_at_once())
            self._compiler.enter_context(internals.never_compiled(internals.flex_attention))
            self._plain_joint_passes = compile_fx._recursive_joint_graph_passes
            replacements = [
                *compiler_replacements(self._memory),
                *leaves_out(lambda: self._is_compiling),
                *self._fake_tensors(),
                *(self._cuda_device() if self._on_cuda else []),
                Replacement(compile_fx, "compile_fx", self._compile_graph(compile_fx)),
                Replacement(internals.GuardBuilder, "TORCH_FUNCTION_STATE", lambda builder, guard: None),
            ]
            self._compiler.enter_context(replaced(replacements))

    def _compile_graph(self, compile_fx: Any) -> Callable[..., Any]:
        plain, plain_inner = compile_fx.compile_fx, compile_fx.compile_fx_inner
        config = internals.inductor_config

        def inner(graph: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
            # The backward graph is compiled when it is first needed: in the middle of the step.
            with internals.disable_current_modes(), self._compiling(), uninterrupted():
                return plain_inner(graph, inputs, *arguments, **options)

        def compile_graph(
            graph: Any, inputs: Any, *arguments: Any, config_patches: dict[str, Any] | None = None, **options: Any
        ) -> Any:
            asked = config_patches or {}
            if not self._is_compiling:
                return plain(graph, inputs, *arguments, config_patches=config_patches, **options)
            with config.patch(asked):
                self._note_modes(config)
            patches = {**asked, **_LEFT_OUT}
            self.num_graphs += 1
            self._is_unanswered = False
            options["inner_compile"] = config.patch(patches)(inner)
            with config.patch(patches), ExitStack() as stack:
                if not self._on_cuda:
                    stack.enter_context(uninterrupted())
                return plain(graph, inputs, *arguments, **options)

        return compile_graph

    def _note_modes(self, config: Any) -> None:
        """Takes over what a mode of `torch.compile` does beside fusing."""
        if not self._on_cuda:
            return
        if config.max_autotune or config.max_autotune_gemm:
            size = self._flushed_bytes(config)
            text = "max-autotune: kernels of matrix products are taken to be cuBLAS's; trying others takes "
            self._report(AUTOTUNING, text + format_size(size))
            self._memory.take_at_next_run(size)
        self._memory.in_cuda_graphs = bool(config.triton.cudagraphs)
        if self._memory.in_cuda_graphs:
            text = (
                "CUDA graphs: buffers of compiled graphs, and copies of their inputs, are in a memory pool of their own"
            )
            self._report(CUDA_GRAPHS, text)

    def _flushed_bytes(self, config: Any) -> int:
        """What a benchmark of a kernel overwrites: the second-level cache (torch/_inductor/runtime/benchmarking.py)."""
        own = getattr(config, "use_experimental_benchmarker", False)
        own = own and not getattr(config, "use_torch_profiler_benchmarker", False)
        properties: Any = DeviceProperties(self._device, 0)
        return int(properties.L2_cache_size) if own else _FLUSHED_BYTES

    def _fake_tensors(self) -> list[Replacement]:
        """Shape-only tensors are tensors of the device, to the compiler."""
        fake: Any = internals.FakeTensor
        plain_new, plain_device = fake.__new__, fake.device
        meta, host, cuda = torch.device("meta"), torch.device("cpu"), torch.device("cuda", 0)

        def as_made(value: Any) -> Any:
            device = torch.device(value)
            if not self._on_cuda:
                return host if device.type == "meta" else value
            return meta if device.type == "cuda" else value

        def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_compiling:
                if len(args) > 2:
                    args = (*args[:2], as_made(args[2]), *args[3:])
                named = {name: as_made(kwargs[name]) for name in ("device", "fake_device") if kwargs.get(name)}
                kwargs = {**kwargs, **named}
            return plain_new(cls, *args, **kwargs)

        def is_shown(tensor: Any) -> bool:
            place = plain_device.__get__(tensor)
            return self._is_compiling and place.type == "meta" and not tensor.fake_mode.in_kernel_invocation

        def device(tensor: Any) -> torch.device:
            return cuda if is_shown(tensor) else plain_device.__get__(tensor)

        def is_meta(tensor: Any) -> bool:
            return plain_device.__get__(tensor).type == "meta" and not is_shown(tensor)

        shown = {
            "device": property(device, plain_device.__set__),
            "is_cuda": property(is_shown),
            "is_meta": property(is_meta),
        }
        return [
            Replacement(fake, "__new__", staticmethod(new)),
            *(in_owner(fake, shown) if self._on_cuda else []),
        ]

    def _on_the_device(self, graph: Any, *arguments: Any, **options: Any) -> Any:
        """Inductor's passes over the joint graph, in which PyTorch's C++ has named the device of shapes alone."""
        cuda = torch.device("cuda", 0)

        def change(value: Any) -> Any:
            return cuda if isinstance(value, torch.device) and value.type == "meta" else value

        for node in list(graph.graph.nodes):
            if node.op != "call_function":
                continue
            node.args, node.kwargs = (
                internals.map_arguments(node.args, change),
                internals.map_arguments(node.kwargs, change),
            )
            if node.target is internals.device_put and node.args[0].meta["val"].device == node.args[1]:
                node.replace_all_uses_with(node.args[0])
                graph.graph.erase_node(node)
        return self._plain_joint_passes(graph, *arguments, **options)

    def _cuda_device(self) -> list[Replacement]:
        """The simulated GPU, as the compiler asks for it."""
        properties: Any = DeviceProperties(self._device, 0)
        capability = (properties.major, properties.minor)
        interface: Any = internals.CudaInterface
        create = classmethod(lambda cls, device: internals.device_hints(properties, device))
        answers: dict[str, Any] = {
            "get_device_properties": lambda device=None: properties,
            "get_compute_capability": lambda device=None: 10 * properties.major + properties.minor,
            "is_bf16_supported": lambda including_emulation=False: capability >= _FIRST_WITH_BFLOAT16,
            "is_triton_capable": lambda device=None: True,
            "raise_if_triton_unavailable": lambda device=None: None,
        }

        def fold(plain: Callable[..., Any], *arguments: Any) -> Any:
            with _OnHost():  # type: ignore[no-untyped-call]
                return plain(*arguments)

        return [
            around(internals.ConstantFolder, "run_node", fold),
            # The same for those that are followed while graphs are made.
            Replacement(internals.proxy_tensor_module, "CONSTANT_NUMEL_LIMIT", -1),
            *(Replacement(interface, name, staticmethod(value)) for name, value in answers.items()),
            Replacement(interface.Worker, "get_device_properties", staticmethod(answers["get_device_properties"])),
            Replacement(internals.DeviceHints, "create", create),
            Replacement(internals.compile_fx_module, "_recursive_joint_graph_passes", self._on_the_device),
            around(internals.operators_module, "resolve_key", _resolve),
            *in_extension({"_conv_determine_backend_memory_format": _convolution_layout}),
            Replacement(torch.cuda, "get_device_properties", answers["get_device_properties"]),
            Replacement(torch.cuda, "get_device_capability", lambda device=None: capability),
            Replacement(torch.cuda, "current_device", lambda: 0),
        ]


def _convolution_layout(data: torch.Tensor, weight: torch.Tensor, backend: Any) -> torch.memory_format:
    """The layout of a convolution's output by cuDNN's rule."""
    return channels_last_format(data, weight) or torch.contiguous_format


def _resolve(plain: Callable[..., Any], operator: Any, key: Any) -> Any:
    """Takes an operator apart above autograd although there is a rule for its shapes, as on any real device."""
    keys = internals.DispatchKey
    resolved = plain(operator, key)
    is_whole = key == resolved == keys.AutogradMeta
    return (
        keys.CompositeImplicitAutograd
        if is_whole and operator.has_kernel_for_dispatch_key(keys.CompositeImplicitAutograd)
        else resolved
    )


class _OnHost(internals.TorchDispatchMode):
    """Makes real tensors for CUDA on the host; those of shapes alone are left to others."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if internals.fake_mode_in_force() is None:
            device = options.get("device")
            if device is not None and device.type == "cuda":
                options = {**options, "device": _HOST}
        return func(*args, **options)
