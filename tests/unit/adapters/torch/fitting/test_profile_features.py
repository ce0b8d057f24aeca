"""Each feature on a step that has it, and its absence elsewhere."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from memfit.adapters.torch.fitting.chunked_loss import SMALLEST_VOCABULARY
from memfit.adapters.torch.fitting.profile import profile
from memfit.adapters.torch.fitting.profile_features import features_of
from memfit.adapters.torch.trace import Step
from tests.unit.adapters.torch.builders import AMPERE


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
