"""Models whose output is as large as their input: segmentation, detection, autoencoders, diffusion."""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from benchmarks.zoo.case import add


def double_convolution(inputs: int, outputs: int) -> nn.Sequential:
    """Two 3x3 convolutions, normalised and rectified."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """The segmentation U-Net, four levels, upsampling by transposed convolution or bilinearly."""

    def __init__(self, bilinear: bool) -> None:
        super().__init__()
        widths = [24, 48, 96, 192]
        self.down = nn.ModuleList(double_convolution(i, o) for i, o in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(
            nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(o, i, 1))
            if bilinear
            else nn.ConvTranspose2d(o, i, 2, 2)
            for i, o in pairwise(widths)
        )
        self.merge = nn.ModuleList(double_convolution(2 * i, i) for i in widths[:-1])
        self.head = nn.Conv2d(widths[0], 21, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Class logits per pixel."""
        skips = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            skips.append(x)
        skips.pop()
        for up, merge in zip(reversed(self.up), reversed(self.merge), strict=True):
            x = merge(torch.cat([up(x), skips.pop()], 1))
        logits: Tensor = self.head(x)
        return logits


def segment(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy per pixel and a soft Dice term."""
    inputs, labels = batch
    logits = model(inputs)
    probabilities = logits.softmax(1)
    target = F.one_hot(labels, 21).permute(0, 3, 1, 2).to(logits.dtype)
    overlap = (probabilities * target).sum((0, 2, 3))
    dice = 1 - (2 * overlap / (probabilities + target).sum((0, 2, 3)).clamp(min=1e-6)).mean()
    loss: Tensor = F.cross_entropy(logits, labels) + dice
    return loss


class TimedBlock(nn.Module):
    """A residual block that is told the timestep."""

    def __init__(self, inputs: int, outputs: int, time_width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)
        self.conv1, self.conv2 = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(time_width, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Residual sum."""
        y = self.conv1(F.silu(self.norm1(x)))
        y = y + self.time(F.silu(time))[:, :, None, None]
        y = self.conv2(F.dropout(F.silu(self.norm2(y)), 0.1, self.training))
        residual: Tensor = self.shortcut(x) + y
        return residual


class SpatialAttention(nn.Module):
    """Self attention over the pixels of a feature map."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(8, width)
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Residual sum."""
        size, width, rows, columns = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(size, 3, self.heads, -1, rows * columns).transpose(3, 4).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v).transpose(2, 3).reshape(size, width, rows, columns)
        residual: Tensor = self.out(y)
        return x + residual


class DiffusionUNet(nn.Module):
    """Predicts the noise in an image, given the timestep."""

    def __init__(self) -> None:
        super().__init__()
        widths, time = [48, 96, 144], 192
        self.embed = nn.Sequential(nn.Linear(64, time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        self.down = nn.ModuleList(TimedBlock(i, o, time) for i, o in zip([widths[0], *widths], widths, strict=False))
        self.shrink = nn.ModuleList(nn.Conv2d(w, w, 3, 2, 1) for w in widths[:-1])
        self.attention = SpatialAttention(widths[-1])
        self.middle = TimedBlock(widths[-1], widths[-1], time)
        self.up = nn.ModuleList(TimedBlock(2 * w, w, time) for w in widths)
        self.grow = nn.ModuleList(nn.Conv2d(o, i, 3, padding=1) for i, o in pairwise(widths))
        self.head = nn.Sequential(nn.GroupNorm(8, widths[0]), nn.SiLU(), nn.Conv2d(widths[0], 3, 3, padding=1))

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        """The predicted noise."""
        frequencies = torch.exp(torch.arange(32, device=x.device) * (-math.log(10000) / 32))
        angles = step[:, None].float() * frequencies
        time = self.embed(torch.cat([angles.sin(), angles.cos()], 1).to(x.dtype))
        x = self.stem(x)
        skips = []
        for level, block in enumerate(self.down):
            x = block(x, time)
            skips.append(x)
            if level < len(self.shrink):
                x = self.shrink[level](x)
        x = self.middle(self.attention(x), time)
        for level in reversed(range(len(self.up))):
            x = self.up[level](torch.cat([x, skips.pop()], 1), time)
            if level:
                x = self.grow[level - 1](F.interpolate(x, scale_factor=2.0, mode="nearest"))
        noise: Tensor = self.head(x)
        return noise


def diffuse(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Denoising loss with a cosine schedule; the noise is drawn in the step."""
    images, steps = batch
    noise = torch.randn_like(images)
    signal = torch.cos(steps.float() / 1000 * math.pi / 2)[:, None, None, None]
    noisy = signal * images + (1 - signal**2).sqrt() * noise
    return F.mse_loss(model(noisy, steps), noise)


class Detector(nn.Module):
    """A RetinaNet-like detector: a ResNet-18, a feature pyramid, shared heads of nine anchors."""

    def __init__(self, num_classes: int = 20, width: int = 96, anchors: int = 9) -> None:
        super().__init__()
        self.num_classes, resnet = num_classes, torchvision.models.resnet18()
        self.stem = nn.Sequential(resnet.conv1, resnet.bn1, resnet.relu, resnet.maxpool, resnet.layer1)
        self.stages = nn.ModuleList([resnet.layer2, resnet.layer3, resnet.layer4])
        self.lateral = nn.ModuleList(nn.Conv2d(c, width, 1) for c in (128, 256, 512))
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(3))
        self.classes = self._head(width, anchors * num_classes)
        self.boxes = self._head(width, anchors * 4)

    @staticmethod
    def _head(width: int, outputs: int) -> nn.Sequential:
        layers = [layer for _ in range(2) for layer in (nn.Conv2d(width, width, 3, padding=1), nn.ReLU())]
        return nn.Sequential(*layers, nn.Conv2d(width, outputs, 3, padding=1))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Class logits and box offsets of all anchors."""
        x, features = self.stem(images), []
        for stage, lateral in zip(self.stages, self.lateral, strict=True):
            x = stage(x)
            features.append(lateral(x))
        for level in (1, 0):
            features[level] = features[level] + F.interpolate(features[level + 1], scale_factor=2.0)
        features = [smooth(f) for smooth, f in zip(self.smooth, features, strict=True)]
        logits = [self.classes(f).permute(0, 2, 3, 1).reshape(len(f), -1, self.num_classes) for f in features]
        offsets = [self.boxes(f).permute(0, 2, 3, 1).reshape(len(f), -1, 4) for f in features]
        return torch.cat(logits, 1), torch.cat(offsets, 1)


def detection_batch() -> tuple[Tensor, Tensor, Tensor]:
    """Images with a class (0 for background) and box per anchor, already matched."""
    anchors = 9 * (24 * 24 + 12 * 12 + 6 * 6)
    labels = torch.where(torch.rand(2, anchors) < 0.01, torch.randint(1, 21, (2, anchors)), 0)
    return torch.randn(2, 3, 192, 192), labels, torch.randn(2, anchors, 4)


def detect(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Focal loss over classes and smooth L1 over the boxes of foreground anchors."""
    images, labels, boxes = batch
    logits, offsets = model(images)
    target = F.one_hot(labels, 21)[..., 1:].to(logits.dtype)
    p = torch.sigmoid(logits)
    cross = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    focus = (1 - (p * target + (1 - p) * (1 - target))) ** 2.0
    balance = 0.25 * target + 0.75 * (1 - target)
    foreground = (labels > 0).to(logits.dtype)
    distance = F.smooth_l1_loss(offsets, boxes, reduction="none").sum(-1) * foreground
    return ((balance * focus * cross).sum() + distance.sum()) / foreground.sum().clamp(min=1)


class Autoencoder(nn.Module):
    """Strided convolutions down, transposed convolutions up."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 32, 64, 128]
        down = [nn.Sequential(nn.Conv2d(i, o, 4, 2, 1), nn.LeakyReLU(0.2)) for i, o in pairwise(widths)]
        widths.reverse()
        up = [nn.Sequential(nn.ConvTranspose2d(i, o, 4, 2, 1), nn.ELU()) for i, o in pairwise(widths)]
        self.encoder, self.decoder = nn.Sequential(*down), nn.Sequential(*up)

    def forward(self, images: Tensor) -> Tensor:
        """The image again."""
        return torch.sigmoid(self.decoder(self.encoder(images)))


class Variational(nn.Module):
    """A convolutional variational autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1),
            nn.BatchNorm2d(32),
            nn.SiLU(),
            nn.Conv2d(32, 64, 3, 2, 1),
            nn.BatchNorm2d(64),
            nn.SiLU(),
        )
        self.moments = nn.Linear(64 * 16 * 16, 2 * 128)
        self.expand = nn.Linear(128, 64 * 16 * 16)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(64, 32, 3, 2, 1, 1), nn.BatchNorm2d(32), nn.SiLU(), nn.ConvTranspose2d(32, 3, 3, 2, 1, 1)
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Reconstruction, mean and log variance."""
        mean, log_variance = self.moments(self.encoder(images).flatten(1)).chunk(2, 1)
        latent = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.decoder(self.expand(latent).view(-1, 64, 16, 16)), mean, log_variance


def reconstruct(model: nn.Module, images: Tensor) -> Tensor:
    """Binary cross entropy of the pixels."""
    return F.binary_cross_entropy(model(images), images)


def evidence(model: nn.Module, images: Tensor) -> Tensor:
    """Negative evidence lower bound."""
    output, mean, log_variance = model(images)
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()
    loss: Tensor = (F.mse_loss(output, images, reduction="sum") + divergence) / len(images)
    return loss


def pixels(size: int = 128) -> tuple[Tensor, Tensor]:
    """Random images with a class per pixel."""
    return torch.randn(4, 3, size, size), torch.randint(21, (4, size, size))


add("unet", "segmentation", lambda: UNet(bilinear=False), pixels, segment)
add("unet_bilinear", "segmentation", lambda: UNet(bilinear=True), pixels, segment)
add(
    "diffusion_unet",
    "diffusion",
    DiffusionUNet,
    lambda: (torch.randn(4, 3, 64, 64), torch.randint(1000, (4,))),
    diffuse,
)
add("detector", "detection", Detector, detection_batch, detect)
add("autoencoder", "generative", Autoencoder, lambda: torch.rand(8, 3, 128, 128), reconstruct)
add("vae", "generative", Variational, lambda: torch.rand(8, 3, 64, 64), evidence)
