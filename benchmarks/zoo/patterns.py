"""Ways of training that change memory: checkpointing, tied weights, channels_last, in-place ops, several networks."""

import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.zoo.case import add
from benchmarks.zoo.vision import classify, images

VOCABULARY = 6000


class TiedDecoder(nn.Module):
    """A causal decoder; the vocabulary head is the embedding, and layers may be checkpointed."""

    def __init__(self, recompute: bool, dropout: float, layers: int = 4, width: int = 256) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(256, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout, F.gelu, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token."""
        length = tokens.shape[1]
        x = self.embedding(tokens) + self.position[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        for layer in self.layers:
            x = checkpoint(layer, x, mask, use_reentrant=False) if self.recompute else layer(x, mask)
        logits: Tensor = self.head(x)
        return logits


def next_token(model: nn.Module, batch: Tensor) -> Tensor:
    """Cross entropy of the next token."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class InPlaceNet(nn.Module):
    """A residual network that updates its tensors in place wherever autograd allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, 2, 1)
        self.convs = nn.ModuleList(nn.Conv2d(64, 64, 3, padding=1) for _ in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm2d(64) for _ in range(6))
        self.head = nn.Linear(64, 100)

    def forward(self, x: Tensor) -> Tensor:
        """Class logits."""
        x = F.relu_(self.stem(x))
        for conv, norm in zip(self.convs, self.norms, strict=True):
            y = norm(conv(x))
            y += x
            x = F.leaky_relu_(y.mul_(0.7), 0.1)
        x = x.mean((2, 3)).mul_(2.0)
        logits: Tensor = self.head(x)
        return logits.add_(0.1)


class DropoutNet(nn.Module):
    """Dropout of every kind after every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(3, 48, 3, padding=1),
            nn.ReLU(),
            nn.Dropout2d(0.1),
            nn.Conv2d(48, 48, 3, padding=1),
            nn.ReLU(),
            nn.Dropout(0.2),
        )
        self.dense = nn.Sequential(
            nn.Linear(48 * 16, 1024),
            nn.SELU(),
            nn.AlphaDropout(0.1),
            nn.Linear(1024, 1024),
            nn.GELU(),
            nn.Dropout(0.5, inplace=True),
        )
        self.head = nn.Linear(1024, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Class logits."""
        pooled = F.adaptive_avg_pool2d(self.convs(x), 4).flatten(1)
        logits: Tensor = self.head(self.dense(pooled))
        return logits


class Adversarial(nn.Module):
    """A DCGAN's generator and discriminator, trained in one step."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(100, 4 * width, 4, bias=False),
            nn.BatchNorm2d(4 * width),
            nn.ReLU(True),
            nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(True),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(True),
            nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1),
            nn.LeakyReLU(0.2, True),
            nn.Conv2d(width, 2 * width, 4, 2, 1),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2, True),
            nn.Conv2d(2 * width, 4 * width, 4, 2, 1),
            nn.InstanceNorm2d(4 * width),
            nn.LeakyReLU(0.2, True),
            nn.Flatten(),
            nn.Linear(4 * width * 16, 1),
        )


def adversarial(model: Adversarial, real: Tensor) -> Tensor:
    """Hinge losses of the discriminator and the generator."""
    fake = model.generator(torch.randn(len(real), 100, 1, 1, device=real.device))
    judged_fake, judged_real = model.discriminator(fake.detach()), model.discriminator(real)
    loss: Tensor = F.relu(1 - judged_real).mean() + F.relu(1 + judged_fake).mean() - model.discriminator(fake).mean()
    return loss


class Siamese(nn.Module):
    """A shared encoder with a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torchvision.models.resnet18(num_classes=256)
        self.project = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 128))

    def forward(self, images: Tensor) -> Tensor:
        """Unit vectors."""
        return F.normalize(self.project(self.encoder(images)))


def contrast(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Contrastive loss of two views (NT-Xent)."""
    first, second = (model(view) for view in batch)
    vectors = torch.cat([first, second])
    similarity = vectors @ vectors.T / 0.1
    similarity = similarity.masked_fill(torch.eye(len(vectors), dtype=torch.bool, device=vectors.device), -1e9)
    partner = torch.arange(len(vectors), device=vectors.device).roll(len(first))
    return F.cross_entropy(similarity, partner)


def triplet(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Triplet loss of three views."""
    anchor, positive, negative = (model(view) for view in batch)
    return F.triplet_margin_loss(anchor, positive, negative)


def checkpointed_vit() -> nn.Module:
    """A ViT that recomputes its blocks."""
    model: nn.Module = timm.create_model("vit_tiny_patch16_224")
    model.set_grad_checkpointing()  # type: ignore[operator]
    return model


def last(build: str) -> nn.Module:
    """A torchvision model in channels_last."""
    model: nn.Module = getattr(torchvision.models, build)()
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def last_images(batch_size: int, size: int) -> tuple[Tensor, Tensor]:
    """Random images in channels_last, with labels."""
    inputs, labels = images(batch_size, size)()
    return inputs.contiguous(memory_format=torch.channels_last), labels


def views(count: int) -> tuple[Tensor, ...]:
    """Several random batches of images."""
    return tuple(torch.randn(4, 3, 96, 96) for _ in range(count))


def sentence() -> Tensor:
    """Random token ids."""
    return torch.randint(VOCABULARY, (4, 129))


add("tied_decoder", "weight tying", lambda: TiedDecoder(recompute=False, dropout=0.0), sentence, next_token)
add("dropout_decoder", "dropout", lambda: TiedDecoder(recompute=False, dropout=0.1), sentence, next_token)
add("checkpointed_decoder", "checkpointing", lambda: TiedDecoder(recompute=True, dropout=0.1), sentence, next_token)
add("checkpointed_vit", "checkpointing", checkpointed_vit, images(4, 224), classify)
add("resnet18_channels_last", "channels_last", lambda: last("resnet18"), lambda: last_images(8, 128), classify)
add("mobilenet_channels_last", "channels_last", lambda: last("mobilenet_v2"), lambda: last_images(4, 128), classify)
add("in_place_net", "in place", InPlaceNet, images(8, 96, num_classes=100), classify)
add("dropout_net", "dropout", DropoutNet, images(8, 64, num_classes=10), classify)
add("gan", "adversarial", Adversarial, lambda: torch.randn(16, 3, 32, 32), adversarial)
add("siamese_contrastive", "contrastive", Siamese, lambda: views(2), contrast)
add("siamese_triplet", "contrastive", Siamese, lambda: views(3), triplet)
