"""Each reason why a module can't be computed again, on a module that has it, and on its harmless twin."""

import random
from dataclasses import dataclass

import numpy
import pytest
import torch
from torch import nn

from memfit.adapters.torch.fitting import profile_refusals as refusals
from memfit.adapters.torch.fitting.profile import profile
from memfit.adapters.torch.trace import Step
from tests.unit.adapters.torch.builders import HOST


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
        (ChangesInput, refusals.CHANGES_INPUT),
        (ChangesOwnTensor, ""),
        (ChangesBuffer, refusals.CHANGES_BUFFER),
        (ReplacesBuffer, refusals.CHANGES_BUFFER),
        (Counts, refusals.REMEMBERS.format(name="count")),
        (DrawsFromPython, refusals.DRAWS_ELSEWHERE),
        (DrawsFromNumpy, refusals.DRAWS_ELSEWHERE),
        (Norm, ""),
        (ReturnsDataclass, ""),
        (ReturnsObject, refusals.STRANGE_OUTPUT.format(kind="Strange")),
        (lambda: nn.Sequential(Part(), Counts()), refusals.REMEMBERS.format(name="count")),
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

    assert reason(SavesNothing(), forward) == refusals.INPUT_CHANGED_LATER


def test_a_cache_that_is_filled():
    def forward(model, x):
        return model.part(model.before(x), [])

    class Fills(Part):
        def forward(self, x, cache):
            out = super().forward(x)
            cache.append(out)
            return out

    assert reason(Fills(), forward) == refusals.FILLS_ARGUMENT.format(kind="list")


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

    assert reason(Joins(), growing) == refusals.ARGUMENT_CHANGED_LATER.format(kind="list")
    assert reason(Joins(), fresh) == ""


def test_a_module_without_gradients():
    def forward(model, x):
        with torch.no_grad():
            out = model.part(x)
        return model.before(x) + out

    assert reason(nn.Sequential(Part()), forward) == refusals.NO_GRADIENTS


def test_a_module_that_nothing_flows_back_through():
    def forward(model, x):
        return model.before(x) + model.part(x).detach()

    assert reason(nn.Sequential(Part()), forward) == refusals.NO_BACKWARD


def test_a_compiled_module():
    compiled = torch.compile(nn.Sequential(Part()), backend="eager")
    assert refusals.refused_from_the_start(compiled) == refusals.COMPILED
    assert refusals.refused_from_the_start(Part()) == ""
    within = Part()
    within.compile(backend="eager")
    assert refusals.refused_from_the_start(within) == refusals.COMPILED


def test_objects_within_objects_are_seen_to_change():
    holder = Strange({"a": [torch.zeros(1)]})
    before = refusals.before_call(Part(), (holder, 3, "text"), {"mask": torch.zeros(1)})
    assert refusals.changed_object(before) == ""
    holder.value["a"].append(torch.ones(1))
    assert refusals.changed_object(before) == "Strange"
