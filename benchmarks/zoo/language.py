"""Language and speech models, most from a `transformers` configuration with random weights."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from benchmarks.zoo.case import add

VOCABULARY = 8000


def text(batch_size: int, length: int, **labels: Callable[[], Tensor]) -> Callable[[], dict[str, Tensor]]:
    """A maker of random token ids with whatever labels are asked for."""

    def make() -> dict[str, Tensor]:
        ids = torch.randint(5, VOCABULARY, (batch_size, length))
        return {"input_ids": ids} | {name: label() for name, label in labels.items()}

    return make


def classes(batch_size: int, num_classes: int = 2) -> Callable[[], Tensor]:
    """A maker of random class labels."""
    return lambda: torch.randint(num_classes, (batch_size,))


def tokens(batch_size: int, length: int) -> Callable[[], Tensor]:
    """A maker of random target tokens."""
    return lambda: torch.randint(5, VOCABULARY, (batch_size, length))


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss that the model itself computes from its labels."""
    loss: Tensor = model(**batch).loss
    return loss


def masked(batch_size: int, length: int) -> Callable[[], dict[str, Tensor]]:
    """A maker of padded text with an attention mask and a class label."""

    def make() -> dict[str, Tensor]:
        mask = torch.ones(batch_size, length, dtype=torch.int64)
        mask[: batch_size // 2, length // 2 :] = 0
        return {
            "input_ids": torch.randint(5, VOCABULARY, (batch_size, length)),
            "attention_mask": mask,
            "labels": torch.randint(2, (batch_size,)),
        }

    return make


def pretrained(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """A maker of a `transformers` model in training mode, with random weights."""

    def build() -> nn.Module:
        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
        return made.train()

    return build


ENCODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
}
add(
    "bert",
    "language",
    pretrained("BertForSequenceClassification", "BertConfig", **ENCODER),
    text(8, 128, labels=classes(8)),
    own_loss,
)
add(
    "bert_eager_masked",
    "language",
    pretrained("BertForSequenceClassification", "BertConfig", **ENCODER, attn_implementation="eager"),
    masked(8, 128),
    own_loss,
)
add(
    "bert_masked_lm",
    "language",
    pretrained("BertForMaskedLM", "BertConfig", **ENCODER),
    text(4, 128, labels=tokens(4, 128)),
    own_loss,
)
add(
    "distilbert",
    "language",
    pretrained(
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        vocab_size=VOCABULARY,
        dim=256,
        n_layers=4,
        n_heads=4,
        hidden_dim=1024,
    ),
    masked(8, 128),
    own_loss,
)
add(
    "roberta",
    "language",
    pretrained("RobertaForSequenceClassification", "RobertaConfig", **ENCODER, max_position_embeddings=514),
    masked(8, 128),
    own_loss,
)
add(
    "gpt2",
    "language",
    pretrained(
        "GPT2LMHeadModel",
        "GPT2Config",
        vocab_size=VOCABULARY,
        n_embd=256,
        n_layer=4,
        n_head=4,
        n_positions=256,
        bos_token_id=1,
        eos_token_id=2,
    ),
    text(4, 128, labels=tokens(4, 128)),
    own_loss,
)
add(
    "llama",
    "language",
    pretrained(
        "LlamaForCausalLM",
        "LlamaConfig",
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        use_cache=False,
    ),
    text(4, 128, labels=tokens(4, 128)),
    own_loss,
)
add(
    "t5",
    "language",
    pretrained(
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=VOCABULARY,
        d_model=256,
        d_ff=1024,
        num_layers=3,
        num_heads=4,
        d_kv=64,
        decoder_start_token_id=0,
    ),
    text(4, 96, labels=tokens(4, 48)),
    own_loss,
)


def mel_features() -> dict[str, Tensor]:
    """Random log-mel features with target tokens."""
    return {"input_features": torch.randn(2, 80, 400), "labels": torch.randint(5, VOCABULARY, (2, 48))}


def waveforms() -> dict[str, Tensor]:
    """Random mono sound with a class label."""
    return {"input_values": torch.randn(2, 16000), "labels": torch.randint(2, (2,))}


add(
    "whisper",
    "speech",
    pretrained(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        vocab_size=VOCABULARY,
        d_model=256,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=1024,
        decoder_ffn_dim=1024,
        max_source_positions=200,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
    ),
    mel_features,
    own_loss,
)
add(
    "wav2vec2",
    "speech",
    pretrained(
        "Wav2Vec2ForSequenceClassification",
        "Wav2Vec2Config",
        hidden_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=768,
        conv_dim=(128,) * 7,
        num_conv_pos_embeddings=32,
        num_conv_pos_embedding_groups=8,
        apply_spec_augment=False,
        layerdrop=0.0,
    ),
    waveforms,
    own_loss,
)


class Translator(nn.Module):
    """`nn.Transformer` with embeddings and a vocabulary head."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.transformer = nn.Transformer(width, 4, 3, 3, 1024, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits for each target position."""
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=source.device)
        hidden = self.transformer(self.embedding(source), self.embedding(target), tgt_mask=mask, tgt_is_causal=True)
        logits: Tensor = self.head(hidden)
        return logits


def sentence_pairs() -> tuple[Tensor, Tensor]:
    """Random source and target sentences."""
    return torch.randint(VOCABULARY, (4, 96)), torch.randint(VOCABULARY, (4, 65))


def translate(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Teacher forcing with label smoothing."""
    source, target = batch
    logits = model(source, target[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), label_smoothing=0.1)


add("transformer_translation", "language", Translator, sentence_pairs, translate)
