"""Small models of many kinds, in float64, each with a batch, a loss and the modules worth recomputing."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from memfit.core.settings import Weighting
from memfit.frameworks.torch.kernels.torchvision_operators import define_missing_operators

NUM_SAMPLES, LENGTH, WIDTH, VOCABULARY = 5, 6, 8, 11


@dataclass(frozen=True)
class Subject:
    model: nn.Module
    batch: Any
    loss: Callable[[Any, Any], Any]
    blocks: tuple[str, ...]
    weighting: Weighting = field(default_factory=Weighting)
    splits_exactly: bool = True

    def copied(self) -> nn.Module:
        return copy.deepcopy(self.model)


def classify(model, batch):
    data, labels = batch
    return F.cross_entropy(model(data), labels)


def _labels(num_classes=3):
    return torch.randint(num_classes, (NUM_SAMPLES,))


def convolutions() -> Subject:
    def block():
        return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))

    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), block(), block(), nn.Flatten(), nn.Linear(4 * 36, 3))
    # Statistics of a batch norm are those of a micro-batch.
    return Subject(model, (torch.randn(NUM_SAMPLES, 3, 6, 6), _labels()), classify, ("1", "2"), splits_exactly=False)


class _Transformer(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=dropout, batch_first=True)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, data):
        hidden = self.embed(data)
        for layer in self.layers:
            # One input by its name, and one that is no tensor.
            hidden = layer(src=hidden, src_mask=None)
        return self.head(hidden.mean(dim=1))


def transformer() -> Subject:
    batch = (torch.randn(NUM_SAMPLES, LENGTH, 3), _labels())
    return Subject(_Transformer(0.2), batch, classify, ("layers.0", "layers.1"), splits_exactly=False)


class _Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, data):
        out, (hidden, _) = self.lstm(data)
        return self.head(out[:, -1] + hidden[-1])


def recurrent() -> Subject:
    return Subject(_Recurrent(), (torch.randn(NUM_SAMPLES, LENGTH, 3), _labels()), classify, ("lstm",))


class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.block = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        # The same module twice.
        return self.head(self.block(self.block(hidden)))


def next_token(model, batch):
    logits = model(batch["tokens"])[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def tied() -> Subject:
    tokens = torch.randint(VOCABULARY, (NUM_SAMPLES, LENGTH))
    labels = tokens.clone()
    labels[0, 2:] = -100
    labels[4] = -100
    counted = Weighting("count", "['labels']", -100, 1)
    return Subject(_Tied(), {"tokens": tokens, "labels": labels}, next_token, ("block", "head"), counted)


def frozen() -> Subject:
    model = nn.Sequential(
        nn.Sequential(nn.Linear(3, WIDTH), nn.ReLU()),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
        nn.Linear(WIDTH, 3),
    )
    model[0].requires_grad_(False)
    return Subject(model, (torch.randn(NUM_SAMPLES, 3), _labels()), classify, ("0", "1"))


class _UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU())
        self.middle = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.SiLU())
        self.up = nn.Sequential(nn.Conv2d(8, 4, 3, padding=1), nn.SiLU())
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, image):
        skipped = self.down(image)
        deep = F.interpolate(self.middle(F.max_pool2d(skipped, 2)), scale_factor=2)
        return self.head(self.up(torch.cat([skipped, deep], dim=1)))


def unet() -> Subject:
    batch = (torch.randn(NUM_SAMPLES, 3, 6, 6), torch.randint(2, (NUM_SAMPLES, 6, 6)))
    return Subject(_UNet(), batch, classify, ("down", "middle", "up"))


def own_loss(model, batch):
    return model(**batch).loss


def own_logits(model, batch):
    # The model's own loss is computed in single precision.
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return F.cross_entropy(model(**inputs).logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def gpt2() -> Subject:
    define_missing_operators()
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    tokens = torch.randint(VOCABULARY, (NUM_SAMPLES, LENGTH))
    labels = tokens.clone()
    labels[1, 3:] = -100
    batch = {"input_ids": tokens, "labels": labels, "attention_mask": torch.ones_like(tokens)}
    counted = Weighting("count", "['labels']", -100, 1)
    return Subject(GPT2LMHeadModel(config), batch, own_logits, ("transformer.h.0", "transformer.h.1"), counted)


def bert() -> Subject:
    define_missing_operators()
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=LENGTH, num_labels=3,
    )  # fmt: skip
    tokens = torch.randint(VOCABULARY, (NUM_SAMPLES, LENGTH))
    blocks = ("bert.encoder.layer.0", "bert.encoder.layer.1")
    # Dropout draws other numbers for other shapes.
    model = BertForSequenceClassification(config).train()
    return Subject(model, {"input_ids": tokens, "labels": _labels()}, own_loss, blocks, splits_exactly=False)


ALL = (convolutions, transformer, recurrent, tied, frozen, unet, gpt2, bert)


def make(build: Callable[[], Subject], seed: int) -> Subject:
    """One of the architectures, in float64 throughout."""
    torch.manual_seed(seed)
    subject = build()
    subject.model.double()

    def widened(value):
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    batch = subject.batch
    batch = {k: widened(v) for k, v in batch.items()} if isinstance(batch, dict) else tuple(map(widened, batch))
    return Subject(subject.model, batch, subject.loss, subject.blocks, subject.weighting, subject.splits_exactly)
