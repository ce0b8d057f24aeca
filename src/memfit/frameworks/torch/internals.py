"""Every private name of PyTorch that memfit uses, with the releases it was seen in.

`internals.storage_use_count` is looked up when it is first used, so a release that lacks a name breaks only what needs
it, and with one clear message. To add a name, add a line to `_PATHS`; for a private attribute of an object, use
`NAMES.of`. Classes that are inherited from are imported by their names, so that they keep their types.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memfit.core.errors import MissingDependency
from memfit.core.private_names import PrivateNames

NAMES = PrivateNames("torch", "2.6 to 2.15")

try:
    from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
    from torch.nn.modules.conv import _ConvNd
    from torch.nn.modules.dropout import _DropoutNd
    from torch.nn.modules.instancenorm import _InstanceNorm
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
except ImportError as error:  # pragma: no cover - another version of PyTorch
    raise NAMES.gone(str(error)) from error

BatchNorm = _BatchNorm
Convolution = _ConvNd
Dropout = _DropoutNd
InstanceNorm = _InstanceNorm
NormBase = _NormBase

# Name here: path in PyTorch. In alphabetical order, one line each.
_PATHS = {
    "all_operator_names": "torch._C._dispatch_get_all_op_names",
    "allowed_globals": "torch._weights_only_unpickler._get_allowed_globals",
    "apply_to_module": "torch.nn.Module._apply",
    "below_autograd": "torch._C._AutoDispatchBelowAutograd",
    "clear_compiler_caches": "torch._inductor.utils.clear_inductor_caches",
    "compile_fx_module": "torch._inductor.compile_fx",
    "CompilerCallback": "torch._dynamo.convert_frame.CatchErrorsWrapper",
    "CompilerContext": "torch._dynamo.eval_frame._TorchDynamoContext",
    "ConstantFolder": "torch._inductor.constant_folding.ConstantFolder",
    "CppScheduling": "torch._inductor.codegen.cpp.CppScheduling",
    "cpu_vec_isa_module": "torch._inductor.cpu_vec_isa",
    "CudaInterface": "torch._dynamo.device_interface.CudaInterface",
    "current_autograd_node": "torch._C._current_autograd_node",
    "current_dispatch_mode": "torch.utils._python_dispatch._get_current_dispatch_mode",
    "default_to_fused_or_foreach": "torch.optim.optimizer._default_to_fused_or_foreach",
    "device_constructors": "torch.utils._device._device_constructors",
    "device_index": "torch.cuda._get_device_index",
    "device_op_overrides": "torch._inductor.codegen.common.get_device_op_overrides",
    "device_put": "torch.ops.prims.device_put.default",
    "DeviceHints": "torch._inductor.runtime.hints.DeviceProperties",
    "disable_current_modes": "torch.utils._python_dispatch._disable_current_modes",
    "disable_torch_dispatch": "torch._C._DisableTorchDispatch",
    "disable_torch_function": "torch._C.DisableTorchFunction",
    "disabled_torch_dispatch": "torch._C._disabled_torch_dispatch_impl",
    "DispatchKey": "torch._C.DispatchKey",
    "DispatchKeySet": "torch._C.DispatchKeySet",
    "enable_torch_function": "torch._C._EnableTorchFunction",
    "EnableReduction": "torch._inductor.codegen.simd_kernel_features.EnableReduction",
    "engine_run_backward": "torch.autograd.graph._engine_run_backward",
    "exclude_dispatch_keys": "torch._C._ExcludeDispatchKeyGuard",
    "extension": "torch._C",
    "FakeStore": "torch.testing._internal.distributed.fake_pg.FakeStore",
    "FakeTensor": "torch._subclasses.fake_tensor.FakeTensor",
    "file_writer": "torch._C.PyTorchFileWriter",
    "flex_attention": "torch.nn.attention.flex_attention.flex_attention",
    "foreach_add": "torch._foreach_add",
    "foreach_add_in_place": "torch._foreach_add_",
    "foreach_devices": "torch.utils._foreach_utils._get_foreach_kernels_supported_devices",
    "foreach_devices_of_optimizers": "torch.optim.optimizer._get_foreach_kernels_supported_devices",
    "function_mode_stack": "torch.overrides._get_current_function_mode_stack",
    "GraphLowering": "torch._inductor.graph.GraphLowering",
    "group_tensors": "torch._C._group_tensors_by_device_and_dtype",
    "GuardBuilder": "torch._dynamo.guards.GuardBuilder",
    "has_compatible_type": "torch._has_compatible_shallow_copy_type",
    "has_kernel": "torch._C._dispatch_has_kernel_for_dispatch_key",
    "include_dispatch_key": "torch._C._IncludeDispatchKeyGuard",
    "inductor_config": "torch._inductor.config",
    "inductor_of_thread": "torch._inductor.virtualized.V",
    "inductor_scheduler_module": "torch._inductor.scheduler",
    "InductorWrapper": "torch._inductor.codegen.wrapper.PythonWrapperCodegen",
    "is_dispatch_key_excluded": "torch._C._dispatch_tls_is_dispatch_key_excluded",
    "is_functional_tensor": "torch._is_functional_tensor",
    "is_functorch_tensor": "torch._C._functorch.is_functorch_wrapped_tensor",
    "joint_graph_module": "torch._inductor.fx_passes.joint_graph",
    "KernelScheduling": "torch._inductor.codegen.simd.SIMDScheduling",
    "keyset_after": "torch._C._dispatch_keyset_full_after",
    "lazy_cuda_call": "torch.cuda._lazy_call",
    "lazy_cuda_init": "torch.cuda._lazy_init",
    "load_state_dict": "torch.distributed.checkpoint.state_dict_loader._load_state_dict",
    "local_scalar_dense": "torch.ops.aten._local_scalar_dense.default",
    "make_subclass": "torch.Tensor._make_subclass",
    "make_wrapper_subclass": "torch.Tensor._make_wrapper_subclass",
    "map_arguments": "torch.fx.node.map_aggregate",
    "MemoryDependency": "torch._inductor.dependencies.MemoryDep",
    "new_dtypes": "torch.storage._new_dtypes",
    "num_dispatch_modes": "torch._C._len_torch_dispatch_stack",
    "num_function_modes": "torch._C._len_torch_function_stack",
    "operators_module": "torch._ops",
    "OptimizedModule": "torch._dynamo.eval_frame.OptimizedModule",
    "parallel_functions": "torch.nn.parallel._functions",
    "parse_to": "torch._C._nn._parse_to",
    "pattern_matcher_module": "torch._inductor.pattern_matcher",
    "pop_dispatch_mode": "torch.utils._python_dispatch._pop_mode",
    "pop_function_mode": "torch._C._pop_torch_function_stack",
    "pop_saved_tensors_hooks": "torch._C._autograd._pop_saved_tensors_default_hooks",
    "proxy_tensor_module": "torch.fx.experimental.proxy_tensor",
    "push_function_mode": "torch._C._push_on_torch_function_stack",
    "push_saved_tensors_hooks": "torch._C._autograd._push_saved_tensors_default_hooks",
    "rebuild_tensor": "torch._utils._rebuild_tensor",
    "rebuild_tensor_v2": "torch._utils._rebuild_tensor_v2",
    "rebuild_tensor_v3": "torch._utils._rebuild_tensor_v3",
    "rebuild_wrapper": "torch._utils._rebuild_wrapper_subclass",
    "reduce_tensor": "torch.Tensor._reduce_ex_internal",
    "reset_code": "torch._dynamo.eval_frame.reset_code",
    "reset_compiler": "torch._dynamo.reset",
    "restore_location": "torch._utils._get_restore_location",
    "save_state_dict": "torch.distributed.checkpoint.state_dict_saver._save_state_dict",
    "SchedulerNode": "torch._inductor.scheduler.SchedulerNode",
    "sdp_priority_order": "torch._C._get_sdp_priority_order",
    "sequence_number": "torch.autograd._get_sequence_nr",
    "serialization_state": "torch.serialization._serialization_tls",
    "set_dispatch_key_excluded": "torch._C._dispatch_tls_set_dispatch_key_excluded",
    "set_dispatch_key_included": "torch._C._dispatch_tls_set_dispatch_key_included",
    "storage_of_weak_reference": "torch.UntypedStorage._new_with_weak_ptr",
    "storage_use_count": "torch._C._storage_Use_Count",
    "swap_tensors": "torch._C._swap_tensor_impl",
    "TensorBase": "torch._C.TensorBase",
    "top_saved_tensors_hooks": "torch._C._autograd._top_saved_tensors_default_hooks",
    "tree_leaves": "torch.utils._pytree.tree_leaves",
    "tree_map": "torch.utils._pytree.tree_map",
    "triton_module": "torch._inductor.codegen.triton",
    "WeakDependency": "torch._inductor.dependencies.WeakDep",
    "worker_loop": "torch.utils.data._utils.worker._worker_loop",
}


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """The buffers of a module itself, which can be put in by name, whatever the module does on assignment."""
    return module._buffers


def parameters_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """The parameters of a module itself, as `buffers_of`."""
    return module._parameters


def place(name: str) -> tuple[Any, str]:
    """The owner of what is called `name` here, and PyTorch's name for it: what it takes to replace it.

    `getattr(*place(name))` is what is there now, replaced or not; the attribute of this module is what was there first.

    Raises:
        MissingDependency: this release doesn't have it.
    """
    path, _, attribute = _PATHS[name].rpartition(".")
    owner = NAMES.find(path)
    NAMES.of(owner, attribute)
    return owner, attribute


# Nested tensors: modules that are loaded when they are used, and what chooses the kernel of their attention.
NESTED_TENSORS, NESTED_ATTENTION = "torch.nested._internal.nested_tensor", "torch.nested._internal.sdpa"
IS_ATTENTION_ON_SHAPES, SELECT_ATTENTION = "_is_computing_meta_flops", "_select_sdp_backend"


def empty_host_cache() -> None:
    """Gives back page-locked host memory that nobody uses; nothing where this release can't."""
    empty = getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        empty()


def clear_cublas_workspaces() -> None:
    """Gives back what cuBLAS keeps for its products; nothing where this build can't."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


# DistributedDataParallel and process groups.


def is_joined(model: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Whether the model is within its `join` context."""
    return bool(NAMES.of(model, "_join_config").enable)


def num_collectives(group: Any) -> int:
    """How many collective operations a group of processes has begun."""
    return int(NAMES.of(group, "_get_sequence_number_for_group")())


def reaches_host(group: Any) -> bool:
    """Whether a group of processes can exchange tensors in host memory."""
    return torch.device("cpu") in getattr(group, "_device_types", [])


def share_buffers(model: torch.nn.parallel.DistributedDataParallel) -> None:
    """Broadcasts the buffers, as a forward pass of the model would, and whatever else is due before one."""
    if torch.is_grad_enabled():
        # Due where passes have run before the guard was made; it communicates, so it may not wait for a pass.
        NAMES.of(model.reducer, "_rebuild_buckets")()
    # The older name is that of releases before 2.13.
    broadcasts = getattr(model, "forward_sync_buffers", None)
    broadcasts = getattr(model, "broadcast_buffers", True) if broadcasts is None else broadcasts
    if broadcasts and any(True for _ in model.module.buffers()):
        NAMES.of(model, "_sync_buffers")()


def around_data_parallel(model: torch.nn.parallel.DistributedDataParallel) -> tuple[Any, Any]:
    """What the model does before and after the forward pass of the module in it."""
    return NAMES.of(model, "_pre_forward"), NAMES.of(model, "_post_forward")


@contextmanager
def without_first_exchanges(model: torch.nn.parallel.DistributedDataParallel) -> Iterator[None]:
    """In this context the first forward and backward pass communicate no more than later ones.

    The first forward pass broadcasts buffers even under `no_sync`, and the first backward pass of a static graph sums
    gradients; DDP gives a model the second attribute only where it has such a graph.
    """
    quiet = {"require_forward_param_sync": False, "_static_graph_delay_allreduce_enqueued": True}
    kept = {name: getattr(model, name) for name in quiet if hasattr(model, name)}
    for name in kept:
        setattr(model, name, quiet[name])
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(model, name, value)


# Loaders.


def forget_workers(batches: Any) -> None:
    """Keeps PyTorch's handler of SIGCHLD from raising an error of its own when a worker of an iterator ends.

    Seen in 1.13 to 2.13; where the names are gone, the handler raises as before.
    """
    with contextlib.suppress(AttributeError, TypeError, ValueError, MissingDependency):
        if batches._worker_pids_set:
            NAMES.find("torch._C._remove_worker_pids")(id(batches))
            batches._worker_pids_set = False


def kept_iterator(loader: Any) -> Any:
    """The iterator of an earlier epoch whose workers a loader has kept; None where there is none."""
    return getattr(loader, "_iterator", None)


def set_index_sampler(iterator: Any, sampler: Any) -> None:
    """Has an iterator with workers take what to load from another sampler."""
    if iterator is not None:
        iterator._index_sampler = sampler


def workers_of(batches: Any) -> tuple[Any, Any]:
    """(processes of an iterator, whether batches are still expected of each)."""
    workers = getattr(batches, "_workers", ())
    return workers, getattr(batches, "_workers_status", [False] * len(workers))


# FSDP2: the state that `fully_shard` gives to modules.


def fsdp_states(model: torch.nn.Module) -> list[Any]:
    """PyTorch's state of every sharded module, outer ones first."""
    from torch.distributed.fsdp import FSDPModule

    sharded = (module for module in model.modules() if isinstance(module, FSDPModule))
    states = [NAMES.of(module, "_get_fsdp_state")() for module in sharded]
    return list({id(state): state for state in states}.values())


def fsdp_groups(states: list[Any]) -> Iterator[Any]:
    """The groups of parameters that are gathered together."""
    for state in states:
        several = getattr(state, "_fsdp_param_groups", None)
        # Releases before 2.12 have one group for each module.
        yield from [state._fsdp_param_group] if several is None and state._fsdp_param_group else several or []


def fsdp_divisor(group: Any) -> float:
    """What PyTorch divides the gradients of a group by."""
    factor = getattr(group, "gradient_divide_factor", None)
    mesh = group.mesh_info
    num_sharing = int(getattr(mesh, "shard_mesh_size", 1)) * int(getattr(mesh, "replicate_mesh_size", 1))
    return float(num_sharing if factor is None else factor)


def recover_fsdp(states: list[Any]) -> None:
    """PyTorch's own recovery from a failed pass, which there is since 2.13."""
    for state in states:
        recover = getattr(state, "_reset_iter_state", None)
        if recover is not None and NAMES.of(state, "_is_root"):
            recover()


def reset_fsdp(states: list[Any]) -> None:
    """Brings sharded modules into the state in which nothing is gathered and no pass is under way."""
    for state in states:
        _set_known(NAMES.of(state, "_state_ctx"), iter_forward_root=None, post_backward_final_callback_queued=False)
        communication = NAMES.of(state, "_comm_ctx")
        _set_known(communication, all_gather_state=None, reduce_scatter_state=None)
        for name in ("post_forward_order", "reduce_scatter_states", "_last_post_reduce_events"):
            getattr(communication, name, []).clear()
        state._training_state = type(NAMES.of(state, "_training_state")).IDLE
        getattr(state, "_modules_to_run_forward", set()).clear()
    for group in fsdp_groups(states):
        work = getattr(NAMES.of(group, "_all_gather_result"), "all_gather_work", None)
        if work is not None:
            work.wait()
        _set_known(
            group,
            _all_gather_result=None,
            _post_reduce_event=None,
            _all_reduce_state=None,
            _reshard_after_forward_event=None,
            _partial_reduce_output=None,
        )
        NAMES.of(group, "_post_forward_indices").clear()
        group._training_state = type(NAMES.of(group, "_training_state")).IDLE
        sharded_state = type(NAMES.of(group, "_sharded_state")).SHARDED
        for parameter in group.fsdp_params:
            if parameter.sharded_state != sharded_state:
                parameter.to_sharded()
            else:
                parameter.free_unsharded_param()
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is not None:
                whole.grad = None
            parameter.unsharded_accumulated_grad = None
        group._sharded_state = sharded_state


# Of an optimizer: whether its step takes the scale of a gradient scaler.
TAKES_SCALE = "_step_supports_amp_scaling"


def _set_known(holder: Any, **values: Any) -> None:
    """Sets those attributes that this release has, and has set up."""
    for name, value in values.items():
        if hasattr(holder, name):
            setattr(holder, name, value)


# Modules, optimizers and tensors.


def has_hooks(parameter: torch.Tensor, *, after_accumulation: bool) -> bool:
    """Whether hooks are called with a parameter's gradient, or once it is added up."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks" if after_accumulation else "_backward_hooks", None))


def renew_hooks_after_accumulation(parameter: Any) -> None:
    """Has the engine call these hooks for what the parameter is now, after `swap_tensors`."""
    parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks


def checks_program(function: Any) -> bool:
    """Whether PyTorch itself compiles this, which is how higher-order operators check the program's functions."""
    module, name = (str(getattr(function, each, "")) for each in ("__module__", "__name__"))
    return module.startswith("torch._higher_order_ops") or name == "_flex_attention_hop_wrapper"


def compiler(*, loads: bool = False) -> Any:
    """The compiler's module; None where it isn't loaded, unless it `loads` now."""
    return NAMES.find("torch._dynamo") if loads else sys.modules.get("torch._dynamo")


@contextmanager
def never_compiled(function: Callable[..., Any]) -> Iterator[None]:
    """In this context code that calls the function is compiled in two parts, before the call and after it."""
    calls = NAMES.find("torch._dynamo.trace_rules._disallowed_callable_ids")
    known = id(function) in calls
    calls.add(id(function))
    try:
        yield
    finally:
        if not known:
            calls.remove(id(function))


def fullgraph_unless(is_on: Callable[[], bool]) -> property:
    """What stands in for the compiler's own note of `fullgraph=True`: not in force while `is_on`."""

    def value(context: Any) -> bool:
        return not is_on() and bool(vars(context).get("fullgraph", False))

    def note(context: Any, asked: bool) -> None:
        vars(context)["fullgraph"] = asked

    return property(value, note)


@contextmanager
def breaks_allowed(callback: Any) -> Iterator[None]:
    """In this context what the compiler calls for a frame may make several graphs of it, whatever was asked for."""
    names = "_torchdynamo_orig_backend", "_torchdynamo_orig_callable"
    convert = next((vars(callback)[name] for name in names if name in vars(callback)), None)
    asked = getattr(convert, "_one_graph", False)
    _set_known(convert, _one_graph=False)
    try:
        yield
    finally:
        _set_known(convert, _one_graph=asked)


def load_compiler_tables() -> None:
    """Lets the compiler note the functions of PyTorch that it knows, before any is replaced: it does so only once."""
    known = NAMES.find("torch._dynamo.variables.torch.TorchInGraphFunctionVariable")
    getattr(known, "_get_handlers", lambda: None)()


@contextmanager
def without_compiler() -> Iterator[None]:
    """In this context compiled models run uncompiled; does nothing where the compiler isn't loaded."""
    # Its setting `disable` would leave out for good what runs meanwhile.
    with contextlib.nullcontext() if compiler() is None else torch.compiler.set_stance("force_eager"):
        yield


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether torch.compile made the module, or compiles its calls."""
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None


@contextmanager
def outside_simulation() -> Iterator[None]:
    """In this context operators run as PyTorch has them, also where a step is being simulated."""
    disable = globals().get("disable_current_modes") or __getattr__("disable_current_modes")
    with disable(), torch._C.DisableTorchFunction():
        yield


def forget_sharding(module: torch.nn.Module) -> None:
    """Takes away the state and the hooks that `fully_shard` gave a module, which has no way back of its own."""
    NAMES.find("torch.distributed._composable_state._module_state_mapping").pop(module, None)
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            if str(getattr(hook, "__module__", "")).startswith("torch.distributed"):
                del hooks[key]
    for name in [name for name in vars(module) if "composable" in name.lower()]:
        del vars(module)[name]


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Learning-rate schedulers warn when no step came before theirs."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def adam_on_lists() -> list[tuple[Any, str]]:
    """The functions that update lists of tensors for Adam and AdamW, each by its module and name."""
    names = (("torch.optim.adam", "_multi_tensor_adam"), ("torch.optim.adamw", "_multi_tensor_adamw"))
    modules = [(NAMES.find(module), name) for module, name in names]
    # Since 2.7 that of AdamW is Adam's.
    return [(module, name) for module, name in modules if hasattr(module, name)]


def found_infinite(scaler: torch.amp.GradScaler, optimizer: Any) -> bool:
    """Whether a gradient scaler has found infinite gradients, and so left the update out."""
    return any(bool(value.item()) for value in NAMES.of(scaler, "_found_inf_per_device")(optimizer).values())


def forget_rules(library: torch.library.Library) -> None:
    """Takes away what a library has put in place of PyTorch's own rules."""
    NAMES.of(library, "_destroy")()


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that a view was made from; a tensor that is no view itself."""
    return tensor._base if is_view(tensor) else tensor


def is_view(tensor: torch.Tensor) -> bool:
    """Whether a tensor shows, as autograd sees it, a part of another."""
    return bool(NAMES.of(tensor, "_is_view")())


def number_of(node: Any) -> int:
    """The sequence number of an autograd node, which tells in which order nodes were made."""
    return int(NAMES.of(node, "_sequence_nr")())


def packet_of(operator: Any) -> Any:
    """An operator without regard to the types of its arguments."""
    return NAMES.of(operator, "_overloadpacket")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Of a tensor that is spread over processes the part that is here, without a call of an operator."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def uncompiled_frame(*, alone: bool = False) -> Any:
    """What Dynamo is told about a frame that is to run as it is, this time, with all that it calls, or `alone`."""
    kinds = NAMES.find("torch._dynamo.types")
    if not hasattr(kinds, "ConvertFrameReturn"):
        # Older releases say it with nothing.
        return None
    actions = NAMES.find("torch._C._dynamo.eval_frame._FrameAction")
    called = actions.DEFAULT if alone else actions.SKIP
    strategy = NAMES.find("torch._C._dynamo.eval_frame._FrameExecStrategy")(actions.SKIP, called)
    return kinds.ConvertFrameReturn(frame_exec_strategy=strategy, apply_to_code=False)


def backward_compiled_at_once() -> Any:
    """A context in which a backward graph is compiled with its forward graph; later in releases that can't."""
    config = NAMES.find("torch._functorch.config")
    name = "force_non_lazy_backward_lowering"
    return config.patch({name: True}) if hasattr(config, name) else contextlib.nullcontext()


def fake_mode_in_force() -> Any:
    """PyTorch's own mode of tensors without memory, where it is on; None where it is off."""
    return NAMES.find("torch._C._get_dispatch_mode")(NAMES.find("torch._C._TorchDispatchModeKey").FAKE)


def device_hints(properties: Any, device: torch.device) -> Any:
    """What Inductor is told about a GPU, in the fields that this release has."""
    hints = __getattr__("DeviceHints")
    known = {name: getattr(properties, name) for name in hints._fields if hasattr(properties, name)}
    capability = 10 * properties.major + properties.minor
    return hints(**{**known, "type": device.type, "index": device.index, "cc": capability})


def original_module(model: torch.nn.Module) -> Any:
    """The module that `torch.compile` was given; None for one that isn't compiled."""
    return getattr(model, "_orig_mod", None)


def reset_scaler(scaler: torch.amp.GradScaler, optimizer: Any) -> None:
    """Has a gradient scaler forget that gradients of an optimizer were unscaled, so that they can be again."""
    states = getattr(scaler, "_per_optimizer_states", None)
    if states is not None:
        states.pop(id(optimizer), None)
    if getattr(scaler, "_scale", None) is not None and getattr(scaler, "_growth_tracker", None) is None:
        # Memory ran out between the two tensors that its first use makes; it would take itself for ready.
        scaler._scale = None


def state_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody changes what an optimizer saves or loads."""
    names = ("load_state_dict_pre_hooks", "load_state_dict_post_hooks", "state_dict_post_hooks")
    return any(NAMES.of(optimizer, f"_optimizer_{name}") for name in names)


def reference_counts(tensor: torch.Tensor) -> tuple[int, int]:
    """(references to a tensor, to its storage), as seen from a dispatch mode."""
    return NAMES.of(tensor, "_use_count")(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def schema_of(operator: Any) -> Any:
    """What an operator's arguments are; None for a higher-order operator, which runs functions of the program."""
    return getattr(operator, "_schema", None)


def name_of(operator: Any) -> str:
    """The name of an operator without regard to the types of its arguments, such as "aten::add"."""
    return operator._schema.name  # type: ignore[no-any-return]


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(indices, values) of a sparse tensor in coordinates, of which some may stand there several times."""
    return NAMES.of(tensor, "_indices")(), NAMES.of(tensor, "_values")()


def num_sparse(tensor: torch.Tensor) -> int:
    """How many elements a sparse tensor holds."""
    return int(NAMES.of(tensor, "_nnz")())


def set_coalesced(tensor: torch.Tensor, is_coalesced: bool) -> torch.Tensor:
    """Notes whether every index of a sparse tensor stands there only once; returns the tensor."""
    return NAMES.of(tensor, "_coalesced_")(is_coalesced)  # type: ignore[no-any-return]


def storage_address(storage: torch.UntypedStorage) -> int:
    """The address of a storage's record, its own as long as somebody refers to it; asked for too often for `NAMES`."""
    return storage._cdata  # type: ignore[no-any-return]


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to, as autograd counts; -1 for a tensor of inference mode, which has no count."""
    return -1 if tensor.is_inference() else tensor._version


__getattr__ = NAMES.table(_PATHS, globals())
