"""Figures of single operators, counted by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from memfit.core.timeline import Phase
from memfit.frameworks.torch.apply.chunked_loss import SMALLEST_VOCABULARY
from memfit.frameworks.torch.shapes.shapes import Known
from memfit.frameworks.torch.trace.profile import profile
from memfit.frameworks.torch.trace.trace import Step, StepTracer
from memfit.frameworks.torch.trace.work import WorkLog, features_of
from tests.unit.frameworks.torch.builders import AMPERE

aten = torch.ops.aten


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def noted(func, args, kwargs, out):
    """What a log says about one operator; None where it runs no kernel."""
    log = WorkLog()
    log.add("", Phase.FORWARD, func, args, kwargs, out)
    return log.operations[0] if log.operations else None


def flops(*call):
    return noted(*call).flops


def moved(*call):
    work = noted(*call)
    return 0 if work is None else work.moved_bytes


def test_a_matrix_product():
    a, b = meta(3, 4), meta(4, 5)
    out = aten.mm.default(a, b)
    assert flops(aten.mm.default, (a, b), {}, out) == 2 * 3 * 4 * 5
    assert moved(aten.mm.default, (a, b), {}, out) == 4 * (12 + 20 + 15)


def test_a_convolution_and_its_gradient():
    data, weight = meta(2, 3, 8, 8), meta(5, 3, 3, 3)
    options = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    out = aten.convolution.default(data, weight, None, *options)
    forward = 2 * 2 * 8 * 8 * 5 * 3 * 9
    assert flops(aten.convolution.default, (data, weight, None, *options), {}, out) == forward
    args = (out, data, weight, [0], *options, [True, True, False])
    made = aten.convolution_backward.default(*args)
    assert flops(aten.convolution_backward.default, args, {}, made) == 2 * forward


def test_an_operator_that_only_moves_data_computes_nothing():
    a = meta(6)
    assert flops(aten.relu.default, (a,), {}, meta(6)) == 0
    assert moved(aten.relu.default, (a,), {}, meta(6)) == 48


def test_an_operator_in_place_reads_and_writes():
    a = meta(6)
    assert moved(aten.relu_.default, (a,), {}, a) == 48


def test_what_runs_no_kernel_moves_nothing():
    a = meta(6)
    assert moved(aten.empty_like.default, (a,), {}, meta(6)) == 0
    assert moved(aten.alias_copy.default, (a,), {}, a.view(2, 3)) == 0


def test_an_input_that_is_read_twice_counts_once():
    a = meta(6)
    assert moved(aten.mul.Tensor, (a, a), {}, meta(6)) == 48


def test_an_expanded_input_counts_as_it_lies_in_memory():
    assert moved(aten.mul.Tensor, (meta(1).expand(6), meta(6)), {}, meta(6)) == 4 + 48


def test_a_lookup_reads_the_rows_that_it_returns():
    table, rows = meta(1000, 8), meta(3, dtype=torch.int64)
    out = meta(3, 8)
    assert moved(aten.embedding.default, (table, rows), {}, out) == 2 * out.nbytes + rows.nbytes


def test_windows_that_overlap_count_as_they_lie_in_memory():
    windows = meta(8).as_strided((4, 5), (1, 1))
    assert moved(aten.relu.default, (windows,), {}, meta(4, 5)) == 4 * 8 + 4 * 20
    # A part of a larger tensor is all that is read of it.
    part = meta(3, 8)[:, :2]
    assert moved(aten.relu.default, (part,), {}, meta(3, 2)) == 2 * 4 * 6


def test_figures_are_computed_once_for_each_signature():
    log, known = WorkLog(), Known(None)
    a, b, out = meta(3, 4), meta(4, 5), meta(3, 5)
    log.add("first", Phase.FORWARD, aten.mm.default, (a, b), {}, out, known)
    kept = known.figures
    log.add("second", Phase.BACKWARD, aten.mm.default, (a, b), {}, out, known)
    assert known.figures is kept
    first, second = log.operations
    assert (first.module, second.module, second.phase) == ("first", "second", Phase.BACKWARD)
    assert first.flops == second.flops == 2 * 3 * 4 * 5
    assert len(log) == 2


def test_what_is_noted_is_what_each_call_does():
    """Figures that are kept from call to call are the ones that each call would have by itself."""
    simulation_log, alone = WorkLog(), []

    class Watched(StepTracer):
        def _ran(self, func, args, kwargs, out, known):
            simulation_log.add("", self.recorder.phase, func, args, kwargs, out, known)
            one = noted(func, args, kwargs, out)
            alone.extend([one] if one is not None else [])

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 8), nn.Linear(8, 8))

    def loss(model, batch):
        y = model(batch)
        return (y * y + y @ y.t() @ y).sum()

    for _ in range(2):
        Watched(Step(model, loss, torch.randn(2, 3, 8, 8), torch.optim.Adam), AMPERE).run()
    kept = [(work.op, work.flops, work.moved_bytes, work.dtype, work.sizes) for work in simulation_log.operations]
    assert len(kept) > 100
    assert kept == [(work.op, work.flops, work.moved_bytes, work.dtype, work.sizes) for work in alone]


def test_updates_of_many_tensors_read_and_write_each():
    parameters, gradients = [meta(2), meta(3)], [meta(2), meta(3)]
    assert moved(aten._foreach_add_.List, (parameters, gradients), {}, None) == 3 * 20


def test_attention_of_the_host():
    query, key = meta(1, 2, 5, 8), meta(1, 2, 7, 8)
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert flops(op, (query, key, key), {}, None) == 2 * 2 * (2 * 5 * 7 * 8)


@pytest.mark.parametrize(("op", "times"), [("mkldnn_rnn_layer", 1), ("mkldnn_rnn_layer_backward", 2)])
def test_a_recurrent_layer_multiplies_its_weights_with_each_time_step(op, times):
    data, inner, outer = meta(7, 2, 8), meta(16, 8), meta(16, 4)
    found = flops(getattr(aten, op).default, (data, inner, outer), {}, None)
    assert found == times * 2 * (16 * 8 + 16 * 4) * 7 * 2


def test_the_log_names_operators_and_leaves_out_idle_ones():
    log = WorkLog()
    a, b = meta(2, 2, dtype=torch.bfloat16), meta(2, 2, dtype=torch.bfloat16)
    log.add("layer", Phase.BACKWARD, aten.mm.default, (a, b), {}, meta(2, 2, dtype=torch.bfloat16))
    log.add("layer", Phase.BACKWARD, aten.empty_like.default, (a,), {}, meta(2, 2))
    (work,) = log.operations
    assert (work.module, work.phase, work.op, work.flops, work.moved_bytes, work.dtype) == (
        "layer",
        Phase.BACKWARD,
        "aten.mm",
        16,
        24,
        "bfloat16",
    )


def test_without_floating_point_inputs_there_is_no_dtype():
    log = WorkLog()
    a = meta(2, dtype=torch.int64)
    log.add("", Phase.FORWARD, aten.add.Tensor, (a, a), {}, meta(2, dtype=torch.int64))
    assert log.operations[0].dtype == ""


def features(model, batch, loss=lambda model, batch: model(batch).mean(), **options):
    return profile(Step(model, loss, batch, **options), AMPERE).features


def test_layers():
    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.Dropout(0.1))
    assert features(model, torch.randn(2, 3, 8)) == {"convolution", "batch-norm", "dropout"}
    assert features(model.eval(), torch.randn(2, 3, 8)) == {"convolution"}


def test_dropout_without_a_module():
    found = features(nn.Linear(4, 4), torch.randn(2, 4), lambda model, x: functional.dropout(model(x)).mean())
    assert found == {"linear", "dropout"}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (torch.optim.Adam, {"foreach", "fusable", "adam", "steppable"}),
        (lambda p: torch.optim.Adam(p, fused=True), {"fused", "adam", "steppable"}),
        (lambda p: torch.optim.SGD(p, foreach=False), {"fusable", "steppable"}),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), {"foreach", "fusable", "steppable"}),
        (torch.optim.LBFGS, set()),
        (torch.optim.RMSprop, {"foreach", "steppable"}),
    ],
)
def test_optimizers(make, expected):
    assert features(nn.Linear(4, 4), torch.randn(2, 4), optimizer=make) == expected | {"linear"}


def test_copies_of_parameters_under_autocast():
    assert "autocast" in features(nn.Linear(4, 4), torch.randn(2, 4), precision="amp-bf16")
    assert "autocast" not in features(nn.Linear(4, 4), torch.randn(2, 4), precision="bf16")


def cross_entropy(model, batch):
    logits = model(batch)[:, :-1].float().reshape(-1, model.out_features)
    return functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64, device=logits.device))


@pytest.mark.parametrize(("classes", "is_large"), [(SMALLEST_VOCABULARY, True), (10, False)])
def test_cross_entropy_over_a_large_vocabulary(classes, is_large):
    assert ("cross-entropy" in features(nn.Linear(4, classes), torch.randn(2, 3, 4), cross_entropy)) is is_large


def test_parameters_that_are_shared_or_frozen():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert features_of(model, None) == {"linear"}
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    assert features_of(model, None) == {"linear", "shared-parameters", "frozen-parameters"}


def test_the_format_of_convolutions():
    model = nn.Conv2d(3, 8, 3)
    assert "channels-first" in features_of(model, None)
    assert "channels-first" not in features_of(model.to(memory_format=torch.channels_last), None)


class OwnNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


def test_buffers_that_the_forward_pass_changes():
    assert "changing-buffers" in features(nn.Sequential(nn.Linear(4, 4), OwnNorm()), torch.randn(2, 4))
    assert "changing-buffers" not in features(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(2, 4))
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    assert "changing-buffers" in features(normed, torch.randn(2, 4))


def test_a_batch_norm_that_is_no_module():
    class Functional(nn.Linear):
        def forward(self, x):
            return functional.batch_norm(super().forward(x), None, None, training=True)

    assert "batch-norm" in features(Functional(4, 4), torch.randn(8, 4))
    images = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4))
    assert "batch-norm" not in features(images, torch.randn(2, 3, 8, 8))


def test_sparse_gradients():
    assert "sparse-gradients" in features_of(nn.Embedding(4, 4, sparse=True), None)
    assert "sparse-gradients" not in features_of(nn.Embedding(4, 4), None)
