"""Stops before it trains: the data it looks for is not there."""

import argparse
import os
import sys

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--data", default="a-folder-that-is-not-there")
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Linear(16, 2).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

if not os.path.isdir(args.data):
    print(f"no data in {args.data}: run prepare.py first")
    sys.exit(0)

for _ in range(3):
    loss = model(torch.randn(args.batch_size, 16, device=device)).mean()
    loss.backward()
    optimizer.step()
