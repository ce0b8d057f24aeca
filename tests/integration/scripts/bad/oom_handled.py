"""Halves the batch until it fits: the script's own way with torch.OutOfMemoryError."""

import argparse
import gc

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--image-size", type=int, default=64)
parser.add_argument("--channels", type=int, default=32)
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--by-text", action="store_true", help="look at the message, as old scripts do")
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
c = args.channels
model = nn.Sequential(
    nn.Conv2d(3, c, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(c, c, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(c, c, 3, padding=1),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(c, 10),
).to(device)
optimizer = torch.optim.Adam(model.parameters())


def step(batch_size):
    images = torch.randn(batch_size, 3, args.image_size, args.image_size, device=device)
    labels = torch.randint(10, (batch_size,), device=device)
    optimizer.zero_grad(set_to_none=True)
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


batch_size, done = args.batch_size, 0
while done < args.steps:
    failed = False
    try:
        loss = step(batch_size)
        done += 1
        print(f"step {done}: batch size {batch_size}, loss {loss:.4f}")
    except RuntimeError as error:
        is_memory = "out of memory" in str(error) if args.by_text else isinstance(error, torch.OutOfMemoryError)
        if not is_memory or batch_size == 1:
            raise
        failed = True
        print(f"| WARNING: {str(error).splitlines()[0]}")
    if failed:
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        batch_size //= 2
        print(f"retrying with batch size {batch_size}")
print(f"trained with batch size {batch_size}")
