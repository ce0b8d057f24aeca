"""Settings put into practice on plain PyTorch code that knows nothing of them, in a session."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memfit.core.settings import OptimizerKernels, Settings
from memfit.core.timeline import Category, Phase
from memfit.frameworks.torch.apply.script_settings import ScriptSettings, has_fused_kernel
from tests.unit.frameworks.torch.sessions import made, phases, running

PLAIN = Settings(set_to_none=False)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.relu(self.up(x)))


def train(steps=2, rows=64, width=128, make=torch.optim.Adam, zero=lambda model, optimizer: optimizer.zero_grad()):
    model = nn.Sequential(*(Block(width) for _ in range(4))).cuda()
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    for _ in range(steps):
        zero(model, optimizer)
        F.mse_loss(model(torch.randn(rows, width).cuda()), torch.zeros(rows, width).cuda()).backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer


def kept_bytes(session):
    return sum(block.size_bytes for block in made(session, category=Category.ACTIVATION, phase=Phase.FORWARD))


def test_modules_are_computed_again_from_their_first_call_on():
    fitting = ScriptSettings(Settings(checkpoint=("0", "2"), set_to_none=False))
    with running(fitting=fitting) as fitted:
        train()
    with running(fitting=ScriptSettings(PLAIN)) as plain:
        train()

    assert fitting.recomputed == {"0", "2"}
    assert kept_bytes(fitted) < 0.7 * kept_bytes(plain)
    assert phases(fitted) == phases(plain)


def test_parts_of_later_models_have_the_name_of_their_class_in_front():
    fitting = ScriptSettings(Settings(checkpoint=("Sequential.1",)))
    with running(fitting=fitting):
        train()
        train()

    assert fitting.recomputed == {"Sequential.1"}


def test_a_module_that_is_not_there_is_never_computed_again():
    fitting = ScriptSettings(Settings(checkpoint=("encoder.0",)))
    with running(fitting=fitting):
        train()

    assert fitting.recomputed == set()


def test_autocast_is_on_from_the_model_to_the_loss_alone():
    with running(fitting=ScriptSettings(Settings(precision="amp-bf16"))):
        model = nn.Linear(8, 8).cuda()
        out = model(torch.randn(4, 8).cuda())
        loss = F.mse_loss(out, torch.zeros(4, 8).cuda())
        assert torch.is_autocast_enabled("cuda")
        loss.backward()

        assert (out.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
        assert not torch.is_autocast_enabled("cuda")


def test_the_script_s_own_autocast_stays():
    with running(fitting=ScriptSettings(Settings(precision="amp-bf16"))):
        model = nn.Linear(8, 8).cuda()
        with torch.autocast("cuda", dtype=torch.float16):
            out = model(torch.randn(4, 8).cuda())
            out.sum().backward()
            assert torch.is_autocast_enabled("cuda")

        assert out.dtype is torch.float16
        assert not torch.is_autocast_enabled("cuda")


@pytest.mark.parametrize(
    ("kernels", "make", "ops"),
    [
        (OptimizerKernels.KEEP, torch.optim.Adam, "_foreach_sqrt"),
        (OptimizerKernels.SINGLE, torch.optim.Adam, "aten.sqrt"),
        (OptimizerKernels.FUSED, torch.optim.Adam, None),
        (OptimizerKernels.FUSED, torch.optim.RMSprop, "aten.sqrt"),
    ],
)
def test_optimizers_get_other_kernels(kernels, make, ops):
    with running(fitting=ScriptSettings(Settings(kernels=kernels))) as session:
        train(make=make)

    square_roots = made(session, op="sqrt", phase=Phase.OPTIMIZER)
    assert bool(square_roots) is (ops is not None)
    assert all(block.op.endswith(ops) for block in square_roots)


@pytest.mark.parametrize("drops", [True, False])
def test_gradients_are_dropped_after_each_update(drops):
    with running(fitting=ScriptSettings(Settings(set_to_none=drops))):
        model, _ = train()
        assert (next(model.parameters()).grad is None) is drops


@pytest.mark.parametrize(
    "zero", [lambda model, optimizer: optimizer.zero_grad(), lambda model, optimizer: model.zero_grad()]
)
def test_one_of_so_many_updates_gets_through(zero):
    with running(fitting=ScriptSettings(Settings(micro_batches=3, set_to_none=False))) as session:
        _, optimizer = train(steps=6, zero=zero)

        assert {int(state["step"]) for state in optimizer.state.values()} == {2}
    assert session.counter.num_steps == 2
    # Three backward passes for each update add to the same gradients.
    assert [phase for phase, _ in phases(session)].count("backward") == 6
    assert len(made(session, category=Category.GRADIENT)) == 2 * 16


def test_a_closure_runs_for_each_micro_batch():
    calls = []
    with running(fitting=ScriptSettings(Settings(micro_batches=2))):
        model = nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def closure():
            calls.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8).cuda()).sum()
            loss.backward()
            return loss

        for _ in range(4):
            optimizer.step(closure)

    assert calls == [True] * 4


def test_it_knows_which_optimizers_are_fused():
    parameters = [nn.Parameter(torch.zeros(2))]

    assert has_fused_kernel(torch.optim.AdamW(parameters))
    assert not has_fused_kernel(torch.optim.RMSprop(parameters))
    assert not has_fused_kernel(object())
