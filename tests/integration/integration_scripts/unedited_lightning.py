"""A script that knows nothing of memfit's guards: a LightningModule that writes checkpoints at the ends of epochs.

With `--fail` memory ends it once, in the second epoch, outside of a step.
"""

import os
import sys

import torch

from memfit.frameworks.torch.kernels.torchvision_operators import define_missing_operators

define_missing_operators()

import lightning.pytorch as lightning  # noqa: E402


class Module(lightning.LightningModule):
    """One layer."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def on_train_batch_start(self, batch, batch_idx):
        if self.global_step == 8 and "--fail" in sys.argv and not os.path.exists("failed"):
            with open("failed", "w", encoding="ascii"):
                raise MemoryError

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


torch.manual_seed(0)
model = Module()
data = torch.utils.data.TensorDataset(torch.randn(48, 4), torch.randn(48, 2))
checkpoints = lightning.callbacks.ModelCheckpoint(dirpath="checkpoints", save_last=True)
trainer = lightning.Trainer(
    max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
    callbacks=[checkpoints],
)  # fmt: skip
trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8))
kind = "guarded" if any(type(callback).__name__ == "LightningGuard" for callback in trainer.callbacks) else "plain"
print("finished", kind, sum(float(parameter.detach().double().square().sum()) for parameter in model.parameters()))
