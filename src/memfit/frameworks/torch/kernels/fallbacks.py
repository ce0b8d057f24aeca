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
from collections.abc import Callable
from typing import Any

import numpy
import torch

from memfit.core.units import MIB, format_size
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.kernels import recurrent
from memfit.frameworks.torch.shapes import shapes, sparse
from memfit.frameworks.torch.shapes.origin import calling_frames
from memfit.frameworks.torch.shapes.shapes import META, Arguments, Operator, Options, is_mask, map_nested, tensors

Report = Callable[[str, str], None]
Rule = Callable[[Operator, Arguments, Options, Report], Any]

DATA_DEPENDENT = "data-dependent-shape"
STAND_IN = "stand-in-value"
NO_RULE = "no-shape-rule"
# Attribute of a boolean tensor that `all()` made.
_IS_ALL = "_memfit_is_all"
# The key of a backend that has none of PyTorch's kernels, so that those for all backends run.
_NO_BACKEND = internals.DispatchKeySet(internals.DispatchKey.PrivateUse1)
_MAX_FRAMES = 27
_LARGEST_HOST_RUN_BYTES = 256 * MIB


def _by_name(func: Operator, args: Arguments, kwargs: Options) -> dict[str, Any]:
    return {a.name: value for a, value in zip(internals.schema_of(func).arguments, args, strict=False)} | kwargs


def _empty(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=META)


def _plain_name(func: Operator) -> str:
    return str(internals.name_of(func)).removeprefix("aten::")


def upper_bound(func: Operator, report: Report, what: str) -> None:
    """Notes that a shape is the largest it can be."""
    report(DATA_DEPENDENT, f"{_plain_name(func)}: {what}; upper bound used")


def _nonzero(func: Operator, args: Arguments, kwargs: Options, report: Report) -> Any:
    upper_bound(func, report, "its size depends on data")
    return _empty(args[0].numel(), args[0].dim())


def _masked_select(func: Operator, args: Arguments, kwargs: Options, report: Report) -> Any:
    upper_bound(func, report, "its size depends on data")
    return _empty(torch.broadcast_shapes(args[0].shape, args[1].shape).numel(), dtype=args[0].dtype)


def _index(func: Operator, args: Arguments, kwargs: Options, report: Report) -> Any:
    """Boolean masks become the integer indices they stand for, as many as they can be."""
    if not any(map(is_mask, args[1])):
        return NotImplemented
    upper_bound(func, report, "a boolean mask selects an unknown number of elements")
    indices: list[Any] = []
    for index in args[1]:
        indices += [_empty(index.numel()) for _ in range(index.dim())] if is_mask(index) else [index]
    return func(args[0], indices)


def _index_put(func: Operator, args: Arguments, kwargs: Options, report: Report) -> Any:
    if not any(map(is_mask, args[1])):
        return NotImplemented
    return torch.empty_like(args[0], device=META) if internals.name_of(func) == "aten::index_put" else args[0]


def _unique(func: Operator, args: Arguments, kwargs: Options, report: Report) -> Any:
    tensor = args[0]
    if any(frame.f_code.co_name.endswith("_tensor_validation") for frame in calling_frames(_MAX_FRAMES)):
        # A metric of torchmetrics counts distinct values only to refuse them when there are too many.
        return _empty(1, dtype=tensor.dtype), _empty(0), _empty(0)
    upper_bound(func, report, "the number of distinct values depends on data")
    given = _by_name(func, args, kwargs)
    dim = given.get("dim")
    count = tensor.numel() if dim is None else tensor.shape[dim]
    shape, inverse_shape = ((count,), tensor.shape) if dim is None else (tensor.shape, (count,))
    inverse = _empty(*(inverse_shape if given.get("return_inverse") else (0,)))
    return _empty(*shape, dtype=tensor.dtype), inverse, _empty(count if given.get("return_counts") else 0)


def _repeat_interleave(func: Operator, args: Arguments, kwargs: Options, report: Report) -> Any:
    if kwargs.get("output_size") is not None:
        return _empty(kwargs["output_size"])
    report(DATA_DEPENDENT, "repeat_interleave: its size depends on data; one repeat of each assumed")
    return _empty(args[0].numel())


def _bincount(func: Operator, args: Arguments, kwargs: Options, report: Report) -> Any:
    minlength = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
    if minlength:
        # Given to have as many bins whatever the data, as for a confusion matrix.
        return _empty(int(minlength))
    report(DATA_DEPENDENT, "bincount: the number of bins depends on data; the input's length assumed")
    return _empty(args[0].numel())


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


def read_as_true(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, marked as one whose value is taken to be True when it is read."""
    setattr(tensor, _IS_ALL, True)
    return tensor


def compare(func: Operator, args: Arguments, kwargs: Options, report: Report) -> Any:
    """A comparison of single numbers comes out as that of their stand-ins: `loss >= 0` is true, as 1 >= 0 is."""
    numbers = []
    for value in args[:2]:
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                return NotImplemented
            value = _stand_in(value) if value.is_meta else value.item()
        numbers.append(value)
    made = func(*args, **kwargs)
    return read_as_true(made) if _COMPARISONS[internals.name_of(func)](*numbers) else made


def conjunction(func: Operator, args: Arguments, kwargs: Options, report: Report) -> Any:
    """`improves & goes_on` of single flags goes by what is known of them, so that a loop ends at its own limit."""
    flags = args[:2]
    if not all(isinstance(flag, torch.Tensor) and flag.dtype is torch.bool and flag.numel() == 1 for flag in flags):
        return NotImplemented
    made = func(*args, **kwargs)
    known = [flag for flag in flags if not flag.is_meta]
    true = all(known) if known else all(hasattr(flag, _IS_ALL) for flag in flags)
    return read_as_true(made) if true else made


_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    f"aten::{name}": getattr(operator, name) for name in ("eq", "ne", "ge", "gt", "le", "lt")
}


def _true(func: Operator, args: Arguments, kwargs: Options, report: Report) -> Any:
    if internals.name_of(func) == "aten::equal" and args[0].dtype is torch.bool and args[0].numel() == 1:
        # That is how PyTorch's C++ code asks whether a flag is set.
        return False
    report(STAND_IN, f"{_plain_name(func)} was read from the device: True stands in for it")
    return True


def _copy(func: Operator, args: Arguments, kwargs: Options, report: Report) -> Any:
    """A copy to the host: what `item` would give for a single number, ones or zeros for more."""
    if not shapes.to_host(kwargs):
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


def host_zeros(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the host; a large tensor of them costs no memory until it is touched."""
    size_bytes = shape.numel() * dtype.itemsize
    if size_bytes < MIB:
        return torch.zeros(shape, dtype=dtype)
    # The pages of NumPy's zeros are the kernel's own until they are written to.
    return torch.from_numpy(numpy.zeros(size_bytes, dtype=numpy.uint8)).view(dtype).view(shape)


def _packed(func: Operator, args: Arguments, kwargs: Options, report: Report) -> Any:
    """Packed sequences: by the lengths where they are known, as on CUDA, where they are on the host."""
    data, lengths, batch_first = args
    if lengths.is_meta or not bool((lengths > 0).all()):
        report(DATA_DEPENDENT, "pack_padded_sequence: the lengths depend on data; full length assumed for each")
        batch, steps = (data.shape[0], data.shape[1]) if batch_first else (data.shape[1], data.shape[0])
        lengths = torch.full((batch,), steps)
    return func(data, lengths, batch_first)


def _reduced_in_place(func: Operator, args: Arguments, kwargs: Options, report: Report) -> Any:
    """A loss whose scalar keeps the memory of all elements' losses: it is made in their size and resized (Loss.cpp)."""
    if _by_name(func, args, kwargs).get("reduction", 1) == 0:
        return NotImplemented
    return _empty(*torch.broadcast_shapes(args[0].shape, args[1].shape), dtype=args[0].dtype).as_strided((), ())


def _grouped_mm(func: Operator, args: Arguments, kwargs: Options, report: Report) -> Any:
    """Products of groups of rows, as experts make them; PyTorch's own rule takes bfloat16 only, its kernels more."""
    left, right = args[:2]
    given = _by_name(func, args, kwargs)
    groups = []
    if left.dim() == right.dim():
        groups = [given["offs"].shape[0] if left.dim() == 2 else left.shape[0]]
    return _empty(*groups, left.shape[-2], right.shape[-1], dtype=given.get("out_dtype") or left.dtype)


def _byte_classes(func: Operator, args: Arguments, kwargs: Options, report: Report) -> Any:
    """Losses take classes as uint8 too, which PyTorch's rule gathers with; kernels know no such index otherwise."""
    classes = [value for value in args[1:3] if value is not None and value.dtype is torch.uint8]
    if not classes:
        return NotImplemented
    wider = _empty(*classes[0].shape)
    return func(*(wider if value is classes[0] else value for value in args), **kwargs)


def _kept_boxes(func: Operator, args: Arguments, kwargs: Options, report: Report) -> Any:
    upper_bound(func, report, "the number of boxes kept depends on data")
    return _empty(args[0].shape[0])


RULES: dict[str, Rule] = {
    "aten::nonzero": _nonzero,
    "aten::masked_select": _masked_select,
    "aten::index": _index,
    **dict.fromkeys(("aten::index_put", "aten::index_put_", "aten::_index_put_impl_"), _index_put),
    **dict.fromkeys(("aten::_unique2", "aten::unique_dim", "aten::unique_consecutive"), _unique),
    "aten::repeat_interleave": _repeat_interleave,
    "aten::bincount": _bincount,
    # Checks such as `isfinite(x).all()` pass, masks without padding are left out.
    **dict.fromkeys(
        ("aten::all", "aten::_is_all_true"),
        lambda func, args, kwargs, report: read_as_true(func(*args, **kwargs)),
    ),
    **dict.fromkeys(
        ("aten::_local_scalar_dense", "aten::is_nonzero"),
        lambda func, args, kwargs, report: stand_in(args[0], report),
    ),
    **dict.fromkeys(("aten::equal", "aten::allclose"), _true),
    **dict.fromkeys(_COMPARISONS, compare),
    **dict.fromkeys(("aten::bitwise_and", "aten::logical_and"), conjunction),
    "aten::_to_copy": _copy,
    "aten::copy_": lambda func, args, kwargs, report: NotImplemented if args[0].is_meta else args[0],
    "aten::_pack_padded_sequence": _packed,
    "aten::_fused_rms_norm": recurrent.rms_norm_forward_rule,
    "aten::_grouped_mm": _grouped_mm,
    **dict.fromkeys(
        ("aten::mse_loss", "aten::smooth_l1_loss", "aten::soft_margin_loss", "aten::binary_cross_entropy"),
        _reduced_in_place,
    ),
    # cuDNN's takes no more memory than PyTorch's own, which is the one that runs.
    "aten::_use_cudnn_ctc_loss": lambda func, args, kwargs, report: False,
    "aten::_ctc_loss_backward": lambda func, args, kwargs, report: torch.empty_like(
        args[1], memory_format=torch.contiguous_format
    ),
    **sparse.RULES,
    **dict.fromkeys(("aten::nll_loss_forward", "aten::nll_loss_backward"), _byte_classes),
    "torchvision::nms": _kept_boxes,
}


def _of_others(func: Operator, *args: Any, **kwargs: Any) -> Any:
    return func.redispatch(_NO_BACKEND, *args, **kwargs)


COMPOSITIONS = {
    f"aten::{name}": _of_others
    for name in """
    logsumexp count_nonzero binary_cross_entropy_with_logits soft_margin_loss_backward dist _euclidean_dist mvlgamma
    _is_any_true
    """.split()  # noqa: SIM905
}
"""Operators without a kernel of their own on any device: below autograd they are made of others that take memory
(CompositeExplicitAutograd in native_functions.yaml)."""


def without_rule(func: Operator, args: Arguments, kwargs: Options, report: Report) -> Any:
    """Outputs of an operator that can't run on shapes."""
    name = internals.name_of(func)
    given = list(tensors((*args, *kwargs.values())))
    if sum(map(shapes.size_bytes, given)) <= _LARGEST_HOST_RUN_BYTES:

        def zeros(tensor: torch.Tensor) -> torch.Tensor:
            return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor

        try:
            out = func(*map_nested(args, zeros), **{k: map_nested(v, zeros) for k, v in kwargs.items()})
        except Exception:  # the kernel's own refusal of zeros, whatever its type: the other rule follows
            pass
        else:
            report(NO_RULE, f"{name} has no shape rule; its CPU kernel was run on zeros of the same shapes")
            return map_nested(out, shapes.shape_like)
    if not given:
        raise NotImplementedError(f"{name} has no shape rule and takes no tensor to go by")
    if not internals.schema_of(func).returns:
        report(NO_RULE, f"{name} has no shape rule and returns nothing; taken to need no memory of its own")
        return None
    size = format_size(shapes.size_bytes(given[0]))
    report(NO_RULE, f"{name} has no shape rule; each output taken to be like its first argument ({size})")
    outputs = [torch.empty_like(given[0], device=META) for _ in internals.schema_of(func).returns]
    return outputs[0] if len(outputs) == 1 else tuple(outputs)
