import pytest
import torch
from torch import nn

from memfit.core.errors import BadOptimizer
from memfit.frameworks.torch.apply import eight_bit
from memfit.frameworks.torch.apply.eight_bit import EightBitUpdates

bitsandbytes = pytest.importorskip("bitsandbytes")


def make_parameter(*shape, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(*shape, dtype=dtype))


def gradient_of(parameter, number):
    return torch.sin(parameter.detach() * (number + 2))


def run(parameter, updates, steps=3):
    for number in range(steps):
        parameter.grad = gradient_of(parameter, number)
        updates.update(parameter)


def state_bytes(optimizer):
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 100), (50,)], ids=["8-bit", "small"])
def test_it_does_what_bitsandbytes_does(shape, dtype):
    expected, found = make_parameter(*shape, dtype=dtype), make_parameter(*shape, dtype=dtype)
    theirs = bitsandbytes.optim.AdamW8bit([expected], lr=0.01, weight_decay=0.1)
    for number in range(3):
        expected.grad = gradient_of(expected, number)
        theirs.step()
    run(found, EightBitUpdates(torch.optim.AdamW([found], lr=0.01, weight_decay=0.1)))
    # Three steps of 0.01; the order of the arithmetic differs, and with it a few roundings to the next code.
    assert (expected - found).abs().float().mean() < (3e-5 if dtype is torch.float32 else 1e-3)
    assert torch.allclose(expected, found, atol=0.006 if dtype is torch.float32 else 0.02)


def test_states_have_a_quarter_of_the_bytes():
    parameter = make_parameter(64, 256)
    optimizer = torch.optim.AdamW([parameter])
    run(parameter, EightBitUpdates(optimizer))
    # Two codes per element, and two scales of 4 bytes per 256 elements.
    assert state_bytes(optimizer) == 2 * parameter.numel() + 8 * parameter.numel() // 256
    assert optimizer.state[parameter]["exp_avg"].dtype is torch.uint8


def test_small_parameters_are_updated_as_by_adam():
    expected, found = make_parameter(50), make_parameter(50)
    plain = torch.optim.Adam([expected], lr=0.01, weight_decay=0.1, maximize=True)
    for number in range(3):
        expected.grad = gradient_of(expected, number)
        plain.step()
    optimizer = torch.optim.Adam([found], lr=0.01, weight_decay=0.1, maximize=True)
    run(found, EightBitUpdates(optimizer))
    assert torch.allclose(expected, found, rtol=1e-5)
    assert optimizer.state[found]["exp_avg"].dtype is torch.float32


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.Adam, {}),
        (torch.optim.Adam, {"weight_decay": 0.5}),
        (torch.optim.AdamW, {"weight_decay": 0.5}),
        (torch.optim.AdamW, {"maximize": True}),
    ],
)
def test_a_first_step_is_that_of_the_plain_optimizer(kind, options):
    # Moments start at zero, which 8 bits hold exactly.
    expected, found = make_parameter(64, 100), make_parameter(64, 100)
    plain = kind([expected], lr=0.01, **options)
    expected.grad = gradient_of(expected, 0)
    plain.step()
    run(found, EightBitUpdates(kind([found], lr=0.01, **options)), steps=1)
    assert torch.allclose(expected, found, atol=1e-6)


def test_parts_do_not_change_the_result(monkeypatch):
    whole, parts = make_parameter(64, 100), make_parameter(64, 100)
    run(whole, EightBitUpdates(torch.optim.AdamW([whole])))
    monkeypatch.setattr(eight_bit, "PART", 512)
    run(parts, EightBitUpdates(torch.optim.AdamW([parts])))
    assert torch.equal(whole, parts)


def test_any_memory_format():
    plain = make_parameter(16, 16, 5, 5)
    changed = nn.Parameter(plain.detach().to(memory_format=torch.channels_last))
    for parameter in (plain, changed):
        updates = EightBitUpdates(torch.optim.AdamW([parameter], lr=0.01))
        for number in range(2):
            # The second gradient has another layout than the parameter.
            gradient = gradient_of(plain, number)
            parameter.grad = gradient if number else gradient.contiguous(memory_format=torch.channels_last)
            updates.update(parameter)
        assert parameter.stride() == parameter.detach().stride()
    # Blocks are other elements, so that roundings differ.
    assert (plain - changed).abs().mean() < 1e-3


def test_moments_are_taken_over_and_given_back():
    # GIVEN an Adam that has made steps
    expected, found = make_parameter(64, 100), make_parameter(64, 100)
    optimizers = []
    for parameter in (expected, found):
        optimizer = torch.optim.Adam([parameter], lr=0.01)
        for number in range(3):
            parameter.grad = gradient_of(parameter, number)
            optimizer.step()
        optimizers.append(optimizer)

    # WHEN its state becomes 8-bit and is given back
    updates = EightBitUpdates(optimizers[1])
    assert optimizers[1].state[found]["exp_avg"].dtype is torch.uint8
    updates.close()

    # THEN it is nearly what it was, and the optimizer goes on
    a, b = optimizers[0].state[expected], optimizers[1].state[found]
    assert a.keys() == b.keys()
    assert torch.equal(a["step"], b["step"])
    for name in ("exp_avg", "exp_avg_sq"):
        assert (a[name] - b[name]).abs().max() <= a[name].abs().max() / 64
    found.grad = gradient_of(found, 3)
    optimizers[1].step()


def test_a_checkpoint_keeps_the_codes():
    parameter = make_parameter(64, 100, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW([parameter])
    run(parameter, EightBitUpdates(optimizer))
    saved = optimizer.state_dict()

    other = torch.optim.AdamW([parameter], lr=0.5)
    EightBitUpdates(other).load_state_dict(saved)
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    for name, value in optimizer.state[parameter].items():
        loaded = other.state[parameter][name]
        assert torch.equal(value, loaded) and value.dtype is loaded.dtype if name != "step" else value == loaded


def test_a_checkpoint_of_the_plain_optimizer_is_shrunk():
    parameter = make_parameter(64, 100)
    plain = torch.optim.AdamW([parameter])
    parameter.grad = gradient_of(parameter, 0)
    plain.step()
    other = torch.optim.AdamW([parameter])
    updates = EightBitUpdates(other)
    updates.load_state_dict(plain.state_dict())
    updates.update(parameter)
    assert other.state[parameter]["exp_avg"].dtype is torch.uint8
    assert other.state[parameter]["step"] == 2


def test_training_goes_down():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    inputs = torch.randn(32, 64)
    target = inputs.roll(1, 1)
    updates = EightBitUpdates(torch.optim.AdamW(model.parameters(), lr=0.01))
    losses = []
    for _ in range(20):
        loss = (model(inputs) - target).square().mean()
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        for parameter in model.parameters():
            updates.update(parameter)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda held: torch.optim.SGD(held, lr=0.1), "torch.optim.Adam and torch.optim.AdamW, but SGD was given"),
        (lambda held: torch.optim.AdamW(held, amsgrad=True), "no amsgrad"),
    ],
)
def test_other_optimizers_are_refused(make, words):
    with pytest.raises(BadOptimizer, match=words):
        EightBitUpdates(make([make_parameter(3)]))


def test_sparse_gradients_are_refused():
    layer = nn.Embedding(100, 64, sparse=True)
    updates = EightBitUpdates(torch.optim.AdamW(layer.parameters()))
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(BadOptimizer, match=r"sparse gradient of a parameter of shape \(100, 64\)"):
        updates.update(layer.weight)
