"""Trains on packed sequences with a choice of attention: flexible, nested or of variable length."""

import argparse
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

parser = argparse.ArgumentParser()
parser.add_argument("--attention", default="flex", choices=("flex", "jagged", "varlen"))
parser.add_argument("--compile", action="store_true")
parser.add_argument("--selective", action="store_true", help="keep the results of products only")
parser.add_argument("--steps", type=int, default=4)
WIDTH, HEADS, LENGTHS = 128, 4, (37, 120, 64, 35)
KEPT = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


class Block(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attend = attend

    def forward(self, x):
        query, key, value = (each.unflatten(-1, (HEADS, -1)) for each in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(self.attend(query, key, value).flatten(-2))


def make_attention(kind, compiled, device):
    if kind == "flex":
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        document = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).to(device)
        size = sum(LENGTHS)
        same = create_block_mask(
            lambda b, h, q, k: (q >= k) & (document[q] == document[k]), None, None, size, size, device=device
        )
        flex = torch.compile(flex_attention) if compiled else flex_attention

        def attend(*tensors):
            heads_first = (each.transpose(0, 1).unsqueeze(0) for each in tensors)
            return flex(*heads_first, block_mask=same).squeeze(0).transpose(0, 1)

        return attend
    if kind == "varlen":
        from torch.nn.attention.varlen import varlen_attn

        ends = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32, device=device)
        return lambda *tensors: varlen_attn(*tensors, ends, ends, max(LENGTHS), max(LENGTHS), window_size=(-1, 0))

    def attend(*tensors):
        tensors = (each.transpose(1, 2) for each in tensors)
        return F.scaled_dot_product_attention(*tensors, is_causal=True).transpose(1, 2)

    return attend


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    attend = make_attention(args.attention, args.compile, device)
    blocks = nn.ModuleList(Block(attend) for _ in range(2)).to(device, dtype)
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-3)
    for step in range(args.steps):
        parts = [torch.randn(length, WIDTH, device=device, dtype=dtype) for length in LENGTHS]
        is_nested = args.attention == "jagged"
        x = torch.nested.nested_tensor(parts, layout=torch.jagged) if is_nested else torch.cat(parts)
        for block in blocks:
            if args.selective:
                contexts = partial(create_selective_checkpoint_contexts, KEPT)
                x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            else:
                x = block(x)
        loss = (x.values() if is_nested else x).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
