"""Which model fits, before anything is downloaded or trained: `python examples/choose_a_model/choose_a_model.py`."""

import resource
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import memfit

CONFIG = Path(__file__).with_name("config.json")
DEVICE = "rtx-3060"
GIB = 2**30


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


def compare(title, jobs):
    estimates = memfit.compare(jobs, device=DEVICE)
    print(title)
    for estimate in estimates:
        change = estimate.peak_bytes / estimates[0].peak_bytes - 1
        print(
            f"  {estimate.subject:<40}{estimate.num_parameters / 1e6:7.1f} M parameters"
            f"{estimate.peak_bytes / GIB:8.2f} GiB{change:+8.0%}"
        )


def big_model():
    """A language model of 8 billion parameters, from its configuration alone: its weights are never allocated."""
    print("\nan 8 billion parameter model, 1 text of 2048 tokens, bf16")
    for device, optimizer in (("h100", "sgd"), ("h100", "adamw"), ("h200", "adamw")):
        job = memfit.named_job(f"hf:{CONFIG}", optimizer=optimizer, sequence_length=2048)
        estimate = memfit.estimate(job, device=device, precision="bf16", batch_size=1)
        print(
            f"  {estimate.device.title:<22}{optimizer:<7}{estimate.peak_bytes / GIB:6.1f} GiB needed, "
            f"{estimate.capacity_bytes / GIB:.1f} usable: {'fits' if estimate.fits else 'does not fit'}"
        )
    # ru_maxrss is in KiB on Linux.
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    billions = estimate.num_parameters / 1e9
    print(f"{billions:.1f} billion parameters; this process used {used:.1f} GiB of host memory.")


def main():
    compare(
        "image classifiers, 64 images of 224 x 224",
        [named("torchvision:resnet50", 64), named("torchvision:mobilenet_v3_large", 64)],
    )
    compare(
        "text classifiers, 16 texts of 256 tokens",
        [
            named("hf:BertForSequenceClassification", 16, sequence_length=256),
            named("hf:DistilBertForSequenceClassification", 16, sequence_length=256),
        ],
    )
    compare(
        "convolutions, 32 images of 64 x 64",
        [convolution_job("plain 3 x 3", separable=False), convolution_job("depthwise separable", separable=True)],
    )
    big_model()


if __name__ == "__main__":
    main()
