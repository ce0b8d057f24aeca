"""What is seen of a step: calls, saved tensors and their ends."""

import torch
from torch import nn

from memfit.adapters.torch.fitting.profile import _WatchedTracer
from memfit.adapters.torch.fitting.profile_calls import OUTSIDE
from memfit.adapters.torch.trace import Step
from memfit.core.timeline import Phase
from tests.unit.adapters.torch.builders import HOST


def watched(model, loss=lambda model, batch: model(batch).exp().sum(), **options):
    tracer = _WatchedTracer(Step(model, loss, torch.randn(4, 8), **options), HOST)
    timeline = tracer.run().timeline
    return tracer.watch, timeline


def make_model():
    return nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()), nn.Linear(8, 8))


def test_calls_come_in_order_and_know_those_around_them():
    watch, _ = watched(make_model())
    assert [(c.path, c.parent, c.last) for c in watch.calls] == [
        ("0", OUTSIDE, 2),
        ("0.0", 0, 1),
        ("0.1", 0, 2),
        ("1", OUTSIDE, 3),
    ]
    outer, first, second, other = watch.calls
    assert outer.blocks == (first.blocks[0], second.blocks[1])
    assert outer.operations == (first.operations[0], second.operations[1])
    assert outer.ticks[1] == other.ticks[0]


def test_saved_tensors_know_who_saved_them_and_when_they_are_let_go():
    watch, timeline = watched(make_model())
    sigmoid = next(i for i, block in enumerate(timeline.blocks) if block.op == "aten.sigmoid")
    saves = {save.call: save for save in watch.saves if save.block == sigmoid}
    # By its own node and as the input of the next layer, whose backward pass comes first.
    assert set(saves) == {2, 3}
    assert all(watch.backward <= s.unpacked <= s.released <= watch.end_of_backward for s in saves.values())
    assert saves[3].released < saves[2].released == timeline.blocks[sigmoid].end
    assert any(save.call == OUTSIDE for save in watch.saves)


def test_phases_are_found():
    watch, timeline = watched(make_model(), optimizer=torch.optim.SGD)
    marks = {mark.phase: mark.tick for mark in timeline.marks if mark.step == 1}
    assert watch.forward == marks[Phase.FORWARD]
    assert watch.backward == marks[Phase.BACKWARD]
    assert watch.end_of_backward == marks[Phase.OPTIMIZER]


def test_a_models_own_recomputation_is_left_to_itself():
    model = make_model()

    def loss(model, batch):
        return torch.utils.checkpoint.checkpoint(model, batch.requires_grad_(), use_reentrant=False).sum()

    watch, _ = watched(model, loss)
    # Inside of it everything goes to its own hooks; what remains is its input.
    assert [save.call for save in watch.saves] == [OUTSIDE]
    assert len(watch.calls) == 4


def test_everything_is_put_back():
    before = nn.Module.__call__
    watch, _ = watched(make_model())
    assert nn.Module.__call__ is before
    assert watch.recorder.on_enter is None
    assert watch.operators.on_run is None
