"""Trains a residual network on images: mixed precision, loader workers, evaluation, checkpoints. Nothing of memfit's.

python examples/dryrun/train.py --batch-size 4 --image-size 64 --steps 2    # for real, on whatever there is
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=384)
parser.add_argument("--image-size", type=int, default=96)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--steps", type=int, default=10_000)
parser.add_argument("--evaluate-every", type=int, default=500)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--checkpoint", default="classifier.pt")
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.backends.cudnn.benchmark = True


class Images(Dataset):
    """Stands for a folder of images."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        label = index % 10
        return torch.full((3, args.image_size, args.image_size), 25 * label, dtype=torch.uint8), label


class Block(nn.Module):
    def __init__(self, channels_in, channels_out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class Classifier(nn.Module):
    def __init__(self, width, num_classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        widths = [width, width, 2 * width, 2 * width, 4 * width, 4 * width, 8 * width, 8 * width]
        pairs = zip([width, *widths], widths, strict=False)
        self.blocks = nn.Sequential(*(Block(a, b, 1 if a == b else 2) for a, b in pairs))
        self.head = nn.Linear(8 * width, num_classes)

    def forward(self, images):
        return self.head(self.blocks(self.stem(images / 255.0)).mean((2, 3)))


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    correct = total = 0
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.bfloat16 if device.type == "cpu" else torch.float16):
            predicted = model(images).argmax(1)
        correct += (predicted == labels).sum().item()
        total += len(labels)
    model.train()
    return correct / total


def batches(loader):
    while True:
        yield from loader


def main():
    options = {"batch_size": args.batch_size, "num_workers": args.workers, "pin_memory": device.type == "cuda"}
    training = DataLoader(Images(50_000), shuffle=True, drop_last=True, **options)
    held_out = DataLoader(Images(args.batch_size), **options)
    model = Classifier(args.width).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device.type)
    best = 0.0
    for step, (images, labels) in zip(range(args.steps), batches(training), strict=False):
        if step % args.evaluate_every == 0:
            accuracy = evaluate(model, held_out)
            print(f"step {step}: accuracy {accuracy:.3f}")
            if accuracy >= best:
                best = accuracy
                torch.save({"model": model.state_dict(), "step": step}, args.checkpoint)
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.bfloat16 if device.type == "cpu" else torch.float16):
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
