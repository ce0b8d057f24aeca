"""Everything is made on the default device; batches are random and never touch the host."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--features", type=int, default=32)
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--layers", type=int, default=3)
parser.add_argument("--steps", type=int, default=3)
args = parser.parse_args()

torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
torch.set_default_dtype(torch.float32)
torch.set_float32_matmul_precision("high")
torch.manual_seed(0)

layers = [nn.Linear(args.features, args.hidden), nn.SiLU()]
for _ in range(args.layers - 1):
    layers += [nn.Linear(args.hidden, args.hidden), nn.LayerNorm(args.hidden), nn.SiLU()]
model = nn.Sequential(*layers, nn.Linear(args.hidden, 1))
print(next(model.parameters()).device, torch.get_default_device())

optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3)
true_weight = torch.linspace(-1, 1, args.features)
history = torch.zeros(args.steps)
for step in range(args.steps):
    x = torch.rand(args.batch_size, args.features)
    y = (x * true_weight).sum(1, keepdim=True) + 0.01 * torch.randn(args.batch_size, 1)
    loss = nn.functional.huber_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history[step] = loss.detach()
with torch.device("cpu"):
    steps = torch.arange(args.steps)
print(steps.tolist(), history.tolist(), "best at", int(history.argmin()))
