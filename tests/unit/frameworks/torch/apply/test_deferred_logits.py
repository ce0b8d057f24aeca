from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from memfit.core.errors import BadInput
from memfit.frameworks.torch.apply.deferred_logits import (
    AutocastState,
    DeferredLogits,
    Recipe,
    deferred,
    finished,
    real,
)

VOCABULARY = 11


def _made(*rows: int, bias: bool = False) -> tuple[DeferredLogits, torch.Tensor]:
    """Deferred logits, and the same computed plainly."""
    torch.manual_seed(0)
    hidden = torch.randn(*rows, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCABULARY, 4, dtype=torch.float64, requires_grad=True)
    offset = torch.randn(VOCABULARY, dtype=torch.float64, requires_grad=True) if bias else None
    recipe = Recipe(hidden, weight, offset, AutocastState.now("cpu"))
    return deferred(recipe), F.linear(hidden, weight, offset)


STAYS: dict[str, Callable[[Any], Any]] = {
    "float": lambda x: x.float(),
    "same dtype": lambda x: x.double(),
    "to dtype": lambda x: x.to(torch.float32),
    "to dtype by name": lambda x: x.to(dtype=torch.bfloat16),
    "to device": lambda x: x.to(x.device),
    "to both": lambda x: x.to("cpu", torch.float32),
    "to other": lambda x: x.to(torch.zeros(1)),
    "shift": lambda x: x[..., :-1, :],
    "shift of rows": lambda x: x[:, 1:],
    "one sample": lambda x: x[0],
    "contiguous": lambda x: x[..., 1:, :].contiguous(),
    "view": lambda x: x.view(-1, VOCABULARY),
    "view, size inferred": lambda x: x.reshape(6, -1),
    "view by list": lambda x: x.view([6, VOCABULARY]),
    "flatten": lambda x: x.flatten(0, 1),
    "flatten by name": lambda x: torch.flatten(x, end_dim=1),
    "mask": lambda x: x[torch.tensor([[True, False, True], [False, True, True]])],
    "rows by number": lambda x: x[torch.tensor([1, 0])],
    "factor": lambda x: x * 0.5,
    "soft cap": lambda x: torch.tanh(x / 30.0) * 30.0,
    "transpose": lambda x: x.transpose(1, 2),
    "permute": lambda x: x.permute(0, 2, 1).float(),
    "there and back": lambda x: x.transpose(1, 2).transpose(1, 2),
    "log-softmax": lambda x: F.log_softmax(x, dim=-1),
    "log-softmax in float32": lambda x: torch.log_softmax(x, -1, dtype=torch.float32),
    "detach": lambda x: x.detach(),
}
COMPUTED: dict[str, Callable[[Any], Any]] = {
    "part of the vocabulary": lambda x: x[..., :5],
    "one word": lambda x: x[..., 3],
    "new dimension": lambda x: x[..., None],
    "mixed shape": lambda x: x.view(-1),
    "everything flat": lambda x: x.flatten(),
    "other split": lambda x: x.reshape(2, 33),
    "tensor factor": lambda x: x * torch.tensor(2.0),
    "sum": lambda x: x.sum(-1),
    "argmax": lambda x: x.argmax(-1),
    "softmax over rows": lambda x: F.log_softmax(x, dim=1),
    "concatenation": lambda x: torch.cat([x, x]),
    "other transpose": lambda x: x.transpose(0, 1),
    "two transposes": lambda x: x.transpose(1, 2)[0],
    "in place": lambda x: x.mul_(2.0),
    "numpy": lambda x: torch.from_numpy(x.detach().numpy()),
}


class TestDeferredLogits:
    @pytest.mark.parametrize("name", STAYS)
    def test_takes_note_of_what_is_asked_without_computing_logits(self, name: str) -> None:
        logits, plain = _made(2, 3, bias=True)
        made, expected = STAYS[name](logits), STAYS[name](plain)
        assert isinstance(made, DeferredLogits)
        assert (made.shape, made.dtype, made.device, made.requires_grad) == (
            expected.shape, expected.dtype, expected.device, expected.requires_grad,
        )  # fmt: skip
        assert made._real is None and logits._real is None
        torch.testing.assert_close(real(made), expected, rtol=1e-14, atol=1e-14)

    @pytest.mark.parametrize("name", COMPUTED)
    def test_gives_true_logits_to_everything_else(self, name: str) -> None:
        logits, plain = _made(2, 3)
        made, expected = COMPUTED[name](logits), COMPUTED[name](plain.clone())
        assert not isinstance(made, DeferredLogits)
        torch.testing.assert_close(made, expected)

    def test_knows_what_it_is_without_being_computed(self) -> None:
        logits, _ = _made(2, 3)
        assert logits.size(-1) == VOCABULARY and logits.dim() == 3 and len(logits) == 2 and logits.numel() == 66
        assert not logits.is_cuda and logits.is_floating_point() and isinstance(logits, torch.Tensor)
        assert logits._real is None

    def test_is_computed_once(self) -> None:
        logits, plain = _made(2, 3)
        logits.mul_(2.0)
        # What was changed in place stays changed.
        torch.testing.assert_close(logits.sum(), 2 * plain.sum())

    def test_gradients_flow_through_logits_that_were_read(self) -> None:
        logits, plain = _made(2, 3)
        hidden, weight = logits.recipe.hidden, logits.recipe.weight
        found = torch.autograd.grad(logits[:, 1:].float().square().sum(), (hidden, weight))
        expected = torch.autograd.grad(plain[:, 1:].float().square().sum(), (hidden, weight))
        torch.testing.assert_close(found, expected)

    def test_refuses_to_compute_logits_from_changed_weights(self) -> None:
        logits, _ = _made(2, 3)
        with torch.no_grad():
            logits.recipe.weight.add_(1.0)
        with pytest.raises(BadInput, match=r"weights that make them had changed.*inside the loss function"):
            logits.sum()

    def test_hooks_on_logits_get_their_gradient(self) -> None:
        logits, _ = _made(2, 3)
        seen: list[torch.Size] = []
        logits.register_hook(lambda gradient: seen.append(gradient.shape))
        logits.sum().backward()
        assert seen == [torch.Size([2, 3, VOCABULARY])]


class TestAutocast:
    def test_comes_back_later(self) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            state = AutocastState.now("cpu")
        with state.again():
            assert torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_enabled("cpu")

    def test_knows_the_dtype_of_products(self) -> None:
        state = AutocastState("cpu", True, torch.bfloat16)
        assert state.result_of(torch.float32) is torch.bfloat16
        assert state.result_of(torch.float64) is torch.float64
        assert AutocastState("cpu", False, torch.bfloat16).result_of(torch.float32) is torch.float32


def test_finished_applies_steps_in_order() -> None:
    steps = ((torch.Tensor.mul, (3.0,), {}), (torch.Tensor.to, (torch.float64,), {}))
    made = finished(torch.ones(2), steps)
    assert made.tolist() == [3.0, 3.0] and made.dtype is torch.float64
