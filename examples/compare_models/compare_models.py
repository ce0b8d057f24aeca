"""What smaller architectures save: MobileNet for ResNet, DistilBERT for BERT, separable convolutions for plain ones."""

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

import memfit

DEVICE = "rtx-3060"


def convolutions(separable, width=128, depth=8):
    layers = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(depth):
        if separable:
            layers += [nn.Conv2d(width, width, 3, padding=1, groups=width), nn.Conv2d(width, width, 1)]
        else:
            layers.append(nn.Conv2d(width, width, 3, padding=1))
        layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def convolution_job(name, separable):
    return memfit.Job(
        model=lambda: convolutions(separable),
        loss=loss,
        batch=(torch.empty(32, 3, 64, 64, device="meta"), torch.empty(32, dtype=torch.int64, device="meta")),
        optimizer=torch.optim.AdamW,
        name=name,
    )


def named(target, batch_size, **options):
    job = memfit.named_job(target, **options)
    return replace(job, batch=job.batch(batch_size), name=target)


def main():
    comparisons = {
        "image classifiers, 64 images of 224 x 224": [
            named("torchvision:resnet50", 64),
            named("torchvision:mobilenet_v3_large", 64),
        ],
        "text classifiers, 16 texts of 256 tokens": [
            named("hf:BertForSequenceClassification", 16, sequence_length=256),
            named("hf:DistilBertForSequenceClassification", 16, sequence_length=256),
        ],
        "convolutions, 32 images of 64 x 64": [
            convolution_job("plain 3 x 3", separable=False),
            convolution_job("depthwise separable", separable=True),
        ],
    }
    for title, jobs in comparisons.items():
        estimates = memfit.compare(jobs, device=DEVICE)
        print(title)
        for estimate in estimates:
            change = estimate.peak_bytes / estimates[0].peak_bytes - 1
            print(
                f"  {estimate.subject:<40}{estimate.num_parameters / 1e6:7.1f} M parameters"
                f"{estimate.peak_bytes / 2**30:8.2f} GiB{change:+8.0%}"
            )


if __name__ == "__main__":
    main()
