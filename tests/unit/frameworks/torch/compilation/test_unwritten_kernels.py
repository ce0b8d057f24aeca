import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memfit.frameworks.torch import internals
from memfit.frameworks.torch.compilation import compiled_steps, unwritten_kernels
from memfit.frameworks.torch.trace import trace
from tests.unit.frameworks.torch.builders import AMPERE

# PyTorch's compiler loads parts of PyTorch that PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore")


def mixed():
    """Reductions within a block of threads and in loops, chains, and an update of buffers."""
    layers = [nn.Linear(96, 3000), nn.LayerNorm(3000), nn.GELU(), nn.Dropout(0.1), nn.Linear(3000, 8000)]
    return nn.Sequential(*layers, nn.LogSoftmax(-1)), torch.empty(512, 96)


def convolutions():
    layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(7)]
    model = nn.Sequential(*layers)
    model(torch.zeros(2, 3, 30, 30))
    return model, torch.empty(64, 3, 30, 30)


class Scores(nn.Module):
    """A softmax over rows that are read once more, in the next loop over them."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(40, 5000)

    def forward(self, x):
        scores = torch.tanh(self.table(x)) * 2
        return F.dropout((scores - scores.amax(-1, keepdim=True)).exp(), 0.1) * scores.mean(-1, keepdim=True)


def scores():
    return Scores(), torch.zeros(300, dtype=torch.int64)


def many_rows():
    """A layer norm whose backward sums over rows and over columns in one kernel."""
    return nn.Sequential(nn.Linear(8, 640), nn.LayerNorm(640)), torch.empty(8192, 8)


def blocks(made):
    model, batch = made
    step = trace.Step(torch.compile(model), lambda m, b: m(b).sum(), batch, optimizer=torch.optim.SGD)
    traced = trace.trace(step, AMPERE)
    assert not traced.notes
    return [(b.op, b.size_bytes, b.start, b.end) for b in traced.timeline.blocks]


@pytest.mark.parametrize("make", [mixed, convolutions, scores, many_rows])
def test_buffers_are_those_of_kernels_that_are_written(make, monkeypatch):
    numbers = {"left out": 0}

    def counted(nodes, kernel, plain=unwritten_kernels._is_plain):
        is_plain = plain(nodes, kernel)
        numbers["left out"] += is_plain
        return is_plain

    monkeypatch.setattr(unwritten_kernels, "_is_plain", counted)
    quick = blocks(make())
    assert numbers["left out"] >= 1
    monkeypatch.setattr(compiled_steps, "leaves_out", lambda is_on: [])

    assert quick == blocks(make())


def test_elsewhere_the_compiler_writes_its_kernels():
    kernels = internals.KernelScheduling.codegen_node_schedule_with_kernel
    blocks(mixed())

    assert internals.KernelScheduling.codegen_node_schedule_with_kernel is kernels


@pytest.mark.skipif(
    not getattr(internals.inductor_config.triton, "mix_order_reduction", False), reason="this release has no such sums"
)
def test_sums_over_rows_and_columns_at_once_take_a_workspace():
    # A row of partial sums for each 16 rows, of the gradients of the weight and of the bias.
    partial_sums_bytes = 2 * (8192 // 16) * 640 * 4

    assert ("inductor", partial_sums_bytes) in [block[:2] for block in blocks(many_rows())]


def test_no_folder_is_left_in_the_compilers_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    blocks(mixed())

    assert list(tmp_path.iterdir()) == []
