import pytest
import torch
from torch import nn

import memfit
from memfit.core.estimate import NOT_COMPILED
from memfit.core.timeline import Category
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.compilation.compiled_steps import AUTOTUNING, CUDA_GRAPHS, not_compiled
from memfit.frameworks.torch.compilation.inductor_graphs import POOL_STREAM
from memfit.frameworks.torch.cuda.devices import DeviceProperties
from memfit.frameworks.torch.trace import trace
from tests.unit.frameworks.torch.builders import AMPERE, HOST

# PyTorch's compiler loads parts of PyTorch that PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore")

ROWS, WIDTH = 512, 128
ONE = ROWS * WIDTH * 4


class Chain(nn.Module):
    """Element by element: eager, every step has a tensor of its own; compiled, one kernel does it all."""

    def __init__(self, breaks=False):
        super().__init__()
        self.inner = nn.ModuleDict({"scale": nn.Linear(WIDTH, WIDTH)})
        self.breaks = breaks

    def forward(self, x):
        x = self.inner["scale"](x)
        if self.breaks:
            torch._dynamo.graph_break()
        for _ in range(4):
            x = torch.sin(x) * torch.cos(x) + 1
        return x


def loss(model, batch):
    return model(batch).sum()


def traced(model, device=HOST, **options):
    step = trace.Step(model, loss, torch.empty(ROWS, WIDTH), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    return trace.trace(step, device, **options)


def codes(made):
    return {note.code for note in made.notes}


@pytest.mark.parametrize("device", [HOST, AMPERE])
def test_compiled_code_has_the_buffers_of_its_kernels(device):
    eager, compiled = traced(Chain(), device), traced(torch.compile(Chain()), device)

    assert not compiled.notes
    assert eager.timeline.peak()[1] - compiled.timeline.peak()[1] > 8 * ONE
    kernels = [block for block in compiled.timeline.blocks if block.op.startswith("inductor.")]
    assert any("cos" in block.op and "sin" in block.op for block in kernels)
    assert {block.module for block in kernels if "addmm" in block.op} == {"inner.scale"}
    # The gradients are what they are without compilation.
    sizes = [
        sorted(b.size_bytes for b in made.timeline.blocks if b.category is Category.GRADIENT)
        for made in (eager, compiled)
    ]
    assert sizes[0] == sizes[1]


def test_parameters_of_a_compiled_model_keep_their_names():
    named = {b.module for b in traced(torch.compile(Chain())).timeline.blocks if b.category is Category.PARAMETER}

    assert named == {"inner.scale"}


class Counting(nn.Module):
    """Compiles what has nothing to compile, as a release does for which all code is such."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.count = torch.compile(lambda number: number + 1)

    def forward(self, x):
        return self.inner(x) * self.count(2)


def test_a_compiler_that_makes_no_graph_is_said():
    (note,) = traced(Counting()).notes

    assert (note.code, "made no graph" in note.text) == (NOT_COMPILED, True)


@pytest.mark.parametrize(("name", "is_compiled"), [("a100-40gb", True), ("t4", False)])
def test_bfloat16_is_compiled_for_devices_that_have_it(name, is_compiled):
    step = trace.Step(torch.compile(Chain()), loss, torch.empty(ROWS, WIDTH), precision="amp-bf16")
    made = trace.trace(step, memfit.find_device(name))
    assert (NOT_COMPILED not in codes(made)) is any(work.is_compiled for work in made.work) is is_compiled


def test_each_graph_of_code_with_a_break_is_compiled():
    whole, broken = traced(torch.compile(Chain())), traced(torch.compile(Chain(breaks=True)))

    assert not broken.notes
    assert len(broken.timeline.blocks) >= len(whole.timeline.blocks)


def test_functions_and_parts_that_are_compiled_are_too():
    part = nn.Sequential(nn.Linear(WIDTH, WIDTH), torch.compile(Chain()))
    compiled = traced(part)

    assert not compiled.notes
    assert any(block.op.startswith("inductor.") and "sin" in block.op for block in compiled.timeline.blocks)


def test_an_estimate_of_a_compiled_model_says_less_than_of_the_plain_one():
    model, batch = Chain(), torch.empty(ROWS, WIDTH)
    eager = memfit.estimate(model, loss, batch, device="cpu")
    compiled = memfit.estimate(torch.compile(model), loss, batch, device="cpu")

    assert compiled.timeline.peak()[1] < eager.timeline.peak()[1]


def test_what_cannot_be_compiled_is_counted_as_eager_and_says_so():
    def refuse(graph, inputs):
        raise RuntimeError("no such kernel")

    eager, compiled = traced(Chain()), traced(torch.compile(Chain(), backend=refuse))

    (note,) = compiled.notes
    assert (note.code, "no such kernel" in note.text) == (NOT_COMPILED, True)
    # Dynamo's caller keeps the argument of a frame that isn't compiled.
    assert 0 <= compiled.timeline.peak()[1] - eager.timeline.peak()[1] <= ONE


def test_the_reason_is_the_innermost_error():
    outer = RuntimeError("backend raised:")
    outer.inner_exception = ValueError("\nbad stride\nmore")

    assert not_compiled(outer).endswith("ValueError: bad stride")


def test_buffers_of_cuda_graphs_are_in_a_pool_of_their_own():
    compiled = traced(torch.compile(Chain(), mode="reduce-overhead"), AMPERE)

    assert codes(compiled) == {CUDA_GRAPHS}
    assert {block.stream for block in compiled.timeline.blocks if "sin" in block.op} == {POOL_STREAM}


def test_inputs_of_cuda_graphs_are_copied_into_their_pool():
    compiled = traced(torch.compile(Chain(), mode="reduce-overhead"), AMPERE)

    copies = [block for block in compiled.timeline.blocks if block.op == "inductor.input_copy"]
    # In each step the batch, and the gradient of the output; parameters and what the forward pass saved stay.
    assert {block.stream for block in copies} == {POOL_STREAM}
    assert [block.size_bytes for block in copies] == [ONE] * len(copies)
    assert len(copies) == 4


def test_autotuning_takes_memory_in_the_first_step():
    compiled = traced(torch.compile(Chain(), mode="max-autotune-no-cudagraphs"), AMPERE)

    assert codes(compiled) == {AUTOTUNING}
    # As much as the second-level cache holds.
    cache = DeviceProperties(AMPERE, 0).L2_cache_size
    assert next(b.size_bytes for b in compiled.timeline.blocks if b.op == "inductor.autotuning") == cache


def test_afterwards_the_compiler_is_what_it_was():
    model = torch.compile(Chain())
    module = internals.compile_fx_module
    before = module.compile_fx, module.compile_fx_inner, internals.FakeTensor.__new__, nn.Module.__call__
    traced(model, AMPERE)

    assert before == (module.compile_fx, module.compile_fx_inner, internals.FakeTensor.__new__, nn.Module.__call__)
    # Nothing that was compiled for shapes is left for real tensors.
    function = torch.compile(Chain(), backend="eager")
    traced(function)
    assert function(torch.ones(2, WIDTH)).device.type == "cpu"
