"""Llama-3.1-8B sharded with FSDP2, as torchtitan's published runs trained it.

    torchrun --nproc-per-node 8 llama_fsdp.py

Computes in bfloat16 on float32 shards, sums gradients in float32, keeps every other product of matrices and the
attention of each block and computes the rest again, and updates with AdamW. LAYERS in the environment makes it smaller.
"""

import os
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._composable.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

DIM, LAYERS, HEADS, KV_HEADS, HIDDEN, VOCABULARY = 4096, int(os.environ.get("LAYERS", 32)), 32, 8, 14336, 128256
BATCH, LENGTH = 2, 8192


def rotate(values: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Queries or keys, turned by their positions."""
    pairs = torch.view_as_complex(values.float().reshape(*values.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[None, :, None]).flatten(3).type_as(values)


class Norm(nn.Module):
    """RMSNorm, computed in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The values, scaled to a mean square of one."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class Attention(nn.Module):
    """Attention of heads that share keys and values."""

    def __init__(self) -> None:
        super().__init__()
        size = DIM // HEADS
        self.wq, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(DIM, KV_HEADS * size, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """What the tokens up to each one say."""
        batch, length, _ = x.shape
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        q, k, v = (each.view(batch, length, -1, DIM // HEADS) for each in (q, k, v))
        q, k = rotate(q, turns), rotate(k, turns)
        k, v = (each[:, :, :, None].expand(-1, -1, -1, HEADS // KV_HEADS, -1).flatten(2, 3) for each in (k, v))
        out = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), is_causal=True)
        return self.wo(out.transpose(1, 2).contiguous().view(batch, length, -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(DIM, HIDDEN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Each token on its own."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Attention and feed-forward layer, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = Norm(), Norm()

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """The values with both added."""
        h = x + self.attention(self.attention_norm(x), turns)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    """The model."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, DIM)
        self.register_buffer("turns", torch.zeros(LENGTH, DIM // HEADS // 2, dtype=torch.complex64))
        self.layers = nn.ModuleDict({str(i): Block() for i in range(LAYERS)})
        self.norm, self.output = Norm(), nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits."""
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.turns)
        return self.output(self.norm(h))


def selective() -> Any:
    """What is kept of a block: attention, what was communicated, and every other product."""
    saved = {
        torch.ops.aten.mm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }
    counts: defaultdict[str, int] = defaultdict(int)

    def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        key = "again" if ctx.is_recompute else "first"
        if func == torch.ops.aten.mm.default:
            counts[key] += 1
        keeps = func in saved and not (func == torch.ops.aten.mm.default and counts[key] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def main() -> None:
    """Three steps on tokens that are all the same."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = dist.device_mesh.init_device_mesh("cuda", (dist.get_world_size(),))
    with torch.device("meta"):
        model = Transformer()
    for name, layer in model.layers.items():
        model.layers[name] = checkpoint_wrapper(layer, context_fn=selective, preserve_rng_state=False)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name, layer in model.layers.items():
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=int(name) < LAYERS - 1)
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=True)
    for _ in range(3):
        tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64).cuda()
        labels = torch.zeros(BATCH, LENGTH, dtype=torch.int64).cuda()
        optimizer.zero_grad()
        pred = model(tokens)
        loss = F.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(0, 1))
        del pred
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()


if __name__ == "__main__":
    main()
