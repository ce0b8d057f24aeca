"""A training script that can also be estimated: README.md has the commands."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import memfit


def make_model():
    def stage(channels_in, channels_out):
        convolution = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(channels_out), nn.ReLU(inplace=True), nn.MaxPool2d(2))

    stages = [stage(a, b) for a, b in ((3, 32), (32, 64), (64, 128))]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def make_batch(batch_size):
    return torch.randn(batch_size, 3, 64, 64), torch.randint(10, (batch_size,))


def job():
    """What `memfit estimate train.py:job` calls."""
    return memfit.Job(make_model, loss, make_batch, optimizer=make_optimizer, num_workers=4, pin_memory=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=8)
    arguments = parser.parse_args()
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    for step in range(arguments.steps):
        value = loss(model, make_batch(arguments.batch_size))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        print(f"step {step + 1}: loss {value.item():.3f}")


if __name__ == "__main__":
    main()
