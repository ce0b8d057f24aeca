"""U-Net for segmentation: mixed precision, dice score by boolean masks, learning rate lowered on a plateau."""

import argparse
import logging
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import optim
from torch.utils.data import DataLoader, Dataset, random_split

parser = argparse.ArgumentParser(description="Train the UNet on images and target masks")
parser.add_argument("--epochs", "-e", type=int, default=1)
parser.add_argument("--batch-size", "-b", type=int, default=2)
parser.add_argument("--learning-rate", "-l", type=float, default=1e-5, dest="lr")
parser.add_argument("--load", "-f", type=str, default=None, help="load a model from a .pth file")
parser.add_argument("--image-size", type=int, default=64)
parser.add_argument("--width", type=int, default=8)
parser.add_argument("--images", type=int, default=10)
parser.add_argument("--validation", "-v", type=float, default=20.0, help="percent of the data used for validation")
parser.add_argument("--amp", action="store_true", help="use mixed precision")
parser.add_argument("--bilinear", action="store_true")
parser.add_argument("--classes", "-c", type=int, default=2)
parser.add_argument("--workers", type=int, default=0)


class DoubleConv(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.double_conv(x)


class Up(nn.Module):
    def __init__(self, in_channels, out_channels, bilinear):
        super().__init__()
        if bilinear:
            self.up = nn.Sequential(
                nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
                nn.Conv2d(in_channels, in_channels // 2, kernel_size=1),
            )
        else:
            self.up = nn.ConvTranspose2d(in_channels, in_channels // 2, kernel_size=2, stride=2)
        self.conv = DoubleConv(in_channels, out_channels)

    def forward(self, x1, x2):
        x1 = self.up(x1)
        diff_y = x2.size()[2] - x1.size()[2]
        diff_x = x2.size()[3] - x1.size()[3]
        x1 = F.pad(x1, [diff_x // 2, diff_x - diff_x // 2, diff_y // 2, diff_y - diff_y // 2])
        return self.conv(torch.cat([x2, x1], dim=1))


class UNet(nn.Module):
    def __init__(self, n_channels, n_classes, width=64, bilinear=False):
        super().__init__()
        self.n_channels, self.n_classes = n_channels, n_classes
        self.inc = DoubleConv(n_channels, width)
        self.pool = nn.MaxPool2d(2)
        self.down = nn.ModuleList([DoubleConv(width * 2**i, width * 2 ** (i + 1)) for i in range(4)])
        self.up = nn.ModuleList([Up(width * 2 ** (i + 1), width * 2**i, bilinear) for i in reversed(range(4))])
        self.outc = nn.Conv2d(width, n_classes, kernel_size=1)

    def forward(self, x):
        features = [self.inc(x)]
        for down in self.down:
            features.append(down(self.pool(features[-1])))
        x = features.pop()
        for up in self.up:
            x = up(x, features.pop())
        return self.outc(x)


class Shapes(Dataset):
    """Bright discs on noise; their outline is the mask."""

    def __init__(self, size, image_size):
        self.size, self.image_size = size, image_size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        y, x = np.ogrid[: self.image_size, : self.image_size]
        centre = rng.integers(self.image_size, size=2)
        mask = (y - centre[0]) ** 2 + (x - centre[1]) ** 2 < (self.image_size // 4) ** 2
        image = rng.normal(size=(3, self.image_size, self.image_size)) + mask
        return {
            "image": torch.as_tensor(image.copy()).float().contiguous(),
            "mask": torch.as_tensor(mask.copy()).long().contiguous(),
        }


def dice_coeff(input, target, reduce_batch_first=False, epsilon=1e-6):
    assert input.size() == target.size()
    sum_dim = (-1, -2) if input.dim() == 2 or not reduce_batch_first else (-1, -2, -3)
    inter = 2 * (input * target).sum(dim=sum_dim)
    sets_sum = input.sum(dim=sum_dim) + target.sum(dim=sum_dim)
    sets_sum = torch.where(sets_sum == 0, inter, sets_sum)
    dice = (inter + epsilon) / (sets_sum + epsilon)
    return dice.mean()


def dice_loss(input, target):
    return 1 - dice_coeff(input.flatten(0, 1), target.flatten(0, 1), reduce_batch_first=True)


def segmentation_loss(model, images, true_masks, criterion):
    masks_pred = model(images)
    loss = criterion(masks_pred, true_masks)
    loss += dice_loss(
        F.softmax(masks_pred, dim=1).float(),
        F.one_hot(true_masks, model.n_classes).permute(0, 3, 1, 2).float(),
    )
    return loss


@torch.inference_mode()
def evaluate(net, dataloader, device, amp):
    net.eval()
    dice_score, pixel_accuracy = 0, []
    with torch.autocast(device.type if device.type != "mps" else "cpu", enabled=amp):
        for batch in dataloader:
            image = batch["image"].to(device=device, dtype=torch.float32, memory_format=torch.channels_last)
            mask_true = batch["mask"].to(device=device, dtype=torch.long)
            assert mask_true.min() >= 0 and mask_true.max() < net.n_classes, "True mask indices should be in range"
            mask_pred = net(image).argmax(dim=1)
            for c in range(1, net.n_classes):
                predicted, true = mask_pred == c, mask_true == c
                overlap = (predicted & true).sum()
                dice_score += (2 * overlap / (predicted.sum() + true.sum()).clamp(min=1)).item()
            foreground = mask_true > 0
            pixel_accuracy.append((mask_pred[foreground] == mask_true[foreground]).float().mean())
    net.train()
    return dice_score / max(len(dataloader), 1), torch.stack(pixel_accuracy).nanmean().item()


def train_model(model, device, args):
    dataset = Shapes(args.images, args.image_size)
    n_val = int(len(dataset) * args.validation / 100)
    n_train = len(dataset) - n_val
    train_set, val_set = random_split(dataset, [n_train, n_val], generator=torch.Generator().manual_seed(0))
    loader_args = {"batch_size": args.batch_size, "num_workers": args.workers, "pin_memory": True}
    train_loader = DataLoader(train_set, shuffle=True, **loader_args)
    val_loader = DataLoader(val_set, shuffle=False, drop_last=True, **loader_args)

    optimizer = optim.RMSprop(model.parameters(), lr=args.lr, weight_decay=1e-8, momentum=0.999, foreach=True)
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=5)
    grad_scaler = torch.amp.GradScaler(device.type, enabled=args.amp and device.type == "cuda")
    criterion = nn.CrossEntropyLoss()
    global_step = 0
    for epoch in range(1, args.epochs + 1):
        model.train()
        epoch_loss = 0
        for batch in train_loader:
            images, true_masks = batch["image"], batch["mask"]
            assert images.shape[1] == model.n_channels
            images = images.to(device=device, dtype=torch.float32, memory_format=torch.channels_last)
            true_masks = true_masks.to(device=device, dtype=torch.long)
            with torch.autocast(device.type if device.type != "mps" else "cpu", enabled=args.amp):
                loss = segmentation_loss(model, images, true_masks, criterion)
            optimizer.zero_grad(set_to_none=True)
            grad_scaler.scale(loss).backward()
            grad_scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            grad_scaler.step(optimizer)
            grad_scaler.update()
            global_step += 1
            epoch_loss += loss.item()
            logging.info("step %d: loss %.4f", global_step, loss.item())
        for tag, value in model.named_parameters():
            if value.grad is not None and (torch.isinf(value.grad) | torch.isnan(value.grad)).any():
                logging.warning("gradient of %s is not finite", tag)
        val_score, accuracy = evaluate(model, val_loader, device, args.amp)
        scheduler.step(val_score)
        logging.info("epoch %d: loss %.4f, dice %.4f, accuracy %.4f", epoch, epoch_loss, val_score, accuracy)
        Path("checkpoints").mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), f"checkpoints/checkpoint_epoch{epoch}.pth")


def main():
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logging.info(f"Using device {device}")
    model = UNet(n_channels=3, n_classes=args.classes, width=args.width, bilinear=args.bilinear)
    model = model.to(memory_format=torch.channels_last)
    if args.load:
        model.load_state_dict(torch.load(args.load, map_location=device))
    model.to(device=device)
    try:
        train_model(model, device, args)
    except torch.cuda.OutOfMemoryError:
        logging.error("Detected OutOfMemoryError! Try a smaller batch or --amp.")
        torch.cuda.empty_cache()
        raise


if __name__ == "__main__":
    main()
