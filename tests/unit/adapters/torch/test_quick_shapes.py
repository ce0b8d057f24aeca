"""Quick shape rules give what PyTorch's own rules give."""

import pytest
import torch

from memfit.adapters.torch import quick_shapes

aten = torch.ops.aten


def meta(*shape, dtype=torch.float32, channels_last=False):
    tensor = torch.empty(shape, dtype=dtype, device="meta")
    return tensor.to(memory_format=torch.channels_last) if channels_last else tensor


def describe(value):
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device.type
    if isinstance(value, list | tuple):
        return [describe(part) for part in value]
    return value


UNARY = ["neg", "relu", "gelu", "silu", "sigmoid", "tanh", "hardswish", "exp", "sqrt", "rsqrt", "clone"]


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("channels_last", [False, True])
def test_unary(name, dtype, channels_last):
    func = getattr(aten, name).default
    tensor = meta(2, 3, 4, 5, dtype=dtype, channels_last=channels_last)
    assert describe(quick_shapes.find(func)((tensor,), {})) == describe(func(tensor))


@pytest.mark.parametrize("func", [aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor])
def test_binary(func):
    a, b = meta(2, 3, 4), meta(2, 3, 4)
    assert describe(quick_shapes.find(func)((a, b), {})) == describe(func(a, b))


@pytest.mark.parametrize("func", [aten.add.Tensor, aten.mul.Tensor])
@pytest.mark.parametrize(
    "other",
    [meta(3, 1), meta(2, 3, 4, dtype=torch.float16), meta(4, 3, 2).permute(2, 1, 0)],
    ids=["broadcast", "other dtype", "other strides"],
)
def test_anything_unusual_is_passed_on(func, other):
    assert quick_shapes.find(func)((meta(2, 3, 4), other), {}) is NotImplemented


def test_integers_are_passed_on():
    # GIVEN an operator whose result has another dtype than its input
    tensor = meta(4, dtype=torch.int64)
    # THEN the quick rule leaves it to PyTorch, which says float32
    assert quick_shapes.find(aten.sigmoid.default)((tensor,), {}) is NotImplemented
    assert aten.sigmoid.default(tensor).dtype is torch.float32


@pytest.mark.parametrize("name", ["gelu_backward", "silu_backward", "sigmoid_backward", "tanh_backward"])
def test_backward(name):
    func = getattr(aten, name).default
    a, b = meta(2, 3), meta(2, 3)
    assert describe(quick_shapes.find(func)((a, b), {})) == describe(func(a, b))


def test_threshold_backward():
    func = aten.threshold_backward.default
    a, b = meta(2, 3), meta(2, 3)
    assert describe(quick_shapes.find(func)((a, b, 0), {})) == describe(func(a, b, 0))


@pytest.mark.parametrize("kwargs", [{}, {"dtype": torch.float16}, {"memory_format": torch.preserve_format}])
@pytest.mark.parametrize("name", ["zeros_like", "ones_like", "empty_like"])
def test_like(name, kwargs):
    func = getattr(aten, name).default
    tensor = meta(2, 3, 4, 5, channels_last=True)
    assert describe(quick_shapes.find(func)((tensor,), kwargs)) == describe(func(tensor, **kwargs))


def test_like_in_another_format_is_passed_on():
    rule = quick_shapes.find(aten.empty_like.default)
    assert rule((meta(2, 3, 4, 5),), {"memory_format": torch.channels_last}) is NotImplemented


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_batch_norm(dtype, channels_last):
    data = meta(2, 3, 4, 5, dtype=dtype, channels_last=channels_last)
    weight, bias, mean, variance = (meta(3) for _ in range(4))
    args = (data, weight, bias, mean, variance, True, 0.1, 1e-5)
    func = aten.native_batch_norm.default
    assert describe(quick_shapes.find(func)(args, {})) == describe(func(*args))


def test_batch_norm_backward():
    data = meta(2, 3, 4, 5)
    statistics = [meta(3) for _ in range(5)]
    args = (data, data, *statistics, True, 1e-5, [True, True, False])
    func = aten.native_batch_norm_backward.default
    assert describe(quick_shapes.find(func)(args, {}))[:2] == describe(func(*args))[:2]


def test_evaluation_batch_norm_is_passed_on():
    args = (meta(2, 3, 4, 5), *(meta(3) for _ in range(4)), False, 0.1, 1e-5)
    assert quick_shapes.find(aten.native_batch_norm.default)(args, {}) is NotImplemented


@pytest.mark.parametrize(
    "func, extra",
    [
        (aten._foreach_sqrt.default, ()),
        (aten._foreach_mul.Scalar, (2.0,)),
        (aten._foreach_add.List, "same"),
        (aten._foreach_div.List, "same"),
    ],
)
def test_foreach(func, extra):
    tensors = [meta(2, 3), meta(4)]
    args = (tensors, [torch.empty_like(t) for t in tensors]) if extra == "same" else (tensors, *extra)
    assert describe(quick_shapes.find(func)(args, {})) == describe(list(func(*args)))


def test_foreach_norm_has_no_quick_rule():
    assert quick_shapes.find(aten._foreach_norm.Scalar) is None
