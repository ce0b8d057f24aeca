"""The Python API on a hand-written model: `python examples/estimate_python/estimate.py [PAGE.html]`."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import memfit


class Block(nn.Module):
    def __init__(self, width, num_heads):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.num_heads = num_heads

    def forward(self, x):
        batch, length, width = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.mlp_norm(x))


class TinyLanguageModel(nn.Module):
    def __init__(self, vocabulary=32_000, width=512, depth=8, num_heads=8):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(depth)))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


def loss(model, tokens):
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def main():
    model = TinyLanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens = torch.zeros(16, 513, dtype=torch.int64)

    estimate = memfit.estimate(model, loss, tokens, optimizer=optimizer, device="rtx-3060", precision="amp-bf16")
    print(estimate)

    print("\nBy operator, largest first:")
    for op, size_bytes in list(estimate.breakdown.by_op.items())[:3]:
        print(f"  {op:<30}{size_bytes / 2**20:8.0f} MiB")

    print("\nOther batch sizes, without another trace:")
    for batch_size in (1, 16, 64):
        other = estimate.at_batch(batch_size)
        print(f"  {batch_size:>4}  {other.peak_bytes / 2**30:6.2f} GiB  {'fits' if other.fits else 'does not fit'}")

    if len(sys.argv) > 1:
        estimate.report(sys.argv[1])
        print(f"\npage: {sys.argv[1]}")


if __name__ == "__main__":
    main()
