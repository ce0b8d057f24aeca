"""Inference only: no optimizer, no gradients."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--batches", type=int, default=3)
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
model.to(device).eval()
predictions = []
with torch.no_grad():
    for _ in range(args.batches):
        images = torch.randn(args.batch_size, 3, 64, 64).to(device)
        predictions += model(images).argmax(1).tolist()
print(len(predictions), "predictions")
