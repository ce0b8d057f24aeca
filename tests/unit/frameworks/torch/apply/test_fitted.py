import copy
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memfit.core.errors import BadBatch, BadInput, BadLoss
from memfit.core.settings import OptimizerKernels, Settings, Weighting
from memfit.core.timeline import Phase
from memfit.frameworks.torch.apply import fitted as module_of_fitted
from memfit.frameworks.torch.apply.fitted import Fitted
from tests.unit.frameworks.torch.apply import architectures
from tests.unit.frameworks.torch.apply.architectures import NUM_SAMPLES, make

EXACT = [build for build in architectures.ALL if build not in
         (architectures.convolutions, architectures.transformer, architectures.bert)]  # fmt: skip


def adam(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def plain_steps(subject, count=2):
    model = subject.copied()
    optimizer = adam(model)
    losses = []
    torch.manual_seed(3)
    for _ in range(count):
        optimizer.zero_grad()
        loss = subject.loss(model, subject.batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return model, losses


def fitted_steps(subject, settings, count=2):
    model = subject.copied()
    torch.manual_seed(3)
    with Fitted(settings, model, adam(model)) as fitted:
        losses = [fitted.step(subject.loss, subject.batch) for _ in range(count)]
    return model, losses


def assert_same(found, expected):
    (model, losses), (wanted, wanted_losses) = found, expected
    assert all(map(torch.equal, losses, wanted_losses))
    assert all(map(torch.equal, model.state_dict().values(), wanted.state_dict().values()))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("build", architectures.ALL)
def test_recomputed_and_offloaded_steps_give_the_same_bits(build, seed):
    subject = make(build, seed)
    settings = Settings(checkpoint=subject.blocks, offload=subject.blocks[:1])

    assert_same(fitted_steps(subject, settings), plain_steps(subject))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("build", EXACT)
@pytest.mark.parametrize("count", [2, 3, NUM_SAMPLES])
def test_micro_batches_add_up_to_the_batch(build, seed, count):
    subject = make(build, seed)
    plain = subject.copied()
    loss = subject.loss(plain, subject.batch)
    loss.backward()

    fitted = Fitted(Settings(count, subject.weighting, checkpoint=subject.blocks), subject.model, None)
    found = fitted.backward(subject.loss, subject.batch)

    torch.testing.assert_close(found, loss.detach(), rtol=1e-12, atol=1e-15)
    for one, other in zip(subject.model.parameters(), plain.parameters(), strict=True):
        if other.grad is None:
            assert one.grad is None
        else:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-15)


def test_gradients_of_before_do_not_count():
    subject = make(architectures.recurrent, 0)
    fitted = Fitted(Settings(2, set_to_none=False), subject.model, None)
    fitted.backward(subject.loss, subject.batch)
    first = {p: p.grad for p in subject.model.parameters()}
    values = {p: p.grad.clone() for p in subject.model.parameters()}

    fitted.backward(subject.loss, subject.batch)

    assert all(p.grad is first[p] and torch.equal(p.grad, values[p]) for p in subject.model.parameters())


def test_a_part_without_anything_that_counts_does_not_spoil_the_others():
    # GIVEN a batch whose last sample is ignored: alone, its mean is not a number
    subject = make(architectures.tied, 0)
    fitted = Fitted(Settings(NUM_SAMPLES, subject.weighting), subject.model, None)

    assert fitted.backward(subject.loss, subject.batch).isfinite()
    assert all(p.grad.isfinite().all() for p in subject.model.parameters())


def given_loss(model, batch):
    data, labels = batch
    counted = (labels != 0).sum()
    losses = F.cross_entropy(model(data), labels, reduction="none") * (labels != 0)
    return losses.sum() / counted, counted


@pytest.mark.parametrize("count", [1, 2, NUM_SAMPLES])
def test_weights_that_the_loss_gives(count):
    subject = make(architectures.frozen, 0)
    batch = (subject.batch[0], torch.tensor([0, 1, 2, 0, 1]))
    plain = subject.copied()
    loss, _ = given_loss(plain, batch)
    loss.backward()

    found = Fitted(Settings(count, Weighting("given")), subject.model, None).backward(given_loss, batch)

    torch.testing.assert_close(found, loss.detach(), rtol=1e-12, atol=0.0)
    for one, other in zip(subject.model[1:].parameters(), plain[1:].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-15)


def test_sums_are_not_weighted():
    subject = make(architectures.frozen, 0)

    def total(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    found = Fitted(Settings(2, Weighting("sum")), subject.model, None).backward(total, subject.batch)

    torch.testing.assert_close(found, total(subject.model, subject.batch).detach())


def test_phases_are_told_for_each_micro_batch():
    subject = make(architectures.frozen, 0)
    told = []

    Fitted(Settings(2), subject.model, adam(subject.model), told.append).step(subject.loss, subject.batch)

    assert told == [Phase.FORWARD, Phase.BACKWARD, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]


def test_gradients_can_be_clipped_before_the_update():
    subject = make(architectures.frozen, 0)
    before = [p.detach().clone() for p in subject.model.parameters()]
    fitted = Fitted(Settings(2), subject.model, torch.optim.SGD(subject.model.parameters(), lr=1.0))

    fitted.backward(subject.loss, subject.batch)
    for parameter in subject.model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    fitted.update()

    assert all(torch.equal(p, old) for p, old in zip(subject.model.parameters(), before, strict=True))


def test_autocast_is_on_for_model_and_loss():
    seen = []

    def loss(model, batch):
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return model(batch).float().sum()

    model = nn.Linear(3, 3)
    Fitted(Settings(precision="amp-bf16"), model).step(loss, torch.randn(2, 3))

    assert seen == [(True, torch.bfloat16)]
    assert not torch.is_autocast_enabled("cpu")


def test_half_precision_scales_losses_and_skips_steps_that_overflow():
    model = nn.Linear(3, 1)
    plain = copy.deepcopy(model)
    batch = torch.randn(4, 3)
    fitted = Fitted(Settings(2, precision="amp-fp16"), model, torch.optim.SGD(model.parameters(), lr=0.1))

    def loss(m, b, factor=1.0):
        return (m(b) * factor).float().mean()

    # GIVEN the gradients, unscaled
    fitted.backward(loss, batch)
    loss(plain, batch).backward()
    torch.testing.assert_close(model.weight.grad, plain.weight.grad, rtol=1e-2, atol=1e-2)
    # WHEN they are never used, the next backward pass works all the same
    scale = fitted.scaler.get_scale()
    before = model.weight.detach().clone()
    fitted.step(lambda m, b: loss(m, b) * float("inf"), batch)

    # THEN infinite gradients change nothing but the scale
    assert torch.equal(model.weight, before)
    assert fitted.scaler.get_scale() < scale
    fitted.step(loss, batch)
    assert not torch.equal(model.weight, before)


def test_channels_last_and_back():
    subject = make(architectures.unet, 0)
    weights = list(subject.model.parameters())
    formats = []

    def loss(model, batch):
        formats.append(batch[0].is_contiguous(memory_format=torch.channels_last))
        return subject.loss(model, batch)

    with Fitted(Settings(2, channels_last=True), subject.model, None) as fitted:
        assert subject.model.down[0].weight.is_contiguous(memory_format=torch.channels_last)
        fitted.backward(loss, subject.batch)

    assert formats == [True, True]
    assert all(one is other for one, other in zip(subject.model.parameters(), weights, strict=True))
    assert subject.model.down[0].weight.is_contiguous()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", [Settings(compile=True), Settings(compile=True, micro_batches=3)])
def test_a_compiled_model_takes_the_same_step(settings, monkeypatch):
    # WITHOUT kernels: those of Inductor are in tests/integration/test_compiled_plan.py
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
    plain = nn.Sequential(inner, nn.Linear(8, 3)).double()
    compiled, batch = copy.deepcopy(plain), torch.randn(7, 6, dtype=torch.float64)

    def loss(model, given):
        return model(given).square().mean()

    loss(plain, batch).backward()
    with Fitted(settings, compiled) as fitted:
        value = fitted.accumulate(loss, batch)
        assert torch._dynamo.utils.counters["stats"]["calls_captured"] > 0
        assert dict(compiled.named_parameters()).keys() == dict(plain.named_parameters()).keys()

    assert "forward" not in vars(compiled)
    torch.testing.assert_close(value, loss(plain, batch).detach())
    for one, other in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.filterwarnings("ignore")
def test_a_model_is_compiled_once():
    with pytest.raises(BadInput, match="the model given is compiled already"):
        Fitted(Settings(compile=True), torch.compile(nn.Linear(2, 2)))


def test_closing_leaves_model_and_optimizer_as_they_were():
    subject = make(architectures.convolutions, 0)
    model, optimizer = subject.model, adam(subject.model)
    attributes = {name: set(module.__dict__) for name, module in model.named_modules()}
    parameters, groups = list(model.parameters()), [dict(group) for group in optimizer.param_groups]
    settings = Settings(
        2, precision="amp-bf16", checkpoint=("1",), offload=("2",), channels_last=True, kernels=OptimizerKernels.SINGLE
    )

    with Fitted(settings, model, optimizer) as fitted:
        fitted.step(subject.loss, subject.batch)
        gradients = [p.grad for p in parameters]

    assert {name: set(module.__dict__) for name, module in model.named_modules()} == attributes
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert all(p.grad is gradient for p, gradient in zip(parameters, gradients, strict=True))
    assert [dict(group) for group in optimizer.param_groups] == groups
    assert fitted.optimizer is optimizer


def test_what_was_done_is_undone_when_the_rest_is_refused():
    subject = make(architectures.convolutions, 0)

    with pytest.raises(BadInput, match="offload names 'nothing'"):
        Fitted(Settings(checkpoint=("1",), offload=("nothing",), channels_last=True), subject.model, None)

    assert "forward" not in subject.model[1].__dict__
    assert subject.model[0].weight.is_contiguous()


def test_an_optimizer_that_searches_along_a_line():
    subject = make(architectures.frozen, 0)
    trained = [p for p in subject.model.parameters() if p.requires_grad]
    fitted = Fitted(Settings(2), subject.model, torch.optim.LBFGS(trained, max_iter=3))
    first = fitted.step(subject.loss, subject.batch)

    assert fitted.step(subject.loss, subject.batch) < first


def test_a_step_needs_a_batch():
    model = torch.nn.Linear(2, 2)
    with Fitted(Settings(), model) as fitted, pytest.raises(BadBatch, match=r"step needs a batch: step\(loss, batch\)"):
        fitted.step(lambda model, batch: model(batch).mean())
    assert model.weight.grad is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Settings(2, step_in_backward=True), "can't add up the gradients of 2 micro-batches"),
        (Settings(precision="amp-fp16", step_in_backward=True), "can't go with precision 'amp-fp16'"),
        (Settings(precision="fp8"), "amp-bf16, amp-fp16, or None, not 'fp8'"),
        (Settings(compile=True, checkpoint=("1",)), "compile goes with neither checkpoint nor offload"),
        (Settings(0), "micro_batches must be at least 1, but 0"),
        (Settings(checkpoint=("1",), offload=("1.0",)), "offload names '1.0', which is part of a module"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_exclude_each_other(settings, words):
    with pytest.raises(BadInput, match=words):
        Fitted(settings, make(architectures.frozen, 0).model, None)


@pytest.mark.parametrize(
    ("loss", "weighting", "words"),
    [
        (lambda model, batch: model(batch), "samples", r"shape \(2, 3\)"),
        (lambda model, batch: 1.0, "samples", "returned float, not a tensor"),
        (lambda model, batch: model(batch).sum(), "given", r"must return \(loss, weight\)"),
        (lambda model, batch: (model(batch).sum(), -1), "given", "the weight -1.0, but it must be 0 or more"),
    ],
)
def test_losses_that_cannot_be_used(loss, weighting, words):
    with pytest.raises(BadLoss, match=words):
        Fitted(Settings(weighting=Weighting(weighting)), nn.Linear(3, 3), None).step(loss, torch.randn(2, 3))


@pytest.fixture
def gpu(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return monkeypatch


def test_expandable_segments_are_asked_for_while_there_is_time(gpu):
    with Fitted(Settings(expandable_segments=True), nn.Linear(3, 3)):
        assert module_of_fitted.allocator_settings() == "expandable_segments:True"

    assert module_of_fitted.allocator_settings() == ""


def test_expandable_segments_come_too_late_when_cuda_is_in_use(gpu):
    gpu.setattr(torch.cuda, "is_initialized", lambda: True)

    with pytest.warns(UserWarning, match="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"):
        Fitted(Settings(expandable_segments=True), nn.Linear(3, 3))
    gpu.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Fitted(Settings(expandable_segments=True), nn.Linear(3, 3))


def trained_convolution(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    images = torch.randn(4, 3, 10, 10, dtype=torch.float64)
    return model, optimizer, images


def square(model, images):
    return model(images).square().mean()


@pytest.mark.parametrize("kernels", [OptimizerKernels.KEEP, OptimizerKernels.FUSED])
def test_another_memory_format_takes_the_state_along(kernels):
    # GIVEN an optimizer that has a state already, and the same beside it for a plain loop
    runs = []
    for settings in (Settings(), Settings(channels_last=True, kernels=kernels)):
        model, optimizer, images = trained_convolution()
        square(model, images).backward()
        optimizer.step()

        # WHEN the format changes, and changes back
        with Fitted(settings, model, optimizer) as fitted:
            for _ in range(3):
                fitted.step(square, images)
        optimizer.zero_grad()
        square(model, images).backward()
        optimizer.step()
        runs.append([p.detach().clone() for p in model.parameters()])

    # THEN training goes the same way
    for plain, changed in zip(*runs, strict=True):
        torch.testing.assert_close(changed, plain, rtol=1e-10, atol=1e-12)


def test_gradients_that_are_used_up_cannot_be_clipped():
    model, optimizer, images = trained_convolution()
    with Fitted(Settings(step_in_backward=True), model, optimizer) as fitted:
        with pytest.raises(BadInput, match=r"call step\(loss, batch\)|Call step\(loss, batch\)"):
            fitted.backward(square, images)
        fitted.step(square, images)


def test_a_model_is_run_by_one_plan_at_a_time():
    model, optimizer, images = trained_convolution()
    first = Fitted(Settings(micro_batches=2), model, optimizer)
    with pytest.raises(BadInput, match="by a plan already"):
        Fitted(Settings(), model, optimizer)
    first.close()
    with Fitted(Settings(), model, optimizer) as second:
        second.step(square, images)
