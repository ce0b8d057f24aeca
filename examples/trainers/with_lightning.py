"""A LightningModule that finishes with too little memory: `python examples/trainers/with_lightning.py`.

`--plain` leaves the guard out. `--memory 500` allows 500 MiB, not 80, on top of what Python and the libraries hold.
"""

import argparse
import logging
import sys

import lightning.pytorch as lightning
import torch

from memfit.integrations import LightningGuard

BATCH, WIDTH, STEPS = 128, 64, 4


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
        loss = torch.nn.functional.cross_entropy(self.head(self.layers(images).mean((2, 3))), labels)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def limit_memory(mebibytes):
    """Limits this process to what it holds now plus this much."""
    import resource

    with open("/proc/self/status", encoding="ascii") as status:
        used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + mebibytes * 2**20, resource.RLIM_INFINITY))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--memory", type=int, default=80, help="MiB")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(STEPS * BATCH, 3, 16, 16), torch.randint(10, (STEPS * BATCH,)))
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[] if options.plain else [LightningGuard()],
    )  # fmt: skip
    model = Convolutions()
    if sys.platform == "linux":
        limit_memory(options.memory)
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=BATCH))
    print(f"{trainer.global_step} steps, mean loss {trainer.callback_metrics['loss']:.4f}")


if __name__ == "__main__":
    main()
