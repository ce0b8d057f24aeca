"""A training script that can also be estimated: `job()` is all that memfit needs. README.md has the commands."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import memfit

VOCABULARY, LENGTH = 32_000, 512


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


class LanguageModel(nn.Module):
    def __init__(self, width=512, depth=8, num_heads=8):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(depth)))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


def loss(model, tokens):
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def make_batch(batch_size):
    return torch.randint(VOCABULARY, (batch_size, LENGTH + 1))


def make_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=3e-4)


def job():
    """What `memfit estimate train.py:job` calls: the same functions that the training loop uses."""
    return memfit.Job(LanguageModel, loss, make_batch, optimizer=make_optimizer, num_workers=4, pin_memory=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=1)
    arguments = parser.parse_args()
    model = LanguageModel()
    optimizer = make_optimizer(model.parameters())
    for step in range(arguments.steps):
        value = loss(model, make_batch(arguments.batch_size))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        print(f"step {step + 1}: loss {value.item():.3f}")


if __name__ == "__main__":
    main()
