"""What a replay needs back."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from memfit.core.guarding import BrokenUpdate
from memfit.frameworks.torch.guard.snapshot import Attributes, Buffers, RandomState, WindowSnapshot


class Counting(nn.Module):
    """A buffer that changes in place, one that is replaced, and one that stays."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("constant", torch.arange(100_000.0))

    def forward(self, values):
        self.count += 1
        self.replaced = self.replaced + 1
        return self.norm(values)


def draws():
    return random.random(), float(torch.rand(())), float(np.random.rand())


def test_random_states_come_back():
    state = RandomState.now()
    first = draws()
    assert draws() != first

    state.restore()

    assert draws() == first


def test_buffers_come_back():
    # GIVEN a step that failed after it changed buffers, in place and by others
    model = Counting()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    buffers = Buffers(model)
    for _ in range(3):
        buffers.remember()
        model(torch.randn(4, 3))

        # WHEN
        buffers.restore()

        # THEN
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, before[name]), name


def test_only_buffers_that_change_are_copied_once_a_step_went_well():
    model = Counting()
    buffers = Buffers(model)
    buffers.remember()
    everything = buffers.size_bytes
    model(torch.randn(4, 3))
    buffers.forget()

    buffers.remember()

    assert everything > 400_000
    assert 0 < buffers.size_bytes < 100


def test_norms_are_copied_although_their_writes_are_not_counted():
    # GIVEN a norm in evaluation mode, which changes nothing, so that nothing is known to change
    model = nn.BatchNorm1d(3).eval()
    buffers = Buffers(model)
    buffers.remember()
    buffers.forget()
    model.train()
    before = model.running_mean.clone()

    buffers.remember()
    model(torch.randn(4, 3))
    buffers.restore()

    assert torch.equal(model.running_mean, before)


def test_a_buffer_that_never_changed_before_can_not_come_back_and_says_so():
    model = Counting()
    buffers = Buffers(model)
    buffers.remember()
    buffers.forget()
    buffers.remember()
    model.constant += 1

    with pytest.raises(BrokenUpdate, match="constant"):
        buffers.restore()
    # From then on it is kept.
    buffers.remember()
    model.constant += 1
    buffers.restore()
    assert model.constant[0] == 1


def test_small_buffers_come_back_although_they_change_for_the_first_time_late():
    model = Counting()
    buffers = Buffers(model)
    buffers.remember()
    buffers.forget()

    buffers.remember()
    model.count += 1
    buffers.restore()

    assert model.count == 0


def test_writes_that_are_not_counted_are_seen_by_their_values():
    # GIVEN a large buffer that changes behind the count of writes
    model = Counting()
    buffers = Buffers(model)
    buffers.remember()
    model.constant.data.add_(1)
    buffers.forget()

    # WHEN
    buffers.remember()
    model.constant.data.add_(1)
    buffers.restore()

    # THEN
    assert model.constant[0] == 1


class Remembering(nn.Module):
    """Keeps what it has seen in attributes."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.calls = 0
        self.seen = []
        self.hidden = None

    def forward(self, values):
        self.calls += 1
        self.seen.append(self.calls)
        self.hidden = self.inner(values).detach()
        self.made = True
        return self.hidden


def test_attributes_come_back():
    model = Remembering()
    attributes = Attributes(nn.Sequential(model))
    model(torch.ones(1, 2))
    del model.made
    seen, hidden = model.seen, model.hidden
    attributes.remember()
    model(torch.zeros(1, 2))
    model.training = False

    attributes.restore()

    assert (model.calls, model.seen, model.hidden) == (1, [1], hidden)
    assert model.seen is seen
    assert not hasattr(model, "made")
    # What the program sets, not a pass, is left alone.
    assert not model.training
    attributes.forget()
    model(torch.zeros(1, 2))
    attributes.restore()
    assert model.calls == 2


def test_only_numbers_that_stay_numbers_count():
    model = type("Counting", (nn.Module,), {})()
    model.passes, model.penalty, model.limit = 0, 0.0, float("nan")
    attributes = Attributes(model)
    attributes.remember()

    model.passes, model.penalty = 1, torch.ones(3)
    attributes.forget()

    assert attributes.changed() == {"passes"}


def test_modules_of_the_loss_come_back_and_are_let_go():
    model, other = nn.Sequential(nn.BatchNorm1d(3)), Counting()
    snapshot = WindowSnapshot(model)
    snapshot.begin()
    own_bytes = snapshot.size_bytes
    snapshot.include([model[0], other])
    other(torch.randn(4, 3))
    model(torch.randn(4, 3))
    assert snapshot.size_bytes > own_bytes > 0

    # A second batch of the same window doesn't move the beginning.
    snapshot.include([other])
    snapshot.restore()

    assert other.count == 0
    assert model[0].num_batches_tracked == 0
    snapshot.forget()
    assert snapshot.size_bytes == 0
    # One that takes no part in the next window may be gone.
    snapshot.begin()
    snapshot.forget()
    assert list(snapshot._known) == [model]
