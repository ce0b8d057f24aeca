"""What a profile promises is held against real traces with the modules computed again."""

import functools
import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memfit.core.settings import Settings
from memfit.core.timeline import Phase
from memfit.frameworks.torch.trace.profile import profile
from memfit.frameworks.torch.trace.trace import Step, trace
from tests.unit.frameworks.torch.builders import AMPERE, HOST


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return torch.relu_(self.dropout(self.second(self.first(x))) + x)


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.Sequential(*(Residual(32) for _ in range(4)))
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Skipping(nn.Module):
    """A small U-Net: outputs of the first half come back in the second."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(nn.Sequential(nn.Conv2d(n, 24, 3, 2, 1), nn.ReLU(), nn.Dropout(0.2)) for n in (3, 24))
        self.up = nn.ModuleList(nn.Sequential(nn.ConvTranspose2d(n, 24, 2, 2), nn.GELU()) for n in (24, 48))

    def forward(self, x):
        first = self.down[0](x)
        return self.up[1](torch.cat([self.up[0](self.down[1](first)), first], 1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(500, 64)
        self.layer = nn.LSTM(64, 64, batch_first=True)
        self.head = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 500))

    def forward(self, x):
        return self.head(self.layer(self.rows(x))[0])


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(300, 32)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(3))

    def forward(self, x):
        x = self.rows(x)
        for layer in self.layers:
            x = layer(x)
        return x


MODELS = {
    "convolutional": (Convolutional, lambda: torch.randn(8, 3, 32, 32)),
    "skipping": (Skipping, lambda: torch.randn(8, 3, 64, 64)),
    "recurrent": (Recurrent, lambda: torch.randint(500, (8, 40))),
    "attending": (Attending, lambda: torch.randint(300, (8, 64))),
}
DEVICES = pytest.mark.parametrize("device", [HOST, AMPERE], ids=["host", "cuda"])


def mean(model, batch):
    return model(batch).float().mean()


def step_of(name, **options):
    build, batch = MODELS[name]
    return Step(build(), mean, batch(), **options)


def predicted_peak(made, paths):
    """The highest point of forward and backward pass if these modules are computed again."""
    blocks = made.timeline.blocks
    end = next(mark.tick for mark in made.timeline.marks if mark.phase is Phase.OPTIMIZER)
    curve = made.timeline.curve()[:end]
    calls = [call for unit in made.units if unit.path in paths for call in unit.calls]

    def covered(kind, block, tick):
        return any(d.block == block and d.start <= tick < d.end for call in calls for d in getattr(call, kind))

    touched = {d.block for call in calls for d in (*call.drops, *call.holds)}
    for block in touched:
        last = end if blocks[block].end is None else blocks[block].end
        for tick in range(blocks[block].start, end):
            dropped = tick < last and covered("drops", block, tick) and not covered("keeps", block, tick)
            held = tick >= last and covered("holds", block, tick)
            curve[tick] += blocks[block].size_bytes * (held - dropped)
    return max(*curve, *(curve[call.backward[0]] + call.extra_bytes for call in calls))


def traced_peak(step, device, paths):
    """The same of a real trace."""
    modules = [step.model.get_submodule(path) for path in paths]
    for module in modules:
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
    try:
        timeline = trace(step, device).timeline
    finally:
        for module in modules:
            del module.forward
    return max(timeline.curve()[: next(m.tick for m in timeline.marks if m.phase is Phase.OPTIMIZER)])


def some_units(made, seed):
    """Units of which none is inside of another."""
    units = [unit.path for unit in made.units if not unit.refused and any(call.drops for call in unit.calls)]
    random.Random(seed).shuffle(units)
    found = []
    for path in units[: 1 + seed * len(units) // 3]:
        if not any(f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.") for other in found):
            found.append(path)
    return found


@DEVICES
@pytest.mark.parametrize("name", MODELS)
def test_the_timeline_is_the_one_of_a_plain_trace(name, device):
    step = step_of(name, optimizer=torch.optim.Adam)
    # Shapes of operators that were met before are taken from a cache, which has no place for outputs that are the same.
    trace(step, device)
    assert profile(step, device).timeline == trace(step, device).timeline


@DEVICES
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_promised_peak_is_the_traced_one(name, device, seed):
    step = step_of(name)
    made = profile(step, device)
    paths = some_units(made, seed)
    assert paths
    assert predicted_peak(made, set(paths)) == pytest.approx(traced_peak(step, device, paths), rel=0.03)


def test_computing_every_block_again_saves_memory():
    step = step_of("convolutional")
    made = profile(step, HOST)
    plain = predicted_peak(made, set())
    assert plain == traced_peak(step, HOST, [])
    assert predicted_peak(made, {f"blocks.{n}" for n in range(4)}) < 0.7 * plain


def test_autocast_is_followed():
    step = step_of("attending", precision="amp-bf16")
    made = profile(step, AMPERE)
    paths = [f"layers.{n}" for n in range(3)]
    assert "autocast" in made.features
    assert predicted_peak(made, set(paths)) == pytest.approx(traced_peak(step, AMPERE, paths), rel=0.03)
    products = [work for work in made.work if work.op in ("aten.mm", "aten.addmm")]
    assert {work.dtype for work in products} == {"bfloat16"}


def test_work_comes_in_the_order_of_the_step_and_knows_its_modules():
    made = profile(step_of("convolutional", optimizer=torch.optim.SGD), HOST)
    phases = [work.phase for work in made.work]
    assert phases == sorted(phases, key=[Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER].index)
    by_phase = {
        phase: sum(w.flops for w in made.work if w.phase is phase and w.module == "blocks.1.first.0")
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    }
    assert by_phase == {Phase.FORWARD: 2 * 8 * 32 * 32 * 32 * 32 * 9, Phase.BACKWARD: 4 * 8 * 32 * 32 * 32 * 32 * 9}
    (call,) = next(unit for unit in made.units if unit.path == "blocks.1").calls
    assert {w.module.split(".")[1] for w in made.work[slice(*call.operations)]} == {"1"}


def test_only_the_first_step_is_described():
    once = profile(step_of("recurrent", optimizer=torch.optim.Adam), HOST)
    assert sum(work.op == "aten.embedding" for work in once.work) == 1
    assert [len(unit.calls) for unit in once.units] == [1] * len(once.units)


def test_of_micro_batches_the_first_is_described():
    made = profile(step_of("convolutional", optimizer=torch.optim.SGD, settings=Settings(micro_batches=2)), HOST)
    assert {len(unit.calls) for unit in made.units} == {1}
    backward = [mark.tick for mark in made.timeline.marks if mark.phase is Phase.BACKWARD]
    assert all(backward[0] <= call.backward[1] < backward[1] for unit in made.units for call in unit.calls)


def test_totals():
    step = step_of("recurrent", optimizer=torch.optim.AdamW)
    step.model.rows.weight.requires_grad_(False)
    made = profile(step, HOST)
    assert (made.optimizer, made.batch_size) == ("AdamW", 8)
    assert made.num_parameters - made.num_trainable == 500 * 64


def test_code_that_refuses_hooks_is_profiled_without_units():
    def loss(model, batch):
        parameters = dict(model.named_parameters())
        gradients = torch.func.grad(lambda p: torch.func.functional_call(model, p, batch).sum())(parameters)
        return model(batch).mean() + sum(g.sum() for g in gradients.values())

    made = profile(Step(nn.Linear(4, 4), loss, torch.randn(2, 4)), HOST)
    assert made.units == ()
    assert made.work


def test_the_users_model_is_left_alone():
    model = Convolutional()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    call = nn.Module.__call__
    profile(Step(model, mean, torch.randn(2, 3, 8, 8), torch.optim.SGD), HOST)
    assert nn.Module.__call__ is call
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


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
