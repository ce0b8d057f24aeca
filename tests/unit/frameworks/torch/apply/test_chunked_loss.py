from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from memfit.frameworks.torch.apply import chunked_loss
from memfit.frameworks.torch.apply.chunked_loss import chunked_cross_entropy
from memfit.frameworks.torch.apply.deferred_logits import DeferredLogits
from memfit.frameworks.torch.kernels.torchvision_operators import define_missing_operators
from tests.unit.frameworks.torch.builders import AMPERE, HOST, run

VOCABULARY = 8192


class LanguageModel(nn.Module):
    """Hidden states and logits of a vocabulary that is just large enough."""

    def __init__(self, *, bias: bool = False, tied: bool = False, wide: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.block = nn.Sequential(nn.Linear(8, VOCABULARY if wide else 16), nn.GELU())
        self.down = nn.Linear(VOCABULARY if wide else 16, 8)
        self.head = nn.Linear(8, VOCABULARY, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.down(self.block(self.embedding(tokens)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(tokens))


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (3, 7))
    labels = torch.randint(0, VOCABULARY, (3, 7))
    labels[0, 2:5] = -100
    return tokens, labels


def _flat(model: Any, batch: Any, **options: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).view(-1, VOCABULARY), batch[1].flatten(), **options)


def _shifted(model: Any, batch: Any) -> torch.Tensor:
    logits = model(batch[0])[..., :-1, :].contiguous().float()
    return nn.CrossEntropyLoss()(logits.view(-1, VOCABULARY), batch[1][..., 1:].contiguous().view(-1))


def _class_weights(model: Any, batch: Any) -> torch.Tensor:
    weight = torch.linspace(0.5, 2.0, VOCABULARY, dtype=torch.float64)
    return _flat(model, batch, weight=weight, label_smoothing=0.1)


def _probabilities(model: Any, batch: Any) -> torch.Tensor:
    target = torch.zeros(21, VOCABULARY, dtype=torch.float64)
    target[:, :3] = 1 / 3
    return F.cross_entropy(model(batch[0]).flatten(0, 1), target)


LOSSES: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "mean": _flat,
    "sum": lambda model, batch: _flat(model, batch, reduction="sum"),
    "each": lambda model, batch: _flat(model, batch, reduction="none").square().sum(),
    "other ignored": lambda model, batch: _flat(model, (batch[0], batch[1].clamp(min=0)), ignore_index=0),
    "smoothing": lambda model, batch: _flat(model, batch, label_smoothing=0.2),
    "class weights": _class_weights,
    "probabilities": _probabilities,
    "shifted": _shifted,
    "soft cap": lambda model, batch: F.cross_entropy(
        (torch.tanh(model(batch[0]) / 3.0) * 3.0).flatten(0, 1), batch[1].flatten()
    ),
    "transposed": lambda model, batch: F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1]),
    "log-softmax": lambda model, batch: F.nll_loss(
        F.log_softmax(model(batch[0]), -1).flatten(0, 1), batch[1].flatten()
    ),
    "matrix product": lambda model, batch: F.cross_entropy(
        (model.hidden(batch[0]) @ model.embedding.weight.T).flatten(0, 1), batch[1].flatten()
    ),
}


def _gradients(
    model: nn.Module, loss: Callable[[Any, Any], Any], batch: Any, num_chunks: int = 0
) -> tuple[float, dict[str, torch.Tensor], bool]:
    """(the loss, gradients by name, whether logits were made by chunks)."""
    model.zero_grad()
    original, recipes = chunked_loss._chunked, []

    def watched(func: Any, recipe: Any, *rest: Any) -> Any:
        recipes.append(recipe)
        return original(func, recipe, *rest)

    with pytest.MonkeyPatch.context() as patch, chunked_cross_entropy(num_chunks) if num_chunks else nullcontext():
        patch.setattr(chunked_loss, "_chunked", watched)
        value = loss(model, batch)
    value.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return value.item(), found, any(recipe is not None for recipe in recipes)


def _assert_same(model: nn.Module, loss: Any, batch: Any, *, tolerance: float = 1e-12, num_chunks: int = 4) -> None:
    value, expected, _ = _gradients(model, loss, batch)
    chunked, found, deferred = _gradients(model, loss, batch, num_chunks)
    assert deferred
    assert found.keys() == expected.keys()
    assert chunked == pytest.approx(value, rel=tolerance)
    scale = max(gradient.norm().item() for gradient in expected.values())
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm().item() <= tolerance * scale, name


class TestChunkedCrossEntropy:
    @pytest.mark.parametrize("name", LOSSES)
    def test_gradients_are_those_of_the_plain_loss(self, name: str) -> None:
        model = LanguageModel(bias=True).double()
        # Its cast to float32 rounds sums, in whichever order they are made.
        _assert_same(model, LOSSES[name], _batch(), tolerance=1e-6 if name == "shifted" else 1e-12)

    def test_tied_embeddings_get_both_gradients(self) -> None:
        _assert_same(LanguageModel(tied=True).double(), _flat, _batch())

    @pytest.mark.parametrize("num_chunks", [1, 2, 5, 100])
    def test_any_number_of_chunks_will_do(self, num_chunks: int) -> None:
        _assert_same(LanguageModel().double(), _flat, _batch(), num_chunks=num_chunks)

    def test_frozen_parameters_get_no_gradient(self) -> None:
        model = LanguageModel(bias=True).double()
        model.head.requires_grad_(False)
        _assert_same(model, _flat, _batch())
        model.requires_grad_(False)
        model.head.bias.requires_grad_(True)
        _assert_same(model, _flat, _batch())

    def test_autocast_rounds_as_it_does_without_chunks(self) -> None:
        def loss(model: Any, batch: Any) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return _flat(model, batch)

        _assert_same(LanguageModel(tied=True, bias=True), loss, _batch(), tolerance=0.01)

    def test_casts_made_for_chunks_are_not_kept_for_others(self) -> None:
        # GIVEN autocast, which keeps what it casts, and a weight that is used again after the loss
        model = LanguageModel()

        def loss(model: Any, batch: Any) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                first = _flat(model, batch)
                return first + F.linear(torch.ones(2, 8), model.head.weight[:4]).sum() + model(batch[0][:1, :1]).sum()

        _assert_same(model, loss, _batch(), tolerance=0.01)

    def test_checkpointed_parts_are_left_as_they_are(self) -> None:
        # GIVEN a wide layer that is computed again in the backward pass, where nothing is deferred
        def loss(model: Any, batch: Any) -> Any:
            hidden = checkpoint(
                lambda tokens: model.down(model.block(model.embedding(tokens))), batch[0], use_reentrant=False
            )
            return F.cross_entropy(model.head(hidden).flatten(0, 1), batch[1].flatten())

        _assert_same(LanguageModel(wide=True).double(), loss, _batch())

    def test_logits_can_be_read_later(self) -> None:
        model, (tokens, labels) = LanguageModel().double(), _batch()
        with chunked_cross_entropy(3):
            logits = model(tokens)
            value = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        value.backward()
        torch.testing.assert_close(logits.argmax(-1), model(tokens).argmax(-1))

    def test_logits_that_are_no_output_of_a_linear_layer_are_chunked_as_they_are(self) -> None:
        # GIVEN logits with a learned factor
        model, batch = LanguageModel().double(), _batch()
        factor = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

        def loss(model: Any, batch: Any) -> Any:
            return F.cross_entropy((model(batch[0]) * factor).flatten(0, 1), batch[1].flatten())

        _, expected, _ = _gradients(model, loss, batch)
        _, found, deferred = _gradients(model, loss, batch, 4)
        assert not deferred
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-16)

    def test_small_vocabularies_and_forward_passes_without_gradients_are_left_alone(self) -> None:
        model = LanguageModel()
        with chunked_cross_entropy(2):
            assert not isinstance(F.linear(torch.ones(2, 3), torch.ones(10, 3, requires_grad=True)), DeferredLogits)
            assert isinstance(model(_batch()[0]), DeferredLogits)
            with torch.no_grad():
                assert not isinstance(model(_batch()[0]), DeferredLogits)

    def test_targets_that_do_not_fit_get_the_error_of_pytorch(self) -> None:
        model, (tokens, labels) = LanguageModel(), _batch()
        with chunked_cross_entropy(2), pytest.raises(ValueError, match="Expected input batch_size"):
            F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()[1:])

    @pytest.mark.parametrize("device", [AMPERE, HOST], ids=["cuda", "host"])
    def test_a_trace_shows_what_is_saved(self, device: Any) -> None:
        model = LanguageModel()
        tokens = torch.zeros(16, 32, dtype=torch.long)
        logits_bytes = tokens.numel() * VOCABULARY * 4

        def chunked(model: Any, batch: Any) -> Any:
            with chunked_cross_entropy(16):
                return _flat(model, batch)

        plain = run(model, (tokens, tokens), loss=_flat, device=device).timeline.peak()[1]
        found = run(model, (tokens, tokens), loss=chunked, device=device).timeline.peak()[1]
        # Logits, log-softmax and its gradient, without a sixteenth of each and of one more gradient.
        assert plain - found > 2.5 * logits_bytes


def _transformers_model(name: str) -> Any:
    define_missing_operators()
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, **sizes}
    without_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_embd=16, n_layer=1, n_head=2, embd_pdrop=0, attn_pdrop=0, resid_pdrop=0, **sizes
        )
        return transformers.GPT2LMHeadModel(config)
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small))
    if name == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(**small, **without_dropout))
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0, decoder_start_token_id=0, **sizes
    )
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_models_of_transformers_are_chunked_unmodified(name: str) -> None:
    model = _transformers_model(name).double()

    def loss(model: Any, batch: Any) -> Any:
        output = model(input_ids=batch[0], labels=batch[1])
        assert output.logits.shape == (3, 7, VOCABULARY)
        return output.loss

    # Causal models cast logits to float32.
    _assert_same(model, loss, _batch(), tolerance=1e-6 if name in ("gpt2", "llama") else 1e-12)
