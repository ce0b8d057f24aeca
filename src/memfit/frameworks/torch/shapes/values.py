"""True values of small simulated tensors.

A simulated tensor has a shape and no values, so whatever a script reads from it has to be stood in for. Much of what
scripts read was never computed by the model: token ids, lengths, masks, labels, step counters, loss scales, positions.
It came from the host, or from a factory such as `arange`, and is small. Such tensors keep their values here.

Values belong to storages: a simulated storage whose bytes are all known has a shadow, a real storage of the same size
on the host. A tensor's values are a host tensor laid over the shadow with the tensor's own offset, sizes and strides,
so views need no bookkeeping and an operator that writes in place is run in place on the shadows. A storage is known as
a whole or not at all, and what is known is exactly what PyTorch's CPU kernels compute.
"""

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from memfit.core.units import KIB, MIB
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.shapes import shapes
from memfit.frameworks.torch.shapes.interception import call_plain
from memfit.frameworks.torch.shapes.shapes import META, Arguments, Operator, Options, map_nested, tensors

_CPU = torch.device("cpu")

# Results that are one number everywhere, and where it is among the arguments.
_FILLS: dict[str, Callable[[Arguments], Any]] = {
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros", "zero_", "_foreach_zero_"), lambda args: 0),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), lambda args: 1),
    **dict.fromkeys(("full", "full_like", "fill_.Scalar"), lambda args: args[1]),
    "new_full": lambda args: args[2],
    "scalar_tensor": lambda args: args[0],
}

# In place, but nothing of what was there before remains.
_OVERWRITING = ("aten::copy_", "aten::fill_", "aten::_foreach_copy_")

# Batch norms write their running statistics, arguments 3 and 4, when argument 5 says training; most schemas don't tell.
_BATCH_NORMS = {f"aten::{name}" for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")}
_BATCH_NORMS.add("aten::_native_batch_norm_legit")
_STATISTICS = {
    "aten::batch_norm_update_stats": (1, 2),
    "aten::batch_norm_gather_stats": (3, 4),
    "aten::batch_norm_gather_stats_with_counts": (3, 4),
    **dict.fromkeys(_BATCH_NORMS, (3, 4)),
}

# Gradients whose values are unknown are taken to be finite: `found_inf` stays what it was.
_FINITE_CHECK = "aten::_amp_foreach_non_finite_check_and_unscale_"


class _UnknownValues(Exception):
    """An argument's values are not known."""


class _Shadow(weakref.ref[Any]):
    """Refers to a simulated storage and holds the bytes that it would have."""

    __slots__ = ("bytes", "key")
    key: int
    bytes: torch.UntypedStorage


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """What an operator means for values, read off its schema once.

    Args:
        runs: it may be run on the host: it is PyTorch's own and gives the same each time.
        first: position of the first tensor, or list, that it reads; without that one known, nothing it makes is.
        written: positions or names of the arguments that it writes.
        overwritten: those of `written` of which nothing old remains.
        training: position of the flag without which nothing is written.
        fill: gives the number that all elements of the result are.
    """

    runs: bool = True
    first: int | None = None
    written: tuple[int | str, ...] = ()
    overwritten: tuple[int | str, ...] = ()
    training: int | None = None
    fill: Callable[[Arguments], Any] | None = None


_IGNORED = _Plan(runs=False)
_ATEN = torch.ops.aten
# The operand that decides the result of an operator alone; of whole numbers and booleans only.
_ABSORBING: dict[Operator, bool] = {
    **dict.fromkeys((_ATEN.bitwise_or.Tensor, _ATEN.bitwise_or_.Tensor), True),
    **dict.fromkeys((_ATEN.logical_or.default, _ATEN.logical_or_.default), True),
    **dict.fromkeys((_ATEN.bitwise_and.Tensor, _ATEN.bitwise_and_.Tensor), False),
    **dict.fromkeys((_ATEN.logical_and.default, _ATEN.logical_and_.default), False),
    **dict.fromkeys((_ATEN.mul.Tensor, _ATEN.mul_.Tensor), False),
}
# Comparisons that finite numbers decide: how PyTorch asks for NaN and for infinity; when, and what comes out.
_FINITE: dict[Operator, tuple[Callable[[Arguments], bool], bool]] = {
    _ATEN.isnan.default: (lambda args: True, False),
    _ATEN.isinf.default: (lambda args: True, False),
    _ATEN.ne.Tensor: (lambda args: args[0] is args[1], False),
    _ATEN.eq.Tensor: (lambda args: args[0] is args[1], True),
    _ATEN.eq.Scalar: (lambda args: args[1] in (math.inf, -math.inf), False),
    _ATEN.ne.Scalar: (lambda args: args[1] in (math.inf, -math.inf), True),
}


class KnownValues:
    """Follows the values of small simulated tensors from operator to operator."""

    # Largest storage that is followed, of integers or booleans and of other numbers; host memory of all values.
    limit_bytes_integer, limit_bytes_float, limit_bytes_total = 16 * MIB, 16 * KIB, 256 * MIB

    def __init__(self) -> None:
        self._total_bytes = 0
        self._shadows: dict[int, _Shadow] = {}

    def learn(self, simulated: torch.Tensor, host: torch.Tensor) -> None:
        """Remembers that `simulated` now holds the values of `host`, which may be of another dtype."""
        with internals.disable_torch_function():
            try:
                if simulated.requires_grad or host.requires_grad:
                    raise _UnknownValues
                self._target(simulated).copy_(host)
            except Exception:
                self.forget(simulated)

    def of(self, simulated: torch.Tensor) -> torch.Tensor | None:
        """The values of `simulated` on the host, or None; later writes show in them, so clone what is to stay."""
        if simulated.layout is not torch.strided:
            return None
        if not simulated.numel():
            return torch.empty_strided(simulated.shape, simulated.stride(), dtype=simulated.dtype, device=_CPU)
        storage = simulated.untyped_storage()
        shadow = self._shadows.get(internals.storage_address(storage))
        if shadow is None or _is_lazy(simulated):
            return None
        if shadow.bytes.nbytes() != storage.nbytes():
            self._drop(shadow)
            return None
        return _lay_over(shadow.bytes, simulated)

    def forget(self, simulated: Any) -> None:
        """From now on the values of `simulated`, and of all that shares its storage, are unknown."""
        try:
            shadow = self._shadows.get(internals.storage_address(simulated.untyped_storage()))
        except RuntimeError:
            return  # sparse tensors and wrappers have no storage
        if shadow is not None:
            self._drop(shadow)

    def clear(self) -> None:
        """Forgets everything."""
        self._shadows.clear()
        self._total_bytes = 0

    def follow(self, func: Operator, args: Arguments, kwargs: Options, out: Any) -> None:
        """Does to the values what `func` has just done to the shapes; what can't be known is forgotten."""
        plan = _read_schema(func)
        if plan is _IGNORED:
            return
        if func in _ABSORBING and self._absorbed(func, args, out):
            return
        if func in _FINITE and _FINITE[func][0](args) and self.of(args[0]) is None:
            self._fill(out, _FINITE[func][1])
            return
        if plan.first is not None:
            # Almost every call ends here: the model's own numbers are unknown.
            try:
                first = args[plan.first]
                if isinstance(first, list | tuple):
                    first = first[0]
                key = internals.storage_address(first.untyped_storage())
                if key not in self._shadows and first.is_meta and first.numel():
                    if plan.written and self._shadows:
                        self._forget_written(plan, args, kwargs)
                    return
            except (AttributeError, IndexError, RuntimeError):
                pass  # a number, an empty list, a sparse tensor
        with internals.disable_torch_function():
            try:
                if plan.fill is not None:
                    self._fill(args[0] if plan.written else out, plan.fill(args))
                    return
                if plan.runs:
                    self._run(plan, func, args, kwargs, out)
                    return
            except Exception:
                pass  # a kernel that the host lacks or that refuses these values: unknown, and not the user's concern
            self._forget_written(plan, args, kwargs)

    def exact(self, func: Operator, args: Arguments, kwargs: Options) -> Any:
        """The result of an operator whose shape or number depends on values, or NotImplemented where they are unknown.

        Tensors in it are simulated, with their values where small enough. An operator that selects by a known mask is
        answered for unknown data too: the mask decides the shape.
        """
        rule = _EXACT.get(internals.name_of(func))
        if rule is None or not any(tensor.is_meta for tensor in tensors((*args, *kwargs.values()))):
            return NotImplemented
        with internals.disable_torch_function():
            try:
                return rule(self, func, args, kwargs)
            except Exception:
                return NotImplemented

    def _absorbed(self, func: Operator, args: Arguments, out: Any) -> bool:
        """Whether one operand decides the result whatever the other is, as True does in "or"; notes it then."""
        deciding = _ABSORBING[func]
        if not isinstance(out, torch.Tensor) or out.dtype.is_floating_point or out.dtype.is_complex:
            return False
        for operand in tensors(args[:2]):
            known = self.of(operand)
            if known is not None and (not deciding or known.dtype is torch.bool) and bool((known == deciding).all()):
                self._fill(out, deciding)
                return True
        return False

    def _drop(self, shadow: "weakref.ref[Any]") -> None:
        assert isinstance(shadow, _Shadow)
        if self._shadows.pop(shadow.key, None) is not None:
            self._total_bytes -= shadow.bytes.nbytes()

    def _target(self, simulated: torch.Tensor) -> torch.Tensor:
        """Where to write the values of `simulated`; one that fills its storage needs not have been known before."""
        known = self.of(simulated)
        if known is not None:
            return known
        storage = simulated.untyped_storage()
        size_bytes = storage.nbytes()
        continuous = simulated.dtype.is_floating_point or simulated.dtype.is_complex
        limit_bytes = self.limit_bytes_float if continuous else self.limit_bytes_integer
        is_small = size_bytes <= limit_bytes and self._total_bytes + size_bytes <= self.limit_bytes_total
        # Its elements are all there is in its storage, each once.
        fills = simulated.numel() * simulated.element_size() == size_bytes and (
            simulated.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense.default(simulated)
        )
        if simulated.requires_grad or not is_small or not fills or _is_lazy(simulated):
            raise _UnknownValues
        shadow = _Shadow(storage, self._drop)
        shadow.key, shadow.bytes = internals.storage_address(storage), torch.UntypedStorage(size_bytes)
        self._shadows[shadow.key] = shadow
        self._total_bytes += size_bytes
        return _lay_over(shadow.bytes, simulated)

    def _fill(self, targets: Any, value: Any) -> None:
        for tensor in tensors((targets,)):
            if tensor.is_meta:
                try:
                    self._target(tensor).fill_(value)
                except Exception:
                    self.forget(tensor)

    def _run(self, plan: _Plan, func: Operator, args: Arguments, kwargs: Options, out: Any) -> None:
        """Runs `func` on the values, or raises."""
        written = tuple(tensors(_pick(plan.written, args, kwargs)))
        made = tuple(tensors((out,)))
        if not any(tensor.is_meta for tensor in made + written):
            return
        # The host's own tensors have been written already.
        if not all(tensor.is_meta for tensor in written):
            raise _UnknownValues
        largest = max(self.limit_bytes_integer, self.limit_bytes_float)
        if any(tensor.is_meta and tensor.untyped_storage().nbytes() > largest for tensor in made):
            raise _UnknownValues
        real_args = [None if i in plan.overwritten else self._real(value) for i, value in enumerate(args)]
        real_kwargs = {name: None if name in plan.overwritten else self._real(kwargs[name]) for name in kwargs}
        for place in plan.overwritten:
            if isinstance(place, int):
                real_args[place] = map_nested(args[place], self._target)
            else:
                real_kwargs[place] = map_nested(kwargs[place], self._target)
        if real_kwargs.get("device") is not None:
            real_kwargs["device"] = _CPU
        self._keep(out, call_plain(func, *real_args, **real_kwargs))

    def _real(self, value: Any) -> Any:
        """`value` with the host's tensors for the simulated ones in it."""

        def of(tensor: torch.Tensor) -> torch.Tensor:
            known = self.of(tensor) if tensor.is_meta else None if tensor.requires_grad else tensor
            if known is None:
                raise _UnknownValues
            return known

        return map_nested(value, of)

    def _keep(self, out: Any, result: Any) -> None:
        """The new tensors in `out` hold the values of `result`."""
        if isinstance(out, list | tuple):
            if len(out) == len(result):
                for part, values in zip(out, result, strict=True):
                    self._keep(part, values)
        elif isinstance(out, torch.Tensor) and out.is_meta and out.layout is torch.strided:
            # A storage that is known already has been written in place, or is only viewed.
            if internals.storage_address(out.untyped_storage()) in self._shadows:
                return
            if out.shape == result.shape and out.dtype is result.dtype:
                self.learn(out, result)

    def _forget_written(self, plan: _Plan, args: Arguments, kwargs: Options) -> None:
        if plan.training is None or args[plan.training]:
            for tensor in tensors(_pick(plan.written, args, kwargs)):
                self.forget(tensor)

    def _simulate(self, result: torch.Tensor) -> torch.Tensor:
        """`result`, computed on the host, as the device would have it."""
        made = shapes.shape_like(result)
        self.learn(made, result)
        return made

    def _small_result(self, func: Operator, args: Arguments, kwargs: Options) -> Any:
        """The result is not much larger than the arguments, or no tensor: compute it."""
        return map_nested(call_plain(func, *self._real(args), **kwargs), self._simulate)

    def _of_size(self, func: Operator, args: Arguments, kwargs: Options, size: int, dtype: torch.dtype) -> Any:
        """The result has this size, which may be large; its values are computed where they are kept."""
        out = torch.empty(size, dtype=dtype, device=META)
        self.follow(func, args, kwargs, out)
        return out

    def _masked_select(self, func: Operator, args: Arguments, kwargs: Options) -> Any:
        data, mask = args[0], self._real(args[1])
        num_elements = torch.broadcast_shapes(data.shape, mask.shape).numel()
        size = int(mask.count_nonzero()) * (num_elements // mask.numel()) if mask.numel() else 0
        return self._of_size(func, args, kwargs, size, data.dtype)

    def _bincount(self, func: Operator, args: Arguments, kwargs: Options) -> Any:
        weights = args[1] if len(args) > 1 else None
        minlength = args[2] if len(args) > 2 else 0
        values = self._real(args[0])
        dtype = torch.int64 if weights is None else torch.float64
        if weights is not None and weights.dtype is torch.float32:
            dtype = torch.float32
        size = int(values.max()) + 1 if values.numel() else 0
        return self._of_size(func, args, kwargs, max(minlength, size), dtype)

    def _index(self, func: Operator, args: Arguments, kwargs: Options) -> Any:
        """Indexing with masks, as indexing with the positions at which they are true."""
        data: torch.Tensor = args[0]
        positions: list[Any] = []
        if not any(map(shapes.is_mask, args[1])):
            return NotImplemented
        for index in args[1]:
            if not shapes.is_mask(index):
                positions.append(index)
                continue
            if index.shape != data.shape[len(positions) : len(positions) + index.dim()]:
                return NotImplemented
            positions.extend(self._simulate(part) for part in self._real(index).nonzero().unbind(1))
        out = func(data, positions)
        self.follow(func, (data, positions), kwargs, out)
        return out

    def _packed(self, func: Operator, args: Arguments, kwargs: Options) -> Any:
        data, lengths, batch_first = args
        lengths = self._real(lengths)
        out = func(data, lengths, batch_first)
        known = self.of(data)
        if known is not None:
            self._keep(out[0], func(known, lengths, batch_first)[0])
        return out


_EXACT: dict[str, Callable[[KnownValues, Operator, Arguments, Options], Any]] = {
    **{
        f"aten::{name}": KnownValues._small_result
        for name in """
        _local_scalar_dense item is_nonzero equal allclose nonzero _unique _unique2 unique_dim unique_consecutive
        unique_dim_consecutive
        """.split()  # noqa: SIM905
    },
    "aten::masked_select": KnownValues._masked_select,
    "aten::index": KnownValues._index,
    "aten::repeat_interleave": lambda known, func, args, kwargs: known._of_size(
        func, args, kwargs, int(known._real(args[0]).sum()), args[0].dtype
    ),
    "aten::bincount": KnownValues._bincount,
    "aten::_pack_padded_sequence": KnownValues._packed,
    "aten::_to_copy": lambda known, func, args, kwargs: (
        call_plain(func, known._real(args[0]), dtype=kwargs.get("dtype")) if shapes.to_host(kwargs) else NotImplemented
    ),
    "aten::copy_": lambda known, func, args, kwargs: (
        NotImplemented if args[0].is_meta else call_plain(func, args[0], known._real(args[1]))
    ),
}


def _lay_over(storage: torch.UntypedStorage, simulated: torch.Tensor) -> torch.Tensor:
    """A host tensor on `storage` with the geometry of `simulated`."""
    empty = torch.empty(0, dtype=simulated.dtype, device=_CPU)
    return empty.set_(storage, simulated.storage_offset(), simulated.shape, simulated.stride())


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Whether the tensor's values are those of its storage negated or conjugated."""
    return tensor.is_neg() or tensor.is_conj()


def _pick(places: tuple[int | str, ...], args: Arguments, kwargs: Options) -> list[Any]:
    """The arguments at these positions and of these names, where given."""
    return [
        kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None for place in places
    ]


def _is_written(operator: str, place: int | str, argument: Any) -> bool:
    if operator == _FINITE_CHECK:
        return place == 0
    # Collectives write into tensors that their schemas show as inputs.
    declared = argument.alias_info is not None and argument.alias_info.is_write
    return declared or operator.startswith("c10d::") or place in _STATISTICS.get(operator, ())


@cache
def _read_schema(func: Operator) -> _Plan:
    schema = internals.schema_of(func)
    namespace, _, name = schema.name.partition("::")
    # Views and changes of geometry leave storages as they are; the size of a storage is compared whenever it is read.
    if shapes.behaviour(func) is shapes.Behaviour.VIEW or torch.Tag.inplace_view in func.tags or "empty" in name:
        return _IGNORED
    places: list[int | str] = [a.name if a.kwarg_only else i for i, a in enumerate(schema.arguments)]
    given = {place: a for place, a in zip(places, schema.arguments, strict=True) if "Tensor" in str(a.type)}
    first = next((place for place in given if isinstance(place, int)), None)
    written = tuple(place for place, a in given.items() if _is_written(schema.name, place, a))
    random = torch.Tag.nondeterministic_seeded in func.tags or any("Generator" in str(a.type) for a in schema.arguments)
    runs = namespace == "aten" and not random
    if not written and not (runs and any("Tensor" in str(r.type) for r in schema.returns)):
        return _IGNORED
    fill = _FILLS.get(name, _FILLS.get(f"{name}.{schema.overload_name}"))
    if runs and fill is not None and not any(isinstance(place, str) for place in written):
        return _Plan(written=written, fill=fill)
    overwriting = schema.name in _OVERWRITING
    return _Plan(
        runs=runs,
        # An operator that overwrites its first tensor doesn't read it.
        first=None if overwriting else first,
        written=written,
        overwritten=(0,) if overwriting else tuple(place for place in written if isinstance(place, str)),
        training=5 if schema.name in _BATCH_NORMS and 3 in written else None,
    )
