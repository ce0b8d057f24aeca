"""Operators whose output the shapes don't decide, and operators without a shape rule.

Where a rule has to assume something, it reports a note:

- a shape that depends on data (`nonzero`, boolean indexing, `unique`): the largest it can be;
- a single value read from the device (`item()`, `.cpu()`): 1, or for booleans False, so that checks such as
  `isnan(x).any()` pass, but True for `all()`, so that those such as `isfinite(x).all()` do; several values: ones of
  floating-point numbers, True of a mask, zeros of whole numbers and of anything of 1 MiB or more;
- no shape rule (custom operators): the operator's CPU kernel is run on zeros of the same shapes where there is one and
  they are small, otherwise each output is taken to be like the first tensor argument.
"""

import operator
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy
import torch

from memfit.adapters.torch import convolution_layout, rms_norm, sparse, synchronized_norm
from memfit.adapters.torch.shapes import META, Operator
from memfit.core.units import MIB, format_size

Report = Callable[[str, str], None]
Rule = Callable[[Operator, tuple[Any, ...], dict[str, Any], Report], Any]

DATA_DEPENDENT = "data-dependent-shape"
STAND_IN = "stand-in-value"
NO_RULE = "no-shape-rule"
# Attribute of a boolean tensor that `all()` made.
_IS_ALL = "_memfit_is_all"
_MAX_FRAMES = 25
_LARGEST_HOST_RUN_BYTES = 256 * MIB


def _empty(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=META)


def upper_bound(func: Operator, report: Report, what: str) -> None:
    """Notes that a shape is the largest it can be."""
    report(DATA_DEPENDENT, f"{func._schema.name.replace('aten::', '')}: {what}; upper bound used")


def _nonzero(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
    upper_bound(func, report, "its size depends on data")
    return _empty(args[0].numel(), args[0].dim())


def _masked_select(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
    upper_bound(func, report, "its size depends on data")
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    return _empty(shape.numel(), dtype=args[0].dtype)


def _indices_of_masks(indices: list[Any]) -> list[Any]:
    """Boolean masks as the integer indices they stand for, as many as they can be."""
    plain: list[Any] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            plain.extend(_empty(index.numel()) for _ in range(index.dim()))
        else:
            plain.append(index)
    return plain


def _has_mask(indices: list[Any]) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)


def _index(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
    tensor, indices = args[0], list(args[1])
    if not _has_mask(indices):
        return NotImplemented
    upper_bound(func, report, "a boolean mask selects an unknown number of elements")
    return func(tensor, _indices_of_masks(indices))


def _index_put(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
    if not _has_mask(list(args[1])):
        return NotImplemented
    if func._schema.name == "aten::index_put":
        return torch.empty_like(args[0], device=META)
    return args[0]


def _is_validation() -> bool:
    """Whether a metric of torchmetrics counts distinct values only to refuse them when there are too many."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return False
        if frame.f_code.co_name.endswith("_tensor_validation"):
            return True
        frame = frame.f_back
    return False


def _unique(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
    tensor = args[0]
    if _is_validation():
        return _empty(1, dtype=tensor.dtype), _empty(0), _empty(0)
    upper_bound(func, report, "the number of distinct values depends on data")
    given = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    dim = given.get("dim")
    count = tensor.numel() if dim is None else tensor.shape[dim]
    inverse_shape = tensor.shape if dim is None else (count,)
    distinct = _empty(*(tensor.shape if dim is not None else (count,)), dtype=tensor.dtype)
    inverse = _empty(*(inverse_shape if given.get("return_inverse") else (0,)))
    return distinct, inverse, _empty(count if given.get("return_counts") else 0)


def _repeat_interleave(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
    if kwargs.get("output_size") is not None:
        return _empty(kwargs["output_size"])
    report(DATA_DEPENDENT, "repeat_interleave: its size depends on data; one repeat of each assumed")
    return _empty(args[0].numel())


def _bincount(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
    minlength = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
    if minlength:
        # Given to have as many bins whatever the data, as for a confusion matrix.
        return _empty(int(minlength))
    report(DATA_DEPENDENT, "bincount: the number of bins depends on data; the input's length assumed")
    return _empty(args[0].numel())


def _scalar(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
    return stand_in(args[0], report)


def stand_in(tensor: torch.Tensor, report: Report) -> Any:
    """What the number in `tensor` is taken to be, and a note of it."""
    value = _stand_in(tensor)
    report(STAND_IN, f"a value was read from the device: {value!r} stands in for it")
    return value


def _stand_in(tensor: torch.Tensor) -> Any:
    """What a single number on the device is taken to be."""
    if tensor.dtype is torch.bool:
        return hasattr(tensor, _IS_ALL)
    return 1.0 if tensor.dtype.is_floating_point else complex(1) if tensor.dtype.is_complex else 1


def _all(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
    """Marks the result of `all()`: checks such as `isfinite(x).all()` pass, masks without padding are left out."""
    return read_as_true(func(*args, **kwargs))


def read_as_true(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, marked as one whose value is taken to be True when it is read."""
    setattr(tensor, _IS_ALL, True)
    return tensor


def _equal(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
    """Equal, but for single booleans: that is how PyTorch's C++ code asks whether a flag is set."""
    if args[0].dtype is torch.bool and args[0].numel() == 1:
        return False
    return _true(func, args, kwargs, report)


def compare(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
    """A comparison of single numbers comes out as that of their stand-ins: `loss >= 0` is true, as 1 >= 0 is."""
    single = [value.numel() == 1 if isinstance(value, torch.Tensor) else True for value in args[:2]]
    if not all(single):
        return NotImplemented
    left, right = map(_number, args[:2])
    made = func(*args, **kwargs)
    return read_as_true(made) if _COMPARISONS[func._schema.name](left, right) else made


def conjunction(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
    """`improves & goes_on` of single flags goes by what is known of them, so that a loop ends at its own limit."""
    flags = args[:2]
    if not all(isinstance(flag, torch.Tensor) and flag.dtype is torch.bool and flag.numel() == 1 for flag in flags):
        return NotImplemented
    made = func(*args, **kwargs)
    known = [flag for flag in flags if not flag.is_meta]
    true = all(known) if known else all(hasattr(flag, _IS_ALL) for flag in flags)
    return read_as_true(made) if true else made


def _number(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return _stand_in(value) if value.is_meta else value.item()


_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "aten::eq": operator.eq,
    "aten::ne": operator.ne,
    "aten::ge": operator.ge,
    "aten::gt": operator.gt,
    "aten::le": operator.le,
    "aten::lt": operator.lt,
}


def _true(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
    report(STAND_IN, f"{func._schema.name.replace('aten::', '')} was read from the device: True stands in for it")
    return True


def _copy(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
    """A copy to the host: what `item` would give for a single number, ones or zeros for more."""
    if not to_host(kwargs):
        return NotImplemented
    tensor = args[0]
    dtype = kwargs.get("dtype") or tensor.dtype
    if tensor.numel() == 1:
        value = _stand_in(tensor)
        report(STAND_IN, f"a value was copied from the device to the host: {value!r} stands in for it")
        return torch.full(tensor.shape, value, dtype=dtype)
    # Numbers that can be divided by and drawn with; an index must be one that is there.
    if dtype.is_floating_point and tensor.numel() * dtype.itemsize < MIB:
        report(STAND_IN, "values were copied from the device to the host: ones stand in for them")
        return torch.ones(tensor.shape, dtype=dtype)
    report(STAND_IN, "values were copied from the device to the host: zeros stand in for them")
    return host_zeros(tensor.shape, dtype)


def to_host(kwargs: dict[str, Any]) -> bool:
    """Whether the arguments of a copy name the host as its destination."""
    device = kwargs.get("device")
    return device is not None and torch.device(device).type != "meta"


def host_zeros(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the host; a large tensor of them costs no memory until it is touched."""
    size_bytes = shape.numel() * dtype.itemsize
    if size_bytes < MIB:
        return torch.zeros(shape, dtype=dtype)
    # The pages of NumPy's zeros are the kernel's own until they are written to.
    return torch.from_numpy(numpy.zeros(size_bytes, dtype=numpy.uint8)).view(dtype).view(shape)


def _copy_in_place(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
    return NotImplemented if args[0].is_meta else args[0]


def _packed(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
    """Packed sequences: by the lengths where they are known, as on CUDA, where they are on the host."""
    data, lengths, batch_first = args
    if lengths.is_meta or not bool((lengths > 0).all()):
        report(DATA_DEPENDENT, "pack_padded_sequence: the lengths depend on data; full length assumed for each")
        batch, steps = (data.shape[0], data.shape[1]) if batch_first else (data.shape[1], data.shape[0])
        lengths = torch.full((batch,), steps)
    return func(data, lengths, batch_first)


def _reduced_in_place(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
    """A loss whose scalar keeps the memory of all elements' losses: it is made in their size and resized (Loss.cpp)."""
    given = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    if given.get("reduction", 1) == 0:
        return NotImplemented
    elements = torch.empty(torch.broadcast_shapes(args[0].shape, args[1].shape), dtype=args[0].dtype, device=META)
    return elements.as_strided((), ())


def _grouped_mm(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
    """Products of groups of rows, as experts make them; PyTorch's own rule takes bfloat16 only, its kernels more."""
    left, right = args[:2]
    given = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    dtype = given.get("out_dtype") or left.dtype
    size: tuple[int, ...]
    if left.dim() == 2 and right.dim() == 2:
        size = (given["offs"].shape[0], left.shape[0], right.shape[1])
    elif left.dim() == 2 or right.dim() == 2:
        size = (left.shape[-2], right.shape[-1])
    else:
        size = (left.shape[0], left.shape[1], right.shape[-1])
    return torch.empty(size, dtype=dtype, device=META)


def _ctc_loss_backward(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
    return torch.empty_like(args[1], memory_format=torch.contiguous_format)


def _kept_boxes(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
    upper_bound(func, report, "the number of boxes kept depends on data")
    return _empty(args[0].shape[0])


RULES: dict[str, Rule] = {
    "aten::nonzero": _nonzero,
    "aten::masked_select": _masked_select,
    "aten::index": _index,
    "aten::index_put": _index_put,
    "aten::index_put_": _index_put,
    "aten::_index_put_impl_": _index_put,
    "aten::_unique2": _unique,
    "aten::unique_dim": _unique,
    "aten::unique_consecutive": _unique,
    "aten::repeat_interleave": _repeat_interleave,
    "aten::bincount": _bincount,
    "aten::all": _all,
    "aten::_is_all_true": _all,
    "aten::_local_scalar_dense": _scalar,
    "aten::equal": _equal,
    "aten::allclose": _true,
    **dict.fromkeys(_COMPARISONS, compare),
    **dict.fromkeys(("aten::bitwise_and", "aten::logical_and"), conjunction),
    "aten::is_nonzero": _scalar,
    "aten::_to_copy": _copy,
    "aten::copy_": _copy_in_place,
    "aten::_pack_padded_sequence": _packed,
    "aten::_fused_rms_norm": rms_norm.forward_rule,
    "aten::convolution": convolution_layout.forward_rule,
    "aten::convolution_backward": convolution_layout.backward_rule,
    "aten::_grouped_mm": _grouped_mm,
    "aten::mse_loss": _reduced_in_place,
    "aten::smooth_l1_loss": _reduced_in_place,
    "aten::soft_margin_loss": _reduced_in_place,
    "aten::binary_cross_entropy": _reduced_in_place,
    # cuDNN's takes no more memory than PyTorch's own, which is the one that runs.
    "aten::_use_cudnn_ctc_loss": lambda func, args, kwargs, report: False,
    "aten::_ctc_loss_backward": _ctc_loss_backward,
    **sparse.RULES,
    **synchronized_norm.RULES,
    "torchvision::nms": _kept_boxes,
}


def without_rule(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> Any:
    """Outputs of an operator that can't run on shapes."""
    name = func._schema.name
    tensors = [value for value in _flatten((*args, *kwargs.values())) if isinstance(value, torch.Tensor)]
    total_bytes = sum(t.numel() * t.element_size() for t in tensors)
    if total_bytes <= _LARGEST_HOST_RUN_BYTES:
        try:
            out = func(*_map(args, _zeros), **{k: _map(v, _zeros) for k, v in kwargs.items()})
        except Exception:  # the kernel's own refusal of zeros, whatever its type: the other rule follows
            pass
        else:
            report(NO_RULE, f"{name} has no shape rule; its CPU kernel was run on zeros of the same shapes")
            return _map(out, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=META))
    if not tensors:
        raise NotImplementedError(f"{name} has no shape rule and takes no tensor to go by")
    size = format_size(tensors[0].numel() * tensors[0].element_size())
    report(NO_RULE, f"{name} has no shape rule; each output taken to be like its first argument ({size})")
    outputs = [torch.empty_like(tensors[0], device=META) for _ in func._schema.returns]
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _flatten(values: Any) -> list[Any]:
    flat: list[Any] = []
    for value in values:
        flat.extend(_flatten(value)) if isinstance(value, list | tuple) else flat.append(value)
    return flat


def _map(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(_map(part, change) for part in value)
    return value


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor
