"""SimCLR: two views of each image, cross entropy on the matrix of similarities, mixed precision."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("-b", "--batch-size", default=8, type=int)
parser.add_argument("--image-size", default=32, type=int)
parser.add_argument("--width", default=16, type=int)
parser.add_argument("--out-dim", default=32, type=int)
parser.add_argument("--train-size", default=32, type=int)
parser.add_argument("--epochs", default=1, type=int)
parser.add_argument("--temperature", default=0.07, type=float)
parser.add_argument("--fp16-precision", action="store_true")
parser.add_argument("--n-views", default=2, type=int)


class Views(Dataset):
    def __init__(self, size, image_size, n_views):
        self.size, self.image_size, self.n_views = size, image_size, n_views

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        image = torch.randn(3, self.image_size, self.image_size, generator=torch.Generator().manual_seed(index))
        return [image.roll(view, 1).flip(2) if view % 2 else image for view in range(self.n_views)], 0


class Encoder(nn.Module):
    def __init__(self, width, out_dim):
        super().__init__()
        layers, channels = [], 3
        for out in (width, 2 * width, 4 * width):
            layers += [nn.Conv2d(channels, out, 3, stride=1, padding=1), nn.BatchNorm2d(out), nn.ReLU()]
            layers += [nn.MaxPool2d(2)]
            channels = out
        self.backbone = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, out_dim))

    def forward(self, x):
        return self.head(self.backbone(x))


def info_nce_loss(features, batch_size, n_views, temperature):
    device = features.device
    labels = torch.cat([torch.arange(batch_size) for _ in range(n_views)], dim=0)
    labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
    labels = labels.to(device)
    features = F.normalize(features, dim=1)
    similarity_matrix = torch.matmul(features, features.T)

    # The diagonal, each image with itself, is dropped from both.
    mask = torch.eye(labels.shape[0], dtype=torch.bool).to(device)
    labels = labels[~mask].view(labels.shape[0], -1)
    similarity_matrix = similarity_matrix[~mask].view(similarity_matrix.shape[0], -1)
    positives = similarity_matrix[labels.bool()].view(labels.shape[0], -1)
    negatives = similarity_matrix[~labels.bool()].view(similarity_matrix.shape[0], -1)
    logits = torch.cat([positives, negatives], dim=1)
    labels = torch.zeros(logits.shape[0], dtype=torch.long).to(device)
    return logits / temperature, labels


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / target.size(0)) for k in topk]


def main():
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(
        Views(args.train_size, args.image_size, args.n_views), batch_size=args.batch_size, shuffle=True, drop_last=True
    )
    model = Encoder(args.width, args.out_dim).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 3e-4, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(loader), eta_min=0, last_epoch=-1)
    criterion = torch.nn.CrossEntropyLoss().to(device)
    scaler = torch.amp.GradScaler(device.type, enabled=args.fp16_precision and device.type == "cuda")
    for epoch in range(args.epochs):
        for images, _ in loader:
            images = torch.cat(images, dim=0)
            images = images.to(device)
            with torch.autocast(device.type, enabled=args.fp16_precision):
                features = model(images)
                logits, labels = info_nce_loss(features, args.batch_size, args.n_views, args.temperature)
                loss = criterion(logits, labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            top1, top5 = accuracy(logits, labels, topk=(1, 5))
            print(f"epoch {epoch}: loss {loss:.4f} top1 {top1[0].item():.2f} top5 {top5[0].item():.2f}")
        scheduler.step()
    torch.save({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, "simclr.pth.tar")


if __name__ == "__main__":
    main()
