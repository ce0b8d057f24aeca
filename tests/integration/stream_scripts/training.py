"""A guarded training over a stream: `training.py DATA CHECKPOINTS FORM WORKERS STEPS`; killed after so many steps."""

import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

import memfit

EPOCHS = 3
NUM_SAMPLES = 150


def write_data(folder):
    """Features and labels that tell which sample they are of."""
    generator = np.random.default_rng(0)
    np.save(Path(folder) / "x.npy", generator.normal(size=(NUM_SAMPLES, 4)))
    np.save(Path(folder) / "y.npy", np.arange(NUM_SAMPLES))


def augment(features):
    """Draws from everything that transforms draw from."""
    return features + 0.1 * torch.randn(4).numpy() + 0.1 * np.random.rand() + 0.1 * random.random()


def open_stream(folder, *, seed=3, **arguments):
    """With a transform, so that however small the data is, several workers have something to do."""
    paths = (Path(folder) / "x.npy", Path(folder) / "y.npy")
    arguments = {"batch_size": 8, "transform": augment, "memory": "16MiB"} | arguments
    return memfit.stream(paths, **arguments, options=memfit.StreamOptions(seed=seed))


def loss_of(model, batch):
    """Cross entropy, with as many classes as there are samples' remainders."""
    features, labels = batch
    return nn.functional.cross_entropy(model(features), labels % 3)


def make_loader(stream, form, num_workers):
    """The three ways in which a stream is given to a guard."""
    if form == "stream":
        return stream
    if form == "loader":
        return stream.loader(num_workers)
    return DataLoader(stream.torch(), batch_size=None, num_workers=num_workers)


def train(data, checkpoints, form, num_workers, stop=None):
    """The parameters in the end, what the guard noted, and the samples in the order in which they came."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = memfit.Guard(
        model,
        optimizer,
        plan=None,
        checkpoint=checkpoints,
        options=memfit.GuardOptions(checkpoint_every=4, remember=False),
    )
    loader = make_loader(open_stream(data), form, num_workers)
    seen = []
    for _ in range(EPOCHS):
        for batch in guard.batches(loader):
            guard.step(loss_of, batch)
            seen.append(batch[1].tolist())
            if stop is not None and len(seen) == stop:
                os.kill(os.getpid(), signal.SIGKILL)
    guard.close()
    return [parameter.detach().clone() for parameter in model.parameters()], guard.resumed_from, seen


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
