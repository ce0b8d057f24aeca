"""A language model with a sparse mixture of experts: tokens are routed by value, experts see what they are sent."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--seq-len", type=int, default=32)
parser.add_argument("--vocab-size", type=int, default=300)
parser.add_argument("--dim", type=int, default=32)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--experts", type=int, default=4)
parser.add_argument("--top-k", type=int, default=2)
parser.add_argument("--steps", type=int, default=3)


class Expert(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.w1 = nn.Linear(dim, 4 * dim, bias=False)
        self.w2 = nn.Linear(4 * dim, dim, bias=False)
        self.w3 = nn.Linear(dim, 4 * dim, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SparseMoE(nn.Module):
    def __init__(self, dim, num_experts, top_k):
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList([Expert(dim) for _ in range(num_experts)])

    def forward(self, hidden_states):
        batch, length, dim = hidden_states.shape
        hidden_states = hidden_states.view(-1, dim)
        router_logits = self.gate(hidden_states)
        routing_weights = F.softmax(router_logits, dim=1, dtype=torch.float)
        routing_weights, selected = torch.topk(routing_weights, self.top_k, dim=-1)
        routing_weights = routing_weights / routing_weights.sum(dim=-1, keepdim=True)
        final = torch.zeros_like(hidden_states)
        expert_mask = F.one_hot(selected, num_classes=self.num_experts).permute(2, 1, 0)
        for expert_idx, expert in enumerate(self.experts):
            idx, top_x = torch.nonzero(expert_mask[expert_idx], as_tuple=True)
            if top_x.shape[0] == 0:
                continue
            current = expert(hidden_states[top_x]) * routing_weights[top_x, idx, None]
            final.index_add_(0, top_x, current.to(hidden_states.dtype))
        # Switch Transformer's balancing loss
        load = expert_mask.float().mean(dim=(1, 2))
        importance = F.softmax(router_logits, dim=-1).mean(dim=0)
        return final.view(batch, length, dim), self.num_experts * (load * importance).sum()


class Block(nn.Module):
    def __init__(self, dim, num_experts, top_k):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention = nn.MultiheadAttention(dim, 4, batch_first=True, bias=False)
        self.moe = SparseMoE(dim, num_experts, top_k)

    def forward(self, x, mask):
        h = self.norm1(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False, is_causal=True)[0]
        out, balance = self.moe(self.norm2(x))
        return x + out, balance


class MoETransformer(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.embedding = nn.Embedding(args.vocab_size, args.dim)
        self.blocks = nn.ModuleList([Block(args.dim, args.experts, args.top_k) for _ in range(args.layers)])
        self.head = nn.Linear(args.dim, args.vocab_size, bias=False)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        x, total = self.embedding(tokens), 0.0
        for block in self.blocks:
            x, balance = block(x, mask)
            total = total + balance
        return self.head(x), total


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = MoETransformer(args).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(args.steps):
        tokens = torch.randint(args.vocab_size, (args.batch_size, args.seq_len + 1)).to(device)
        logits, balance = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) + 0.01 * balance
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        used = f", {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB" if device.type == "cuda" else ""
        print(f"step {step}: loss {loss.item():.4f} balance {float(balance):.4f} norm {norm:.3f}{used}")


if __name__ == "__main__":
    main()
