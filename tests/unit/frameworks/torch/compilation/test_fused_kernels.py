import pytest
import torch
from torch import nn

from memfit.frameworks.torch.compilation.fused_kernels import FUSED
from memfit.frameworks.torch.trace import trace
from tests.unit.frameworks.torch.builders import AMPERE, HOST

# PyTorch's compiler loads parts of PyTorch that PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore")

ROWS, WIDTH = 512, 128
ONE = ROWS * WIDTH * 4


def kernels(model, batch, device):
    """(bytes moved, bytes written) of each fused kernel of a forward pass."""
    step = trace.Step(torch.compile(model), lambda m, b: m(b), batch, training=False)
    traced = trace.trace(step, device)
    assert not traced.notes and all(work.is_compiled for work in traced.work)
    return [(work.moved_bytes, work.sizes[0]) for work in traced.work if work.op == FUSED]


class Calculation(nn.Module):
    def __init__(self, calculate):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(1000, WIDTH))
        self.calculate = calculate

    def forward(self, x):
        return self.calculate(self, x)


@pytest.mark.parametrize("device", [HOST, AMPERE])
@pytest.mark.parametrize(
    ("calculate", "batch", "expected"),
    [
        # What is between two operators of a kernel is neither written nor read.
        (lambda self, x: x.sin().cos() + 1, torch.empty(ROWS, WIDTH), (2 * ONE, ONE)),
        # A row that is used for all others is read once.
        (lambda self, x: x + self.table[0], torch.empty(ROWS, WIDTH), (2 * ONE + WIDTH * 4, ONE)),
        # Of a slice no more is read than there is in it.
        (lambda self, x: x[:128] * 2, torch.empty(ROWS, WIDTH), (ONE // 2, ONE // 4)),
        # Of a table the rows that are looked up.
        (
            lambda self, x: self.table[x] + 1,
            torch.zeros(16, dtype=torch.int64),
            (16 * (8 + 8 * WIDTH), 16 * 4 * WIDTH),
        ),
        (lambda self, x: x.square().sum(-1), torch.empty(ROWS, WIDTH), (ONE + ROWS * 4, ROWS * 4)),
    ],
)
def test_a_kernel_moves_what_others_made_and_what_others_need(device, calculate, batch, expected):
    (found,) = kernels(Calculation(calculate), batch, device)
    assert found == expected


def test_operators_that_a_graph_calls_are_compiled_too():
    step = trace.Step(torch.compile(nn.Linear(WIDTH, 8)), lambda m, b: m(b).sum(), torch.empty(ROWS, WIDTH))
    work = {one.op: one for one in trace.trace(step, AMPERE).work}
    assert work["aten.addmm"].is_compiled and work["aten.addmm"].sizes == (1, ROWS, 8, WIDTH)
    # The loss is outside of the model.
    assert not work["aten.sum"].is_compiled
