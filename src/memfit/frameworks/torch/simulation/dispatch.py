"""The simulated device's operators: a dispatch mode below autograd.

Every operator of the step arrives here after autograd has done its part. It is run for its shapes only, and each new
storage goes to the recorder. What the operator's CUDA or CPU kernel allocates for itself comes from `internals`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from memfit.core.timeline import Category
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.kernels import convolution_layout, fallbacks
from memfit.frameworks.torch.kernels.assumed_values import Draws, HostReads, Selections, SizeBounds
from memfit.frameworks.torch.shapes import shapes, sparse
from memfit.frameworks.torch.shapes.device_labels import BARE, DeviceLabels
from memfit.frameworks.torch.shapes.formulas import Formulas
from memfit.frameworks.torch.shapes.origin import OriginTracker
from memfit.frameworks.torch.shapes.recorder import (
    Program,
    Recorder,
    is_accumulated_in_place,
    references_of_sole_owner,
)
from memfit.frameworks.torch.shapes.shapes import META, Arguments, Behaviour, Operator, Options, map_nested
from memfit.frameworks.torch.shapes.values import KnownValues

# (arguments, output) -> blocks that live only inside the operator.
Internals = Callable[[Arguments, Any], Program]

_ADD = torch.ops.aten.add.Tensor
_CAT = torch.ops.aten.cat.default
_SOFTMAX = torch.ops.aten._softmax.default
_TO_COPY = torch.ops.aten._to_copy.default
_SELECTING = {"aten::nonzero", "aten::index", "aten::masked_select"}
_MATRIX_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mv", "aten::addbmm"}

# Collectives after which a rank of the fake process group has what it had before.
_KEEPING = {
    f"c10d::{name}"
    for name in """
    broadcast_ allreduce_ allreduce_coalesced_ barrier reduce_ allgather_ _allgather_base_
    """.split()  # noqa: SIM905
}

# Operators that may take host tensors beside device tensors, as CUDA's do.
_MIXED_DEVICES_ALLOWED = {
    f"aten::{name}"
    for name in """
    copy_ _to_copy index index_put index_put_ _index_put_impl_ set_ lift_fresh _pack_padded_sequence _ctc_loss
    _use_cudnn_ctc_loss _ctc_loss_backward
    """.split()  # noqa: SIM905
} | {f"bitsandbytes::optimizer_update_{name}" for name in ("32bit", "8bit_blockwise")}


class SimulatedOperators(internals.TorchDispatchMode):
    """Runs every operator for its shapes and records what it allocates.

    Args:
        recorder: receives the blocks.
        origin: knows where the user's code is.
        internals: per operator, what its kernel allocates for itself.
        rules: per operator, its outputs where only this device has them, beside those of `fallbacks`.
        host_is_device: tensors on the CPU belong to the simulated device.
        report: takes (code, text) of each assumption made.
        labels: knows the shape-only tensors that are not on the simulated device.
        values: knows the values of small tensors; None: no value is known.
        copied_in: what tensors are for that come from the host, until somebody knows better.
    """

    def __init__(
        self,
        recorder: Recorder,
        origin: OriginTracker,
        internals: dict[str, Internals],
        rules: dict[str, fallbacks.Rule],
        *,
        host_is_device: bool,
        report: Callable[[str, str], None],
        labels: DeviceLabels,
        values: KnownValues | None = None,
        copied_in: Category | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._labels = labels
        self._values = values
        self._copied_in = copied_in
        self._taken_apart = False
        """Whether the parts of the operator that runs have been followed one by one."""
        self.on_write: Callable[[torch.Tensor], None] | None = None
        """Called with each tensor that an operator is about to change in place."""
        self.on_run: Callable[[Operator, Arguments, Options, Any, shapes.Known | None], None] | None = None
        """Called with each operator that did work on the device: arguments, output, what is kept of its signature."""
        self.compositions: dict[str, Callable[..., Any]] = {}
        """By name, operators of libraries as other operators: takes the operator and its arguments; see `quantized`."""
        self.around: AbstractContextManager[Any] = nullcontext()
        """Entered for each operator."""
        self.host_reads = HostReads(lambda: origin.current()[1], report)
        self._recorder = recorder
        self._origin = origin
        self._internals = internals
        self._rules = {**fallbacks.RULES, **rules}
        self._host_is_device = host_is_device
        self._bounds = SizeBounds()
        self._formulas = Formulas(recorder)
        # Found out here, where no mode is on.
        self._sole_owner = references_of_sole_owner()
        self._depends_on_data = False

        def noticing(code: str, text: str) -> None:
            self._depends_on_data |= code == fallbacks.DATA_DEPENDENT
            report(code, text)

        self._report = noticing
        if values is not None:
            self._selections = Selections(values, noticing)
            self._draws = Draws(values, self.host_reads.waits, report)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here; PyTorch would otherwise wrap each call in a guard that costs more than the call.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """PyTorch compiles code although this mode is on: it is off while that is done."""
        return True

    def __torch_dispatch__(
        self, func: Operator, types: Any, args: Arguments = (), kwargs: Options | None = None
    ) -> Any:
        if types and any(map(_handles_itself, types)):
            if internals.FakeTensor in types:
                # PyTorch's own inquiries into shapes, as DTensor makes them: nobody's memory.
                return func(*args, **(kwargs or {}))
            nested = next((kind for kind in types if kind.__module__ == internals.NESTED_TENSORS), None)
            if nested is not None:
                # Its devices are read, and named again, with the function mode off, as in a forward pass.
                with self, internals.disable_torch_function():
                    return nested.__torch_dispatch__(func, types, args, kwargs or {})
            # A tensor made of other tensors, such as a DTensor: it comes back here with its parts.
            return NotImplemented
        # The autograd engine comes here with the function mode on, which would hide that tensors are shape-only.
        with self.around, internals.disable_torch_function():
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Operator, args: Arguments, kwargs: Options) -> Any:
        device = kwargs.get("device") if kwargs else None
        if device is not None and device.type == "cuda":
            # Python code of PyTorch below the function mode, as DTensor's is, names the device too.
            kwargs = {**kwargs, "device": META}
        kind = shapes.behaviour(func)
        # A user's own autograd function runs its forward pass without gradients, but its node has been made already.
        node = None if torch.is_grad_enabled() else internals.current_autograd_node()
        if node is None:
            self._origin.remember()
        else:
            self._formulas.enter(node)
        if kind is Behaviour.VIEW:
            return func(*args, **kwargs)
        if kind is Behaviour.COMPOSITE and internals.name_of(func) not in self._rules:
            with self:
                return func.decompose(*args, **kwargs)
        if self._labels:
            place = self._elsewhere(func, args, kwargs)
            if place is not None:
                return self._run_elsewhere(func, args, kwargs, place)
        simulated, foreign = _devices(args, kwargs)
        if not simulated:
            return self._run_on_host(func, args, kwargs)
        if foreign:
            args, kwargs = self._bring_over(func, args, kwargs)
        if func is _ADD and is_accumulated_in_place(args, kwargs, self._sole_owner):
            return self._ran_in_place(func, args, kwargs)
        if node is not None and self._formulas.runs_in_place(func, args):
            self._record(func, args, args[0], fresh=False)
            return self._ran_in_place(func, args, kwargs)
        composition = self.compositions.get(internals.name_of(func))
        if composition is not None:
            with self:
                out = composition(func, *args, **kwargs)
            if out is not NotImplemented:
                return out
        self._taken_apart = False
        if kind is Behaviour.IN_PLACE and self.on_write is not None:
            self.on_write(args[0])
        out, known = self._run_on_device(func, args, kwargs, kind)
        if self._values is not None and not self._taken_apart and internals.name_of(func) not in _KEEPING:
            self._selections.follow(func, args, out)
            self._values.follow(func, args, kwargs, out)
            self._draws.follow(func, args, kwargs, out)
            if func is _SOFTMAX:
                self.host_reads.are_probabilities(out)
        if self.on_run is not None and not self._taken_apart:
            self.on_run(func, args, kwargs, out, known)
        return out

    def _ran_in_place(self, func: Operator, args: Arguments, kwargs: Options) -> Any:
        """The first argument, which holds the output of an operator that isn't in place itself."""
        if self._values is not None:
            self._values.forget(args[0])
        if self.on_run is not None:
            self.on_run(func, args, kwargs, args[0], None)
        return args[0]

    def _run_on_device(
        self, func: Operator, args: Arguments, kwargs: Options, kind: Behaviour
    ) -> tuple[Any, shapes.Known | None]:
        """(the output, what is kept of the operator's signature)."""
        if func.namespace == "c10d":
            out = _collective(func, args, kwargs)
            self._gather_values(func, args)
            return out, None
        special = self._rules.get(internals.name_of(func))
        if special is not None:
            out = self._exact(func, args, kwargs)
            if out is not NotImplemented and internals.name_of(func) in _SELECTING and self._bounds.among(args):
                # By a mask that was made up for the largest sizes.
                self._depends_on_data = True
            if special is fallbacks.compare or special is fallbacks.conjunction:
                args = tuple(map(self._number, args))
            if out is NotImplemented and self._values is not None:
                out = self._selections.bounded(func, args)
            if out is NotImplemented:
                out = special(func, args, kwargs, self._report)
                if isinstance(out, bool | int | float):
                    out = self.host_reads.answer(out)
            if out is not NotImplemented:
                return self._record(func, args, out), None
        if kind is Behaviour.OTHER:
            out = self._execute(func, args, kwargs)
            if args and isinstance(args[0], torch.Tensor) and internals.name_of(func).startswith("aten::resize"):
                self._recorder.resized(args[0].untyped_storage(), _name(func))
            # With `out=`, as compiled graphs call operators, kernels take for themselves what they always do.
            return self._record(func, args, out), None
        out, known = shapes.run(func, args, kwargs, self._execute)
        return self._record(func, args, out, fresh=kind is Behaviour.FRESH), known

    def _gather_values(self, func: Operator, args: tuple[Any, ...]) -> None:
        """What the other ranks would send is taken to be what this one has, where that is known."""
        if self._values is None or internals.name_of(func) not in ("c10d::allgather_", "c10d::_allgather_base_"):
            return
        outputs, inputs = (given if isinstance(given, list) else [given] for given in args[:2])
        for mine, received in zip(inputs, outputs, strict=False):
            known = self._values.of(mine)
            for tensor in shapes.tensors((received,)):
                self._values.forget(tensor)
                if known is not None:
                    times = tensor.numel() // max(1, known.numel())
                    self._values.learn(tensor, known.flatten().repeat(times).view(tensor.shape).clone())

    def _number(self, value: Any) -> Any:
        """A single number on the device as one of the host, where it is known."""
        if self._values is None or not isinstance(value, torch.Tensor) or value.dim() or not value.is_meta:
            return value
        known = self._values.of(value)
        return value if known is None else known.clone()

    def read_number(self, tensor: torch.Tensor) -> Any:
        """The number in a tensor of one element, or what stands in for it."""
        known = None if self._values is None else self._values.of(tensor)
        return fallbacks.stand_in(tensor, self._report) if known is None else known.item()

    def _exact(self, func: Operator, args: Arguments, kwargs: Options) -> Any:
        """The true output of an operator that needs values, where they are known."""
        out = NotImplemented if self._values is None else self._values.exact(func, args, kwargs)
        if out is NotImplemented and func is _TO_COPY and shapes.to_host(kwargs):
            return self.host_reads.host_copy(args[0], kwargs.get("dtype") or args[0].dtype)
        return out

    def _record(self, func: Operator, args: Arguments, out: Any, *, fresh: bool = True) -> Any:
        name = _name(func)
        sizes = self._bounds.among(args)
        if sizes and func is _CAT:
            sizes |= {out.shape[args[1] if len(args) > 1 else 0]}
        self._recorder.at_most = self._depends_on_data or (bool(sizes) and self._bounds.follow(out, sizes))
        if self._depends_on_data:
            self._bounds.made_by_data(out, args)
            self._depends_on_data = False
        inside = self._internals.get(internals.name_of(func))
        program = [] if inside is None else inside(args, out)
        # A program that names outputs names all that are on the device.
        if fresh and not any(isinstance(part, torch.Tensor) for part in program):
            self._add(out, name)
        self._recorder.add_inside(program, name, Category.WORKSPACE)
        self._recorder.at_most = False
        return out

    def _add(self, out: Any, name: str, category: Category | None = None) -> None:
        if isinstance(out, torch.Tensor):
            if not out.is_meta or type(out) is internals.FakeTensor:
                return
            if out.layout is torch.strided:
                self._recorder.add(out, name, category)
            else:
                for part in sparse.parts(out):
                    self._recorder.add(part, name, category)
        elif isinstance(out, list | tuple):
            for part in out:
                self._add(part, name, category)

    def _execute(self, func: Operator, args: Arguments, kwargs: Options) -> Any:
        rule = convolution_layout.RULES.get(internals.name_of(func))
        if rule is not None:
            out = rule(func, args, kwargs, self._report)
            if out is not NotImplemented:
                return out
        if internals.name_of(func) in _MATRIX_PRODUCTS:
            out = _product(func, args, kwargs)
            if out is not NotImplemented:
                return out
        try:
            return func(*args, **kwargs)
        except NotImplementedError:
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                self._taken_apart = True
                return out
            return fallbacks.without_rule(func, args, kwargs, self._report)

    def _run_on_host(self, func: Operator, args: Arguments, kwargs: Options) -> Any:
        """A factory for the device, a copy to it, or an operator on host tensors only."""
        if func is _TO_COPY and args[0].layout is not torch.strided and not shapes.to_host(kwargs):
            out = sparse.to_device(args[0], kwargs.get("dtype"))
        else:
            out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor) and out.is_meta:
            copied = args and isinstance(args[0], torch.Tensor)
            self._add(out, _name(func), self._copied_in if copied else None)
            if self._values is not None:
                if copied and func is _TO_COPY:
                    self._values.learn(out, args[0])
                else:
                    self._values.follow(func, args, kwargs, out)
        elif not isinstance(out, torch.Tensor):
            self._add(out, _name(func))
        if self.on_run is not None:
            self.on_run(func, args, kwargs, out, None)
        return out

    def _elsewhere(self, func: Operator, args: Arguments, kwargs: Options) -> torch.device | None:
        """The place of what an operator makes, where that isn't the simulated device."""
        labels = self._labels
        if labels.requested is not None:
            return labels.requested if labels.requested != labels.device else None
        of_arguments = [labels.of(value) for value in shapes.tensors((*args, *kwargs.values())) if value.is_meta]
        if not of_arguments:
            return None
        real = [place for place in of_arguments if place != BARE]
        if len(set(real)) > 1 and internals.name_of(func) not in _MIXED_DEVICES_ALLOWED:
            raise _several_devices(*sorted(set(map(str, real))))
        place = real[0] if real else BARE
        return place if place != labels.device else None

    def _run_elsewhere(self, func: Operator, args: Arguments, kwargs: Options, place: torch.device) -> Any:
        """Runs an operator of another place: for its shapes, on nobody's account."""
        if place.type == "cpu":
            # A large model's weights, which the host holds as shapes, among tensors that it really holds.
            args, kwargs = _as_shapes(args, kwargs)
        special = self._rules.get(internals.name_of(func))
        out = special(func, args, kwargs, self._report) if special is not None else NotImplemented
        if out is NotImplemented:
            out = self._execute(func, args, kwargs)
        for tensor in shapes.tensors((out,)):
            if tensor.is_meta and not self._recorder.known(tensor):
                self._labels.mark(tensor, place)
        return out

    def _bring_over(self, func: Operator, args: Arguments, kwargs: Options) -> tuple[Arguments, Options]:
        """Host tensors among device tensors: as shapes where the device is the host, else refused as CUDA does."""
        if internals.name_of(func) in _MIXED_DEVICES_ALLOWED and not self._host_is_device:
            return args, kwargs
        if not self._host_is_device and any(t.is_cpu and t.dim() for t in shapes.tensors((*args, *kwargs.values()))):
            raise _several_devices("cuda:0", "cpu")
        return _as_shapes(args, kwargs)


@cache
def _name(func: Operator) -> str:
    return str(internals.name_of(func)).replace("::", ".")


def _several_devices(*names: str) -> RuntimeError:
    between = " and ".join(names)
    return RuntimeError(f"Expected all tensors to be on the same device, but found at least two devices, {between}!")


def _collective(func: Operator, args: Arguments, kwargs: Options) -> Any:
    """A collective of the fake process group: in place, and it returns an object that can be waited for."""
    try:
        return func(*args, **kwargs)
    except NotImplementedError:
        # Older releases have no shape rule; the fake group looks at no tensor, so that any will do.
        small = torch.empty(1)
        args_instead, kwargs_instead = (
            map_nested(list(given), lambda tensor: small) for given in (args, kwargs.values())
        )
        out = func(*args_instead, **dict(zip(kwargs, kwargs_instead, strict=True)))
        return (args[0], *out[1:]) if isinstance(out, tuple) else out


@cache
def _handles_itself(kind: type) -> bool:
    """Whether a class of tensors says itself what operators do to it."""
    own = getattr(kind, "__torch_dispatch__", None)
    return own not in (torch.Tensor.__torch_dispatch__, internals.disabled_torch_dispatch)


def _as_shapes(args: Arguments, kwargs: Options) -> tuple[Arguments, Options]:
    """The arguments with the tensors in them that have more than one element as shapes only."""

    def shape_only(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_meta or tensor.dim() == 0 else shapes.shape_like(tensor)

    return map_nested(args, shape_only), {name: map_nested(value, shape_only) for name, value in kwargs.items()}


def _product(func: Operator, args: Arguments, kwargs: Options) -> Any:
    """Refuses what kernels of matrix products refuse and PyTorch's shape rules let pass.

    With `out_dtype`, 16-bit factors are summed up in float32, and what is added may be of either dtype (Blas.cpp).
    """
    given = [value for value in args if isinstance(value, torch.Tensor)]
    out_dtype = next((value for value in args if isinstance(value, torch.dtype)), None)
    factors, added = (given, []) if out_dtype is None else (given[-2:], given[:-2])
    dtypes = {matrix.dtype for matrix in factors}
    if len(dtypes) > 1:
        names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise RuntimeError(f"the matrices of a product must have the same dtype, but {names} were given")
    if added and added[0].dtype not in (out_dtype, factors[0].dtype):
        raise RuntimeError("self dtype must match either out_dtype or the dtype of the matrices of the product")
    if out_dtype is None or internals.name_of(func) != "aten::baddbmm":
        return NotImplemented
    # PyTorch's rule takes `out_dtype` for another number; that of the product alone has the same result.
    if added[0].shape != (*factors[0].shape[:2], factors[1].shape[2]):
        raise RuntimeError("self must have the same shape as the output")
    if "out" in kwargs:
        return torch.ops.aten.bmm.dtype_out(*factors, out_dtype, out=kwargs["out"])
    return torch.ops.aten.bmm.dtype(*factors, out_dtype)


def _devices(args: Arguments, kwargs: Options) -> tuple[bool, bool]:
    """(any simulated tensor, any other tensor with dimensions) among the arguments."""
    simulated = foreign = False
    for tensor in shapes.tensors((*args, *kwargs.values()) if kwargs else args):
        if tensor.is_meta:
            simulated = True
        elif tensor.dim():
            foreign = True
    return simulated, foreign
