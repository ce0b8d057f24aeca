"""Model-agnostic meta-learning: inner updates with autograd.grad(create_graph=True) and functional_call."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=2, help="tasks per meta-update")
parser.add_argument("--shots", type=int, default=5)
parser.add_argument("--ways", type=int, default=5)
parser.add_argument("--image-size", type=int, default=28)
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--inner-steps", type=int, default=2)
parser.add_argument("--inner-lr", type=float, default=0.4)
parser.add_argument("--first-order", action="store_true")
parser.add_argument("--iterations", type=int, default=3)


class ConvNet(nn.Module):
    def __init__(self, width, ways, image_size):
        super().__init__()
        layers, channels = [], 1
        for _ in range(3):
            norm = nn.BatchNorm2d(width, track_running_stats=False)
            layers += [nn.Conv2d(channels, width, 3, padding=1), norm, nn.ReLU(), nn.MaxPool2d(2)]
            channels = width
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(width * (image_size // 8) ** 2, ways)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def make_task(args, device):
    labels = torch.arange(args.ways).repeat(2 * args.shots)
    images = torch.randn(len(labels), 1, args.image_size, args.image_size) + labels[:, None, None, None]
    half = args.ways * args.shots
    images, labels = images.to(device), labels.to(device)
    return images[:half], labels[:half], images[half:], labels[half:]


def adapt(model, params, x, y, args):
    for _ in range(args.inner_steps):
        loss = F.cross_entropy(functional_call(model, params, (x,)), y)
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=not args.first_order)
        params = {name: p - args.inner_lr * g for (name, p), g in zip(params.items(), grads, strict=True)}
    return params


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = ConvNet(args.width, args.ways, args.image_size).to(device)
    meta_optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for iteration in range(args.iterations):
        meta_optimizer.zero_grad()
        outer_loss, accuracies = torch.tensor(0.0, device=device), []
        for _ in range(args.batch_size):
            support_x, support_y, query_x, query_y = make_task(args, device)
            adapted = adapt(model, dict(model.named_parameters()), support_x, support_y, args)
            logits = functional_call(model, adapted, (query_x,))
            outer_loss += F.cross_entropy(logits, query_y) / args.batch_size
            accuracies.append((logits.argmax(1) == query_y).float().mean())
        outer_loss.backward()
        meta_optimizer.step()
        print(f"iteration {iteration}: loss {outer_loss.item():.4f} accuracy {torch.stack(accuracies).mean():.3f}")


if __name__ == "__main__":
    main()
