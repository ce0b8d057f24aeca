"""The guard of Lightning, without the library: what it decides. What it comes to is in the integration tests."""

from types import SimpleNamespace

import pytest
import torch

from memfit.core import run_events
from memfit.frameworks.torch.guard import lightning_guard
from memfit.frameworks.torch.guard.lightning_guard import Metrics, resumed


class Metric(torch.nn.Module):
    """As much of a torchmetrics metric as there is to put back."""

    def __init__(self):
        super().__init__()
        self._defaults = {"total": None, "seen": None}
        self.total = torch.zeros(())
        self.seen = []
        self._update_count = 0
        self._computed = None

    def update(self, value):
        self.total += value
        self.seen.append(value)
        self._update_count += 1


def test_metrics_are_put_back_as_often_as_it_takes():
    # GIVEN a metric of the model and one that was logged
    module = torch.nn.Module()
    module.metric = Metric()
    logged = Metric()
    trainer = SimpleNamespace(_results={"loss": logged}, lightning_module=module)
    for metric in (module.metric, logged):
        metric.update(1)
    metrics = Metrics(trainer)
    metrics.remember()

    # WHEN a step changes them, logs something new and is undone, twice
    for _ in range(2):
        for metric in (module.metric, logged):
            metric.update(5)
        trainer._results["new"] = Metric()
        metrics.restore()

        # THEN they are as before
        assert set(trainer._results) == {"loss"}
        for metric in (module.metric, logged):
            assert (metric.total, metric.seen, metric._update_count) == (1, [1], 1)


def test_a_probe_leaves_metrics_alone():
    metric = Metric()
    metrics = Metrics(SimpleNamespace(_results=None, lightning_module=torch.nn.ModuleList([metric])))

    with metrics.kept():
        metric.update(3)

    assert metric.total == 0


def trainer_of(**changes):
    parameters = [torch.nn.Parameter(torch.ones(1))]
    values = {
        "lightning_module": SimpleNamespace(automatic_optimization=True),
        "strategy": type("SingleDeviceStrategy", (), {})(),
        "optimizers": [torch.optim.SGD(parameters)],
        **changes,
    }
    return SimpleNamespace(**values)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"lightning_module": SimpleNamespace(automatic_optimization=False)}, "use memfit.Guard in it"),
        ({"strategy": type("DeepSpeedStrategy", (), {})()}, "DeepSpeedStrategy runs passes"),
        ({"optimizers": []}, "it has 0 optimizers"),
        ({"optimizers": [torch.optim.LBFGS([torch.nn.Parameter(torch.ones(1))])]}, "LBFGS"),
    ],
)
def test_what_cannot_be_guarded_is_said(changes, reason):
    found = lightning_guard._why_not(trainer_of(**changes))

    assert reason in found
    assert bool(reason) == bool(found)


class FakeGuard:
    """Calls an update as often as it is told to."""

    def __init__(self, times=1):
        self._times = times

    def update(self, update, *, replay):
        assert replay
        for _ in range(self._times):
            update()


def test_the_step_gets_the_result_of_a_closure_that_was_run_before_it():
    order = []

    def closure():
        order.append("closure")
        return "loss"

    def step(closure):
        order.append("step")
        return closure()

    assert lightning_guard._step(FakeGuard(times=2), step, closure) == "loss"
    assert order == ["closure", "step", "step"]


def test_an_optimizer_that_asks_for_the_loss_again_gets_it_computed_again():
    calls = []

    def closure():
        calls.append(1)
        return len(calls)

    assert lightning_guard._step(FakeGuard(), lambda closure: (closure(), closure()), closure) == (1, 2)


def test_a_second_attempt_goes_on_from_the_last_checkpoint(supervised, tmp_path):
    assert resumed(None) is None
    written = tmp_path / "last.ckpt"
    written.touch()
    supervised.attempt(1)
    run_events.note("checkpoint", path=str(written))
    supervised.attempt(2)

    assert resumed(None) == str(written)
    assert resumed("own") == "own"


def test_a_second_attempt_without_a_checkpoint_says_what_to_do(supervised, caplog):
    supervised.attempt(1)
    supervised.attempt(2)

    assert resumed(None) is None
    assert "every_n_train_steps" in caplog.text


def test_a_checkpoint_is_told_when_it_was_written(supervised, tmp_path):
    supervised.attempt(1)
    order = []
    trainer = SimpleNamespace(global_step=7)
    told = lightning_guard._noting(trainer, lambda path, weights_only=False: order.append(len(supervised.events())))

    told(tmp_path / "a.ckpt")
    told(tmp_path / "weights.ckpt", True)

    assert order == [0, 1]
    assert supervised.events() == [("checkpoint", {"step": 7, "update": 7, "path": str(tmp_path / "a.ckpt")})]
