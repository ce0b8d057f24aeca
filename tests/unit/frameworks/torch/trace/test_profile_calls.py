"""What is seen of a step: calls, saved tensors and their ends."""

import random
from dataclasses import dataclass

import numpy
import pytest
import torch
from torch import nn

from memfit.core.timeline import Phase
from memfit.frameworks.torch.trace import profile_calls
from memfit.frameworks.torch.trace.profile import _WatchedTracer, profile
from memfit.frameworks.torch.trace.profile_calls import OUTSIDE
from memfit.frameworks.torch.trace.trace import Step
from tests.unit.frameworks.torch.builders import HOST


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


class Part(nn.Module):
    """A linear layer, with room for misbehaviour."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.count = 0
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        return torch.tanh(self.linear(x)) * 2


class ChangesInput(Part):
    def forward(self, x):
        return super().forward(x.mul_(2))


class ChangesOwnTensor(Part):
    def forward(self, x):
        return super().forward((x * 2).mul_(2))


class ChangesBuffer(Part):
    def forward(self, x):
        self.seen.add_(1)
        return super().forward(x)


class ReplacesBuffer(Part):
    def forward(self, x):
        self.seen = self.seen + 1
        return super().forward(x)


class Counts(Part):
    def forward(self, x):
        self.count += 1
        return super().forward(x)


class DrawsFromPython(Part):
    def forward(self, x):
        return super().forward(x) * random.random()


class DrawsFromNumpy(Part):
    def forward(self, x):
        return super().forward(x) * float(numpy.random.rand())


class Norm(Part):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return super().forward(self.norm(x))


@dataclass
class Output:
    value: torch.Tensor
    note: str = ""


class Strange:
    def __init__(self, value):
        self.value = value


class ReturnsDataclass(Part):
    def forward(self, x):
        return Output(super().forward(x))


class ReturnsObject(Part):
    def forward(self, x):
        return Strange(super().forward(x))


class Whole(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.part = part

    def forward(self, x):
        out = self.part(self.before(x))
        return out if isinstance(out, torch.Tensor) else out.value


def reason(part, forward=Whole.forward):
    model = Whole(part)

    def loss(model, batch):
        return forward(model, batch).mean()

    made = profile(Step(model, loss, torch.randn(4, 8)), HOST)
    return next(unit.refused for unit in made.units if unit.path == "part")


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (Part, ""),
        (ChangesInput, profile_calls.CHANGES_INPUT),
        (ChangesOwnTensor, ""),
        (ChangesBuffer, profile_calls.CHANGES_BUFFER),
        (ReplacesBuffer, profile_calls.CHANGES_BUFFER),
        (Counts, profile_calls.REMEMBERS.format(name="count")),
        (DrawsFromPython, profile_calls.DRAWS_ELSEWHERE),
        (DrawsFromNumpy, profile_calls.DRAWS_ELSEWHERE),
        (Norm, ""),
        (ReturnsDataclass, ""),
        (ReturnsObject, profile_calls.STRANGE_OUTPUT.format(kind="Strange")),
        (lambda: nn.Sequential(Part(), Counts()), profile_calls.REMEMBERS.format(name="count")),
        (lambda: nn.Sequential(Part(), ChangesInput()), ""),
    ],
)
def test_what_a_module_does_besides(part, expected):
    assert reason(part()) == expected


def test_an_input_that_is_changed_later():
    def forward(model, x):
        middle = model.before(x)
        out = torch.relu(model.part.linear.weight.sum() + model.part(middle))
        return out + middle.mul_(2)

    class SavesNothing(Part):
        def forward(self, x):
            # A sum saves no tensor, so that its input may be changed.
            return torch.tanh(self.linear.weight).sum() + x

    assert reason(SavesNothing(), forward) == profile_calls.INPUT_CHANGED_LATER


def test_a_cache_that_is_filled():
    def forward(model, x):
        return model.part(model.before(x), [])

    class Fills(Part):
        def forward(self, x, cache):
            out = super().forward(x)
            cache.append(out)
            return out

    assert reason(Fills(), forward) == profile_calls.FILLS_ARGUMENT.format(kind="list")


def test_a_list_that_grows_afterwards():
    class Joins(Part):
        def forward(self, values):
            return super().forward(sum(values))

    def growing(model, x):
        values = [model.before(x)]
        values.append(model.part(values))
        return sum(values)

    def fresh(model, x):
        values = [model.before(x)]
        return model.part(values) + values[0]

    assert reason(Joins(), growing) == profile_calls.ARGUMENT_CHANGED_LATER.format(kind="list")
    assert reason(Joins(), fresh) == ""


def test_a_module_without_gradients():
    def forward(model, x):
        with torch.no_grad():
            out = model.part(x)
        return model.before(x) + out

    assert reason(nn.Sequential(Part()), forward) == profile_calls.NO_GRADIENTS


def test_a_module_that_nothing_flows_back_through():
    def forward(model, x):
        return model.before(x) + model.part(x).detach()

    assert reason(nn.Sequential(Part()), forward) == profile_calls.NO_BACKWARD


def test_a_compiled_module():
    compiled = torch.compile(nn.Sequential(Part()), backend="eager")
    assert profile_calls.is_compiled(compiled)
    assert not profile_calls.is_compiled(Part())
    within = Part()
    within.compile(backend="eager")
    assert profile_calls.is_compiled(within)


def test_objects_within_objects_are_seen_to_change():
    holder = Strange({"a": [torch.zeros(1)]})
    before = profile_calls.before_call(Part(), (holder, 3, "text"), {"mask": torch.zeros(1)})
    assert profile_calls.changed_object(before) == ""
    holder.value["a"].append(torch.ones(1))
    assert profile_calls.changed_object(before) == "Strange"
