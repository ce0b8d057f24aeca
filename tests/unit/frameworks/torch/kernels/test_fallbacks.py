import itertools
import resource
import uuid

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memfit.core.errors import StepFailed
from memfit.core.timeline import Phase
from memfit.frameworks.torch.kernels import fallbacks
from tests.unit.frameworks.torch.builders import AMPERE, HOST, forward_blocks, line_of, made_in, observe, run, sizes
from tests.unit.frameworks.torch.sessions import codes, running

DATA = torch.empty(4, 6)


def shape_of(work, *inputs, device=AMPERE):
    """(what `work` returned, codes and lines of the notes)."""
    result, traced = observe(work, *(inputs or (DATA,)), device=device)
    return result, [(note.code, note.source.rpartition(":")[2]) for note in traced.notes]


def noted(code, work):
    return [(code, str(line_of(work)))]


def nonzero(x):
    return x.nonzero().shape


def where(x):
    return [index.shape for index in torch.where(x > 0)]


def masked_select(x):
    return x.masked_select(x > 0).shape


def index_by_mask(x):
    return x[x > 0].shape


def index_rows_by_mask(x):
    return x[(x > 0).any(1)].shape


def index_column_by_mask(x):
    return x[:, (x > 0).any(0)].shape


def unique(x):
    return x.unique().shape


def unique_rows(x):
    return [part.shape for part in x.unique(dim=0, return_inverse=True, return_counts=True)]


def unique_all(x):
    return [part.shape for part in x.unique(return_inverse=True, return_counts=True)]


def unique_consecutive(x):
    return [part.shape for part in torch.unique_consecutive(x, return_inverse=True)]


def bincount(x):
    return torch.bincount(x.long().flatten()).shape


def bincount_with_bins(x):
    return torch.bincount(x.long().flatten(), minlength=100).shape


def repeat_interleave(x):
    return x.repeat_interleave(x[:, 0].long(), dim=0).shape


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (nonzero, (24, 2)),
        (where, [(24,), (24,)]),
        (masked_select, (24,)),
        (index_by_mask, (24,)),
        (index_rows_by_mask, (4, 6)),
        (index_column_by_mask, (4, 6)),
        (unique, (24,)),
        (unique_rows, [(4, 6), (4,), (4,)]),
        (unique_all, [(24,), (4, 6), (24,)]),
        (unique_consecutive, [(24,), (4, 6)]),
        (bincount, (24,)),
        (repeat_interleave, (4, 6)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("device", [AMPERE, HOST], ids=["cuda", "host"])
def test_shapes_that_depend_on_data_are_the_largest_possible(work, expected, device):
    result, found = shape_of(work, device=device)

    assert result == expected
    assert found == noted("data-dependent-shape", work)


def test_outputs_of_unique_that_nobody_asked_for_take_nothing():
    _, traced = observe(unique, DATA)

    assert sizes(forward_blocks(traced), "_unique2") == [24 * 4]


def put_by_mask(x):
    x[x > 0] = x.flatten()


def fill_by_mask(x):
    x[x > 0] = 0.0


def test_a_given_number_of_bins_needs_no_guess():
    assert shape_of(bincount_with_bins) == ((100,), [])


def test_writing_by_a_mask_needs_no_guess():
    assert shape_of(put_by_mask)[1] == []


def test_filling_by_a_mask_needs_no_guess():
    assert shape_of(fill_by_mask)[1] == []


def test_a_known_number_of_repeats_needs_no_guess():
    assert shape_of(lambda x: x.repeat_interleave(3, dim=0).shape) == ((12, 6), [])
    counts = torch.tensor([1, 2, 3, 4])

    def given_size(x, counts):
        return x.repeat_interleave(counts, dim=0, output_size=10).shape

    assert shape_of(given_size, DATA, counts) == ((10, 6), [])


def test_selected_elements_have_gradients():
    model = nn.Linear(6, 6)

    def loss(model, batch):
        out = model(batch)
        return out[out > 0].sum()

    traced = run(model, DATA, loss=loss)

    assert made_in(traced, Phase.BACKWARD)


def item(x):
    return x.sum().item()


def integer(x):
    return int(x.long().sum())


def any_bad(x):
    return bool(x.isnan().any())


def all_good(x):
    return bool((x > 0).all())


def finite(x):
    return bool(torch.isfinite(x.sum()))


def condition(x):
    return "yes" if x.sum() > 0 else "no"


def negative(x):
    return bool(x.sum() < 0)


def same_number(x):
    return bool(x.sum() == x.mean())


def formatted(x):
    return f"{x.sum():.2f}"


def equal(x):
    return torch.equal(x, x)


def all_close(x):
    return torch.allclose(x, x)


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (item, 1.0),
        (integer, 1),
        # Checks for nan, overflow and padding pass.
        (any_bad, False),
        (all_good, True),
        (finite, True),
        # A comparison of single numbers is that of their stand-ins.
        (condition, "yes"),
        (negative, False),
        (same_number, True),
        (formatted, "1.00"),
        (equal, True),
        (all_close, True),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("device", [AMPERE, HOST], ids=["cuda", "host"])
def test_values_read_from_the_device_have_stand_ins(work, expected, device):
    result, found = shape_of(work, device=device)

    assert result == expected
    assert found == noted("stand-in-value", work)


def copied(x):
    return x.cpu()


def listed(x):
    return torch.tensor(x.tolist())


def as_array(x):
    return torch.from_numpy(x.detach().cpu().numpy())


def as_array_by_numpy(x):
    return torch.from_numpy(np.asarray(x.cpu()))


@pytest.mark.parametrize("work", [copied, listed, as_array, as_array_by_numpy])
def test_copies_on_the_host_hold_ones(work):
    result, found = shape_of(lambda x: bool((work(x) == 1).all()) and tuple(work(x).shape))

    assert result == (4, 6)
    assert found == noted("stand-in-value", work)


@pytest.mark.parametrize("work", [as_array, as_array_by_numpy])
def test_on_the_host_arrays_hold_ones(work):
    result, found = shape_of(lambda x: bool((work(x) == 1).all()) and tuple(work(x).shape), device=HOST)

    assert result == (4, 6)
    assert found == noted("stand-in-value", work)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda x: x.half(), 1),
        (lambda x: x.double(), 1),
        # An index must be one that is there, and what a mask selects takes most memory when it selects all.
        (lambda x: x.long(), 0),
        (lambda x: x > 0, 1),
        (lambda x: x.new_empty(2**18 - 1), 1),
        (lambda x: x.new_empty(2**18), 0),
    ],
    ids=["float16", "float64", "int64", "bool", "less than 1 MiB", "1 MiB"],
)
def test_what_stands_in_for_several_values(make, expected):
    assert shape_of(lambda x: bool((make(x).cpu() == expected).all()))[0] is True


def test_an_array_of_a_tensor_on_the_device_is_refused_as_on_cuda():
    with pytest.raises(StepFailed, match=r"Use Tensor\.cpu\(\)"):
        observe(lambda x: x.numpy(), DATA)


def test_copies_into_host_tensors_leave_them_there():
    def work(x):
        target = torch.ones(4, 6)
        target.copy_(x)
        return target.device.type, float(target.sum())

    assert shape_of(work)[0] == ("cpu", 24.0)


@pytest.fixture
def library():
    """A namespace of operators that lasts as long as the test."""
    name = f"memfit_test_{uuid.uuid4().hex}"
    with torch.library._scoped_library(name, "FRAGMENT") as made:
        yield name, made


def define(library, schema, kernel=None):
    name, made = library
    made.define(schema)
    operator = schema.partition("(")[0]
    if kernel is not None:
        made.impl(operator, kernel, "CPU")
    return getattr(getattr(torch.ops, name), operator)


def test_an_operator_without_shape_rule_runs_its_host_kernel_on_zeros(library):
    # GIVEN a custom operator with a kernel for the CPU alone, whose output is smaller than its input
    halve = define(library, "halve(Tensor x) -> Tensor", lambda x: x[: x.shape[0] // 2].double())

    def work(x):
        out = halve(x)
        return tuple(out.shape), out.dtype

    result, found = shape_of(work)

    assert result == ((2, 6), torch.float64)
    assert found == noted("no-shape-rule", work)


def test_an_operator_without_any_kernel_is_taken_to_be_like_its_first_argument(library):
    two = define(library, "two(Tensor x, Tensor y) -> (Tensor, Tensor)")

    def work(x, y):
        return [tuple(part.shape) for part in two(x, y)]

    result, found = shape_of(work, DATA, torch.empty(3))

    assert result == [(4, 6), (4, 6)]
    assert found == noted("no-shape-rule", work)


def test_an_operator_whose_kernel_refuses_zeros_is_taken_to_be_like_its_first_argument(library):
    def refuse(x):
        raise ValueError("zeros")

    picky = define(library, "picky(Tensor x) -> Tensor", refuse)

    assert shape_of(lambda x: tuple(picky(x).shape))[0] == (4, 6)


def test_a_large_argument_is_not_made_real(library, monkeypatch):
    monkeypatch.setattr(fallbacks, "_LARGEST_HOST_RUN_BYTES", 10)
    halve = define(library, "halve(Tensor x) -> Tensor", lambda x: x[:2])

    assert shape_of(lambda x: tuple(halve(x).shape))[0] == (4, 6)


def test_an_operator_with_a_shape_rule_needs_no_note(library):
    name, _ = library
    double = define(library, "double(Tensor x) -> Tensor", lambda x: x * 2)
    torch.library.register_fake(f"{name}::double", lambda x: torch.empty_like(x), lib=library[1])

    assert shape_of(lambda x: tuple(double(x).shape)) == ((4, 6), [])


def test_losses_that_check_their_values_pass():
    def loss(model, batch):
        value = F.mse_loss(model(batch), batch)
        if torch.isnan(value) or not torch.isfinite(value) or not value.isfinite().all():
            raise FloatingPointError("loss is nan")
        return value

    traced = run(nn.Linear(6, 6), DATA, loss=loss)

    assert {note.code for note in traced.notes} == {"stand-in-value"}


def test_repeated_reads_on_one_line_are_one_note():
    def work(x):
        return [x.sum().item() for _ in range(10)]

    _, traced = observe(work, DATA)

    assert len(traced.notes) == 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (lambda x: x.sum(), 1.0),
        (lambda x: x.sum().half(), 1.0),
        (lambda x: x.long().sum(), 1),
        (lambda x: x.sum().view(1, 1), 1.0),
        (lambda x: x.isnan().any(), False),
        (lambda x: x.isfinite().all(), True),
    ],
    ids=["float", "half", "integer", "one element", "any", "all"],
)
def test_a_single_value_copied_to_the_host_is_what_item_gives(value, expected):
    def work(x):
        there = value(x)
        host = there.cpu()
        return host.device.type, host.shape == there.shape, host.dtype is there.dtype, host.item() == there.item()

    assert shape_of(work)[0] == ("cpu", True, True, True)
    assert shape_of(lambda x: value(x).cpu().item())[0] == expected


def test_a_single_value_may_change_its_dtype_on_the_way():
    def work(x):
        host = x.sum().cpu().long()
        return host.dtype, host.item()

    assert shape_of(work)[0] == (torch.int64, 1)


def test_complex_numbers_have_a_stand_in():
    assert shape_of(lambda x: torch.fft.rfft(x).sum().item())[0] == 1 + 0j


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_zeros_on_the_host_cost_nothing_until_they_are_touched():
    # GIVEN a gigabyte of zeros
    before = resident_bytes()
    zeros = fallbacks.host_zeros(torch.Size((1024, 1024, 256)), torch.float32)

    # THEN it is there, and takes no memory
    assert resident_bytes() - before < 64 * 2**20
    assert (zeros.shape, zeros.dtype, zeros.is_contiguous()) == ((1024, 1024, 256), torch.float32, True)
    assert zeros[5, 6].sum() == 0
    # It can be written to like any other.
    zeros[0, 0, 0] = 1
    assert zeros[0, 0].sum() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 4), (1024, 1024)], ids=str)
def test_zeros_on_the_host_are_zeros(shape, dtype):
    zeros = fallbacks.host_zeros(torch.Size(shape), dtype)

    assert (zeros.shape, zeros.dtype, zeros.device.type) == (shape, dtype, "cpu")
    assert not zeros.any()


def compared(x):
    total = x.sum()
    return [bool(found) for found in (total >= 0, total > 0, total == 1, total != 1, total <= 0, total < 1)]


def test_comparisons_of_single_numbers_are_those_of_their_stand_ins():
    result, found = shape_of(compared)

    assert result == [True, True, True, False, False, False]
    assert set(found) == {("stand-in-value", str(line_of(compared) + 1))}


def test_comparisons_of_single_numbers_with_each_other_and_with_constants():
    def work(x):
        whole = x.long().sum()
        return [bool(found) for found in (x.sum() < float("inf"), x.sum() <= x.mean(), whole == 1, x[:1, :1] > 0.5)]

    assert shape_of(work)[0] == [True, True, True, True]


def test_comparisons_of_many_numbers_are_read_as_before():
    assert shape_of(lambda x: ((x > 0).any().item(), (x > 0)[0, 0].item()))[0] == (False, False)


def test_known_numbers_are_compared_as_they_are():
    with running() as session:
        number = torch.tensor(-3.0, device="cuda")
        found = bool(number >= 0), bool(number < 0), bool(number == -3)

    assert found == (False, True, True)
    assert codes(session) == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_unknown_number_is_compared_with_a_known_one(device):
    # GIVEN the best loss so far, as programs begin with
    with running():
        best = torch.tensor(float("inf"), device=device)
        loss = torch.randn(3, device="cuda").sum()

        assert bool(loss < best)


def test_flags_that_are_asked_for_in_cplusplus_are_not_set():
    def work(x):
        flag = (x > 0).any()
        return torch.equal(flag, torch.ones_like(flag)), torch.equal(x, x), torch.equal(x > 0, x > 0)

    assert shape_of(work)[0] == (False, True, True)


def test_what_a_mask_of_the_host_selects_is_an_upper_bound():
    # GIVEN scores on the device, of which a program keeps the good ones on the host
    with running():
        scores = torch.rand(6, device="cuda")
        kept = scores.cpu()[(scores > 0.5).cpu()]
    assert kept.shape == (6,)
    # THEN a single step reads the same
    assert observe(lambda x: (x > 0.5).cpu().tolist(), torch.empty(6))[0] == [True] * 6


def test_classes_may_be_bytes():
    kernel = torch.ops.aten.nll_loss_forward.default
    rule = fallbacks.RULES[kernel._schema.name]
    logits, weight = torch.empty(6, 5, device="meta"), torch.empty(5, device="meta")
    classes, integers = (torch.empty(6, dtype=dtype, device="meta") for dtype in (torch.uint8, torch.int64))
    for arguments in itertools.product((None, weight), (0, 1), (255,)):
        made, usual = rule(kernel, (logits, classes, *arguments), {}, None), kernel(logits, integers, *arguments)
        assert [(part.shape, part.dtype) for part in made] == [(part.shape, part.dtype) for part in usual]
    assert rule(kernel, (logits, integers, None, 1, -100), {}, None) is NotImplemented


def forward_sizes(work, count):
    """Operators of a forward pass that make a block of `count` float32 numbers."""
    _, traced = observe(lambda x: work(x) is None, torch.empty(count))
    return [b.op for b in forward_blocks(traced) if b.size_bytes == 4 * count]


def test_operators_made_of_others_take_what_these_take():
    # GIVEN exponentials in the tensor of differences; losses in a second tensor beside the logarithms
    assert forward_sizes(lambda x: x.logsumexp(0), 1000) == ["aten.sub"]
    made = forward_sizes(lambda x: F.binary_cross_entropy_with_logits(x, x), 1000)
    assert len(made) == 2
    assert made[0] == "aten.log_sigmoid_forward"


def test_a_large_operator_that_returns_nothing_has_no_output():
    large = torch.empty(300 * 2**20 // 4, device="meta")
    notes = []

    out = fallbacks.without_rule(
        torch.ops.aten._fused_sgd_.default,
        ([large], [large], []),
        {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False}
        | {"is_first_step": True},
        lambda code, text: notes.append(text),
    )

    assert out is None
    assert notes == ["aten::_fused_sgd_ has no shape rule and returns nothing; taken to need no memory of its own"]
