"""Small models of every kind for `benchmarks.compiled_steps`: compiled in seconds, with peaks of tens of MiB."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Built = tuple[nn.Module, Tensor]


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """A scalar of whatever a model returns."""
    value: Tensor = model(batch).float().square().mean()
    return value


class Residual(nn.Module):
    """A module added to its input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Its input and what the module makes of it."""
        value: Tensor = x + self.inner(x)
        return value


class Attention(nn.Module):
    """Causal self-attention: by PyTorch's function, or written out."""

    def __init__(self, width: int, heads: int, written_out: bool = False, rotary: bool = False) -> None:
        super().__init__()
        self.heads, self.written_out, self.rotary = heads, written_out, rotary
        self.to_qkv, self.to_out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attends to earlier places."""
        rows, length, width = x.shape
        q, k, v = self.to_qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.rotary:
            q, k = rotated(q), rotated(k)
        if self.written_out:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            out = F.dropout(scores.masked_fill(hidden, -math.inf).softmax(-1), 0.1, self.training) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        value: Tensor = self.to_out(out.transpose(1, 2).reshape(rows, length, width))
        return value


def rotated(x: Tensor) -> Tensor:
    """Rotary position embedding."""
    half = x.shape[-1] // 2
    rates = 10_000 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * rates
    one, other = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([one * cos - other * sin, one * sin + other * cos], -1)


class RMSNorm(nn.Module):
    """Root mean square norm, as language models write it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Divides by the root of the mean square."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class SwiGLU(nn.Module):
    """A gated layer."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, hidden), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Gate times value."""
        value: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return value


class Language(nn.Module):
    """Embedding, blocks, logits."""

    def __init__(self, blocks: nn.Module, width: int, vocabulary: int = 1000) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(vocabulary, width), blocks
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of each token."""
        logits = self.head(self.blocks(self.embedding(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")


def _blocks(
    depth: int, width: int, norm: Callable[[int], nn.Module], mixer: Callable[[], nn.Module], **kind: bool
) -> nn.Module:
    parts: list[nn.Module] = []
    for _ in range(depth):
        parts.append(Residual(nn.Sequential(norm(width), Attention(width, 4, **kind))))
        parts.append(Residual(nn.Sequential(norm(width), mixer())))
    return nn.Sequential(*parts)


def _wide(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))


def _tokens(rows: int, length: int) -> Tensor:
    return torch.randint(0, 1000, (rows, length))


def mlp() -> Built:
    """Linear layers with GELU, norm and dropout."""
    layers = [nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512), nn.Dropout(0.1), nn.Linear(512, 10)]
    return nn.Sequential(*layers), torch.randn(4096, 256)


def residual_mlp() -> Built:
    """A deep network of residual layers."""
    part = [Residual(nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 128), nn.SiLU())) for _ in range(6)]
    return nn.Sequential(*part, nn.Linear(128, 10)), torch.randn(8192, 128)


def _conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Module:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


def _head(width: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def convnet() -> Built:
    """Convolutions with batch norm."""
    return nn.Sequential(_conv(3, 32), _conv(32, 64, stride=2), _conv(64, 64), _head(64)), torch.randn(16, 3, 64, 64)


def resnet() -> Built:
    """Residual blocks of convolutions."""
    blocks = [Residual(nn.Sequential(_conv(32, 32), _conv(32, 32))) for _ in range(3)]
    return nn.Sequential(_conv(3, 32), *blocks, _head(32)), torch.randn(16, 3, 48, 48)


def mobilenet() -> Built:
    """Depthwise and pointwise convolutions."""
    parts = [nn.Sequential(_conv(48, 48, groups=48), _conv(48, 48, kernel=1)) for _ in range(3)]
    return nn.Sequential(_conv(3, 48), *parts, _head(48)), torch.randn(16, 3, 48, 48)


def autoencoder() -> Built:
    """Convolutions down, transposed convolutions up."""
    up = [nn.ConvTranspose2d(64, 32, 2, 2), nn.ReLU(), nn.ConvTranspose2d(32, 3, 2, 2), nn.Sigmoid()]
    return nn.Sequential(_conv(3, 32, stride=2), _conv(32, 64, stride=2), *up), torch.randn(16, 3, 96, 96)


class UNet(nn.Module):
    """Two levels, joined."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = _conv(3, 32), _conv(32, 64), _conv(96, 32)

    def forward(self, x: Tensor) -> Tensor:
        """Down, up and joined."""
        top = self.first(x)
        below = F.interpolate(self.second(F.max_pool2d(top, 2)), scale_factor=2, mode="nearest")
        value: Tensor = self.last(torch.cat([top, below], 1))
        return value


def unet() -> Built:
    """Two levels of convolutions, up-sampled and joined."""
    return UNet(), torch.randn(8, 3, 64, 64)


def encoder() -> Built:
    """PyTorch's own transformer layers."""
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(16, 128, 128)


def gpt() -> Built:
    """Attention by PyTorch's function, GELU, layer norm."""
    return Language(_blocks(2, 128, nn.LayerNorm, lambda: _wide(128)), 128), _tokens(16, 128)


def llama() -> Built:
    """RMS norm, rotary positions, gated layers."""
    return Language(_blocks(2, 128, RMSNorm, lambda: SwiGLU(128, 344), rotary=True), 128), _tokens(16, 128)


def written_out() -> Built:
    """Attention written out, with dropout."""
    return Language(_blocks(2, 128, nn.LayerNorm, lambda: _wide(128), written_out=True), 128), _tokens(8, 128)


class Vision(nn.Module):
    """Patches into a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.blocks = nn.Conv2d(3, 128, 8, 8), _blocks(2, 128, nn.LayerNorm, lambda: _wide(128))

    def forward(self, x: Tensor) -> Tensor:
        """The mean over patches."""
        value: Tensor = self.blocks(self.patches(x).flatten(2).transpose(1, 2)).mean(1)
        return value


def vit() -> Built:
    """Patches into a transformer."""
    return Vision(), torch.randn(16, 3, 96, 96)


class Recurrent(nn.Module):
    """A gated cell, unrolled."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(256, 384)

    def forward(self, x: Tensor) -> Tensor:
        """The state after the last step."""
        state = x.new_zeros(x.shape[0], 128)
        for step in range(x.shape[1]):
            keep, new, out = self.gates(torch.cat([x[:, step], state], -1)).chunk(3, -1)
            state = torch.sigmoid(keep) * state + torch.tanh(new) * torch.sigmoid(out)
        return state


def recurrent() -> Built:
    """A gated cell over eight steps."""
    return Recurrent(), torch.randn(2048, 8, 128)


class Experts(nn.Module):
    """Every expert on every row, weighted."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.first = nn.Linear(128, 4), nn.Parameter(torch.randn(4, 128, 256) / 16)
        self.second = nn.Parameter(torch.randn(4, 256, 128) / 16)

    def forward(self, x: Tensor) -> Tensor:
        """The weighted sum."""
        hidden = F.gelu(torch.einsum("nd,edh->enh", x, self.first))
        return torch.einsum("enh,ehd,ne->nd", hidden, self.second, self.router(x).softmax(-1))


def experts() -> Built:
    """A dense mixture of experts."""
    return Experts(), torch.randn(2048, 128)


class Broken(nn.Module):
    """Two halves with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _wide(128), _wide(128)

    def forward(self, x: Tensor) -> Tensor:
        """Both halves."""
        x = self.first(x)
        torch._dynamo.graph_break()
        value: Tensor = self.second(x)
        return value


def graph_break() -> Built:
    """Two graphs, because the code has a break."""
    return Broken(), torch.randn(4096, 128)


class Mixed(nn.Module):
    """A model under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 256))

    def forward(self, x: Tensor) -> Tensor:
        """In bfloat16 where autocast says so."""
        with torch.autocast("cpu", torch.bfloat16):
            value: Tensor = self.inner(x)
        return value


def autocast() -> Built:
    """Layers under autocast to bfloat16."""
    return Mixed(), torch.randn(4096, 256)


_BUILDERS = (
    mlp, residual_mlp, convnet, resnet, mobilenet, autoencoder, unet, encoder, gpt, llama, written_out, vit, recurrent,
    experts, graph_break, autocast,
)  # fmt: skip
MODELS: dict[str, Callable[[], Built]] = {build.__name__: build for build in _BUILDERS}
