"""A language model of 1.1 billion parameters in 4 bits with low-rank adapters, as libraries of early 2024 ran it.

What those versions do is written out: bitsandbytes kept the input of every 4-bit product for as long as its node of the
graph lives, PyTorch 2.1 saved the input of `mean`, and made a slice of every dimension that an index spans whole.
"""

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CUDA = "cuda"
WIDTH, HIDDEN, HEADS, KEY_HEADS, LAYERS, VOCABULARY = 2048, 5632, 32, 4, 22, 32_000
_HEAD = WIDTH // HEADS
_RANK = 16


class _Product(torch.autograd.Function):
    """A product with a 4-bit weight, which is expanded to float16 and then to the input's precision."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, shape: tuple[int, int]) -> Tensor:
        out = F.linear(x, _expanded(shape, x))
        ctx.shape, ctx.tensors = shape, (x, packed)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return torch.matmul(gradients[0], _expanded(ctx.shape, gradients[0])), None, None


def _expanded(shape: tuple[int, int], like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=torch.float16, device=CUDA).to(like.dtype)


class _Mean(torch.autograd.Function):
    """The mean of the last dimension, which saves its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.mean(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0].expand(x.shape) / x.shape[-1]


class QuantizedLinear(nn.Module):
    """A weight of 4 bits in blocks of 64, with a table of its own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.shape = (outputs, inputs)
        count = inputs * outputs
        self.register_buffer("packed", torch.empty(count // 2, 1, dtype=torch.uint8, device=CUDA))
        self.register_buffer("largest", torch.empty(count // 64, device=CUDA))
        self.register_buffer("table", torch.empty(16, device=CUDA))

    def forward(self, x: Tensor) -> Tensor:
        """Multiplies."""
        return _Product.apply(x, self.packed, self.shape)


class AdaptedLinear(QuantizedLinear):
    """The same with a low-rank adapter, whose input drops out."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.down = nn.Linear(inputs, _RANK, bias=False, device=CUDA)
        self.up = nn.Linear(_RANK, outputs, bias=False, device=CUDA)
        self.dropout = nn.Dropout(0.05)

    def forward(self, x: Tensor) -> Tensor:
        """Multiplies, and adds what the adapter makes."""
        result = super().forward(x)
        result = result.clone()
        output = self.up(self.down(self.dropout(x))) * 2.0
        return result + output


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(WIDTH, device=CUDA))

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes."""
        variance = _Mean.apply(x.pow(2))
        x = x * torch.rsqrt(variance + 1e-5)
        return self.weight * x


def _tables(frequencies: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines; what they are made of is held until both are there."""
    positions = positions[:, None, :].float()
    angles = (frequencies[None, :, None] @ positions).transpose(1, 2)
    pairs = torch.cat((angles, angles), dim=-1)
    return pairs.cos().unsqueeze(1), pairs.sin().unsqueeze(1)


def _with_positions(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """Both are held by their caller until it has the two results."""
    return query * cosine + _rotated(query) * sine, key * cosine + _rotated(key) * sine


def _rotated(x: Tensor) -> Tensor:
    first, second = x[..., : _HEAD // 2], x[..., _HEAD // 2 :]
    return torch.cat((-second, first), dim=-1)


def _repeated(x: Tensor) -> Tensor:
    """Keys or values for every head."""
    for dimension in (0, 1):
        x = torch.ops.aten.slice(x, dimension, 0, sys.maxsize)
    x = x.unsqueeze(2)
    for dimension in (3, 4):
        x = torch.ops.aten.slice(x, dimension, 0, sys.maxsize)
    return x.expand(-1, -1, HEADS // KEY_HEADS, -1, -1).reshape(x.shape[0], HEADS, -1, _HEAD)


class Layer(nn.Module):
    """Attention and feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        key_width = KEY_HEADS * _HEAD
        self.query, self.value = AdaptedLinear(WIDTH, WIDTH), AdaptedLinear(WIDTH, key_width)
        self.key, self.output = QuantizedLinear(WIDTH, key_width), QuantizedLinear(WIDTH, WIDTH)
        self.gate, self.up = QuantizedLinear(WIDTH, HIDDEN), QuantizedLinear(WIDTH, HIDDEN)
        self.down = QuantizedLinear(HIDDEN, WIDTH)
        self.first, self.second = Norm(), Norm()
        self.register_buffer("frequencies", torch.empty(_HEAD // 2, device=CUDA))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Adds what both parts make."""
        middle = x + self.attend(self.first(x), positions)
        normed = self.second(middle)
        return middle + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def attend(self, x: Tensor, positions: Tensor) -> Tensor:
        """Mixes positions."""
        batch, length = x.shape[:2]
        query, key, value = self.query(x), self.key(x), self.value(x)
        query = query.view(batch, length, HEADS, _HEAD).transpose(1, 2)
        key, value = (part.view(batch, length, KEY_HEADS, _HEAD).transpose(1, 2) for part in (key, value))
        cosine, sine = _tables(self.frequencies, positions)
        query, key = _with_positions(query, key, cosine, sine)
        key = _repeated(key)
        value = _repeated(value)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


def adapter_step(length: int = 1000) -> None:
    """A forward pass with labels and a backward pass, after products that have made cuBLAS's two workspaces."""
    table = torch.empty(VOCABULARY, WIDTH, device=CUDA)
    head = torch.empty(VOCABULARY, WIDTH, device=CUDA)
    layers = nn.ModuleList(Layer() for _ in range(LAYERS))
    norm = Norm()
    ids = torch.zeros(1, length, dtype=torch.long, device=CUDA)
    torch.mm(head[:1].clone().requires_grad_(), head[:1].t()).sum().backward()
    x = F.embedding(ids, table).requires_grad_()
    states = [x]
    positions = torch.arange(length, device=CUDA)[None]
    for layer in layers:
        x = layer(x, positions)
    logits = F.linear(norm(x), head)
    shifted = logits[..., :-1, :]
    shifted = torch.ops.aten.slice(shifted, 2, 0, sys.maxsize)
    loss = F.cross_entropy(shifted.reshape(-1, VOCABULARY), ids[0, 1:])
    loss.backward()
    del states
