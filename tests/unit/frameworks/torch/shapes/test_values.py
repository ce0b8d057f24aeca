"""What is known of a simulated tensor is what the same program computes on the CPU.

Programs are written once, for any device, and run twice: on the CPU, and on shapes under a small dispatch mode that
calls `KnownValues` as the simulated device does.
"""

import gc
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.core.units import MIB
from memfit.frameworks.torch.shapes.interception import call_plain, intercepting
from memfit.frameworks.torch.shapes.values import KnownValues

aten = torch.ops.aten
CPU, META = torch.device("cpu"), torch.device("meta")


class ValueNeeded(Exception):
    """A result depends on values that are unknown."""


class Shapes(TorchDispatchMode):
    """Runs operators on shapes and tells `values` about each."""

    def __init__(self, values):
        super().__init__()
        self.values = values

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [*args, *kwargs.values()]
        tensors = [t for part in given for t in (part if isinstance(part, list | tuple) else [part])]
        if not any(isinstance(t, torch.Tensor) and t.is_meta for t in tensors) and kwargs.get("device") != META:
            return func(*args, **kwargs)
        out = self.values.exact(func, args, kwargs)
        if out is not NotImplemented:
            return out
        if reads_values(func, args, kwargs):
            raise ValueNeeded(func)
        out = func(*args, **kwargs)
        if func is aten._to_copy.default and not args[0].is_meta:
            self.values.learn(out, args[0])
        elif func is aten.copy_.default and not args[1].is_meta:
            self.values.learn(args[0], args[1])
        else:
            self.values.follow(func, args, kwargs, out)
        return out


def reads_values(func, args, kwargs):
    if func is aten.index.Tensor:
        return any(i is not None and i.dtype is torch.bool for i in args[1])
    if func is aten._to_copy.default:
        return kwargs.get("device", META) != META
    if func is aten.copy_.default:
        return not args[0].is_meta
    return bool({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(func.tags))


def limited(**limits):
    values = KnownValues()
    vars(values).update(limits)
    return values


def simulate(program, values=None):
    """(what `program` returns on shapes, the values it left)"""
    values = values or KnownValues()
    with Shapes(values):
        return program(META), values


def unknown(*shape, device, dtype=torch.float32):
    """Numbers that a model might have computed."""
    return (torch.rand(shape, device=device) * 10).to(dtype)


def same(known, real):
    return known is not None and known.dtype is real.dtype and torch.equal(known, real)


def assert_known(program):
    expected = program(CPU)
    made, values = simulate(program)
    assert len(made) == len(expected) > 0
    for number, (tensor, real) in enumerate(zip(made, expected, strict=True)):
        if isinstance(real, torch.Tensor):
            assert tensor.is_meta, f"result {number} is not simulated"
            assert same(values.of(tensor), real), f"result {number}: {values.of(tensor)} instead of {real}"
        else:
            assert tensor == real and type(tensor) is type(real), f"result {number}"


def assert_unknown(program):
    made, values = simulate(program)
    assert [values.of(tensor) for tensor in made] == [None] * len(made)


TOKENS = torch.tensor([[5, 3, 8, 0, 0], [7, 2, 0, 0, 0], [1, 4, 6, 9, 2]])
LENGTHS = torch.tensor([3, 2, 5])


def on(device, host):
    """A copy: on the CPU `to` would give the very same tensor."""
    return host.to(device, copy=True)


def padding_mask(device):
    tokens = on(device, TOKENS)
    mask = tokens != 0
    return mask, mask.long().sum(-1), (~mask).any(), mask.float().mean(dim=1), tokens.masked_fill(~mask, -100)


def position_ids(device):
    tokens = on(device, TOKENS)
    mask = tokens.ne(0).int()
    incremental = (torch.cumsum(mask, dim=1).type_as(mask) * mask).long() + 1
    plain = torch.arange(tokens.size(1), device=device).unsqueeze(0).expand_as(tokens)
    return incremental, plain, plain + tokens, torch.arange(2, 20, 3, device=device)


def causal_mask(device):
    mask = torch.full((5, 5), float("-inf"), device=device).triu(1)
    boolean = torch.ones(5, 5, dtype=torch.bool, device=device).tril()
    padding = (on(device, TOKENS) != 0)[:, None, None, :]
    return mask, boolean, padding & boolean, torch.where(padding, 0.0, torch.finfo(torch.float32).min)


def lengths_and_offsets(device):
    lengths = on(device, LENGTHS)
    offsets = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    mask = torch.arange(5, device=device)[None, :] < lengths[:, None]
    return offsets, mask, lengths.max(), lengths.argmax(), lengths.flip(0), int(lengths.max())


def shifted_labels(device):
    tokens = on(device, TOKENS)
    labels = tokens.clone()
    labels[labels == 0] = -100
    shifted = labels[..., 1:].contiguous().view(-1)
    valid = shifted != -100
    return labels, shifted, valid.sum(), shifted[valid], valid.nonzero(), int(valid.sum())


def shift_right(device):
    tokens = on(device, TOKENS)
    shifted = tokens.new_zeros(tokens.shape)
    shifted[:, 1:] = tokens[:, :-1].clone()
    shifted[:, 0] = 2
    shifted.masked_fill_(shifted == 9, 0)
    return shifted, tokens


def views_and_writes(device):
    base = torch.zeros(4, 6, dtype=torch.int64, device=device)
    base[1].fill_(7)
    base.t()[2].add_(torch.arange(4, device=device))
    base.view(-1)[5::7] = -1
    base[2:, ::2].mul_(3).sub_(1)
    row = base[3]
    row[0] = 50
    base.view(2, 12)[1].clamp_(max=10)
    diagonal = base.diagonal()
    diagonal += 100
    return base, row, diagonal, base.unfold(1, 2, 2), base.transpose(0, 1).reshape(-1)


def index_put(device):
    base = torch.zeros(3, 5, dtype=torch.int64, device=device)
    rows, columns = torch.tensor([0, 2, 2]).to(device), torch.tensor([1, 1, 4]).to(device)
    base[rows, columns] = torch.tensor([7, 8, 9]).to(device)
    base.index_put_((rows, columns), torch.tensor(1).to(device), accumulate=True)
    base[base > 8] = 0
    counts = torch.zeros(10, dtype=torch.int64, device=device).scatter_add_(
        0, on(device, TOKENS).view(-1), torch.ones(15, dtype=torch.int64, device=device)
    )
    return base, counts, base.index_add(0, rows, torch.ones_like(base)), base[rows], base[rows, columns]


def where_and_comparisons(device):
    a, b = on(device, TOKENS), on(device, TOKENS.flip(1))
    chosen = torch.where(a > b, a, b)
    return chosen, torch.maximum(a, b), (a == b).all(), torch.isin(a, b[0]), torch.logical_xor(a > 2, b > 2), a.eq(b)


def cat_and_stack(device):
    a, b = on(device, TOKENS), on(device, LENGTHS)
    return (
        torch.cat([a, b[:, None]], dim=1),
        torch.stack([b, b * 2]),
        torch.cat([torch.empty(0, dtype=torch.int64, device=device), b]),
        torch.hstack((b, b)),
        *torch.cat([a, a]).split([1, 5]),
        *(b.repeat(2).chunk(2)),
        torch.cat([b, b], out=torch.empty(6, dtype=torch.int64, device=device)),
    )


def sort_and_topk(device):
    tokens, lengths = on(device, TOKENS), on(device, LENGTHS)
    order, indices = lengths.sort(descending=True)
    best = tokens.float().topk(2, dim=1)
    return (
        order,
        indices,
        indices.argsort(),
        *best,
        tokens.sort(dim=0, stable=True).values,
        tokens.gather(1, best.indices),
        tokens.kthvalue(2).values,
        torch.searchsorted(order.flip(0), torch.tensor([4]).to(device)),
    )


def masks_of_data(device):
    tokens, lengths = on(device, TOKENS), on(device, LENGTHS)
    mask = tokens > 3
    return (
        tokens[mask],
        tokens.masked_select(mask),
        *mask.nonzero(as_tuple=True),
        torch.argwhere(mask),
        tokens[mask[:, 0]],
        tokens[:, mask[0]],
        tokens[lengths > 2, 1],
        *tokens.unique(return_counts=True, return_inverse=True),
        *torch.unique_consecutive(tokens, return_counts=True),
        tokens.unique(dim=0),
        torch.repeat_interleave(lengths),
        tokens.repeat_interleave(lengths, dim=0),
        tokens.view(-1).bincount(),
        lengths.bincount(minlength=9),
        lengths.bincount(weights=lengths.float()),
    )


def reads(device):
    tokens, lengths = on(device, TOKENS), on(device, LENGTHS)
    host = torch.empty(3, dtype=torch.float64)
    host.copy_(lengths)
    total = lengths.sum()
    return (
        lengths.tolist(),
        lengths.cpu().numpy().tolist(),
        lengths.to(CPU, torch.float32).tolist(),
        host.tolist(),
        total.item(),
        float(lengths.float().mean()),
        bool((lengths > 4).any()),
        torch.equal(tokens, tokens.clone()),
        torch.allclose(lengths.float(), lengths.float() + 1),
        [int(part) for part in lengths],
        list(range(lengths[0])),
    )


def one_hot(device):
    tokens = on(device, TOKENS)
    return (
        torch.zeros(3, 5, 10, device=device).scatter_(2, tokens[..., None], 1.0),
        F.one_hot(tokens, 10),
        torch.eye(10, dtype=torch.int64, device=device)[tokens],
    )


def factories(device):
    return (
        torch.arange(5, device=device),
        torch.arange(0, 1, 0.25, device=device),
        torch.linspace(0, 1, 7, device=device),
        torch.eye(3, device=device),
        torch.full((2, 2), 3, device=device),
        torch.full((), 65536.0, device=device),
        torch.tril_indices(3, 3, device=device),
        torch.scalar_tensor(2.5, device=device),
        torch.zeros_like(unknown(3, device=device)),
        torch.ones_like(unknown(3, device=device), dtype=torch.int64),
        torch.full_like(unknown(3, device=device), 1.5),
        unknown(3, device=device).new_full((2,), 4),
        unknown(3, device=device).new_ones(2),
        torch.ones(4, dtype=torch.bool, device=device),
        torch.zeros(2, 3, dtype=torch.bfloat16, device=device),
        torch.arange(3, out=torch.empty(3, dtype=torch.int64, device=device)),
        torch.hann_window(8, periodic=False, device=device),
    )


def dtypes_and_layouts(device):
    tokens = on(device, TOKENS)
    words = torch.tensor([1.5, -2.0, 3.25], dtype=torch.float16)
    return (
        tokens.to(torch.int32),
        tokens.float().half().bfloat16(),
        tokens.int().view(torch.int16),
        words.to(device),
        words.to(device, torch.float32),
        tokens.t().contiguous(),
        tokens.t().clone(),
        torch.view_as_real(torch.polar(words.float(), words.float()).to(device)),
        tokens.t().to(torch.int16),
        (tokens.float() / 3).round(decimals=2),
    )


def counters(device):
    steps = [torch.zeros((), device=device) for _ in range(3)]
    torch._foreach_add_(steps, 1)
    torch._foreach_add_(steps, torch.tensor(1.0), alpha=1.0)
    corrections = torch._foreach_pow(0.9, steps)
    torch._foreach_sub_(corrections, 1)
    torch._foreach_neg_(corrections)
    batches = torch.tensor(0).to(device)
    for _ in range(3):
        batches.add_(1)
    copies = [torch.empty((), device=device) for _ in range(3)]
    torch._foreach_copy_(copies, steps)
    torch._foreach_zero_(steps)
    return *steps, *corrections, *copies, batches


def overwritten(device):
    zeroed = unknown(3, 4, device=device)
    zeroed.zero_()
    filled = unknown(4, 3, device=device).t()
    filled.fill_(2)
    by_tensor = unknown(3, device=device)
    by_tensor.fill_(torch.tensor(1.5).to(device))
    copied = unknown(3, 5, device=device, dtype=torch.int64)
    copied.copy_(TOKENS)
    broadcast = unknown(2, 3, device=device)
    broadcast.copy_(on(device, LENGTHS))
    sums = unknown(3, 5, device=device, dtype=torch.int64)
    torch.add(on(device, TOKENS), 1, out=sums)
    part = torch.zeros(4, dtype=torch.int64, device=device)
    part[1:] = on(device, LENGTHS)
    return zeroed, filled, by_tensor, copied, broadcast, sums, part


def host_among_simulated(device):
    tokens = on(device, TOKENS)
    return (
        tokens + torch.tensor(3),
        torch.tensor(3) * tokens,
        tokens[torch.tensor([0, 2])],
        tokens[torch.tensor([True, False, True])],
        tokens.clone().index_put_((torch.tensor([0]),), torch.tensor(5).to(device)),
    )


def relative_positions(device):
    context = torch.arange(6, device=device)[:, None]
    memory = torch.arange(6, device=device)[None, :]
    relative = memory - context
    buckets = (relative > 0).to(torch.long) * 16
    distance = relative.abs()
    far = 8 + (torch.log(distance.float() / 8 + 1e-6) / math.log(128 / 8) * 8).to(torch.long)
    far = torch.min(far, torch.full_like(far, 15))
    buckets += torch.where(distance < 8, distance, far)
    frequencies = 1.0 / (10000 ** (torch.arange(0, 8, 2, device=device).float() / 8))
    angles = torch.outer(torch.arange(6, device=device).float(), frequencies)
    return buckets, frequencies, torch.cat((angles, angles), dim=-1).cos(), torch.bucketize(distance, memory[0])


def packed_sequence(device):
    data = torch.arange(30).view(3, 5, 2).float().to(device)
    packed = torch.nn.utils.rnn.pack_padded_sequence(data, LENGTHS, batch_first=True, enforce_sorted=False)
    return packed.data, packed.batch_sizes.tolist()


def statistics(device):
    layer = torch.nn.BatchNorm1d(5, affine=False).to(device)
    out = layer(TOKENS.float().to(device))
    return out, layer.running_mean, layer.running_var, layer.num_batches_tracked


def loss_scaling(device):
    """Two steps of `torch.amp.GradScaler`, in its own operators."""
    scale = torch.full((), 2.0**16, device=device)
    tracker = torch.full((), 0, dtype=torch.int32, device=device)
    reads = []
    for _ in range(2):
        scaled = unknown(1, device=device).sum() * scale
        gradients = [scaled * unknown(3, device=device), scaled * unknown(2, device=device)]
        found = torch.full((), 0.0, device=device)
        inverse = scale.double().reciprocal().float()
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
        reads += [found.item(), inverse.item()]
        torch._amp_update_scale_(scale, tracker, found, 2.0, 0.5, 2)
        reads += [scale.item(), tracker.item()]
    return reads, scale, tracker, found, inverse


PROGRAMS = [
    padding_mask,
    position_ids,
    causal_mask,
    lengths_and_offsets,
    shifted_labels,
    shift_right,
    views_and_writes,
    index_put,
    where_and_comparisons,
    cat_and_stack,
    sort_and_topk,
    masks_of_data,
    reads,
    one_hot,
    factories,
    dtypes_and_layouts,
    counters,
    overwritten,
    host_among_simulated,
    relative_positions,
    packed_sequence,
    statistics,
    loss_scaling,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_values_are_those_of_the_cpu(program):
    assert_known(program)


@pytest.mark.parametrize(
    "program",
    [
        lambda d: [torch.rand(3, device=d)],
        lambda d: [torch.randperm(3, device=d)],
        lambda d: [torch.randint(9, (3,), device=d)],
        lambda d: [torch.zeros(3, device=d).normal_()],
        lambda d: [torch.full((3,), 0.5, device=d).bernoulli()],
        lambda d: [torch.rand_like(torch.zeros(3, device=d))],
        lambda d: [F.dropout(torch.ones(30, device=d))],
        lambda d: [torch.empty(3, device=d), torch.empty_like(torch.zeros(3, device=d))],
        lambda d: [on(d, LENGTHS).new_empty(3), torch.empty_strided((2, 2), (1, 2), device=d)],
    ],
)
def test_what_is_random_or_not_initialised_is_unknown(program):
    assert_unknown(program)


def test_what_is_made_from_unknown_values_is_unknown():
    def program(device):
        data, tokens = unknown(3, 5, device=device), on(device, TOKENS)
        weights = unknown(10, 4, device=device)
        return [
            data + tokens,
            tokens * data,
            torch.where(tokens > 3, data, 0.0),
            torch.cat([tokens.float(), data]),
            F.embedding(tokens, weights),
            data > 3,
            torch._foreach_add([tokens.float(), data], 1)[0],
            unknown(1, device=device).fill_(data.sum()),
        ]

    assert_unknown(program)


@pytest.mark.parametrize(
    "write",
    [
        lambda target, data: target.add_(data),
        lambda target, data: target[1].copy_(data[0]),
        lambda target, data: target.view(-1)[2:].mul_(data.view(-1)[2:]),
        lambda target, data: target.masked_fill_(data > 5, 0),
        lambda target, data: target.index_put_((torch.zeros(1, dtype=torch.int64),), data[:1]),
        lambda target, data: torch.add(data, 1, out=target),
        lambda target, data: torch._foreach_mul_([target], [data]),
        lambda target, data: torch._foreach_mul_([data, target], [data, data]),
        lambda target, data: torch._foreach_copy_([data, target], [data, data]),
        lambda target, data: target.uniform_(),
        lambda target, data: torch.rand(2, 3, out=target),
        lambda target, data: torch.min(data, dim=1, out=(target[:, 0], torch.empty(2, dtype=torch.int64, device=META))),
        lambda target, data: target.untyped_storage().copy_(data.untyped_storage()),
    ],
)
def test_writing_what_is_unknown_forgets(write):
    # GIVEN a known tensor and a view of it
    def program(device):
        target = torch.ones(2, 3, device=device)
        view = target[:1]

        # WHEN something unknown is written into it
        write(target, unknown(2, 3, device=device))
        return [target, view, target + 1]

    # THEN neither is known any more
    assert_unknown(program)


def test_forgetting_is_not_for_ever():
    def program(device):
        target = torch.ones(2, 3, device=device)
        target.add_(unknown(2, 3, device=device))
        target.zero_()
        return [target, target.view(-1)[1:]]

    assert_known(program)


def test_a_part_that_becomes_known_does_not_make_the_whole_known():
    def program(device):
        target = unknown(2, 3, device=device)
        target[0].zero_()
        target.t()[0] = 1
        torch.ones(3, out=target[1])
        overlapping = unknown(4, device=device).as_strided((2, 2), (1, 1))
        return [target, target[0], overlapping.zero_()]

    assert_unknown(program)


def test_an_error_on_the_host_makes_unknown():
    # GIVEN token ids beyond the end of a table
    def program(device):
        table, index = torch.arange(4, device=device), torch.tensor([0, 9]).to(device)
        counts = torch.zeros(4, dtype=torch.int64, device=device)

        # WHEN they are looked up, or written to, which shapes alone allow
        return [table[index], table.gather(0, index), counts.scatter_(0, index, 1)]

    # THEN no error surfaces
    assert_unknown(program)


def test_only_small_tensors_are_followed():
    values = limited(limit_bytes_integer=80, limit_bytes_float=40)

    def program(device):
        integers = torch.zeros(10, dtype=torch.int64, device=device), torch.arange(11, device=device)
        floats = torch.ones(10, device=device), torch.ones(11).to(device)
        products = floats[0][:, None] * floats[0], integers[0].float()
        return *integers, *floats, *products

    made, values = simulate(program, values)

    assert [values.of(tensor) is not None for tensor in made] == [True, False, True, False, False, True]


def test_all_values_together_are_limited_and_the_dead_make_room():
    # GIVEN room for two tensors
    values = limited(limit_bytes_total=160)
    made, _ = simulate(lambda device: [torch.zeros(10, dtype=torch.int64, device=device) for _ in range(3)], values)
    assert [values.of(tensor) is not None for tensor in made] == [True, True, False]

    # WHEN one of them dies
    view = made[1][2:]
    del made[:1]
    gc.collect()

    # THEN there is room for another
    (new,), _ = simulate(lambda device: [torch.ones(10, dtype=torch.int64, device=device)], values)
    assert values.of(new).tolist() == [1] * 10

    # WHEN a tensor dies of which a view lives
    del made[:]
    gc.collect()

    # THEN its values live too
    assert values.of(view).tolist() == [0] * 8
    values.clear()
    assert values.of(view) is None


def test_parameters_are_not_learned():
    def program(device):
        parameter = torch.nn.Parameter(torch.ones(3))
        initialised = torch.nn.Parameter(torch.empty(3, device=device))
        torch.nn.init.zeros_(initialised)
        with torch.no_grad():
            loaded = torch.nn.Parameter(torch.empty(3, device=device)).copy_(torch.ones(3))
        return [parameter.to(device), initialised, loaded]

    assert_unknown(program)


def test_learning_writes_into_parts_and_casts():
    values = KnownValues()
    whole = torch.empty(4, dtype=torch.int32, device=META)
    values.learn(whole[:2], torch.ones(2))
    assert values.of(whole) is None

    values.learn(whole, torch.tensor([1, 2, 3, 4]))
    values.learn(whole[2:], torch.tensor(9.0))

    assert values.of(whole).tolist() == [1, 2, 9, 9]
    assert values.of(whole).dtype is torch.int32


def test_learning_from_what_needs_a_gradient_forgets():
    values = KnownValues()
    tensor = torch.empty(2, device=META)
    values.learn(tensor, torch.ones(2))

    values.learn(tensor, torch.ones(2, requires_grad=True))
    with torch.no_grad():
        values.follow(aten.mul.Tensor, (torch.ones(2, requires_grad=True), 1), {}, tensor)

    assert values.of(tensor) is None


def test_forgetting_a_view_forgets_its_storage():
    values = KnownValues()
    tensor = torch.empty(2, 2, device=META)
    values.learn(tensor, torch.ones(2, 2))

    values.forget(tensor[1])
    values.forget(torch.empty(2, device=META))

    assert values.of(tensor) is None


def test_lazy_views_and_sparse_tensors_are_unknown():
    values = KnownValues()
    (numbers,), _ = simulate(lambda device: [torch.tensor([1 + 2j]).to(device)], values)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (2,), check_invariants=True).to(META)

    values.forget(sparse)

    assert values.of(numbers).tolist() == [1 + 2j]
    assert values.of(numbers.conj()) is None
    assert values.of(numbers.conj().imag) is None
    assert values.of(sparse) is None


def test_writing_through_a_lazy_view_forgets():
    values = KnownValues()
    (numbers,), _ = simulate(lambda device: [torch.tensor([1 + 2j]).to(device)], values)

    simulate(lambda device: numbers.conj().copy_(torch.tensor([3 + 4j])), values)

    assert values.of(numbers) is None


def test_a_storage_that_changes_its_size_is_forgotten():
    def grown(device):
        tensor = torch.arange(3, device=device)
        tensor.resize_(5)
        return [tensor]

    def emptied(device):
        tensor = torch.arange(3, device=device)
        tensor.untyped_storage().resize_(0)
        return [tensor]

    assert_unknown(grown)
    assert_unknown(emptied)


def test_a_tensor_set_to_another_storage_has_its_values():
    def program(device):
        tensor, other = torch.arange(3, device=device), torch.arange(4, 7, device=device)
        tensor.set_(other)
        return tensor, other

    assert_known(program)


def test_changes_of_geometry_keep_values():
    def program(device):
        tensor = on(device, TOKENS)
        return [tensor.t_().unsqueeze_(0).transpose_(0, 1), tensor[:, 0] + 1]

    assert_known(program)


def test_outputs_that_were_resized_are_known():
    def program(device):
        out = torch.empty(0, dtype=torch.int64, device=device)
        return [torch.add(on(device, TOKENS), 1, out=out)]

    assert_known(program)


def test_unknown_data_is_selected_by_known_masks():
    # GIVEN activations, and masks from the host
    def program(device):
        data = torch.arange(30.0).view(3, 5, 2) if device == CPU else unknown(3, 5, 2, device=device)
        mask = on(device, TOKENS) > 3

        # WHEN they are selected
        return (
            data[mask],
            data[mask, 1],
            data[:, mask[0]],
            data.masked_select(mask[..., None]),
            data.masked_select(mask[0, :, None]),
            data.repeat_interleave(on(device, LENGTHS), dim=0),
            torch.nn.utils.rnn.pack_padded_sequence(data, LENGTHS, batch_first=True, enforce_sorted=False).data,
            on(device, LENGTHS).bincount(data[:, 0, 0]),
        )

    # THEN the results have their true sizes, and no values
    expected = program(CPU)
    made, values = simulate(program)
    assert [(t.shape, t.dtype) for t in made] == [(t.shape, t.dtype) for t in expected]
    assert [values.of(t) for t in made] == [None] * len(made)


@pytest.mark.parametrize(
    "read",
    [
        lambda data, tokens: data.sum().item(),
        lambda data, tokens: data.tolist(),
        lambda data, tokens: torch.equal(data, data),
        lambda data, tokens: tokens[data > 3],
        lambda data, tokens: data.nonzero(),
        lambda data, tokens: data.masked_select(data > 3),
        lambda data, tokens: data.long().unique(),
        lambda data, tokens: data.long().view(-1).bincount(),
        lambda data, tokens: torch.repeat_interleave(data.long().view(-1)),
        lambda data, tokens: torch.empty(3, 5).copy_(data),
    ],
)
def test_what_depends_on_unknown_values_is_left_to_the_caller(read):
    with pytest.raises(ValueNeeded):
        simulate(lambda device: read(unknown(3, 5, device=device), on(device, TOKENS)))


def test_only_what_depends_on_values_is_answered_exactly():
    values = KnownValues()
    (tokens,), _ = simulate(lambda device: [on(device, TOKENS)], values)

    assert values.exact(aten.add.Tensor, (tokens, 1), {}) is NotImplemented
    assert values.exact(aten.index.Tensor, (tokens, [tokens[0]]), {}) is NotImplemented
    assert values.exact(aten.index.Tensor, (tokens, [torch.ones(7, dtype=torch.bool)]), {}) is NotImplemented
    assert values.exact(aten._to_copy.default, (tokens,), {"dtype": torch.float32}) is NotImplemented
    assert values.exact(aten.nonzero.default, (TOKENS,), {}) is NotImplemented
    assert values.exact(aten.nonzero.default, (tokens,), {}).is_meta


def test_a_selection_too_large_to_keep_still_has_its_size():
    values = limited(limit_bytes_integer=800)

    def program(device):
        repeats = torch.full((10,), 10**9, device=device)
        return torch.repeat_interleave(repeats), torch.tensor([10**12]).to(device).bincount()

    (repeated, counts), _ = simulate(program, values)

    assert (repeated.numel(), counts.numel()) == (10**10, 10**12 + 1)
    assert values.of(repeated) is values.of(counts) is None


def test_values_read_are_copies():
    def program(device):
        lengths = on(device, LENGTHS)
        read = lengths.to(CPU, copy=True)
        lengths.add_(1)
        return [read.tolist(), lengths]

    assert_known(program)


def test_the_hosts_own_tensors_are_left_alone():
    values = KnownValues()
    host, source = torch.ones(2), torch.empty(2, device=META)
    values.learn(source, torch.zeros(2))

    # WHEN operators are reported that have written to the host
    values.follow(aten.add_.Tensor, (host, 1), {}, host)
    values.follow(aten._foreach_add_.Scalar, ([host], 1), {}, None)
    values.follow(aten.copy_.default, (host, source), {}, host)
    values.follow(aten.zero_.default, (host,), {}, host)
    values.follow(aten.add.out, (host, source), {"out": host}, host)
    assert values.of(source).tolist() == [0, 0]
    values.follow(aten._foreach_add_.Scalar, ([source, host], 1), {}, None)

    # THEN the host's tensors aren't written again
    assert host.tolist() == [1, 1]
    assert values.of(source) is None


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_are_forgotten_in_training_only(training):
    def program(device):
        layer = torch.nn.BatchNorm1d(5).to(device).train(training)
        layer(unknown(3, 5, device=device))
        return layer.running_mean, layer.running_var, layer.num_batches_tracked

    (mean, variance, count), values = simulate(program)

    assert (values.of(mean) is None, values.of(variance) is None) == (training, training)
    assert values.of(count).item() == training


def test_gradients_that_were_known_are_not_after_unscaling_with_others():
    def program(device):
        zeros, found = torch.zeros(3, device=device), torch.zeros((), device=device)
        gradients = [zeros, unknown(3, device=device)]
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.ones((), device=device))
        return zeros, found

    (zeros, found), values = simulate(program)

    assert values.of(zeros) is None
    assert values.of(found).item() == 0


def test_an_overflow_in_known_gradients_is_found():
    def program(device):
        gradients, found = [torch.tensor([1.0, math.inf]).to(device)], torch.zeros((), device=device)
        scale, tracker = torch.full((), 8.0, device=device), torch.zeros((), dtype=torch.int32, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.full((), 0.5, device=device))
        torch._amp_update_scale_(scale, tracker, found, 2.0, 0.5, 2)
        return found, scale, tracker, *gradients

    assert_known(program)


def test_operators_of_others_are_not_run():
    # GIVEN a user's operator that counts its calls and is called like one of PyTorch's
    calls = []

    @torch.library.custom_op("memfit_values_test::ones_like", mutates_args={"target"})
    def shift(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        calls.append(target)
        return source + 1

    @shift.register_fake
    def _(target, source):
        return torch.empty_like(source)

    # WHEN it is called with known tensors
    def program(device):
        target, source = on(device, LENGTHS), on(device, LENGTHS)
        return source, shift(target, source), target

    made, values = simulate(program)

    # THEN it isn't run on the host; what it says it writes is forgotten
    assert calls == []
    assert [values.of(tensor) is not None for tensor in made] == [True, False, False]


def test_first_arguments_without_a_storage_are_no_obstacle():
    values = KnownValues()
    (tokens,), _ = simulate(lambda device: [on(device, TOKENS)], values)
    sums = torch.empty_like(tokens)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (2,), check_invariants=True).to(META)

    values.follow(aten.add.Tensor, (sparse, sparse), {}, sparse)
    values.follow(aten.add.Tensor, (2, tokens), {}, sums)

    assert same(values.of(sums), TOKENS + 2)


def test_choices_made_for_the_device_do_not_touch_values():
    # GIVEN an interceptor that is wrong for the host
    def intercept(op, data, *args, **kwargs):
        return call_plain(op, data, *args, **kwargs) + 1

    values = KnownValues()
    (lengths,), _ = simulate(lambda device: [on(device, LENGTHS)], values)
    sums = torch.empty_like(lengths)

    # WHEN values are followed while it is on
    with intercepting({"cumsum": intercept}):
        values.follow(aten.cumsum.default, (lengths, 0), {}, sums)

    # THEN they are PyTorch's own
    assert values.of(sums).tolist() == [3, 5, 10]


def test_results_of_another_size_or_type_than_the_true_one_are_unknown():
    values = KnownValues()
    (mask,), _ = simulate(lambda device: [on(device, TOKENS) == 8], values)
    largest = torch.empty(15, 2, dtype=torch.int64, device=META)
    wide = torch.empty(3, 5, dtype=torch.int64, device=META)

    values.follow(aten.nonzero.default, (mask,), {}, largest)
    values.follow(aten.logical_not.default, (mask,), {}, wide)

    assert values.of(largest) is values.of(wide) is None


def test_collectives_forget_what_they_are_given():
    values = KnownValues()
    tensors = [torch.empty(2, device=META) for _ in range(2)]
    for tensor in tensors:
        values.learn(tensor, torch.ones(2))

    values.follow(torch.ops.c10d.allreduce_.default, (tensors, None, None, None, False), {}, (tensors, None))

    assert [values.of(tensor) for tensor in tensors] == [None, None]


DECIDED = {
    "or of booleans": lambda known, other: [known | other.bool(), other.bool() | known, torch.logical_or(known, other)],
    "or in place": lambda known, other: [other.bool().logical_or_(known), other.bool().bitwise_or_(known)],
    "and of booleans": lambda known, other: [~known & other.bool(), torch.logical_and(other, ~known)],
    "and in place": lambda known, other: [other.bool().logical_and_(~known), other.bool().bitwise_and_(~known)],
    "and of whole numbers": lambda known, other: [(~known).long() & other.long()],
    "product of whole numbers": lambda known, other: [
        other.long() * (~known).long(),
        other.long().mul_((~known).long()),
    ],
}


@pytest.mark.parametrize("name", DECIDED)
def test_an_operand_that_decides_alone_makes_known(name):
    def program(device):
        return DECIDED[name](torch.ones(2, 3, dtype=torch.bool, device=device), unknown(2, 3, device=device))

    assert_known(program)


def test_an_operand_that_decides_is_as_large_as_the_result():
    # GIVEN one row of zeros, broadcast over unknown numbers
    def program(device):
        return [unknown(4, 3, device=device, dtype=torch.int64) * torch.zeros(3, dtype=torch.int64, device=device)]

    assert_known(program)


UNDECIDED = {
    "or with some": lambda some, other: [some | other.bool()],
    "and with some": lambda some, other: [some & other.bool()],
    "or with whole numbers": lambda some, other: [torch.ones_like(some).long() | other.long()],
    # Zero times infinity is no zero.
    "product of floating-point numbers": lambda some, other: [other * torch.zeros_like(other)],
    "exclusive or": lambda some, other: [torch.ones_like(some) ^ other.bool()],
}


@pytest.mark.parametrize("name", UNDECIDED)
def test_an_operand_that_does_not_decide_alone_leaves_unknown(name):
    def program(device):
        some = torch.tensor([True, False, True]).to(device)
        return UNDECIDED[name](some, unknown(3, device=device))

    assert_unknown(program)


def test_unknown_numbers_are_taken_to_be_finite():
    def program(device):
        numbers = unknown(2, 3, device=device)
        not_numbers = torch.isnan(numbers), numbers != numbers
        infinite = torch.isinf(numbers), numbers == float("inf"), numbers == -float("inf")
        finite = torch.isfinite(numbers), ~torch.isfinite(numbers), numbers == numbers, numbers != float("inf")
        return [*not_numbers, *infinite, *finite, numbers.isnan().any(), not_numbers[0] | infinite[0]]

    assert_known(program)


def test_known_numbers_that_are_not_finite_are_told():
    def program(device):
        numbers = torch.tensor([1.0, float("nan"), float("inf")]).to(device)
        return [numbers.isnan(), numbers.isinf(), numbers != numbers, numbers == float("inf")]

    assert_known(program)


def test_other_comparisons_of_unknown_numbers_are_unknown():
    def program(device):
        numbers, others = unknown(3, device=device), unknown(3, device=device)
        return [numbers == 1.0, numbers != others]

    assert_unknown(program)


def test_whole_numbers_are_followed_up_to_16_mib():
    def program(device):
        return [torch.zeros(count, dtype=torch.int64, device=device) for count in (2 * MIB, 2 * MIB + 1)]

    made, values = simulate(program)

    assert [values.of(tensor) is not None for tensor in made] == [True, False]


# Steps of random programs: each takes tensors of five integers and gives another, or writes into the first.
STEPS = {
    "add": lambda a, b, k: a + b,
    "scale": lambda a, b, k: a * k,
    "compare": lambda a, b, k: (a > b).long(),
    "where": lambda a, b, k: torch.where(a > k, a, b),
    "cumulate": lambda a, b, k: a.cumsum(0) % 17,
    "sort": lambda a, b, k: a.sort().values,
    "select": lambda a, b, k: a[b % 5],
    "roll": lambda a, b, k: torch.cat([a[k % 5 :], a[: k % 5]]),
    "constant": lambda a, b, k: torch.full_like(a, k),
    "positions": lambda a, b, k: torch.arange(k, k + 5, device=a.device),
    "random": lambda a, b, k: torch.randint(9, (5,), device=a.device),
    "view": lambda a, b, k: a.view(5, 1)[:, 0],
    "write": lambda a, b, k: a.add_(k),
    "write other": lambda a, b, k: a.copy_(b),
    "write part": lambda a, b, k: a[: k % 5].copy_(b[: k % 5]),
    "write element": lambda a, b, k: a[k % 5].fill_(k),
    "write masked": lambda a, b, k: a.masked_fill_(b > k, k),
    "write indexed": lambda a, b, k: a.index_put_((b % 5,), b, accumulate=True),
    "write random": lambda a, b, k: a.random_(0, 9),
    "write list": lambda a, b, k: torch._foreach_add_([a, b], k),
    "write result": lambda a, b, k: torch.sub(b, k, out=a),
    "zero": lambda a, b, k: a.zero_(),
}
NUMBERS = st.integers(0, 20)
STEP = st.tuples(st.sampled_from(sorted(STEPS)), NUMBERS, NUMBERS, NUMBERS)


def run_steps(steps, device):
    """The tensors that a random program leaves; what it doesn't read any more stays alive."""
    tensors = [torch.arange(5).to(device), torch.tensor([3, 1, 4, 1, 5]).to(device)]
    for name, first, second, number in steps:
        a, b = tensors[first % len(tensors)], tensors[second % len(tensors)]
        if name.startswith("write") and a.untyped_storage()._cdata == b.untyped_storage()._cdata:
            continue  # PyTorch refuses some of these
        made = STEPS[name](a, b, number)
        if isinstance(made, torch.Tensor) and made.numel() == 5:
            tensors.append(made)
    return tensors


@given(st.lists(STEP, max_size=25))
def test_random_programs_know_nothing_wrong(steps):
    expected = run_steps(steps, CPU)
    made, values = simulate(lambda device: run_steps(steps, device))

    known = [values.of(tensor) for tensor in made]

    assert len(made) == len(expected)
    assert all(k is None or same(k, real) for k, real in zip(known, expected, strict=True))
    if not any("random" in name for name, *_ in steps):
        assert None not in known
