import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memfit.core.errors import StepFailed
from memfit.core.timeline import Category, Phase
from memfit.frameworks.torch.kernels import autocast
from memfit.frameworks.torch.kernels.autocast import Autocast
from tests.unit.frameworks.torch.builders import (
    AMPERE,
    HOST,
    forward_blocks,
    kept_bytes,
    made_in,
    moment,
    observe,
    run,
    sizes,
)

LISTS = {
    "lower": autocast.LOWER_PRECISION,
    "float32": autocast.FLOAT32,
    "by dtype argument": autocast.FLOAT32_BY_DTYPE_ARGUMENT,
    "by extra dtype": list(autocast.FLOAT32_BY_EXTRA_DTYPE),
    "widest": autocast.WIDEST,
    "banned": autocast.BANNED,
}


def known_to_torch(key="AutocastCUDA"):
    """Operators for which this build of PyTorch has a kernel of an autocast, whether or not it has CUDA."""
    return {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    }


def test_the_lists_hold_every_operator_that_torch_casts():
    listed = {name for names in LISTS.values() for name in names}

    assert known_to_torch(), "no kernels found: the check would pass on nothing"
    assert listed == known_to_torch()


def test_no_operator_is_on_two_lists():
    listed = [name for names in LISTS.values() for name in names]

    assert sorted(listed) == sorted(set(listed))


def dtype_of(work, *inputs, dtype=torch.float16, device=AMPERE):
    """The dtype of what `work` returns under autocast."""

    def under_autocast(*arguments):
        with torch.autocast("cuda", dtype=dtype):
            return work(*arguments).dtype

    return observe(under_autocast, *inputs, device=device)[0]


MATRIX = torch.empty(4, 4)
HALF = torch.empty(4, 4, dtype=torch.float16)


@pytest.mark.parametrize(
    ("work", "inputs", "expected"),
    [
        (torch.mm, (MATRIX, MATRIX), torch.float16),
        (torch.matmul, (MATRIX, HALF), torch.float16),
        (F.linear, (MATRIX, MATRIX, torch.empty(4)), torch.float16),
        (lambda a, b: torch.einsum("ij,jk->ik", a, b), (MATRIX, MATRIX), torch.float16),
        (torch.exp, (HALF,), torch.float32),
        (lambda a: F.layer_norm(a, (4,)), (HALF,), torch.float32),
        (F.mse_loss, (HALF, HALF), torch.float32),
        (lambda a: F.softmax(a, -1), (HALF,), torch.float32),
        (lambda a: F.log_softmax(a, -1), (HALF,), torch.float32),
        (lambda a: F.softmax(a, -1, dtype=torch.float16), (HALF,), torch.float16),
        (torch.sum, (HALF,), torch.float32),
        (lambda a: a.sum(0), (HALF,), torch.float32),
        (lambda a: a.norm(), (HALF,), torch.float32),
        (lambda a: a.norm(2, 0), (HALF,), torch.float32),
        (torch.addcmul, (MATRIX, HALF, HALF), torch.float32),
        (torch.addcmul, (HALF, HALF, HALF), torch.float16),
        (torch.dot, (torch.empty(4), HALF[0]), torch.float32),
        # Not on any list: the input's own precision.
        (torch.relu, (HALF,), torch.float16),
        (torch.relu, (MATRIX,), torch.float32),
        # float64 is never cast.
        (torch.mm, (MATRIX.double(), MATRIX.double()), torch.float64),
    ],
)
def test_each_list_gives_the_precision_cuda_gives(work, inputs, expected):
    assert dtype_of(work, *inputs) is expected


def test_bfloat16_is_an_option():
    assert dtype_of(torch.mm, MATRIX, MATRIX, dtype=torch.bfloat16) is torch.bfloat16


def test_a_banned_loss_fails_as_on_cuda():
    model = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid())

    def loss(model, batch):
        with torch.autocast("cuda"):
            return F.binary_cross_entropy(model(batch), torch.ones(3, 1, device="cuda"))

    with pytest.raises(StepFailed, match="binary_cross_entropy_with_logits"):
        run(model, torch.empty(3, 4), loss=loss)


def test_a_banned_loss_works_outside_autocast():
    model = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid())

    def loss(model, batch):
        with torch.autocast("cuda"):
            out = model(batch)
        return F.binary_cross_entropy(out.float(), torch.ones(3, 1, device="cuda"))

    assert made_in(run(model, torch.empty(3, 4), loss=loss), Phase.BACKWARD)


class Twice(nn.Module):
    """Applies one layer to its own output."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64, bias=False)

    def forward(self, data):
        return self.layer(self.layer(data))


def casts(blocks, size_bytes):
    return [b for b in blocks if b.op == "aten._to_copy" and b.size_bytes == size_bytes]


def test_the_cast_of_a_parameter_is_made_once_and_freed_after_the_block():
    # GIVEN a layer used twice and a pass without gradients
    traced = run(Twice(), torch.empty(8, 64), precision="amp-fp16", training=False)

    # THEN its weight is cast once, and the cast is gone before the next pass
    made = casts(forward_blocks(traced), 64 * 64 * 2)
    assert len(made) == 1
    assert made[0].end is not None
    assert made[0].end <= moment(traced.timeline, Phase.FORWARD, 2)


def test_the_cast_of_a_parameter_lives_as_long_as_the_backward_pass_needs_it():
    traced = run(Twice(), torch.empty(8, 64), precision="amp-fp16")

    (made,) = casts(forward_blocks(traced), 64 * 64 * 2)
    assert made.category is Category.ACTIVATION
    assert moment(traced.timeline, Phase.BACKWARD) < made.end < moment(traced.timeline, Phase.OPTIMIZER)


def test_without_the_cache_each_use_casts():
    def loss(model, batch):
        with torch.autocast("cuda", cache_enabled=False):
            return model(batch).float().mean()

    traced = run(Twice(), torch.empty(8, 64), loss=loss, training=False)

    assert len(casts(forward_blocks(traced), 64 * 64 * 2)) == 2


def test_nested_blocks_share_one_cast_and_later_blocks_make_another():
    def loss(model, batch):
        with torch.autocast("cuda"):
            model.layer(batch)
            with torch.autocast("cuda"):
                model.layer(batch)
            model.layer(batch)
        with torch.autocast("cuda"):
            model.layer(batch)

    traced = run(Twice(), torch.empty(8, 64), loss=loss, training=False)

    assert len(casts(forward_blocks(traced), 64 * 64 * 2)) == 2


def test_a_disabled_region_keeps_the_precision():
    def work(data):
        with torch.autocast("cuda"):
            with torch.autocast("cuda", enabled=False):
                inside = torch.mm(data, data).dtype
            return inside, torch.mm(data, data).dtype

    assert observe(work, MATRIX)[0] == (torch.float32, torch.float16)


def test_a_frozen_parameter_is_cast_again_at_each_use():
    # CUDA's cache keeps only casts of leaves that require a gradient.
    model = Twice().requires_grad_(False)

    traced = run(model, torch.empty(8, 64), precision="amp-fp16", training=False)

    assert len(casts(forward_blocks(traced), 64 * 64 * 2)) == 2


def test_an_activation_is_cast_again_at_each_use():
    # GIVEN a float32 activation with a gradient, which is no leaf
    def loss(model, batch):
        middle = model.layer.weight[:8].exp()
        with torch.autocast("cuda"):
            return (model.layer(middle) + model.layer(middle)).float().sum()

    traced = run(Twice(), torch.empty(1), loss=loss)

    assert len(casts(forward_blocks(traced), 8 * 64 * 2)) == 2


@pytest.mark.parametrize("function", [F.softmax, F.log_softmax])
def test_softmax_of_float16_makes_no_float32_copy_of_its_input(function):
    def work(data):
        with torch.autocast("cuda"):
            function(data, -1)

    _, traced = observe(work, torch.empty(32, 32, dtype=torch.float16))

    assert sizes(forward_blocks(traced)) == [32 * 32 * 4]


def test_softmax_of_bfloat16_makes_one():
    # The fused conversion exists for float16 alone.
    def work(data):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            F.softmax(data, -1)

    _, traced = observe(work, torch.empty(32, 32, dtype=torch.bfloat16))

    assert sizes(forward_blocks(traced)) == [32 * 32 * 4, 32 * 32 * 4]


def test_a_users_own_block_in_the_loss_equals_the_precision_option():
    def loss(model, batch):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(batch).float().mean()

    own = run(Twice(), torch.empty(8, 64), loss=loss)
    option = run(Twice(), torch.empty(8, 64), precision="amp-bf16")

    assert kept_bytes(own) == kept_bytes(option)
    assert sizes(own.timeline.blocks) == sizes(option.timeline.blocks)


def test_autocast_keeps_less_than_float32():
    # GIVEN three layers whose inputs the backward pass needs
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))

    def loss(model, batch):
        return model(batch).sum()

    # WHEN traced in both precisions
    full = kept_bytes(run(model, torch.empty(64, 16), loss=loss))
    mixed = kept_bytes(run(model, torch.empty(64, 16), loss=loss, precision="amp-fp16"))

    # THEN float32 keeps two outputs and the loss; float16 keeps three inputs, two weights, and the loss
    assert full == 2 * 64 * 16 * 4 + 4
    assert mixed == 3 * 64 * 16 * 2 + 2 * 16 * 16 * 2 + 4


def test_gradients_of_parameters_stay_float32():
    model = nn.Linear(16, 16, bias=False)

    traced = run(model, torch.empty(64, 16), precision="amp-fp16")

    gradients = [b for b in made_in(traced, Phase.BACKWARD) if b.category is Category.GRADIENT]
    assert sizes(gradients) == [16 * 16 * 4]


def test_the_state_is_what_it_was_after_a_trace():
    def loss(model, batch):
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") is torch.bfloat16
        return model(batch).float().mean()

    def state():
        common = torch.cuda.amp.common
        return (
            torch.is_autocast_enabled("cuda"),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cuda"),
            torch.is_autocast_cache_enabled(),
            torch.clear_autocast_cache,
            torch.cuda.is_bf16_supported,
            common.amp_definitely_not_available,
        )

    before = state()
    run(Twice(), torch.empty(8, 64), loss=loss, precision="amp-bf16")

    assert state() == before


def test_the_state_is_what_it_was_after_a_failed_trace():
    def loss(model, batch):
        with torch.autocast("cuda"):
            raise ValueError("no")

    before = torch.clear_autocast_cache
    with pytest.raises(StepFailed):
        run(Twice(), torch.empty(8, 64), loss=loss, precision="amp-bf16")

    assert not torch.is_autocast_enabled("cuda")
    assert torch.clear_autocast_cache is before


ON_THE_HOST = {
    "mm": (torch.mm, (MATRIX, MATRIX)),
    "linear": (F.linear, (MATRIX, MATRIX, torch.empty(4))),
    "einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, b), (MATRIX, MATRIX)),
    "mv": (torch.mv, (MATRIX, MATRIX[0])),
    "convolution": (lambda a: F.conv1d(a.view(1, 4, 4), torch.zeros(4, 4, 1, dtype=a.dtype)), (MATRIX,)),
    "attention": (lambda a: F.scaled_dot_product_attention(*[a.view(1, 1, 4, 4)] * 3), (MATRIX,)),
    "softmax": (lambda a: F.softmax(a, -1), (HALF,)),
    "layer norm": (lambda a: F.layer_norm(a, (4,)), (HALF,)),
    "exp": (torch.exp, (HALF,)),
    "sum": (torch.sum, (HALF,)),
    "norm": (lambda a: a.norm(), (HALF,)),
    "prod": (torch.prod, (HALF,)),
    "squared error": (F.mse_loss, (HALF, HALF)),
    "cross entropy": (lambda a: F.cross_entropy(a, torch.zeros(4, dtype=torch.int64)), (HALF,)),
    "binary cross entropy": (lambda a: F.binary_cross_entropy(a.sigmoid(), a.sigmoid()), (HALF,)),
    "cat": (lambda a, b: torch.cat([a, b]), (HALF, MATRIX)),
    "stack": (lambda a, b: torch.stack([a, b]), (HALF, MATRIX)),
    "index copy": (lambda a, b: a.index_copy(0, torch.tensor([0]), b[:1]), (MATRIX, MATRIX)),
    "padding": (lambda a: F.pad(a.view(1, 4, 4), (1, 1), mode="reflect"), (HALF,)),
    "pooling": (lambda a: F.avg_pool3d(a.view(1, 1, 4, 2, 2), 2), (HALF,)),
    "relu": (torch.relu, (HALF,)),
}


@pytest.mark.parametrize("name", ON_THE_HOST)
def test_the_host_gives_the_precision_that_the_real_one_gives(name):
    # GIVEN real numbers and PyTorch's own autocast
    work, inputs = ON_THE_HOST[name]
    inputs = [torch.zeros_like(tensor).to(torch.bfloat16 if tensor is HALF else tensor.dtype) for tensor in inputs]

    def under_autocast(*arguments):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return work(*arguments).dtype

    # THEN shapes on the host come out in the same precision
    assert observe(under_autocast, *inputs, device=HOST)[0] is under_autocast(*inputs)


def test_the_host_has_a_list_for_every_operator_that_torch_casts_there():
    listed = [*autocast.HOST_LOWER_PRECISION, *autocast.HOST_WIDEST, *autocast.host_float32()]

    assert sorted(listed) == sorted(set(listed))
    assert set(listed) == known_to_torch("AutocastCPU")


def test_real_tensors_are_left_alone():
    real = torch.ones(2, 2)

    assert Autocast("cuda").cast(real, torch.float16) is real
