"""Drops, offloads, holds and extra bytes of steps that can be counted by hand: float32, 4 samples of 1024 bytes."""

import torch
from torch import nn

from memfit.adapters.torch.fitting.profile import profile
from memfit.adapters.torch.trace import Step
from tests.unit.adapters.torch.builders import HOST

WIDTH, BYTES = 256, 4 * 256 * 4


class Twice(nn.Module):
    """Two activations are saved inside: the sigmoid's output and the exponential's, which is returned."""

    def forward(self, x):
        return torch.sigmoid(x * 2).exp()


def units(model, loss=lambda model, batch: model(batch).sum()):
    made = profile(Step(model, loss, torch.randn(4, WIDTH)), HOST)
    return made, {unit.path: unit for unit in made.units}


def only_call(unit):
    (call,) = unit.calls
    return call


def test_what_is_saved_inside_is_dropped_until_the_backward_pass():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Twice(), nn.Linear(WIDTH, WIDTH))
    made, found = units(model)
    call = only_call(found["1"])
    ops = {made.timeline.blocks[drop.block].op: drop for drop in call.drops}
    # The output is saved by the next layer too, until just before the backward pass of this one.
    assert set(ops) == {"aten.sigmoid"}
    drop = ops["aten.sigmoid"]
    assert made.timeline.blocks[drop.block].size_bytes == BYTES
    assert call.forward[0] < drop.start <= call.forward[1] < drop.end == call.backward[0] < call.backward[1]


def test_an_input_that_nobody_saved_is_held():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Twice(), nn.Linear(WIDTH, WIDTH))
    made, found = units(model)
    (hold,) = only_call(found["1"]).holds
    block = made.timeline.blocks[hold.block]
    assert (block.op, hold.start) == ("aten.addmm", block.end)
    assert hold.end == only_call(found["1"]).backward[1]


def test_the_second_forward_pass_stops_at_the_last_saved_tensor():
    class Wide(nn.Module):
        def forward(self, x):
            return torch.cat([(x * 1).cos()] * 8, 1)

    made, found = units(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(Wide())))
    # Only the input of the cosine is saved: neither its output nor the eightfold one is made again.
    assert only_call(found["1"]).extra_bytes == 0
    assert [made.timeline.blocks[d.block].op for d in only_call(found["1"]).drops] == ["aten.mul"]


def test_temporaries_before_the_last_saved_tensor_are_extra():
    class Wide(nn.Module):
        def forward(self, x):
            return torch.cat([x] * 8, 1).sum(1, keepdim=True).exp()

    _, found = units(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(Wide())))
    small = 4 * 4
    # The sum of the wide tensor, then the exponential's output; the latter is saved and so is there anyway.
    assert only_call(found["1"]).extra_bytes == 8 * BYTES + small - small


def test_what_somebody_else_holds_is_not_dropped():
    kept = []

    class Leaks(nn.Module):
        def forward(self, x):
            middle = torch.sigmoid(x)
            kept.append(middle.detach())
            return middle.exp() * 2

    def loss(model, batch):
        kept.clear()
        return model(batch).sum()

    made, found = units(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(Leaks())), loss)
    kept.clear()
    assert [made.timeline.blocks[d.block].op for d in only_call(found["1"]).drops] == ["aten.exp"]


def test_offloads_include_inputs_that_only_this_call_saves():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    made, found = units(model)
    (offload,) = only_call(found["1"]).offloads
    assert made.timeline.blocks[offload.block].module == "0"
    # Neither the batch nor parameters wait in host memory, so that the first layer has nothing to offload.
    assert "0" not in found


def test_containers_that_are_never_called_and_leaves_without_drops_are_no_units():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Sequential(Twice()), nn.Identity()])

        def forward(self, x):
            return self.parts[1](self.parts[0](x.requires_grad_()))

    _, found = units(Whole())
    assert list(found) == ["parts.0", "parts.0.0"]


def test_a_module_that_is_called_twice_has_two_calls():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.part = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), Twice())

        def forward(self, x):
            return self.part(self.part(self.first(x)))

    _, found = units(Shared())
    one, two = found["part"].calls
    assert one.forward[1] <= two.forward[0] < two.backward[0] < one.backward[0]


def test_calls_inside_of_a_call_of_the_same_module_are_left_out():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, again=True):
            out = torch.sigmoid(self.linear(x))
            return self(out, again=False) if again else out

    _, found = units(nn.Sequential(nn.Linear(WIDTH, WIDTH), Nested()))
    assert len(found["1"].calls) == 1
    assert len(found["1.linear"].calls) == 2
