"""Small training jobs for the tests of the public API and the command line."""

import torch
from torch import nn
from torch.nn import functional

from memfit import Job


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 10)

    def forward(self, images):
        return self.head(functional.relu(self.norm(self.conv(images))).mean((2, 3)))


class DeepConvNet(nn.Sequential):
    """Large enough for workspaces and cached segments to matter."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 64, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 128, 3, stride=2),
            nn.ReLU(),
            nn.Conv2d(128, 32, 3),
        )


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1000, 64)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(2))
        self.head = nn.Linear(64, 1000)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class Contrastive(nn.Module):
    """Two towers and a matrix of similarities, which grows with the square of the batch."""

    def __init__(self):
        super().__init__()
        self.left = nn.Linear(128, 32)
        self.right = nn.Linear(128, 32)

    def forward(self, left, right):
        return self.left(left) @ self.right(right).T


def classification_loss(model, batch):
    inputs, labels = batch
    return functional.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())


def mean_loss(model, batch):
    return model(batch).mean()


def contrastive_loss(model, batch):
    similarity = model(*batch)
    return functional.cross_entropy(similarity, torch.arange(len(similarity), device=similarity.device))


def images(batch_size, size=32):
    return torch.empty(batch_size, 3, size, size), torch.zeros(batch_size, dtype=torch.int64)


def tokens(batch_size, length=16):
    return torch.zeros(batch_size, length, dtype=torch.int64), torch.zeros(batch_size, length, dtype=torch.int64)


def pairs(batch_size):
    return torch.empty(batch_size, 128), torch.empty(batch_size, 128)


def conv_job(batch_size=4, **options):
    return Job(ConvNet, classification_loss, images(batch_size), **{"optimizer": torch.optim.Adam, **options})


def transformer_job(batch_size=4, **options):
    return Job(Transformer, classification_loss, tokens(batch_size), **{"optimizer": torch.optim.Adam, **options})


def contrastive_job(batch_size=4, **options):
    return Job(Contrastive, contrastive_loss, pairs(batch_size), **{"optimizer": torch.optim.SGD, **options})


def deep_job(batch_size=100):
    return Job(DeepConvNet, mean_loss, torch.empty(batch_size, 3, 64, 64), torch.optim.SGD)
