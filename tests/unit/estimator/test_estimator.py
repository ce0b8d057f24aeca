"""What the verbs share. Estimates themselves are tested through the verbs, in test_api.py."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from memfit.api.devices import resolve
from memfit.api.jobs import open_estimator
from memfit.core.errors import BadBatch, BadInput
from memfit.core.job import Job
from memfit.core.settings import Settings
from memfit.core.spread import ORDER
from memfit.estimator.estimator import checked_batch_size


def loss(model, batch):
    return model(batch).square().mean()


@pytest.fixture
def job():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in range(4)))
    return Job(model, loss, torch.randn(512, 64), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def test_settings_change_the_estimate(job):
    # GIVEN an estimator that has seen the plain step
    estimator = open_estimator(job, resolve("cpu"))
    plain = estimator.run(eager=False)

    # WHEN the same step is run in four parts, or with a block computed again
    parts, host_bytes = estimator.with_settings(Settings(micro_batches=4))
    again, _ = estimator.with_settings(Settings(checkpoint=("0", "1")))

    # THEN both need less, and nothing waits on the host
    assert parts.allocated_peak_bytes < plain.allocated_peak_bytes
    assert again.allocated_peak_bytes < plain.allocated_peak_bytes
    assert host_bytes == 0


def test_settings_that_change_nothing_give_the_plain_estimate(job):
    estimator = open_estimator(job, resolve("cpu"))
    plain = estimator.run(eager=False)
    fitted, _ = estimator.with_settings(Settings())
    assert fitted.allocated_peak_bytes == pytest.approx(plain.allocated_peak_bytes, rel=0.001)


def test_orders_of_the_operators_widen_the_interval(job, monkeypatch):
    estimator = open_estimator(job, resolve("cpu"))
    plain = estimator.run(eager=False)
    other = open_estimator(job, resolve("cpu"))
    trace = other.tracer.trace
    monkeypatch.setattr(other.tracer, "trace", lambda *given: replace(trace(*given), spread=(0.75, 1.5)), raising=False)

    found = other.run(eager=False)

    assert found.peak_bytes == plain.peak_bytes
    order = next(spread for spread in found.spreads if spread.name == ORDER)
    assert order.below_bytes == pytest.approx(0.25 * plain.peak_bytes, abs=1)
    assert order.above_bytes == pytest.approx(0.5 * plain.peak_bytes, abs=1)
    assert found.interval_bytes[1] >= 1.5 * plain.peak_bytes


def test_an_allocator_that_expands_uses_the_trace_again(job):
    estimator = open_estimator(job, resolve("a100-40gb"))
    estimator.run(eager=False)
    plain, _ = estimator.with_settings(Settings())
    expanded, _ = estimator.with_settings(Settings(expandable_segments=True))
    assert expanded.timeline is plain.timeline
    assert expanded.reserved_peak_bytes <= plain.reserved_peak_bytes


def test_a_fitted_estimate_has_no_other_batch_size(job):
    estimator = open_estimator(job, resolve("cpu"))
    estimator.run(eager=False)
    fitted, _ = estimator.with_settings(Settings(micro_batches=2))
    with pytest.raises(BadInput):
        fitted.at_batch(8)


@pytest.mark.parametrize("size", [0, -1, 1.5, "8", True, 10**18])
def test_a_batch_size_is_a_whole_number_from_1_up(size):
    with pytest.raises(BadBatch):
        checked_batch_size(size)
