"""Metric learning with triplets mined within the batch: hardest positive and negative of each anchor."""

import argparse

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Sampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--per-class", type=int, default=4)
parser.add_argument("--classes", type=int, default=8)
parser.add_argument("--image-size", type=int, default=32)
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--embedding", type=int, default=32)
parser.add_argument("--margin", type=float, default=0.2)
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--mining", choices=["hard", "semihard"], default="semihard")


class BalancedSampler(Sampler):
    def __init__(self, labels, per_class, batch_size, steps):
        self.by_class = [np.flatnonzero(labels.numpy() == c) for c in labels.unique().tolist()]
        self.per_class, self.batch_size, self.steps = per_class, batch_size, steps

    def __iter__(self):
        rng = np.random.default_rng(0)
        for _ in range(self.steps):
            chosen = rng.choice(len(self.by_class), self.batch_size // self.per_class, replace=False)
            yield np.concatenate([rng.choice(self.by_class[c], self.per_class) for c in chosen]).tolist()

    def __len__(self):
        return self.steps


class EmbeddingNet(nn.Module):
    def __init__(self, width, embedding):
        super().__init__()
        self.convnet = nn.Sequential(
            nn.Conv2d(3, width, 5, padding=2),
            nn.PReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 5, padding=2),
            nn.PReLU(),
            nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(4),
        )
        self.fc = nn.Linear(2 * width * 16, embedding)

    def forward(self, x):
        return F.normalize(self.fc(self.convnet(x).flatten(1)), dim=1)


def triplet_loss(embeddings, labels, margin, mining):
    distances = torch.cdist(embeddings, embeddings)
    same = labels[:, None] == labels[None, :]
    eye = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    if mining == "hard":
        hardest_positive = distances.masked_fill(~same | eye, float("-inf")).topk(1, dim=1).values
        hardest_negative = distances.masked_fill(same, float("inf")).topk(1, dim=1, largest=False).values
        losses = F.relu(hardest_positive - hardest_negative + margin)
        return losses.mean(), losses.numel()
    anchors, positives = torch.nonzero(same & ~eye, as_tuple=True)
    gaps = distances[anchors, positives][:, None] - distances[anchors] + margin
    semihard = (gaps > 0) & (gaps < margin) & ~same[anchors]
    rows, negatives = semihard.nonzero(as_tuple=True)
    if len(rows) == 0:
        return gaps.mean() * 0, 0
    a, p = anchors[rows], positives[rows]
    near = (embeddings[a] - embeddings[p]).pow(2).sum(1)
    far = (embeddings[a] - embeddings[negatives]).pow(2).sum(1)
    losses = F.relu(near - far + margin)
    active = losses[losses > 0]
    return active.sum() / max(1, active.numel()), active.numel()


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    labels = torch.arange(args.classes).repeat_interleave(2 * args.per_class)
    images = torch.randn(len(labels), 3, args.image_size, args.image_size) + labels[:, None, None, None]
    sampler = BalancedSampler(labels, args.per_class, args.batch_size, args.steps)
    loader = DataLoader(TensorDataset(images, labels), batch_sampler=sampler)
    model = EmbeddingNet(args.width, args.embedding).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step, (x, y) in enumerate(loader):
        x, y = x.to(device), y.to(device)
        embeddings = model(x)
        loss, count = triplet_loss(embeddings, y, args.margin, args.mining)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}, {count} triplets")
    model.eval()
    with torch.no_grad():
        embeddings = torch.cat([model(part.to(device)).cpu() for part in images.split(args.batch_size)])
    nearest = torch.cdist(embeddings, embeddings).topk(2, largest=False).indices[:, 1]
    print("recall at 1:", (labels[nearest] == labels).float().mean().item())


if __name__ == "__main__":
    main()
