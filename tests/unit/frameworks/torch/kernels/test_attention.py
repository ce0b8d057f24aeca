import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from memfit.core.errors import StepFailed
from memfit.core.estimate import LACKS_PRECISION
from memfit.core.timeline import Category, Phase
from memfit.frameworks.torch.kernels.attention import Call, choose_cuda_kernel
from tests.unit.frameworks.torch.builders import (
    AMPERE,
    HOST,
    cuda,
    forward_blocks,
    kept_bytes,
    made_in,
    observe,
    run,
    sizes,
)
from tests.unit.frameworks.torch.sessions import codes, made, running

# No power of two, so that no other tensor is as large as a matrix of scores.
BATCH, HEADS, LENGTH, HEAD = 2, 4, 80, 32


def tensor(batch=BATCH, heads=HEADS, length=LENGTH, head=HEAD, dtype=torch.float16, grad=True):
    return torch.empty(batch, heads, length, head, dtype=dtype, device="meta", requires_grad=grad)


def choose(
    query=None, key=None, value=None, *, mask=None, dropout=0.0, causal=False, grouped=False, capability=(8, 6), **shape
):
    """The kernel for tensors of one shape, unless some are given."""
    query, key, value = (t if t is not None else tensor(**shape) for t in (query, key, value))
    return choose_cuda_kernel(Call(query, key, value, mask, dropout, causal, enable_gqa=grouped), capability)


@pytest.mark.parametrize(
    ("dtype", "capability", "expected"),
    [
        (torch.float16, (8, 0), "flash"),
        (torch.bfloat16, (9, 0), "flash"),
        (torch.float16, (7, 5), "efficient"),
        (torch.float16, (6, 1), "efficient"),
        (torch.bfloat16, (7, 5), "math"),
        (torch.float32, (8, 6), "efficient"),
        (torch.float32, (7, 0), "efficient"),
        (torch.float64, (8, 0), "math"),
    ],
)
def test_precision_and_generation_decide(dtype, capability, expected):
    assert choose(dtype=dtype, capability=capability) == expected


@pytest.mark.parametrize(
    ("head", "dtype", "capability", "expected"),
    [
        (256, torch.float16, (8, 0), "flash"),
        (264, torch.float16, (8, 0), "efficient"),
        (257, torch.float16, (8, 0), "math"),
        (60, torch.float16, (8, 0), "flash"),  # padded to a multiple of 8
        (60, torch.float16, (7, 5), "math"),
        (60, torch.float32, (8, 0), "efficient"),
        (62, torch.float32, (8, 0), "math"),
        (62, torch.float32, (7, 5), "efficient"),
        (62, torch.float16, (6, 1), "efficient"),
        # Consumer parts of Ampere and Ada lack the shared memory for the backward pass of large heads.
        (224, torch.float16, (8, 6), "flash"),
        (232, torch.float16, (8, 6), "efficient"),
        (232, torch.float16, (8, 9), "efficient"),
        (232, torch.float16, (9, 0), "flash"),
    ],
)
def test_the_head_size_decides(head, dtype, capability, expected):
    assert choose(head=head, dtype=dtype, capability=capability) == expected


def test_large_heads_are_a_problem_of_the_backward_pass_alone():
    assert choose(head=232, grad=False) == "flash"


def test_dropout_lowers_the_largest_head():
    assert choose(head=200) == "flash"
    assert choose(head=200, dropout=0.1) == "efficient"
    assert choose(head=192, dropout=0.1) == "flash"


def test_a_mask_rules_out_flash():
    assert choose(mask=torch.ones(LENGTH, LENGTH, dtype=torch.bool, device="meta")) == "efficient"


def test_causal_attention_of_unequal_lengths_rules_out_flash():
    assert choose(causal=True) == "flash"
    assert choose(key=tensor(length=32), value=tensor(length=32)) == "flash"
    assert choose(key=tensor(length=32), value=tensor(length=32), causal=True) == "efficient"


def test_grouped_queries_need_flash_or_math():
    few = tensor(heads=2)
    assert choose(key=few, value=few, grouped=True) == "flash"
    assert choose(key=few, value=few, grouped=False) == "math"
    single = tensor(heads=2, dtype=torch.float32)
    assert choose(query=tensor(dtype=torch.float32), key=single, value=single, grouped=True) == "math"


def test_odd_shapes_need_math():
    flat = torch.empty(BATCH, LENGTH, HEAD, dtype=torch.float16, device="meta")
    assert choose(flat, flat, flat) == "math"
    across = tensor(length=HEAD, head=LENGTH).transpose(-1, -2)
    assert choose(across, across, across) == "math"
    assert choose(length=0) == "math"


def test_different_value_sizes_rule_out_flash():
    assert choose(value=tensor(head=64)) == "efficient"


@pytest.mark.parametrize(
    ("backends", "expected"),
    [
        ([SDPBackend.FLASH_ATTENTION], "flash"),
        ([SDPBackend.EFFICIENT_ATTENTION], "efficient"),
        ([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], "efficient"),
        ([SDPBackend.CUDNN_ATTENTION], "flash"),
        ([SDPBackend.MATH], "math"),
    ],
)
def test_switches_of_the_user_decide(backends, expected):
    with sdpa_kernel(backends):
        assert choose() == expected
    assert choose() == "flash"


def test_the_users_order_of_priority_decides():
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert choose() == "efficient"
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert choose() == "math"


def test_the_switches_of_the_backend_module_decide():
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        assert choose() == "efficient"
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION])
def test_a_kernel_that_cannot_run_is_an_error_as_on_cuda(backend):
    with sdpa_kernel(backend), pytest.raises(RuntimeError, match="no attention kernel"):
        choose(dtype=torch.float32)


class Attend(nn.Module):
    """One self-attention on heads of `HEAD`, of whose projections only the query's learns."""

    def __init__(self, dtype=torch.float16, **options):
        super().__init__()
        self.project = nn.Linear(HEAD, HEAD, bias=False, dtype=dtype)
        self.options = options

    def forward(self, data):
        mixed = self.project(data)
        return F.scaled_dot_product_attention(mixed, mixed, mixed, **self.options)


DATA = torch.empty(BATCH, HEADS, LENGTH, HEAD, dtype=torch.float16)
SQUARES = {BATCH * HEADS * LENGTH * LENGTH * size for size in (1, 2, 4)}
TENSOR_BYTES = BATCH * HEADS * LENGTH * HEAD * 2


def squares(traced):
    """Blocks of the size of a matrix of scores, in any precision."""
    return [b for b in traced.timeline.blocks if b.size_bytes in SQUARES]


def test_flash_keeps_no_matrix_of_scores():
    traced = run(Attend(), DATA, loss=lambda m, b: m(b).sum())

    assert squares(traced) == []
    # The projection, which is query, key and value; the output; a float32 row sum; the loss; a random state.
    row_sums = BATCH * HEADS * LENGTH * 4
    assert 0 <= kept_bytes(traced) - (2 * TENSOR_BYTES + row_sums + 2) <= 64


def test_efficient_keeps_no_matrix_of_scores_either():
    traced = run(Attend(), DATA, device=cuda(7, 5))

    assert squares(traced) == []
    assert any("efficient_attention" in block.op for block in traced.timeline.blocks)


def test_math_keeps_matrices_of_scores():
    def loss(model, batch):
        with sdpa_kernel(SDPBackend.MATH):
            return model(batch).float().sum()

    traced = run(Attend(), DATA, loss=loss)

    kept = [b for b in squares(traced) if b.category is Category.ACTIVATION]
    assert kept
    assert all("attention" not in block.op for block in traced.timeline.blocks)


def test_an_unaligned_head_is_padded_for_flash():
    model = Attend()
    model.project = nn.Linear(HEAD, 28, bias=False, dtype=torch.float16)

    traced = run(model, DATA)

    padded = BATCH * HEADS * LENGTH * 32 * 2
    assert [b.size_bytes for b in forward_blocks(traced) if "pad" in b.op].count(padded) == 3
    assert any("flash_attention" in block.op for block in traced.timeline.blocks)


def test_a_boolean_mask_becomes_an_additive_one():
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)

    def loss(model, batch):
        data, mask = batch
        mixed = model.project(data)
        return F.scaled_dot_product_attention(mixed, mixed, mixed, attn_mask=mask).float().sum()

    traced = run(Attend(), (DATA, mask), loss=loss)

    # One for all samples and heads, in the precision of the query.
    made = [b.size_bytes for b in forward_blocks(traced) if b.op == "aten.zeros_like"]
    assert made == [LENGTH * LENGTH * 2]


def test_a_mask_whose_rows_are_unaligned_is_padded():
    def loss(model, batch):
        data, mask = batch
        mixed = model.project(data)
        return F.scaled_dot_product_attention(mixed, mixed, mixed, attn_mask=mask).float().sum()

    data = torch.empty(BATCH, HEADS, 60, HEAD, dtype=torch.float16)
    traced = run(Attend(), (data, torch.empty(60, 60, dtype=torch.float16)), loss=loss)

    assert [b.size_bytes for b in forward_blocks(traced) if "pad" in b.op] == [60 * 64 * 2]


def test_autocast_casts_before_the_choice():
    model = Attend(dtype=torch.float32)

    traced = run(model, DATA.float(), precision="amp-fp16")

    assert any("flash_attention" in block.op for block in traced.timeline.blocks)


def test_grouped_queries_run_forward_and_backward():
    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(HEAD, HEAD, dtype=torch.float16)

        def forward(self, data):
            query, few = self.project(data), self.project(data[:, :2])
            return F.scaled_dot_product_attention(query, few, few, enable_gqa=True)

    traced = run(Grouped(), DATA)

    assert any(
        "flash_attention_backward" in block.op and block.category is Category.WORKSPACE
        for block in made_in(traced, Phase.BACKWARD)
    )


def test_attention_weights_with_dropout_and_causality_run():
    traced = run(Attend(dropout_p=0.1, is_causal=True), DATA)

    assert squares(traced) == []


def test_a_restricted_user_hears_that_no_kernel_fits():
    def loss(model, batch):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return model(batch).mean()

    with pytest.raises(StepFailed, match="no attention kernel"):
        run(Attend(dtype=torch.float32), DATA.float(), loss=loss)


@pytest.mark.parametrize(
    ("options", "fused"),
    [({}, True), ({"is_causal": True}, True), ({"dropout_p": 0.5}, False)],
)
def test_the_host_chooses_for_itself(options, fused):
    traced = run(Attend(dtype=torch.float32, **options), DATA.float(), device=HOST)

    assert bool(squares(traced)) is not fused
    assert any("flash_attention_for_cpu" in block.op for block in traced.timeline.blocks) is fused


def test_a_layer_of_the_framework_attends_by_the_same_rules():
    # GIVEN the framework's own encoder layer, whose attention is called from C++ or Python depending on the mode
    layer = nn.TransformerEncoderLayer(64, 2, 64, batch_first=True, dropout=0.0)

    # WHEN it is trained on a sequence of 80
    traced = run(layer, torch.empty(3, 80, 64), precision="amp-fp16", device=AMPERE)

    # THEN no block is as large as the scores of 3 x 2 heads
    scores = {3 * 2 * 80 * 80 * size for size in (2, 4)}
    assert [b for b in traced.timeline.blocks if b.size_bytes in scores] == []


@pytest.mark.parametrize(
    ("capability", "dtype", "told"),
    [
        ((7, 5), torch.bfloat16, True),
        ((7, 5), torch.float16, False),
        ((8, 6), torch.bfloat16, False),
        # No device has a lean kernel for it.
        ((7, 5), torch.float64, False),
    ],
)
def test_attention_that_another_precision_would_make_lean_says_so(capability, dtype, told):
    query = torch.empty(1, 2, 64, 32, dtype=dtype)

    _, traced = observe(lambda q: F.scaled_dot_product_attention(q, q, q).shape, query, device=cuda(*capability))

    found = [note.text for note in traced.notes if note.code == LACKS_PRECISION and "matrix of scores" in note.text]
    assert len(found) == told
    assert all("for float16 (amp-fp16, fp16) it has one" in text for text in found)
    # Finding out takes no memory of the device.
    assert not [block for block in forward_blocks(traced) if block.op.endswith("empty_like")]


SAMPLES = torch.empty(10, 20)


class Dropped(nn.Module):
    """A layer, then dropout, then a layer that keeps what the dropout let through."""

    def __init__(self, p=0.5, inplace=False):
        super().__init__()
        self.first = nn.Linear(20, 20, bias=False)
        self.drop = nn.Dropout(p, inplace=inplace)
        self.last = nn.Linear(20, 1, bias=False)

    def forward(self, data):
        return self.last(self.drop(self.first(data)))


def last_output(model, batch):
    return model(batch).sum()


OUTPUT = 10 * 20 * 4


@pytest.mark.parametrize(
    ("device", "mask"),
    [(AMPERE, 10 * 20), (HOST, 10 * 20 * 4)],
    ids=["cuda: one byte each", "host: one number each"],
)
def test_dropout_keeps_its_mask_as_the_device_does(device, mask):
    traced = run(Dropped(), SAMPLES, loss=last_output, device=device)

    # Beside the mask: the output of the dropout for the last layer, and the loss.
    assert kept_bytes(traced) == mask + OUTPUT + 4


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_nothing_or_all_is_no_native_dropout(p):
    traced = run(Dropped(p), SAMPLES, loss=last_output)

    assert sizes(forward_blocks(traced), "native_dropout") == []


def test_dropout_in_evaluation_mode_keeps_nothing():
    traced = run(Dropped().eval(), SAMPLES, loss=last_output)

    assert kept_bytes(traced) == OUTPUT + 4


def test_dropout_in_place_keeps_a_mask_of_numbers_on_cuda_too():
    # CUDA fuses only the dropout that makes a new tensor.
    traced = run(Dropped(inplace=True), SAMPLES, loss=last_output)

    assert kept_bytes(traced) == OUTPUT + OUTPUT + 4


def test_choices_hold_inside_functions_called_from_cplusplus():
    # GIVEN a layer of the framework that calls dropout from inside another operator
    layer = nn.MultiheadAttention(20, 2, dropout=0.5, batch_first=True)

    def loss(model, batch):
        return model(batch, batch, batch, need_weights=True)[0].sum()

    # WHEN it trains with attention weights asked for, which rules out the fused kernels
    traced = run(layer, torch.empty(4, 10, 20), loss=loss)

    # THEN the dropout of the weights keeps one byte per weight
    masks = [b for b in forward_blocks(traced) if b.op == "aten.native_dropout" and b.size_bytes == 4 * 2 * 10 * 10]
    assert [mask.category for mask in masks] == [Category.ACTIVATION]


STEPS, ROWS, CLASSES, LETTERS = 50, 4, 20, 10
CTC = nn.functional.ctc_loss


def ctc_blocks(input_lengths, target_lengths):
    """(sizes of what a loss of sequences made, the notes)"""
    with running() as session:
        scores = torch.randn(STEPS, ROWS, CLASSES, device="cuda", requires_grad=True)
        targets = torch.ones(ROWS, LETTERS, dtype=torch.int64, device="cuda")
        loss = CTC(scores.log_softmax(-1), targets, input_lengths(), target_lengths())
        loss.backward()
        assert scores.grad.shape == scores.shape
    return [block.size_bytes for block in made(session, op="_ctc_loss")], codes(session)


GIVEN = [STEPS, 30, 20, 10], [8, 6, 4, 2]
WAYS = {
    "on the host": lambda lengths: lambda: torch.tensor(lengths),
    "as numbers": lambda lengths: lambda: tuple(lengths),
    "on the device": lambda lengths: lambda: torch.tensor(lengths, device="cuda"),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_loss_of_sequences_goes_by_their_lengths(way):
    found, noted = ctc_blocks(*(WAYS[way](lengths) for lengths in GIVEN))

    # A number per sequence, and one for each step and each place of the longest target: its letters and the blanks.
    assert sorted(found) == [ROWS * 4, ROWS * STEPS * (2 * 8 + 1) * 4]
    assert noted == []


def test_lengths_that_nobody_knows_are_the_longest_possible():
    def anything():
        return torch.randint(1, 9, (ROWS,), device="cuda")

    found, noted = ctc_blocks(anything, anything)

    assert sorted(found) == [ROWS * 4, ROWS * STEPS * (2 * LETTERS + 1) * 4]
    assert set(noted) == {"stand-in-value"}
