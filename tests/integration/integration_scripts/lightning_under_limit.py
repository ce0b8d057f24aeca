"""A LightningModule without a limit, under one, and under one with a guard; prints how each ends."""

import json

import torch
from forks import forked

from memfit.frameworks.torch.kernels.torchvision_operators import define_missing_operators

define_missing_operators()

import lightning.pytorch as lightning  # noqa: E402

from memfit.integrations import LightningGuard  # noqa: E402

BATCH, WIDTH = 128, 64


class Convolutions(lightning.LightningModule):
    """Wide layers on small images."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, WIDTH, 3, padding=1),
            *(torch.nn.Sequential(torch.nn.GELU(), torch.nn.Conv2d(WIDTH, WIDTH, 1)) for _ in range(4)),
        )
        self.head = torch.nn.Linear(WIDTH, 10)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.head(self.layers(images).mean((2, 3))), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(*callbacks):
    """Trains two steps; a sum over the weights."""
    torch.manual_seed(0)
    model = Convolutions()
    data = torch.utils.data.TensorDataset(torch.randn(2 * BATCH, 3, 16, 16), torch.randint(10, (2 * BATCH,)))
    trainer = lightning.Trainer(
        max_epochs=1, logger=False, accelerator="cpu", enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=list(callbacks),
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=BATCH))
    return sum(float(parameter.detach().double().square().sum()) for parameter in model.parameters())


if __name__ == "__main__":
    # The first run is in this process: libraries import more when they are used for the first time.
    headroom = 64 << 20
    answers = {
        "plain": train(),
        "plain under the limit": forked(train, headroom),
        "guarded under the limit": forked(lambda: train(LightningGuard()), headroom),
    }
    print(json.dumps(answers))
