"""Image classification with Lightning: module, data loaders, metrics, checkpoints, early stopping."""

import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--image-size", type=int, default=32)
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--num-classes", type=int, default=10)
parser.add_argument("--train-size", type=int, default=32)
parser.add_argument("--val-size", type=int, default=16)
parser.add_argument("--max-epochs", type=int, default=1)
parser.add_argument("--precision", default="32-true")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--learning-rate", type=float, default=1e-3)


class Images(Dataset):
    def __init__(self, size, image_size, num_classes):
        self.size, self.image_size, self.num_classes = size, image_size, num_classes

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, self.image_size, self.image_size, generator=generator), index % self.num_classes


class Residual(nn.Module):
    def __init__(self, channels_in, channels_out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class Classifier(L.LightningModule):
    def __init__(self, width=16, num_classes=10, learning_rate=1e-3, max_epochs=1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            Residual(width, width, 1),
            Residual(width, 2 * width, 2),
            Residual(2 * width, 4 * width, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * width, num_classes),
        )
        self.train_acc = MulticlassAccuracy(num_classes)
        self.val_acc = MulticlassAccuracy(num_classes)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.train_acc(logits, y)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_acc", self.train_acc, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_acc.update(logits, y)
        self.log("val_loss", F.cross_entropy(logits, y), prog_bar=True, sync_dist=True)
        self.log("val_acc", self.val_acc, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.hparams.max_epochs)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch"}}


def main():
    args = parser.parse_args()
    L.seed_everything(7, workers=True)
    train_set = Images(args.train_size, args.image_size, args.num_classes)
    val_set = Images(args.val_size, args.image_size, args.num_classes)
    train_loader = DataLoader(
        train_set, args.batch_size, shuffle=True, num_workers=args.workers, pin_memory=True, drop_last=True
    )
    val_loader = DataLoader(val_set, args.batch_size, num_workers=args.workers)
    model = Classifier(args.width, args.num_classes, args.learning_rate, args.max_epochs)
    checkpoints = ModelCheckpoint(dirpath="checkpoints", monitor="val_acc", mode="max", save_last=True)
    trainer = L.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=1,
        precision=args.precision,
        max_epochs=args.max_epochs,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        callbacks=[checkpoints, LearningRateMonitor("epoch"), EarlyStopping("val_loss", patience=3)],
        logger=CSVLogger("logs"),
    )
    trainer.fit(model, train_loader, val_loader)
    trainer.validate(model, val_loader)
    print("best:", checkpoints.best_model_path, checkpoints.best_model_score)


if __name__ == "__main__":
    main()
