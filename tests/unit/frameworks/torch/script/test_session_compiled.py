"""Programs that call `torch.compile` in a session: what they compile is compiled, on shapes."""

import importlib

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from memfit.core.estimate import NOT_COMPILED
from memfit.core.timeline import Category
from memfit.frameworks.torch.compilation.compiled_steps import CUDA_GRAPHS
from memfit.frameworks.torch.compilation.inductor_graphs import POOL_STREAM
from memfit.frameworks.torch.script.session import UPDATE_AS_EAGER
from memfit.frameworks.torch.simulation.higher_order import FLEX_AS_FUSED
from tests.unit.frameworks.torch.sessions import codes, made, running, timeline, visiting

# PyTorch's compiler loads parts of PyTorch that PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore")

ROWS, WIDTH = 512, 256
ONE = ROWS * WIDTH * 4


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.inner(x)
        for _ in range(4):
            x = torch.sin(x) * torch.cos(x) + 1
        return x


def whole(model):
    compiled = torch.compile(model)
    return lambda x: compiled(x).sum()


def own_call(model):
    model.compile(fullgraph=True)
    return lambda x: model(x).sum()


def function(model):
    @torch.compile(dynamic=True)
    def loss(x):
        return model(x).sum()

    return loss


def eager(model):
    return lambda x: model(x).sum()


def train(make, rows=(ROWS, ROWS)):
    model = Chain().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = make(model)
    for number in rows:
        loss(torch.randn(number, WIDTH).cuda()).backward()
        optimizer.step()
        optimizer.zero_grad()


def peak(make, **options):
    with running(**options) as session:
        train(make)
    return timeline(session).peak()[1]


@pytest.mark.parametrize("make", [whole, own_call, function])
def test_what_a_program_compiles_has_the_buffers_of_its_kernels(make):
    with running() as session:
        train(make)

    assert codes(session) == []
    assert session.compiled.num_graphs == 1
    assert any("sin" in block.op for block in made(session) if block.op.startswith("inductor."))
    assert peak(eager) - timeline(session).peak()[1] > 6 * ONE
    # Parameters keep their names, also where their model is called by compiled code alone.
    assert {block.module for block in made(session, category=Category.PARAMETER)} == {"inner"}


class Outer(nn.Module):
    """A model whose part breaks the graph."""

    def __init__(self):
        super().__init__()
        self.part = Broken()

    def forward(self, x):
        return self.part(torch.cos(x)) * 2


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.chain = Chain()

    def forward(self, x):
        x = torch.sin(x)
        torch._dynamo.graph_break()
        return self.chain(x)


def test_what_follows_a_break_in_a_part_is_compiled():
    with running() as session:
        compiled = torch.compile(Outer().cuda())
        compiled(torch.randn(ROWS, WIDTH).cuda()).sum().backward()

    assert session.compiled.num_graphs >= 3
    assert any("addmm" in block.op for block in made(session) if block.op.startswith("inductor."))


def test_batches_of_other_sizes_are_compiled_too():
    with running() as session:
        train(whole, rows=(ROWS, ROWS + 8, ROWS + 16))

    assert codes(session) == []
    # One for the first size, one for all others.
    assert session.compiled.num_graphs == 2


def test_a_stand_in_for_triton_is_not_for_the_compiler():
    with running() as session, session.simulation.with_stand_ins():
        importlib.import_module("triton")
        train(whole)

    assert codes(session) == []
    assert session.compiled.num_graphs == 1


def test_where_a_session_does_not_compile_it_is_eager():
    assert peak(whole, compiles=False) == peak(eager)


def test_steps_of_cuda_graphs_may_be_marked():
    def marked(model):
        compiled = torch.compile(model, mode="reduce-overhead")

        def step(x):
            torch.compiler.cudagraph_mark_step_begin()
            return compiled(x).sum()

        return step

    with running() as session:
        train(marked)

    assert session.compiled.num_graphs == 1


def test_buffers_of_cuda_graphs_are_taken_from_their_pool():
    def overhead(model):
        compiled = torch.compile(model, mode="reduce-overhead")
        return lambda x: compiled(x).sum()

    with running() as session:
        train(overhead)

    assert codes(session) == [CUDA_GRAPHS]
    assert {block.stream for block in made(session) if "sin" in block.op} == {POOL_STREAM}


def test_what_cannot_be_compiled_is_eager_and_says_so():
    def refused(model):
        def refuse(graph, inputs):
            raise RuntimeError("no such kernel")

        compiled = torch.compile(model, backend=refuse)
        return lambda x: compiled(x).sum()

    with running() as session:
        train(refused)

    assert codes(session) == [NOT_COMPILED]
    assert session.counter.num_steps == 2


def test_a_compiled_update_is_counted_as_a_step():
    with running() as session:
        parameter = nn.Parameter(torch.ones(4, device="cuda"))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        update = torch.compile(lambda: optimizer.step())
        for _ in range(2):
            parameter.sum().backward()
            update()

    assert session.counter.num_steps == 2
    assert codes(session) == [UPDATE_AS_EAGER]


def test_attention_that_is_compiled_as_one_graph_runs():
    with running() as session:
        attend = torch.compile(flex_attention, fullgraph=True)
        query = torch.randn(2, 4, 128, 64, device="cuda", requires_grad=True)
        attend(query, query, query).sum().backward()

    assert codes(session) == [FLEX_AS_FUSED]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        query = torch.sin(self.inner(x)) * 2
        return torch.cos(flex_attention(query, query, query)) * 2


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_model_with_attention_may_be_compiled_as_one_graph(fullgraph):
    with running() as session:
        model = torch.compile(Attention().cuda(), fullgraph=fullgraph)
        model(torch.randn(2, 4, 128, 64, device="cuda")).sum().backward()

    assert codes(session) == [FLEX_AS_FUSED]
    # What is before and after the attention.
    assert session.compiled.num_graphs == 2


def test_an_update_that_is_compiled_as_one_graph_is_counted_as_a_step():
    with running() as session:
        parameter = nn.Parameter(torch.ones(4, device="cuda"))
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        @torch.compile(fullgraph=True)
        def update():
            optimizer.step()

        parameter.sum().backward()
        update()

    assert session.counter.num_steps == 1
    assert codes(session) == [UPDATE_AS_EAGER]


def test_afterwards_one_graph_is_one_graph():
    model = Broken()
    with visiting() as session:
        compiled = torch.compile(model.cuda(), backend="eager", fullgraph=True)
        compiled(torch.randn(2, WIDTH).cuda()).sum().backward()
    assert session.compiled.num_graphs == 0
    assert session.compiled.has_begun

    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(torch.ones(2, WIDTH))


def test_a_full_device_refuses_buffers_of_compiled_graphs():
    with running(4 * ONE) as session, pytest.raises(torch.OutOfMemoryError):
        train(whole, rows=(16 * ROWS,))

    assert session.failures[-1].op.startswith(("inductor", "aten."))


def test_afterwards_a_model_is_compiled_for_real_tensors():
    model = Chain()
    with visiting() as session:
        compiled = torch.compile(model.cuda(), backend="eager")
        compiled(torch.randn(2, WIDTH).cuda()).sum().backward()
    assert session.compiled.has_begun

    assert compiled(torch.ones(2, WIDTH)).device.type == "cpu"
    assert torch.isfinite(compiled(torch.ones(2, WIDTH))).all()
