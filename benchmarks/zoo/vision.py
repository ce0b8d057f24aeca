"""Image classifiers: convolutional networks from torchvision, transformers and mixers from timm."""

from collections.abc import Callable

import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from benchmarks.zoo.case import add

NUM_CLASSES = 1000

Batch = tuple[Tensor, Tensor]


def images(batch_size: int, size: int, channels: int = 3, num_classes: int = NUM_CLASSES) -> Callable[[], Batch]:
    """A maker of random images with labels."""

    def make() -> Batch:
        return torch.randn(batch_size, channels, size, size), torch.randint(num_classes, (batch_size,))

    return make


def classify(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of the model's logits."""
    inputs, labels = batch
    loss: Tensor = F.cross_entropy(model(inputs), labels)
    return loss


def clips(batch_size: int, frames: int, size: int) -> Callable[[], Batch]:
    """A maker of random video clips with labels."""

    def make() -> Batch:
        return torch.randn(batch_size, 3, frames, size, size), torch.randint(400, (batch_size,))

    return make


class ResidualBlock3d(nn.Module):
    """Two 3x3x3 convolutions with a shortcut, as in R3D."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv3d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm3d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv3d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm3d(outputs),
        )
        self.shortcut = nn.Sequential(nn.Conv3d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm3d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Residual sum."""
        return F.relu(self.body(x) + self.shortcut(x))


def r3d() -> nn.Module:
    """A small R3D video classifier."""
    stem = [nn.Conv3d(3, 32, (3, 7, 7), (1, 2, 2), (1, 3, 3), bias=False), nn.BatchNorm3d(32), nn.ReLU(inplace=True)]
    blocks = [ResidualBlock3d(32, 32, 1), ResidualBlock3d(32, 64, 2), ResidualBlock3d(64, 128, 2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(128, 400))


def vgg() -> nn.Module:
    """VGG-11 with a smaller classifier, which would otherwise hold 90% of the parameters."""
    model: nn.Module = torchvision.models.vgg11_bn()
    model.classifier = nn.Sequential(nn.Linear(512 * 49, 512), nn.ReLU(True), nn.Dropout(), nn.Linear(512, NUM_CLASSES))
    return model


models = torchvision.models
add("resnet18", "convnet", models.resnet18, images(8, 128), classify)
add("resnet50", "convnet", models.resnet50, images(4, 160), classify)
add("vgg11_bn", "convnet", vgg, images(4, 128), classify)
add("alexnet", "convnet", models.alexnet, images(8, 128), classify)
add("mobilenet_v3_large", "convnet", models.mobilenet_v3_large, images(8, 160), classify)
add("efficientnet_b0", "convnet", models.efficientnet_b0, images(4, 160), classify)
add("densenet121", "convnet", models.densenet121, images(4, 128), classify)
add("convnext_tiny", "convnet", models.convnext_tiny, images(4, 128), classify)
add("regnet_y_400mf", "convnet", models.regnet_y_400mf, images(8, 160), classify)
add("shufflenet_v2", "convnet", models.shufflenet_v2_x1_0, images(8, 160), classify)
add("squeezenet", "convnet", models.squeezenet1_1, images(8, 160), classify)
add("inception_v3", "convnet", lambda: timm.create_model("inception_v3"), images(4, 160), classify)
add(
    "vit_small",
    "vision transformer",
    lambda: timm.create_model("vit_small_patch16_224", depth=8),
    images(4, 224),
    classify,
)
add("deit_tiny", "vision transformer", lambda: timm.create_model("deit_tiny_patch16_224"), images(4, 224), classify)
add("swin_tiny", "vision transformer", models.swin_t, images(2, 128), classify)
add("mlp_mixer", "vision mixer", lambda: timm.create_model("mixer_s16_224"), images(4, 224), classify)
add("r3d", "video", r3d, clips(2, 8, 64), classify)
