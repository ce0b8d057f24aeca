"""Fully sharded training (FSDP2) of a small Transformer, to be started by torchrun."""

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=2)
parser.add_argument("--seq-len", type=int, default=32)
parser.add_argument("--vocab-size", type=int, default=256)
parser.add_argument("--dim", type=int, default=64)
parser.add_argument("--n-layers", type=int, default=2)
parser.add_argument("--n-heads", type=int, default=4)
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--mixed-precision", action="store_true")
parser.add_argument("--explicit-prefetching", action="store_true")
parser.add_argument("--no-reshard", action="store_true", help="keep gathered parameters after forward")
parser.add_argument("--checkpoint", default="fsdp2.pt")


class Attention(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.wqkv = nn.Linear(dim, 3 * dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        bsz, seq_len, dim = x.size()
        q, k, v = self.wqkv(x).view(bsz, seq_len, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(output.transpose(1, 2).contiguous().view(bsz, seq_len, dim))


class TransformerBlock(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, n_heads)
        self.ffn_norm = nn.LayerNorm(dim)
        self.feed_forward = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    def __init__(self, vocab_size, seq_len, dim, n_layers, n_heads):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.pos_embeddings = nn.Embedding(seq_len, dim)
        self.layers = nn.ModuleList([TransformerBlock(dim, n_heads) for _ in range(n_layers)])
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens):
        pos = torch.arange(tokens.size(1), device=tokens.device)
        h = self.tok_embeddings(tokens) + self.pos_embeddings(pos)
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h)).float()

    def reset_parameters(self):
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()


def set_modules_to_prefetch(model):
    for i, layer in enumerate(model.layers[:-1]):
        layer.set_modules_to_forward_prefetch([model.layers[i + 1]])
    for i, layer in enumerate(model.layers[1:], start=1):
        layer.set_modules_to_backward_prefetch([model.layers[i - 1]])


def main():
    args = parser.parse_args()
    use_cuda = torch.cuda.is_available()
    rank = int(os.environ["LOCAL_RANK"])
    if use_cuda:
        device = torch.device(f"cuda:{rank}")
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    dist.init_process_group(backend="nccl" if use_cuda else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(0)

    with torch.device("meta"):
        model = Transformer(args.vocab_size, args.seq_len, args.dim, args.n_layers, args.n_heads)
    fsdp_kwargs = {"mesh": mesh, "reshard_after_forward": not args.no_reshard}
    if args.mixed_precision:
        fsdp_kwargs["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, **fsdp_kwargs)
    fully_shard(model, **fsdp_kwargs)
    assert isinstance(model, FSDPModule)
    model.to_empty(device=device)
    model.reset_parameters()
    if args.explicit_prefetching:
        set_modules_to_prefetch(model)
    if rank == 0:
        sharded = sum(p.to_local().numel() for p in model.parameters())
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {sharded:,} on this rank")

    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(args.steps):
        if args.explicit_prefetching:
            # The first all-gather starts before the forward pass does.
            model.unshard()
        tokens = torch.randint(0, args.vocab_size, (args.batch_size, args.seq_len + 1), device=device)
        with torch.profiler.record_function("step") if step == 1 else nullcontext():
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optim.step()
            optim.zero_grad()
        average = loss.detach().clone()
        dist.all_reduce(average, op=dist.ReduceOp.SUM)
        if rank == 0:
            print(f"step {step}: loss {average.item() / dist.get_world_size():.4f}")

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(state, args.checkpoint)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
