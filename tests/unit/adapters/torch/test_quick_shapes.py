import itertools

import pytest
import torch

from memfit.adapters.torch import quick_shapes
from tests.unit.adapters.torch.builders import observe

META = torch.device("meta")


def empty(*shape, dtype=torch.float32, layout=None):
    made = torch.empty(shape, dtype=dtype, device=META)
    return made.to(memory_format=layout) if layout is not None else made


# Plain, channels-last, transposed, expanded, strided, empty, scalar.
TENSORS = {
    "dense": empty(2, 3, 4, 5),
    "channels-last": empty(2, 3, 4, 5, layout=torch.channels_last),
    "transposed": empty(4, 3).t(),
    "expanded": empty(1, 3).expand(4, 3),
    "strided": empty(4, 8)[:, ::2],
    "none": empty(0, 3),
    "scalar": empty(),
    "half": empty(2, 3, dtype=torch.float16),
    "integers": empty(2, 3, dtype=torch.int64),
    "booleans": empty(2, 3, dtype=torch.bool),
}


def describe(out):
    if isinstance(out, torch.Tensor):
        return tuple(out.shape), out.stride(), out.dtype
    if out is None:
        return None
    return [describe(part) for part in out]


def assert_agrees(op, *args, **kwargs):
    """The quick rule gives what PyTorch gives, or passes."""
    quick = quick_shapes.find(op)(args, kwargs)
    if quick is NotImplemented:
        return False
    assert describe(quick) == describe(op(*args, **kwargs))
    return True


def overload(name):
    packet, _, suffix = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), suffix)


UNARY = ("neg", "relu", "gelu", "silu", "sigmoid", "tanh", "hardswish", "exp", "sqrt", "rsqrt", "clone")


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("kind", TENSORS)
def test_functions_of_one_tensor(name, kind):
    tensor = TENSORS[kind]
    if name in ("gelu", "silu", "hardswish") and not tensor.is_floating_point():
        return
    if name == "neg" and tensor.dtype is torch.bool:
        return
    quick = assert_agrees(overload(f"{name}.default"), tensor)
    assert quick or kind not in ("dense", "channels-last", "half")


@pytest.mark.parametrize("name", ["add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor"])
def test_functions_of_two_tensors(name):
    # GIVEN every pair of tensors that can be combined, and numbers
    quick = 0
    for first, second in itertools.product([*TENSORS.values()], [*TENSORS.values(), 2, 2.5]):
        try:
            overload(name)(first, second)
        except (RuntimeError, TypeError):
            continue
        # THEN the rule agrees with PyTorch wherever it answers
        quick += assert_agrees(overload(name), first, second)
    assert quick > len(TENSORS)


def test_scaled_sums_are_passed_on():
    tensor = TENSORS["dense"]

    assert not assert_agrees(torch.ops.aten.add.Tensor, tensor, tensor, alpha=2)


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("threshold_backward", (0,)),
        ("gelu_backward", ()),
        ("silu_backward", ()),
        ("sigmoid_backward", ()),
        ("tanh_backward", ()),
        ("hardswish_backward", ()),
    ],
)
@pytest.mark.parametrize("kinds", [("dense", "dense"), ("dense", "channels-last"), ("channels-last", "dense")])
def test_gradients_of_functions(name, extra, kinds):
    gradient, tensor = (TENSORS[kind] for kind in kinds)

    quick = assert_agrees(overload(f"{name}.default"), gradient, tensor, *extra)

    assert quick is (kinds[0] == kinds[1])


@pytest.mark.parametrize("name", ["zeros_like", "ones_like", "empty_like"])
@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": torch.float64},
        {"memory_format": torch.preserve_format},
        {"memory_format": torch.contiguous_format},
        {"pin_memory": False},
    ],
    ids=str,
)
def test_tensors_like_others(name, kind, options):
    assert_agrees(overload(f"{name}.default"), TENSORS[kind], **options)


def test_a_tensor_like_another_on_the_host_is_passed_on():
    rule = quick_shapes.find(torch.ops.aten.zeros_like.default)

    assert rule((TENSORS["dense"],), {"device": torch.device("cpu")}) is NotImplemented


LISTS = [
    [empty(3, 4), empty(5)],
    [empty(3, 4, dtype=torch.float16), empty(5, dtype=torch.float16)],
    [empty(4, 3).t(), empty(5)],
]


@pytest.mark.parametrize("name", ["add", "mul", "div", "sub"])
@pytest.mark.parametrize("first", LISTS)
@pytest.mark.parametrize("second", LISTS)
def test_lists_with_lists(name, first, second):
    assert_agrees(overload(f"_foreach_{name}.List"), first, second)


@pytest.mark.parametrize("name", ["sqrt", "neg", "abs", "reciprocal"])
@pytest.mark.parametrize("tensors", LISTS)
def test_lists_alone(name, tensors):
    assert_agrees(overload(f"_foreach_{name}.default"), tensors)


def test_lists_in_place_give_nothing():
    assert quick_shapes.find(torch.ops.aten._foreach_mul_.Scalar)((LISTS[0], 2.0), {}) is None
    assert torch.ops.aten._foreach_mul_.Scalar(LISTS[0], 2.0) is None


def test_norms_and_maxima_of_lists_have_no_quick_rule():
    # Their results are not like their inputs.
    assert quick_shapes.find(torch.ops.aten._foreach_norm.Scalar) is None


@pytest.mark.parametrize("kind", ["dense", "channels-last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm(kind, dtype, training):
    data = TENSORS[kind].to(dtype)
    parts = [empty(3, dtype=torch.float64 if dtype is torch.float64 else torch.float32) for _ in range(4)]

    quick = assert_agrees(torch.ops.aten.native_batch_norm.default, data, *parts, training, 0.1, 1e-5)

    assert quick is training


@pytest.mark.parametrize("mask", list(itertools.product([True, False], repeat=2)))
def test_the_gradient_of_batch_norm(mask):
    data, vector = TENSORS["dense"], empty(3)
    args = (data, data, vector, vector, vector, vector, vector, True, 1e-5)

    assert assert_agrees(torch.ops.aten.native_batch_norm_backward.default, *args, [True, *mask])


def test_batch_norm_makes_no_gradient_that_nobody_wants():
    # PyTorch's shape rule makes the input's gradient regardless; its CUDA kernel doesn't.
    data, vector = TENSORS["dense"], empty(3)
    args = (data, data, vector, vector, vector, vector, vector, True, 1e-5, [False, True, False])

    quick = quick_shapes.find(torch.ops.aten.native_batch_norm_backward.default)(args, {})

    assert describe(quick) == [None, ((3,), (1,), torch.float32), None]


def test_classes_may_be_bytes():
    logits, weight = empty(6, 5), empty(5)
    kernel = torch.ops.aten.nll_loss_forward.default
    for reduction in (0, 1):
        for given in (None, weight):
            arguments = (given, reduction, 255)
            usual = kernel(logits, empty(6, dtype=torch.int64), *arguments)
            found = quick_shapes.find(kernel)((logits, empty(6, dtype=torch.uint8), *arguments), {})
            assert describe(found) == describe(usual)
    assert quick_shapes.find(kernel)((logits, empty(6, dtype=torch.int64), None, 1, -100), {}) is NotImplemented


def test_a_loss_over_classes_in_bytes_is_simulated():
    def step(data, classes):
        with torch.enable_grad():
            data = data.clone().requires_grad_()
            torch.nn.functional.cross_entropy(data, classes).backward()
        return data.grad.shape

    data, classes = torch.zeros(16, 5), torch.zeros(16, dtype=torch.uint8)
    assert step(data, classes) == (16, 5)

    shape, _ = observe(step, data, classes)

    assert shape == (16, 5)


def test_every_rule_is_for_an_operator_that_makes_tensors_of_its_own():
    # A view or an operator that changes metadata must never be answered from a rule.
    for op in quick_shapes._RULES:
        written = [a for a in op._schema.arguments if a.alias_info is not None and not a.alias_info.is_write]
        assert not written, op


def test_rules_are_used_on_the_simulated_device():
    shape, _ = observe(lambda data: (data + data).shape, torch.empty(2, 3))

    assert shape == (2, 3)
