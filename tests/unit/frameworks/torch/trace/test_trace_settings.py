"""Traces of steps that run as the settings of a plan say, next to what such steps really take."""

import copy

import pytest
import torch
from torch import nn

from memfit.core.errors import StepFailed
from memfit.core.settings import OptimizerKernels, OptimizerState, Settings, Weighting
from memfit.core.timeline import Category, Phase
from memfit.frameworks.torch.apply.fitted import Fitted
from tests.unit.frameworks.torch.builders import AMPERE, HOST, kept_bytes, mean_of_output, run, total
from tests.unit.frameworks.torch.measured import allocations

ROWS, WIDTH, DEPTH = 64, 128, 4
BATCH = torch.randn(ROWS, WIDTH)
BLOCKS = tuple(map(str, range(DEPTH)))


def layers():
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)))


def convolutions():
    def block():
        return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1))

    return nn.Sequential(*(block() for _ in range(DEPTH)))


def encoders():
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
    return nn.Sequential(*(copy.deepcopy(layer) for _ in range(DEPTH)))


MODELS = {
    layers: BATCH,
    convolutions: torch.randn(8, 8, 24, 24),
    encoders: torch.randn(8, 32, WIDTH),
}


def adam(parameters):
    return torch.optim.AdamW(parameters)


def peak(settings, model=None, batch=BATCH, device=AMPERE, **options):
    return run(model or layers(), batch, optimizer=adam, device=device, settings=settings, **options).timeline.peak()[1]


def measured_peak(settings, model, batch):
    tensors = (*model.parameters(), *model.buffers(), batch)
    start = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    fitted = Fitted(settings, model, adam(model.parameters()))

    def steps():
        for _ in range(2):
            fitted.step(mean_of_output, batch)

    most = live = 0
    for change in allocations(steps):
        live += change
        most = max(most, live)
    return start + most


@pytest.mark.parametrize("device", [AMPERE, HOST], ids=["cuda", "host"])
def test_plain_settings_leave_the_timeline_as_it_is(device):
    expected = run(layers(), BATCH, optimizer=adam, device=device).timeline
    found = run(layers(), BATCH, optimizer=adam, device=device, settings=Settings()).timeline

    assert [(m.phase, m.step) for m in found.marks] == [(m.phase, m.step) for m in expected.marks]
    # But for the copy of the loss that outlives it.
    assert found.peak()[1] - expected.peak()[1] in (0, 4)
    for category in Category:
        at_peak = (total(timeline.live_at(timeline.peak()[0]), category) for timeline in (found, expected))
        assert abs(next(at_peak) - next(at_peak)) <= 4


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize(
    "settings",
    [
        Settings(checkpoint=BLOCKS),
        Settings(checkpoint=BLOCKS[1:3]),
        Settings(4),
        Settings(3, checkpoint=BLOCKS[:2]),
        Settings(2, set_to_none=False),
    ],
    ids=["all recomputed", "half recomputed", "micro-batches", "both", "zeroed gradients"],
)
def test_the_traced_peak_is_the_measured_one(build, settings):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        traced = peak(settings, build(), MODELS[build], HOST)
        measured = measured_peak(settings, build(), MODELS[build])
    finally:
        torch.set_num_threads(before)

    assert traced == pytest.approx(measured, rel=0.03)


def test_recomputed_blocks_keep_their_inputs_only():
    plain, recomputed = (
        run(layers(), BATCH, optimizer=adam, settings=Settings(checkpoint=paths)) for paths in ((), BLOCKS)
    )

    # THEN each block's output is kept once, as the next one's input, rather than by its tanh as well
    assert kept_bytes(recomputed) <= kept_bytes(plain)
    encoder = encoders(), MODELS[encoders], HOST
    assert peak(Settings(checkpoint=BLOCKS), *encoder) < 0.8 * peak(Settings(), *encoder)


def test_blocks_of_the_second_pass_belong_to_their_module():
    timeline = run(layers(), BATCH, optimizer=adam, settings=Settings(checkpoint=BLOCKS)).timeline

    again = [b for b in timeline.blocks if b.phase is Phase.BACKWARD and b.op in ("aten.addmm", "aten.tanh")]
    assert {block.module for block in again} == {f"{i}.{j}" for i in range(DEPTH) for j in range(2)}


def test_of_many_micro_batches_two_are_traced_and_the_whole_batch_counts():
    made = run(layers(), BATCH, optimizer=adam, settings=Settings(8))

    step = [Phase.FORWARD, Phase.BACKWARD] * 2 + [Phase.OPTIMIZER]
    assert [(mark.phase, mark.step) for mark in made.timeline.marks] == [
        (Phase.SETUP, 0),
        *((phase, 1) for phase in step),
        *((phase, 2) for phase in step),
    ]
    assert made.batch_bytes == ROWS * WIDTH * 4
    assert total(made.timeline.live_at(made.timeline.peak()[0]), Category.BATCH) == made.batch_bytes
    gradients = [b for b in made.timeline.blocks if b.category is Category.GRADIENT]
    assert total(gradients) == 2 * sum(p.numel() * 4 for p in layers().parameters())


def test_what_waits_on_the_host_is_not_on_the_device():
    made = run(encoders(), MODELS[encoders], optimizer=adam, settings=Settings(offload=BLOCKS))
    plain = run(encoders(), MODELS[encoders], optimizer=adam)

    assert plain.host_bytes == 0
    assert made.host_bytes > 0.5 * kept_bytes(plain)
    assert kept_bytes(plain) - kept_bytes(made) == pytest.approx(made.host_bytes, rel=0.1)


@pytest.mark.parametrize(
    "settings",
    [
        Settings(kernels=OptimizerKernels.SINGLE),
        Settings(step_in_backward=True),
        Settings(state=OptimizerState.HOST),
    ],
    ids=["one at a time", "in backward", "host"],
)
def test_the_optimizer_is_fitted_too(settings):
    model, batch = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))), torch.randn(2, 512)

    assert peak(settings, model, batch) < peak(Settings(), model, batch) - 512 * 512 * 4


def test_states_made_in_the_backward_pass_are_known_as_such():
    made = run(layers(), BATCH, optimizer=adam, settings=Settings(step_in_backward=True)).timeline
    weights = sum(p.numel() * 4 for p in layers().parameters())

    assert total(made.live_at(made.num_ticks - 1), Category.OPTIMIZER_STATE) >= 2 * weights
    assert {mark.step for mark in made.marks} == {0, 1, 2}


def test_half_precision():
    assert peak(Settings(precision="amp-bf16"), encoders(), MODELS[encoders]) < peak(
        Settings(), encoders(), MODELS[encoders]
    )
    assert peak(Settings(precision="amp-fp16", checkpoint=BLOCKS)) > 0


def test_the_users_objects_are_as_before():
    model = encoders()
    optimizer = adam(model.parameters())
    attributes = {name: dict(module.__dict__) for name, module in model.named_modules()}
    parameters = list(model.parameters())
    settings = Settings(2, checkpoint=BLOCKS[:2], offload=BLOCKS[2:], kernels=OptimizerKernels.SINGLE)

    run(model, MODELS[encoders], optimizer=optimizer, settings=settings)

    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == attributes
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert not optimizer.state
    assert optimizer.param_groups[0]["foreach"] is None


def test_an_optimizer_that_searches_along_a_line():
    made = run(layers(), BATCH, optimizer=torch.optim.LBFGS, settings=Settings(2, checkpoint=BLOCKS))

    assert made.timeline.peak()[1] > 0


def test_failures_are_told_as_without_settings():
    def loss(model, batch):
        raise KeyError("labels")

    with pytest.raises(StepFailed, match=r"failed in its forward.*KeyError: 'labels'"):
        run(layers(), BATCH, loss=loss, settings=Settings(2))


def test_more_parts_than_samples_are_as_many_as_samples():
    most, more = (run(layers(), BATCH, settings=Settings(parts)) for parts in (ROWS, ROWS + 1))
    assert more.timeline.peak() == most.timeline.peak()


def test_weights_of_parts_need_no_values():
    def loss(model, batch):
        return mean_of_output(model, batch["data"]), batch["mask"].sum()

    batch = {"data": BATCH, "mask": torch.ones(ROWS)}
    for weighting in (Weighting("given"), Weighting("count", "['mask']", 0)):
        given = loss if weighting.kind == "given" else (lambda model, part: loss(model, part)[0])
        made = run(layers(), batch, loss=given, optimizer=adam, settings=Settings(2, weighting))
        assert made.notes == ()
