"""Fine-tuning with low-rank adapters: a frozen half-precision base, trainable additions, groups of parameters."""

import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=2)
parser.add_argument("--seq-len", type=int, default=32)
parser.add_argument("--vocab-size", type=int, default=300)
parser.add_argument("--dim", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--rank", type=int, default=4)
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])


class LoRALinear(nn.Module):
    def __init__(self, base, rank, alpha=16, dropout=0.05):
        super().__init__()
        self.base = base
        self.base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        self.dropout = nn.Dropout(dropout)
        self.scaling = alpha / rank

    def forward(self, x):
        update = F.linear(F.linear(self.dropout(x).to(self.lora_a.dtype), self.lora_a), self.lora_b)
        return self.base(x) + (update * self.scaling).to(x.dtype)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        h = self.norm1(x)
        q, k, v = (layer(h).view(b, t, 4, d // 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attention.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, vocab_size, seq_len, dim, layers):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, dim), nn.Embedding(seq_len, dim)
        self.blocks = nn.Sequential(*[Block(dim) for _ in range(layers)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))


def add_adapters(model, rank):
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("q", "v", "up"):
            setattr(block, name, LoRALinear(getattr(block, name), rank))
    for norm in (m for m in model.modules() if isinstance(m, nn.LayerNorm)):
        norm.requires_grad_(True)
    return model


def parameter_groups(model):
    a = [p for n, p in model.named_parameters() if p.requires_grad and n.endswith("lora_a")]
    b = [p for n, p in model.named_parameters() if p.requires_grad and n.endswith("lora_b")]
    norms = [p for n, p in model.named_parameters() if p.requires_grad and "norm" in n]
    return [
        {"params": a, "lr": 1e-4},
        {"params": b, "lr": 1.6e-3},
        {"params": norms, "lr": 1e-5, "weight_decay": 0.0},
    ]


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    base = Decoder(args.vocab_size, args.seq_len, args.dim, args.layers).to(getattr(torch, args.dtype))
    model = add_adapters(base, args.rank).to(device)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    print(f"trainable params: {trainable:,} || all params: {total:,} || trainable%: {100 * trainable / total:.4f}")
    optimizer = torch.optim.AdamW(parameter_groups(model), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    for step in range(args.steps):
        ids = torch.randint(args.vocab_size, (args.batch_size, args.seq_len + 1), device=device)
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f} lr {schedule.get_last_lr()}")
    adapters = {k: v.cpu() for k, v in model.state_dict().items() if "lora" in k}
    torch.save(adapters, "adapters.pt")


if __name__ == "__main__":
    main()
