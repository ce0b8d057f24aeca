import functools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit.core.errors import BadBatch, BadInput, BadLoss
from memfit.frameworks.torch.apply.loss_function import as_loss

MODEL = nn.Linear(4, 3)
X, Y = torch.rand(6, 4), torch.randint(3, (6,))
EXPECTED = F.cross_entropy(MODEL(X), Y)


class Smoothed(nn.Module):
    """A criterion of the user's own."""

    def forward(self, prediction, target):
        return F.cross_entropy(prediction, target)


def by_name(y_hat, y):
    return F.cross_entropy(y_hat, y)


def of_model_and_batch(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


class OwnLoss(nn.Module):
    """Returns its loss as `form` says."""

    def __init__(self, form):
        super().__init__()
        self.linear, self.form = MODEL, form

    def forward(self, x, labels=None):
        logits = self.linear(x)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return self.form(loss, logits)


FORMS = {
    "attribute": lambda loss, logits: SimpleNamespace(loss=loss, logits=logits),
    "mapping": lambda loss, logits: {"loss": loss, "logits": logits},
    "tuple": lambda loss, logits: (loss, logits),
    "last": lambda loss, logits: (logits, loss),
    "scalar": lambda loss, logits: logits if loss is None else loss,
}


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        F.cross_entropy,
        functools.partial(F.cross_entropy, reduction="mean"),
        Smoothed(),
        by_name,
        of_model_and_batch,
    ],
)
def test_criteria_and_functions_of_a_model_give_the_same(loss):
    assert torch.equal(as_loss(loss)(MODEL, (X, Y)), EXPECTED)


def test_weights_of_classes_go_where_the_targets_are():
    # GIVEN a criterion on the host, as people give it, and a step on a device
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    estimate = memfit.estimate(nn.Linear(4, 3), criterion, (X, Y), device="t4")

    assert estimate.fits
    assert criterion.weight.tolist() == [1.0, 2.0, 3.0]
    assert torch.equal(as_loss(criterion)(MODEL, (X, Y)), criterion(MODEL(X), Y))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("batch", [{"x": X, "labels": Y}, (X, Y)], ids=["mapping", "tuple"])
def test_a_model_that_returns_its_loss_needs_none(form, batch):
    assert torch.equal(as_loss(None)(OwnLoss(form), batch), EXPECTED)


@pytest.mark.parametrize("form", ["attribute", "mapping"])
def test_a_criterion_finds_logits_and_labels(form):
    assert torch.equal(as_loss(nn.CrossEntropyLoss())(OwnLoss(FORMS[form]), {"x": X, "labels": Y}), EXPECTED)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_model_without_a_loss_is_refused(form):
    with pytest.raises(BadLoss, match=r"no loss was given and OwnLoss returns none.*no labels.*criterion"):
        as_loss(None)(OwnLoss(form), {"x": X})


@pytest.mark.parametrize("batch", [X, {"x": X}, (X,)])
def test_a_criterion_needs_a_target(batch):
    with pytest.raises(BadBatch, match=r"CrossEntropyLoss compares outputs with targets.*no target.*\(x, y\)"):
        as_loss(nn.CrossEntropyLoss())(MODEL, batch)


def test_a_function_of_a_model_is_none_however_its_batch_is_called():
    def loss(net, y):
        return F.cross_entropy(net(y[0]), y[1])

    assert torch.equal(as_loss(loss)(MODEL, (X, Y)), EXPECTED)


def test_what_is_no_function_is_refused():
    with pytest.raises(BadInput, match=r"function of \(model, batch\), but str was given.*criterion"):
        as_loss("mse")


def test_a_class_of_losses_is_none():
    with pytest.raises(BadInput, match=r"the class CrossEntropyLoss; give an object of it: CrossEntropyLoss\(\)"):
        as_loss(nn.CrossEntropyLoss)


def test_a_pair_without_a_loss_says_what_is_missing():
    with pytest.raises(BadLoss, match=r"no loss was given, and Sequential does not take the 2 parts.*CrossEntropyLoss"):
        as_loss(None)(nn.Sequential(nn.Linear(2, 2)), (torch.zeros(1, 2), torch.zeros(1)))


def test_a_pass_without_gradients_needs_no_loss():
    estimates = [memfit.estimate(MODEL, batch=batch, device="t4", mode="inference") for batch in (X, (X,))]
    with_loss = memfit.estimate(MODEL, lambda model, batch: model(batch), X, device="t4", mode="inference")

    assert [estimate.peak_bytes for estimate in estimates] == [with_loss.peak_bytes] * 2


def test_estimate_plan_and_fitted_step_take_them():
    model, batch = OwnLoss(FORMS["attribute"]), {"x": X, "labels": Y}
    own = memfit.estimate(model, batch=batch, device="t4").peak_bytes
    assert memfit.estimate(model, batch, device="t4").peak_bytes == own
    assert memfit.estimate(lambda: OwnLoss(FORMS["tuple"]), batch=batch, device="t4").peak_bytes == own
    by_criterion = memfit.estimate(MODEL, nn.CrossEntropyLoss(), (X, Y), device="t4").peak_bytes
    assert by_criterion == memfit.estimate(MODEL, of_model_and_batch, (X, Y), device="t4").peak_bytes
    plan = memfit.plan(model, batch=batch, optimizer="sgd", device="t4", options=memfit.PlanOptions(measure=False))
    fitted = plan.apply(model, torch.optim.SGD(model.parameters(), lr=0.0))
    assert torch.allclose(fitted.step(None, batch), EXPECTED)
    assert torch.allclose(fitted.step(nn.CrossEntropyLoss(), batch), EXPECTED)


@pytest.mark.parametrize(
    ("model", "loss"), [(MODEL, nn.CrossEntropyLoss()), (OwnLoss(FORMS["scalar"]), None)], ids=["criterion", "own"]
)
def test_a_guard_takes_them(model, loss):
    guard = memfit.Guard(model, torch.optim.SGD(model.parameters(), lr=0.0))
    assert guard.step(loss, (X, Y)).loss == pytest.approx(EXPECTED.item())
