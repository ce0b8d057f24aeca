import logging

import bitsandbytes
import pytest
import torch
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from torch import nn

import memfit
from memfit.api.devices import resolve
from memfit.core.estimate import PAGED_STATE
from memfit.core.timeline import Category, Phase
from memfit.frameworks.torch.kernels import quantized
from memfit.frameworks.torch.kernels.quantized import Quantized
from tests.unit.frameworks.torch.measured import allocations

INPUT, HIDDEN, ROWS = 256, 512, 64


@pytest.fixture(autouse=True)
def no_warnings_of_the_library():
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def mlp():
    return nn.Sequential(nn.Linear(INPUT, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, INPUT))


def loss(model, batch):
    return model(batch).pow(2).mean()


def optimizer_of(name, parameters):
    momentum = {"momentum": 0.9} if "SGD" in name else {}
    return getattr(bitsandbytes.optim, name)(parameters, lr=1e-3, **momentum)


def estimate(model, optimizer=None, device="a100-40gb", rows=ROWS, **options):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad]) if optimizer is None else optimizer
    return memfit.estimate(model, loss, torch.zeros(rows, INPUT), optimizer=optimizer, device=device, **options)


def bytes_of(result, category):
    return result.state_bytes.get(category, 0)


WEIGHT = INPUT * HIDDEN
# Codes of one byte, a float32 for each 256 of them; small parameters keep float32.
CODES = 2 * (WEIGHT + WEIGHT // 256 * 4)
SMALL = (INPUT + HIDDEN) * 4
MAP = 256 * 4
STATES = {
    "AdamW8bit": 2 * (CODES + SMALL + MAP),
    "Lion8bit": CODES + SMALL + MAP,
    "SGD8bit": CODES + SMALL + MAP,
    "AdamW32bit": 2 * (2 * WEIGHT + INPUT + HIDDEN) * 4,
}


@pytest.mark.parametrize("name", STATES)
def test_state_of_an_optimizer_is_what_the_library_allocates(name):
    model = mlp()
    assert bytes_of(estimate(model, optimizer_of(name, model.parameters())), "optimizer state") == STATES[name]


def test_paged_state_is_the_hosts_and_the_rest_of_it_the_devices():
    result = estimate(mlp(), lambda parameters: optimizer_of("PagedAdamW8bit", parameters))
    assert result.host.parts[PAGED_STATE] == 2 * 2 * WEIGHT
    assert bytes_of(result, "optimizer state") == STATES["AdamW8bit"] - 2 * 2 * WEIGHT
    assert quantized.PAGED_STATE in {note.code for note in result.notes}


def test_the_librarys_registers_are_as_before():
    pages = bitsandbytes.functional.GlobalPageManager.get_instance().paged_tensors
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    tables = dict(bitsandbytes.functional.name2qmap)
    before = (list(pages), dict(manager.pid2config), dict(manager.index2config))
    model = nn.Sequential(bitsandbytes.nn.StableEmbedding(1024, 64), nn.Linear(64, 64))
    model.register_module("quantized", Linear4bit(64, 64))
    ids = torch.zeros(4, 8, dtype=torch.int64)
    memfit.estimate(
        model,
        lambda model, ids: model[1](model[0](ids)).mean(),
        ids,
        optimizer=optimizer_of("PagedAdamW32bit", [p for p in model.parameters() if p.requires_grad]),
        device="a100-40gb",
    )
    assert (pages, manager.pid2config, manager.index2config) == before
    assert bitsandbytes.functional.name2qmap == tables


def make_4bit(*, nested=False):
    return nn.Sequential(
        nn.Linear(INPUT, INPUT),
        Linear4bit(INPUT, HIDDEN, compute_dtype=torch.bfloat16, compress_statistics=nested, bias=False),
        nn.Linear(HIDDEN, 16),
    )


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("is_quantized", [False, True])
def test_4bit_weights_take_codes_and_the_state_of_their_quantisation(nested, is_quantized):
    model = make_4bit(nested=nested)
    plain = sum(p.numel() * 4 for part in (model[0], model[2]) for p in part.parameters())
    model = model.to("cpu") if is_quantized else model
    weight = model[1].weight
    blocks = WEIGHT // 64
    state = blocks + blocks // 256 * 4 + MAP + 4 if nested else blocks * 4
    assert bytes_of(estimate(model), "parameter") == plain + WEIGHT // 2 + state + 16 * 4
    assert model[1].weight is weight
    assert not weight.is_meta


def test_4bit_products_dequantise_their_weights_and_keep_none():
    result = estimate(make_4bit(), rows=2048)
    dequantised = [b for b in result.timeline.blocks if b.op == "bitsandbytes.dequantize_4bit"]
    # In the dtype of the product, and then in that of the weights before they were quantised.
    assert [(b.size_bytes, b.phase) for b in dequantised[:2]] == [
        (WEIGHT * 2, Phase.FORWARD),
        (WEIGHT * 4, Phase.BACKWARD),
    ]
    assert all(b.category is Category.TEMPORARY for b in dequantised)


def test_few_rows_are_multiplied_without_dequantised_weights():
    result = estimate(make_4bit(), rows=4)
    assert next(b.phase for b in result.timeline.blocks if b.op == "bitsandbytes.dequantize_4bit") is Phase.BACKWARD


def test_which_kernel_multiplies_is_the_librarys_own_table():
    def fused(device, rows):
        return Quantized(resolve(device), None, None, None)._is_fused(torch.bfloat16, rows, 4096, 4096)

    assert [fused("rtx-3090", rows) for rows in (4, 64, 128, 4096)] == [True, True, False, False]
    assert [fused("h100-80gb", rows) for rows in (4, 64)] == [True, False]
    # A device of which nobody knows how many multiprocessors it has.
    assert not fused("24GiB", 16)


@pytest.mark.parametrize("threshold", [0.0, 6.0])
@pytest.mark.parametrize("is_quantized", [False, True])
def test_8bit_weights(threshold, is_quantized):
    layer = Linear8bitLt(INPUT, HIDDEN, bias=False, has_fp16_weights=False, threshold=threshold)
    model = nn.Sequential(nn.Linear(INPUT, INPUT), layer)
    model = model.to("cpu") if is_quantized else model
    result = estimate(model)
    assert bytes_of(result, "parameter") == (INPUT * INPUT + INPUT) * 4 + WEIGHT + HIDDEN * 4
    assert (quantized.OUTLIERS in {note.code for note in result.notes}) == bool(threshold)
    # Magnitudes in float16 and the mask of outliers.
    looked_for = [b.size_bytes for b in result.timeline.blocks if b.op in ("aten.abs", "aten.ge")]
    assert looked_for[:2] == ([ROWS * INPUT * 2, ROWS * INPUT] if threshold else [])
    sums = [b.size_bytes for b in result.timeline.blocks if b.op == "bitsandbytes.int8_linear_matmul"]
    assert sums[0] == ROWS * HIDDEN * 4


def test_peft_adapters_on_4bit_weights():
    from peft import LoraConfig, get_peft_model

    model = nn.Sequential(nn.Linear(INPUT, INPUT), Linear4bit(INPUT, HIDDEN, compute_dtype=torch.bfloat16)).to("cpu")
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["1"], use_dora=True))
    result = memfit.estimate(
        model,
        lambda model, batch: model(batch).float().pow(2).mean(),
        torch.zeros(ROWS, INPUT),
        optimizer=optimizer_of("AdamW8bit", [p for p in model.parameters() if p.requires_grad]),
        device="a100-40gb",
    )
    adapters = (8 * INPUT + 8 * HIDDEN + HIDDEN) * 4
    assert bytes_of(result, "gradient") >= adapters
    # All are smaller than what is kept in 8 bits, but for the larger of the two.
    small, large = (8 * INPUT + HIDDEN) * 4, 8 * HIDDEN
    assert bytes_of(result, "optimizer state") == 2 * (small + large + large // 256 * 4 + MAP)


def measured_peak(model, batch, optimizer):
    """The most that torch's allocator holds in a second step: what the first has left, and what the second adds."""

    def step():
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    total = peak = 0
    for change in allocations(step):
        total += change
        peak = max(peak, total)
    return peak


@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit", "SGD8bit", "AdamW32bit"])
def test_steps_on_the_cpu_take_what_was_measured(name):
    model, batch = mlp(), torch.randn(ROWS, INPUT)
    optimizer = optimizer_of(name, model.parameters())
    timeline = memfit.estimate(model, loss, batch, optimizer=optimizer, device="cpu").timeline
    start = next(mark.tick for mark in timeline.marks if mark.step == 2)
    curve = timeline.curve()
    held = curve[start - 1] if start else 0
    # What single numbers of the first step still hold.
    assert max(curve[start:]) - held == pytest.approx(measured_peak(model, batch, optimizer), abs=64)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: Linear4bit(INPUT, HIDDEN, compute_dtype=torch.bfloat16, compress_statistics=False),
        lambda: Linear4bit(INPUT, HIDDEN, compute_dtype=torch.bfloat16, compress_statistics=True),
        lambda: Linear8bitLt(INPUT, HIDDEN, has_fp16_weights=False),
        lambda: Linear8bitLt(INPUT, HIDDEN, has_fp16_weights=False, threshold=6.0),
    ],
    ids=["4bit", "4bit-nested", "8bit", "8bit-threshold"],
)
def test_quantised_layers_on_the_cpu_take_what_was_measured(layer):
    model = nn.Sequential(nn.Linear(INPUT, INPUT), layer(), nn.GELU(), nn.Linear(HIDDEN, 16)).to("cpu")
    batch = torch.randn(ROWS, INPUT)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    # In the first pass a layer of the library casts its bias.
    loss(model, batch)
    timeline = memfit.estimate(model, loss, batch, optimizer=optimizer, device="cpu").timeline
    start = next(mark.tick for mark in timeline.marks if mark.step == 2)
    curve = timeline.curve()
    assert max(curve[start:]) - curve[start - 1] == pytest.approx(measured_peak(model, batch, optimizer), abs=64)
