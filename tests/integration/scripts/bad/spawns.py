"""Trains in processes of its own: multiprocessing.Process, or the script itself once more."""

import argparse
import multiprocessing
import subprocess
import sys

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--how", choices=["process", "pool", "subprocess", "here"], default="process")


def train(batch_size):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Linear(64, 64).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = model(torch.randn(batch_size, 64).to(device)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")
    return batch_size


def main():
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    if args.how == "process":
        process = context.Process(target=train, args=(args.batch_size,))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"training ended with {process.exitcode}")
    elif args.how == "pool":
        with context.Pool(1) as pool:
            print(pool.map(train, [args.batch_size]))
    elif args.how == "subprocess":
        command = [sys.executable, __file__, "--how", "here", "--batch-size", str(args.batch_size)]
        subprocess.run(command, check=True)
    else:
        train(args.batch_size)


if __name__ == "__main__":
    main()
