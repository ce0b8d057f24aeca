"""Splits its model over two devices."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
args = parser.parse_args()


class TwoHalves(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 256), nn.ReLU()).to("cuda:0")
        self.second = nn.Linear(256, 10).to("cuda:1")

    def forward(self, x):
        return self.second(self.first(x.to("cuda:0")).to("cuda:1"))


model = TwoHalves()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    outputs = model(torch.randn(args.batch_size, 64))
    labels = torch.randint(10, (args.batch_size,)).to(outputs.device)
    loss = nn.functional.cross_entropy(outputs, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
