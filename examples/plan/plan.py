"""A step that needs too much memory, planned and trained: `python examples/plan/plan.py [BUDGET] [FOLDER]`."""

import copy
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import memfit

DEVICE = "cpu"
BUDGET = "60MiB"
VOCABULARY, WIDTH, NUM_HEADS, NUM_BLOCKS, LENGTH, BATCH_SIZE = 256, 128, 4, 6, 65, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        heads = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, NUM_HEADS, -1))
        attended = F.scaled_dot_product_attention(*heads.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))


def loss(model, tokens):
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batches(num_batches):
    torch.manual_seed(1)
    # Each token is the one before it plus 0, 1 or 2, which a model can learn to expect.
    steps = torch.randint(0, 3, (num_batches, BATCH_SIZE, LENGTH))
    return (steps.cumsum(-1) + torch.arange(BATCH_SIZE)[:, None]) % VOCABULARY


def train(name, step, num_steps=4):
    started = time.perf_counter()
    losses = [step(batch).item() for batch in batches(num_steps)]
    seconds = (time.perf_counter() - started) / num_steps
    print(f"{name}: loss {', '.join(f'{value:.4f}' for value in losses)}, {seconds:.2f} s a step")


def main():
    budget = sys.argv[1] if len(sys.argv) > 1 else BUDGET
    folder = Path(sys.argv[2] if len(sys.argv) > 2 else "out")
    folder.mkdir(parents=True, exist_ok=True)
    # Times of one thread mean the same whatever else the machine does.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plain = copy.deepcopy(model)

    try:
        plan = memfit.plan(model, loss, batches(1)[0], optimizer=optimizer, device=DEVICE, budget=budget)
    except memfit.PlanNotFound as error:
        sys.exit(str(error))
    print(plan)
    plan.save(folder / "plan.json")
    print(f"\nplan written to {folder / 'plan.json'}")

    fitted = memfit.load_plan(folder / "plan.json").apply(model, optimizer)
    train("as planned", lambda batch: fitted.step(loss, batch))

    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)

    def plain_step(batch):
        value = loss(plain, batch)
        value.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        return value.detach()

    train("as it is", plain_step)


if __name__ == "__main__":
    main()
