from types import SimpleNamespace

import torch

from memfit.core.timeline import Category
from memfit.frameworks.torch.compilation import inductor_graphs
from memfit.frameworks.torch.compilation.inductor_graphs import GraphMemory
from memfit.frameworks.torch.shapes.origin import OriginTracker
from memfit.frameworks.torch.shapes.recorder import Recorder

CODE = """
import triton
from torch._inductor.async_compile import AsyncCompile
import torch
kernel = AsyncCompile().triton("kernel", "code")

def call(args):
    given, = args
    args.clear()
    assert_size_stride(given, (4,), (1,))
    buf0 = memfit_allocate('buf0', (8,), (1,), torch.float32)
    kernel.run(given, buf0)
    buf1 = buf0; del buf0  # reuse
    buf2 = empty_strided_cuda((2,), (1,), torch.float32)
    return (buf1, )
"""


def run(memory, code=CODE):
    scheduler = SimpleNamespace(name_to_buf={}, name_to_fused_node={})
    graph = SimpleNamespace(codegen=lambda: (SimpleNamespace(value=code), None), scheduler=scheduler)
    return memory.runnable(graph).call([torch.empty(4, device="meta")])


def memory():
    origin = OriginTracker()
    return GraphMemory(Recorder(origin.current), origin, on_cuda=True)


def test_a_graph_runs_on_shapes_and_its_buffers_are_recorded():
    made = memory()
    (out,) = run(made)

    assert (out.shape, out.device.type) == ((8,), "meta")
    sizes = [(block.size_bytes, block.end is None) for block in made.recorder.timeline().blocks]
    assert sizes == [(32, True), (8, False)]


def test_what_is_taken_once_is_taken_when_a_graph_first_runs():
    made = memory()
    made.take_at_next_run(100)
    run(made)
    run(made)

    blocks = [block for block in made.recorder.timeline().blocks if block.category is Category.WORKSPACE]
    assert [block.size_bytes for block in blocks] == [100]


def test_modules_have_the_paths_that_people_know():
    path = inductor_graphs._module_path
    assert path("L['self']._modules['layers']._modules['0'].norm") == "layers.0.norm"
    assert path("L['self']") == ""
    assert path("L['fn']._orig_mod.head") == "head"
