"""A dozen small training steps, one for each kind of kernels that networks are made of.

Each is a `Job`, so that it is estimated like any other; `memfit verify` runs it, too. On a GPU batches are larger, so
that what grows with them stands out from what doesn't, and half of the steps run under autocast.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfit.core.job import Job

Maker = Callable[[int], Any]
_GPU_SCALE = 16
_VOCABULARY = 8192
_CLASSES = 100


class _Residual(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


class _Attention(nn.Module):
    """A block of a transformer: attention over heads of 32 channels, then a perceptron."""

    def __init__(self, width: int, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, -1, 32).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.mlp(self.norms[1](x))
        return out


class _Patches(nn.Module):
    """An image as a sequence of its patches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, width, 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        patches: Tensor = self.project(x)
        return patches.flatten(2).transpose(1, 2)


class _Mean(nn.Module):
    """The mean over the positions of a sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(_VOCABULARY, 128), nn.LSTM(128, 256, 2, batch_first=True)
        self.head = nn.Linear(256, _VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(self.embedding(x))[0])
        return logits


class _Skips(nn.Module):
    """Down to a quarter of the size and up again, with what was there on the way down."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = _convolution(3, width), _convolution(width, 2 * width, stride=2)
        self.up, self.last = nn.ConvTranspose2d(2 * width, width, 2, 2), nn.Conv2d(2 * width, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        top = self.first(x)
        out: Tensor = self.last(torch.cat([top, self.up(self.second(top))], 1))
        return out


def _convolution(inputs: int, outputs: int, size: int = 3, *, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


def _classifier(*body: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, _CLASSES))


def _cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    logits = model(inputs)
    if logits.dim() == labels.dim() + 1 == 3:
        logits, labels = logits.flatten(0, 1), labels.flatten()
    return F.cross_entropy(logits, labels)


def _images(size: int = 64) -> Maker:
    return lambda n: (torch.randn(n, 3, size, size), torch.randint(_CLASSES, (n,)))


def _tokens(length: int) -> Maker:
    return lambda n: tuple(torch.randint(_VOCABULARY, (2, n, length)))


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def _residual(channels_last: bool = False) -> nn.Module:
    def block() -> nn.Module:
        return _Residual(nn.Sequential(_convolution(64, 64), _convolution(64, 64)))

    model: Any = _classifier(_convolution(3, 64, stride=2), block(), block(), block(), width=64)
    made: nn.Module = model.to(memory_format=torch.channels_last) if channels_last else model
    return made


def _separable() -> nn.Module:
    blocks = [
        nn.Sequential(_convolution(inputs, inputs, groups=inputs), _convolution(inputs, outputs, 1))
        for inputs, outputs in ((32, 96), (96, 192))
    ]
    return _classifier(_convolution(3, 32, stride=2), *blocks, width=192)


def _large() -> nn.Module:
    body = [_convolution(3, 64), _convolution(64, 64), nn.MaxPool2d(2), _convolution(64, 128, 5)]
    return _classifier(*body, width=128)


def _blocks(*, causal: bool) -> list[nn.Module]:
    return [_Attention(256, causal=causal) for _ in range(3)]


def _language(*, causal: bool) -> nn.Module:
    return nn.Sequential(nn.Embedding(_VOCABULARY, 256), *_blocks(causal=causal), nn.Linear(256, _VOCABULARY))


def _vision() -> nn.Module:
    return nn.Sequential(_Patches(256), *_blocks(causal=False), _Mean(), nn.Linear(256, _CLASSES))


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, _CLASSES))


def _vectors(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 1024), torch.randint(_CLASSES, (n,))


def _scenes(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, 96, 96), torch.randint(4, (n, 96, 96))


def list_steps(*, on_gpu: bool) -> list[tuple[Job, int]]:
    """Each step as a job, with its batch size."""
    adam, adamw, half = torch.optim.Adam, torch.optim.AdamW, "amp-fp16"
    # Name, model, batch, optimizer, precision, batch size on a host, whose narrow type is bfloat16.
    rows: list[tuple[str, Callable[[], nn.Module], Maker, Any, str, int]] = [
        ("perceptron, Adam", _perceptron, _vectors, adam, "fp32", 256),
        ("residual network, SGD", _residual, _images(), _sgd, "fp32", 16),
        ("residual network, autocast", _residual, _images(), _sgd, half, 16),
        ("residual network, channels_last", lambda: _residual(channels_last=True), _images(), _sgd, half, 16),
        ("depthwise convolutions", _separable, _images(), _sgd, "fp32", 16),
        ("large convolutions", _large, _images(), adamw, "fp32", 4),
        ("segmentation with skips", lambda: _Skips(32), _scenes, adamw, half, 4),
        ("language model, causal", lambda: _language(causal=True), _tokens(128), adamw, "fp32", 4),
        ("language model, autocast", lambda: _language(causal=True), _tokens(128), adamw, half, 4),
        ("encoder, SGD", lambda: _language(causal=False), _tokens(96), _sgd, "fp32", 4),
        ("vision transformer", _vision, _images(), adamw, half, 16),
        ("LSTM language model", _Recurrent, _tokens(32), adam, "fp32", 4),
    ]
    scale, narrow = (_GPU_SCALE, half) if on_gpu else (1, "amp-bf16")
    return [
        (Job(model, _cross_entropy, batch, optimizer, narrow if kind == half else kind, name=name), scale * size)
        for name, model, batch, optimizer, kind, size in rows
    ]
