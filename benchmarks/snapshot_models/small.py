"""Two small programs: an image that is optimized against a frozen regressor, and a checkpointed perceptron."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CUDA = "cuda"


def _layer(inputs: int, outputs: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
    return nn.Sequential(convolution, nn.ReLU(), nn.BatchNorm2d(outputs), nn.MaxPool2d(2))


class ImageRegressor(nn.Module):
    """One number of an image with 30 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_layer(30, 16), _layer(16, 32), _layer(32, 64)])
        self.pool = nn.MaxPool2d(32)
        self.dense = nn.Sequential(
            *(nn.Dropout(), nn.Linear(64, 200), nn.ReLU()),
            *(nn.Dropout(), nn.Linear(200, 100), nn.ReLU()),
            *(nn.Dropout(), nn.Linear(100, 20), nn.ReLU()),
        )
        self.last = nn.Linear(20, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The number."""
        for layer in self.layers:
            x = layer(x)
        x = self.pool(x).flatten(1)
        return self.last(self.dense(x))


def _image_distance(image: Tensor, other: Tensor) -> Tensor:
    return torch.mean((image - other) ** 2, dim=(0, 1, 2, 3))


def _label_distance(label: Tensor, other: Tensor) -> Tensor:
    return (label - other) ** 2


def optimize_image(steps: int = 10) -> None:
    """Moves an image away from its label and not from itself, with every gradient looked at for NaN."""
    model = ImageRegressor().to(CUDA).requires_grad_(False)
    # A product before the history begins: its workspace is there already.
    model(torch.zeros(1, 30, 256, 256, device=CUDA))
    label = torch.zeros(1, 1, device=CUDA)
    image = torch.zeros(1, 30, 256, 256).to(CUDA)
    changed = torch.zeros(1, 30, 256, 256).to(CUDA).requires_grad_()
    optimizer = torch.optim.Adam([changed])
    with torch.autograd.set_detect_anomaly(True):
        for _ in range(steps):
            predicted = model(changed)
            loss = _image_distance(changed, image) - _label_distance(predicted, label)
            with torch.no_grad():
                distances = _image_distance(changed, image), -_label_distance(predicted, label)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    del distances


def checkpointed_perceptron() -> None:
    """One forward and backward pass, whose recomputation does not stop early.

    The program ran a changed copy of `torch.utils.checkpoint` that keeps what it recomputes, as a hook does here, and
    had cuBLAS go without a workspace.
    """
    model = nn.Sequential(
        nn.Linear(100, 4096, device=CUDA), nn.Linear(4096, 256, device=CUDA), nn.Linear(256, 10, device=CUDA)
    )
    batch = torch.randn(32, 100, device=CUDA)
    out = checkpoint(model, batch, use_reentrant=False, early_stop=False)
    recomputed: list[Tensor] = []
    for layer in model:
        layer.register_forward_hook(lambda _, inputs, result: recomputed.append(result.detach()))
    out.backward(torch.ones_like(out))
