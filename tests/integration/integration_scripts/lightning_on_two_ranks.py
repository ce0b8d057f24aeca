"""A LightningModule on several processes, of which the last runs out of memory; each prints what it came to."""

import json
import os
from contextlib import nullcontext

import torch

from benchmarks.guard_cases import Faults, Schedule, largest_difference
from memfit import GuardOptions
from memfit.frameworks.torch.kernels.torchvision_operators import define_missing_operators

define_missing_operators()

import lightning.pytorch as lightning  # noqa: E402

from memfit.integrations import LightningGuard  # noqa: E402


class Module(lightning.LightningModule):
    """Three layers."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(3))
        )

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def train(*callbacks, faults=None):
    class Steps(lightning.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if faults is not None and batch_idx % 2 == 0:
                faults.begin(trainer.global_step)

    torch.manual_seed(0)
    model = Module().double()
    data = torch.utils.data.TensorDataset(torch.randn(128, 8).double(), torch.randn(128, 8).double())
    trainer = lightning.Trainer(
        max_epochs=1, logger=False, accelerator="cpu", devices=2, strategy="ddp", accumulate_grad_batches=2,
        gradient_clip_val=0.1, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[*callbacks, Steps()],
    )  # fmt: skip
    with faults or nullcontext():
        trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8))
    return model


if __name__ == "__main__":
    is_last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
    faults = Faults(Schedule(4, 4, rate=0.2, phases=("forward", "backward")) if is_last else Schedule(0, 0))
    # Each of a few operators, of which there are fewer than the schedule counts on.
    faults._schedule.faults = {step: [(kind, n % 5) for kind, n in f] for step, f in faults._schedule.faults.items()}
    plain = train()
    answer = {
        "without failures": largest_difference(plain, train(LightningGuard(options=GuardOptions(remember=False)))),
        "with failures": largest_difference(
            plain, train(LightningGuard(options=GuardOptions(remember=False)), faults=faults)
        ),
        "failures": len(faults.raised),
    }
    # One write, so that lines of processes don't mix.
    os.write(1, (json.dumps(answer) + "\n").encode())
