import importlib

import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from memfit.core.errors import StepFailed
from memfit.core.timeline import Category, Phase
from memfit.frameworks.torch.kernels.fallbacks import DATA_DEPENDENT
from memfit.frameworks.torch.simulation import higher_order
from tests.unit.frameworks.torch.builders import AMPERE, HOST, cuda, kept_bytes, made_in, run, total
from tests.unit.frameworks.torch.measured import allocations
from tests.unit.frameworks.torch.sessions import running

flex_module = importlib.import_module("torch.nn.attention.flex_attention")

ROWS, WIDTH = 64, 256
SIZE = ROWS * WIDTH * 4

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:return_lse is deprecated"),
]


def step(function, *, device=AMPERE, width=WIDTH, rows=ROWS):
    """The trace of `function` applied to what a layer makes."""

    def loss(model, batch):
        return function(model(batch)).sum()

    return run(nn.Linear(width, width), torch.zeros(rows, width), loss=loss, device=device)


def chain(value):
    return value.sin().cos().exp()


def test_a_branch_keeps_its_operands_only():
    branched = step(lambda x: torch.cond(x.sum() > 0, chain, torch.sin, (x,)))
    # The layer's output; as operators, `chain` keeps that and two more.
    assert kept_bytes(branched) - kept_bytes(step(torch.sum)) in range(SIZE, SIZE + 64)
    assert kept_bytes(step(chain)) >= 3 * SIZE
    again = [b.op for b in made_in(branched, Phase.BACKWARD)]
    assert {"aten.sin", "aten.cos"} <= set(again)


def test_the_branch_that_a_known_number_chooses():
    traced = step(lambda x: torch.cond(False, chain, torch.tanh, (x,)))
    assert "aten.exp" not in {b.op for b in traced.timeline.blocks}


def test_elements_are_computed_again_and_their_results_stacked():
    traced = step(lambda x: map_rows(lambda row: row.sin().cos(), x))
    stacked = [b.size_bytes for b in made_in(traced, Phase.FORWARD) if b.op == "aten.stack"]
    assert stacked == [SIZE]
    assert kept_bytes(traced) < 2 * SIZE + 1024


def test_a_scan_carries_and_stacks():
    def total_so_far(carried, row):
        carried = carried + row.sin()
        return carried, carried.clone()

    traced = step(lambda x: scan(total_so_far, torch.zeros_like(x[0]), x)[1])
    made = made_in(traced, Phase.FORWARD)
    assert sum(b.op == "aten.sin" for b in made) == ROWS
    assert [b.size_bytes for b in made if b.op == "aten.stack"] == [SIZE]


def test_a_loop_of_unknown_length_takes_one_turn():
    def loop(x):
        while_loop = torch._higher_order_ops.while_loop
        return while_loop(lambda value: value.sum() > 0, lambda value: (value.sin(),), (x,))[0]

    traced = step(loop)
    assert sum(b.op == "aten.sin" for b in made_in(traced, Phase.FORWARD)) == 1
    assert [note.code for note in traced.notes] == [DATA_DEPENDENT]


def test_a_loop_whose_counter_is_followed_takes_all_its_turns():
    with running() as session:
        count, value = torch.zeros((), dtype=torch.int64, device="cuda"), torch.ones(4096, device="cuda")
        while_loop = torch._higher_order_ops.while_loop
        count, value = while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, x.sin()), (count, value))
    made = session.recorder.timeline().blocks
    assert sum(block.op == "aten.sin" for block in made) == 5


BATCH, HEADS, LENGTH, HEAD = 2, 4, 256, 32
SCORES = BATCH * HEADS * LENGTH * LENGTH * 4
ACROSS = BATCH * HEADS * LENGTH * HEAD * 4


def attend(length=LENGTH, **options):
    def attention(x):
        # As projections make them: heads behind the sequence.
        query, key, value = x.view(3, BATCH, length, HEADS, HEAD).transpose(2, 3)
        return flex_attention(query, key, value, **options)

    return attention


def trace_attention(function, device=AMPERE):
    return step(function, device=device, width=HEADS * HEAD, rows=3 * BATCH * LENGTH)


def has_scores(traced):
    blocks = traced.timeline.blocks
    return any(block.size_bytes >= SCORES for block in blocks if block.category is not Category.WORKSPACE)


def test_compiled_attention_keeps_its_output_and_a_number_per_row():
    traced = trace_attention(attend(score_mod=lambda score, *place: score * 2))
    assert not has_scores(traced)
    # Query, key and value are one tensor here, which the layer's product keeps for nobody.
    plain = trace_attention(torch.sum)
    assert kept_bytes(traced) - kept_bytes(plain) in range(3 * ACROSS + ACROSS, 4 * ACROSS + 4 * ACROSS // HEAD)
    assert [note.code for note in traced.notes] == [higher_order.FLEX_AS_FUSED]
    assert "2.00 MiB each" in traced.notes[0].text


def test_a_mask_of_blocks_is_on_the_device():
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, LENGTH, LENGTH, device="cpu")
    traced = trace_attention(lambda x: attend(block_mask=mask.to(x.device))(x))
    assert not has_scores(traced)


def test_a_learned_bias_gets_a_gradient():
    bias = nn.Parameter(torch.zeros(LENGTH, LENGTH))

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.bias = nn.Linear(HEADS * HEAD, HEADS * HEAD), bias

        def forward(self, x):
            bias = self.bias
            return attend(score_mod=lambda score, b, h, q, k: score + bias[q, k])(self.layer(x))

    traced = run(Attention(), torch.zeros(3 * BATCH * LENGTH, HEADS * HEAD), optimizer=torch.optim.SGD)
    gradients = [b.size_bytes for b in traced.timeline.blocks if b.category is Category.GRADIENT]
    assert LENGTH * LENGTH * 4 in gradients


def attend_in_a_session(attention):
    with running() as session:
        query, key, value = (
            torch.randn(BATCH, HEADS, LENGTH, HEAD, device="cuda", requires_grad=True) for _ in range(3)
        )
        out, rows = attention(query, key, value, return_lse=True)
        # Products of its own have cuBLAS's workspace.
        blocks = session.recorder.timeline().blocks
        kept = session.memory.allocated_bytes - total(blocks, Category.WORKSPACE)
        out.sum().backward()
        assert query.grad.shape == query.shape
        assert rows.shape == query.shape[:-1]
        assert out.is_cuda
    return kept, [block.size_bytes for block in session.recorder.timeline().blocks].count(SCORES)


def test_a_script_that_compiles_nothing_computes_matrices_of_scores_and_keeps_none():
    kept, num_matrices = attend_in_a_session(flex_attention)
    kept_compiled, none = attend_in_a_session(lambda *args, **options: torch.compile(flex_attention)(*args, **options))
    assert num_matrices > 8
    assert none == 0
    assert kept == kept_compiled


def test_what_is_measured_on_the_cpu_of_attention_that_is_not_compiled(monkeypatch):
    monkeypatch.setattr(flex_module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    x = torch.randn(3 * BATCH * LENGTH, HEADS * HEAD)
    with torch.no_grad():
        attend()(x)
        total_bytes = peak = 0
        for change in allocations(lambda: attend()(x)):
            total_bytes += change
            peak = max(peak, total_bytes)
    # Most of it are matrices of scores; the simulation's are as many, give or take one.
    with running() as session:
        base = session.memory.allocated_bytes
        given = x.to("cuda")
        with torch.no_grad():
            attend()(given)
    blocks = session.recorder.timeline()
    simulated = blocks.peak()[1] - base - x.numel() * 4
    workspace = total(blocks.blocks, Category.WORKSPACE)
    assert simulated - workspace == pytest.approx(peak, abs=SCORES + ACROSS)


def test_float8_products_are_for_devices_that_have_them():
    def product(x):
        left, right = x.detach().to(torch.float8_e4m3fn), x.detach().to(torch.float8_e4m3fn)
        scale = torch.ones((), device=x.device)
        return (
            torch._scaled_mm(left, right.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16).float() + x.sum()
        )

    traced = step(product, device=cuda(9, 0))
    made = {b.op: b.size_bytes for b in made_in(traced, Phase.FORWARD)}
    assert made["aten._scaled_mm"] == ROWS * ROWS * 2
    assert [b.size_bytes for b in made_in(traced, Phase.FORWARD) if b.size_bytes == ROWS * WIDTH]
    with pytest.raises(StepFailed, match=r"capability 8\.9 or more"):
        step(product)


def test_nested_sequences_attend_without_padding():
    lengths = (37, 120, 64, 200)
    width = HEADS * HEAD

    def loss(model, batch):
        nested = torch.nested.nested_tensor_from_jagged(model(batch), offsets)
        query = nested.unflatten(-1, (HEADS, HEAD)).transpose(1, 2)
        out = nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        return out.values().float().sum()

    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    with running() as session:
        model = nn.Linear(width, width, device="cuda", dtype=torch.bfloat16)
        offsets = offsets.cuda()
        loss(model, torch.randn(sum(lengths), width, device="cuda", dtype=torch.bfloat16)).backward()
    blocks = session.recorder.timeline().blocks
    attention = [b.size_bytes for b in blocks if b.op == "aten._flash_attention_forward"]
    assert max(attention) == sum(lengths) * width * 2
    scratch = [
        b.size_bytes for b in blocks if b.op == "aten._flash_attention_backward" and b.category is Category.WORKSPACE
    ]
    padded = sum(lengths) + 128 * len(lengths)
    assert scratch == [padded * width * 4, padded * HEADS * 4]


def test_the_host_refuses_a_backward_pass_of_flex_attention_as_pytorch_does():
    with pytest.raises(StepFailed, match="FlexAttention"):
        trace_attention(attend(), device=HOST)
