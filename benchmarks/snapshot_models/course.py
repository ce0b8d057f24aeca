"""The transformer of a public course on language models, as two of its students ran it.

Pre-norm blocks of RMSNorm, rotary positions, causal attention written out, and SwiGLU; embedding and output have
weights of their own. The two differ in how they write norms, positions, softmax, loss and the optimizer.
"""

import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model and its batch."""

    vocabulary: int
    context: int
    width: int
    layers: int
    heads: int
    hidden: int
    batch: int


@dataclass(frozen=True, slots=True)
class Style:
    """How a student writes the parts of the model; `attend` takes query, key, value and the mask, if `masks`."""

    norm: type[nn.Module]
    rotary: type[nn.Module]
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    masks: bool
    norms_first: bool
    names_norms: bool


class Linear(nn.Module):
    """A product with a weight, without bias, by einsum."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device=CUDA))

    def forward(self, x: Tensor) -> Tensor:
        """Multiplies."""
        return torch.einsum("...i,oi->...o", x, self.weight)


class Embedding(nn.Module):
    """Rows of a table."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width, device=CUDA))

    def forward(self, ids: Tensor) -> Tensor:
        """Looks rows up."""
        return self.weight[ids]


class ReciprocalNorm(nn.Module):
    """RMSNorm that multiplies by the reciprocal root, in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, device=CUDA))

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes in float32."""
        dtype = x.dtype
        x = x.to(torch.float32)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale
        return (self.weight * x).to(dtype)


class DividingNorm(nn.Module):
    """RMSNorm that divides by the root."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, device=CUDA))

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes."""
        root = torch.sqrt((x**2).mean(dim=-1, keepdim=True) + 1e-5)
        return x / root * self.weight


class CachedRotary(nn.Module):
    """Rotary positions whose table is on the device; halves are unbound from one view."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(2, context, width // 2, device=CUDA), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Turns pairs of numbers by their positions."""
        table: Tensor = self.table
        first, second = x.unflatten(-1, (-1, 2)).movedim(-1, 0)
        cosine, sine = table[:, : x.shape[-2]]
        turned = cosine * first - sine * second
        others = sine * first + cosine * second
        return torch.stack((turned, others), dim=-1).flatten(-2)


class CopiedRotary(nn.Module):
    """Rotary positions whose tables stay on the host and are copied by each call; halves are slices."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.cosine, self.sine = torch.ones(context, width // 2), torch.zeros(context, width // 2)

    def forward(self, x: Tensor) -> Tensor:
        """Turns pairs of numbers by their positions."""
        sine = self.sine[: x.shape[-2]].to(x.device)
        cosine = self.cosine[: x.shape[-2]].to(x.device)
        turned = x[..., ::2] * cosine - x[..., 1::2] * sine
        others = x[..., ::2] * sine + x[..., 1::2] * cosine
        return torch.stack((turned, others), dim=-1).reshape(x.shape)


class SwiGlu(nn.Module):
    """The feed-forward part."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1 = Linear(shape.width, shape.hidden)
        self.w2 = Linear(shape.hidden, shape.width)
        self.w3 = Linear(shape.width, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Gates one product by another."""
        return self.w2(_silu(self.w1(x)) * self.w3(x))


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class Attention(nn.Module):
    """Causal attention over heads."""

    def __init__(self, shape: Shape, style: Style, rotary: nn.Module) -> None:
        super().__init__()
        self.heads, self.attend, self.masks, self.rotary = shape.heads, style.attend, style.masks, rotary
        self.query, self.key, self.value, self.output = (Linear(shape.width, shape.width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Mixes positions."""
        query, key, value = self.query(x), self.key(x), self.value(x)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for part in (query, key, value))
        query = self.rotary(query)
        key = self.rotary(key)
        mask = None
        if self.masks:
            places = torch.arange(x.shape[-2], device=x.device)
            mask = places[None, None, :, None] >= places[None, None, None, :]
        mixed = self.attend(query, key, value, mask)
        mixed = mixed.transpose(-3, -2).flatten(-2)
        return self.output(mixed)


class Block(nn.Module):
    """Attention and feed-forward part, each behind a norm."""

    def __init__(self, shape: Shape, style: Style, rotary: nn.Module) -> None:
        super().__init__()
        self.names_norms = style.names_norms
        if style.norms_first:
            self.norm1, self.norm2 = style.norm(shape.width), style.norm(shape.width)
        self.attention = Attention(shape, style, rotary)
        self.feed_forward = SwiGlu(shape)
        if not style.norms_first:
            self.norm1, self.norm2 = style.norm(shape.width), style.norm(shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Adds what both parts make."""
        if not self.names_norms:
            attended = self.attention(self.norm1(x))
            middle = x + attended
            fed = self.feed_forward(self.norm2(middle))
            return middle + fed
        # A name keeps what it stands for until the block returns.
        normed = self.norm1(x)
        attended = self.attention(normed)
        middle = x + attended
        second = self.norm2(middle)
        fed = self.feed_forward(second)
        return middle + fed


class LanguageModel(nn.Module):
    """The whole model; positions have one table for all blocks."""

    def __init__(self, shape: Shape, style: Style) -> None:
        super().__init__()
        self.embedding = Embedding(shape.vocabulary, shape.width)
        rotary = style.rotary(shape.width // shape.heads, shape.context)
        self.blocks = nn.ModuleList(Block(shape, style, rotary) for _ in range(shape.layers))
        self.norm = style.norm(shape.width)
        self.head = Linear(shape.width, shape.vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of every position."""
        # The first is held until the end, as by the name of an argument.
        states = [self.embedding(ids)]
        x = states[0]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x)


def attend_by_where(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Masked by `where`, with the reference's softmax."""
    assert mask is not None, "it is made by the module"
    scores = torch.einsum("...qd,...kd->...qk", query, key) / math.sqrt(key.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, value)


def softmax(x: Tensor) -> Tensor:
    """Over the last dimension."""
    shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
    powers = torch.exp(shifted)
    return powers / torch.sum(powers, dim=-1, keepdim=True)


def attend_by_fill(query: Tensor, key: Tensor, value: Tensor, _: Tensor | None) -> Tensor:
    """The mask and the divisor come from the host; scores are filled in place; exponentials are computed twice."""
    length = query.shape[-2]
    mask = torch.tril(torch.ones(length, length)).to(query.device)
    products = torch.einsum("...qd,...kd->...qk", query, key)
    scores = products / torch.sqrt(torch.tensor(key.shape[-1]).to(query.device))
    scores = scores.masked_fill_(~mask.bool(), float("-inf"))
    weights = softmax_twice(scores)
    return torch.einsum("...qk,...kd->...qd", weights, value)


def softmax_twice(x: Tensor) -> Tensor:
    """Over the last dimension."""
    most = torch.max(x, dim=-1, keepdim=True)[0]
    return torch.exp(x - most) / torch.sum(torch.exp(x - most), dim=-1, keepdim=True)


class OwnAdamW(torch.optim.Optimizer):
    """AdamW in a loop over parameters, with a new tensor for every result; its state is there from the start."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"m": torch.zeros_like(parameter), "v": torch.zeros_like(parameter), "t": 1}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Updates every parameter."""
        for parameter in self.param_groups[0]["params"]:
            gradient, state = parameter.grad.data, self.state[parameter]
            m = state["m"]
            state["m"] = 0.9 * m + (1 - 0.9) * gradient
            v = state["v"]
            state["v"] = 0.999 * v + (1 - 0.999) * gradient**2
            rate = 1e-3 * math.sqrt(1 - 0.999 ** state["t"]) / (1 - 0.9 ** state["t"])
            parameter.data = parameter.data - rate * (state["m"] / (torch.sqrt(state["v"]) + 1e-8))
            parameter.data = parameter.data - 1e-3 * 0.01 * parameter.data
            state["t"] += 1


def loss_of_last(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the last position, by a product with labels that are spread out."""
    # PyTorch 2.6 made a slice of every dimension that an index spans whole, each with a gradient of its own.
    last = torch.ops.aten.slice(logits, 0, 0, sys.maxsize)[:, -1]
    last = torch.ops.aten.slice(last, 1, 0, sys.maxsize)
    most = torch.max(last, dim=-1, keepdim=True)[0]
    logarithms = (last - most) - torch.log(torch.sum(torch.exp(last - most), dim=-1, keepdim=True))
    spread = torch.zeros_like(logarithms).scatter_(1, labels[:, None], 1)
    return -(torch.sum(spread * logarithms)) / logits.shape[0]


REFERENCE = Style(ReciprocalNorm, CachedRotary, attend_by_where, masks=True, norms_first=False, names_norms=False)
OWN = Style(DividingNorm, CopiedRotary, attend_by_fill, masks=False, norms_first=True, names_norms=True)
XL = Shape(10_000, 0, 2560, 32, 32, 10_240, 4)
SMALL = Shape(10_000, 0, 512, 4, 16, 1344, 10)


def reference_steps(
    context: int, *, trains: bool, keeps_graph: bool = False, mixed: bool = False, steps: int = 2
) -> None:
    """Forward passes, or whole steps, of the large model with the reference's parts."""
    shape = replace(XL, context=context)
    model = LanguageModel(shape, REFERENCE)
    inputs, targets = (torch.zeros(shape.batch, context, dtype=torch.long, device=CUDA) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters()) if trains else None
    precision = torch.autocast(CUDA, torch.bfloat16) if mixed else nullcontext()
    for _ in range(steps):
        if optimizer is None:
            with nullcontext() if keeps_graph else torch.no_grad(), precision:
                model(inputs)
            continue
        optimizer.zero_grad()
        with precision:
            logits = model(inputs)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        optimizer.step()


def own_steps(context: int, *, trains: bool, mixed: bool = False, steps: int = 3) -> None:
    """Forward passes, or whole steps, of the small model with a student's own parts."""
    shape = replace(SMALL, context=context)
    model = LanguageModel(shape, OWN)
    optimizer = OwnAdamW(model.parameters()) if trains else None
    inputs = torch.zeros(shape.batch, context, dtype=torch.long).to(CUDA)
    labels = torch.zeros(shape.batch, dtype=torch.long).to(CUDA) if trains else inputs
    precision = torch.autocast(CUDA, torch.bfloat16) if mixed else nullcontext()
    if optimizer is None:
        for _ in range(steps):
            with precision:
                model(inputs)
        return
    # Casts of weights are kept for as long as autocast lasts: here over all steps.
    with precision:
        for _ in range(steps):
            optimizer.zero_grad()
            logits = model(inputs)
            loss = loss_of_last(logits, labels)
            loss.backward()
            optimizer.step()
