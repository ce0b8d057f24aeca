"""Hyper-parameters searched with one model in memory: `python examples/many_models/search.py [TRIALS] [FOLDER]`."""

import gc
import sys

import optuna
import psutil
import torch
from torch import nn
from torch.nn import functional as F

import memfit

CLASSES, FEATURES, BATCH_SIZE, NUM_STEPS = 10, 64, 64, 4


def build(parameters):
    width = parameters["width"]
    layers = [nn.Linear(FEATURES, width), nn.ReLU(), nn.Dropout(parameters["dropout"])]
    return nn.Sequential(*layers, nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES))


def batch(generator):
    labels = torch.randint(CLASSES, (BATCH_SIZE,), generator=generator)
    return F.one_hot(labels, FEATURES) + 0.3 * torch.randn(BATCH_SIZE, FEATURES, generator=generator), labels


def objective(trial):
    parameters = {
        "lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True),
        "width": trial.suggest_categorical("width", [512, 1024, 2048]),
        "dropout": trial.suggest_float("dropout", 0.0, 0.5),
    }
    model = train(parameters)
    trial.keep(model)
    return score(model)


def train(parameters):
    model = build(parameters)
    optimizer = torch.optim.Adam(model.parameters(), lr=parameters["lr"])
    data = torch.Generator().manual_seed(0)
    for _ in range(NUM_STEPS):
        inputs, labels = batch(data)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return model


def score(model):
    inputs, labels = batch(torch.Generator().manual_seed(1))
    with torch.no_grad():
        return F.cross_entropy(model.eval()(inputs), labels).item()


def resident_mib():
    gc.collect()
    return psutil.Process().memory_info().rss / 2**20


def main():
    num_trials = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    folder = sys.argv[2] if len(sys.argv) > 2 else "out/search"
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # the table below says it all
    # PyTorch and its libraries take memory when they are first used.
    train({"lr": 1e-3, "width": 2048, "dropout": 0.1})

    search = memfit.search(objective, trials=num_trials, folder=folder)
    print(search)
    memory = [trial.user_attrs["memory_bytes"] / 2**20 for trial in search.trials]
    print(f"after the first trial {memory[0]:.0f} MiB, after the last {memory[-1]:.0f} MiB")
    model = search.load_best(build(search.best.params))
    print(f"best parameters loaded: score {score(model):.6g}")

    print("\nthe same trials in a loop that keeps every model:")
    kept, memory = [], []
    for trial in search.trials:
        kept.append(train(trial.params))
        memory.append(resident_mib())
    print(f"after the first trial {memory[0]:.0f} MiB, after the last {memory[-1]:.0f} MiB, for {len(kept)} models")


if __name__ == "__main__":
    main()
