"""Never ends and has no optimizer: an agent that acts and never learns."""

import argparse
import itertools

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--report-every", type=int, default=100)
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2)).to(device)
state = torch.zeros(args.batch_size, 4, device=device)
for turn in itertools.count():
    with torch.no_grad():
        action = policy(state).argmax(1, keepdim=True)
        state = (state + 0.1 * (action - 0.5)).clamp(-1, 1)
    if turn % args.report_every == 0:
        print(f"turn {turn}: mean {state.mean().item():.3f}", flush=True)
