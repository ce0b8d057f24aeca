"""Detection with a torchvision model, in the manner of torchvision's reference scripts: metric logger, warm-up."""

import argparse
import datetime
import math
import sys
import time
from collections import defaultdict, deque

import torch
import torch.distributed as dist
import torch.utils.data
import torchvision

parser = argparse.ArgumentParser(description="Detection Training")
parser.add_argument("--model", default="ssdlite320_mobilenet_v3_large")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
parser.add_argument("-b", "--batch-size", default=2, type=int)
parser.add_argument("--images", default=8, type=int)
parser.add_argument("--image-size", default=128, type=int)
parser.add_argument("--epochs", default=1, type=int)
parser.add_argument("-j", "--workers", default=0, type=int)
parser.add_argument("--lr", default=0.002, type=float)
parser.add_argument("--amp", action="store_true")


class SmoothedValue:
    """Tracks a series of values and gives smoothed ones over a window or the whole."""

    def __init__(self, window_size=20, fmt="{median:.4f} ({global_avg:.4f})"):
        self.deque = deque(maxlen=window_size)
        self.total = 0.0
        self.count = 0
        self.fmt = fmt

    def update(self, value, n=1):
        self.deque.append(value)
        self.count += n
        self.total += value * n

    @property
    def median(self):
        return torch.tensor(list(self.deque)).median().item()

    @property
    def global_avg(self):
        return self.total / self.count

    @property
    def max(self):
        return max(self.deque)

    def __str__(self):
        return self.fmt.format(median=self.median, global_avg=self.global_avg, max=self.max)


class MetricLogger:
    def __init__(self, delimiter="\t"):
        self.meters = defaultdict(SmoothedValue)
        self.delimiter = delimiter

    def update(self, **kwargs):
        for k, v in kwargs.items():
            if isinstance(v, torch.Tensor):
                v = v.item()
            assert isinstance(v, (float, int))
            self.meters[k].update(v)

    def log_every(self, iterable, print_freq, header=""):
        start = end = time.time()
        iter_time = SmoothedValue(fmt="{median:.4f}")
        for i, obj in enumerate(iterable):
            yield obj
            iter_time.update(time.time() - end)
            if i % print_freq == 0 or i == len(iterable) - 1:
                eta = datetime.timedelta(seconds=int(iter_time.global_avg * (len(iterable) - i)))
                parts = [f"{header} [{i}/{len(iterable)}]", f"eta: {eta}", f"time: {iter_time}"]
                parts += [f"{name}: {meter}" for name, meter in self.meters.items()]
                if torch.cuda.is_available():
                    parts.append(f"max mem: {torch.cuda.max_memory_allocated() / 1024**2:.0f}")
                print(self.delimiter.join(parts))
            end = time.time()
        print(f"{header} Total time: {datetime.timedelta(seconds=int(time.time() - start))}")


def reduce_dict(input_dict, average=True):
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if world_size < 2:
        return input_dict
    with torch.inference_mode():
        names = sorted(input_dict)
        values = torch.stack([input_dict[k] for k in names], dim=0)
        dist.all_reduce(values)
        if average:
            values /= world_size
        return dict(zip(names, values, strict=True))


class Shapes(torch.utils.data.Dataset):
    def __init__(self, size, image_size):
        self.size, self.image_size = size, image_size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        corner = torch.rand(3, 2, generator=generator) * self.image_size / 2
        boxes = torch.cat([corner, corner + self.image_size / 4], dim=1)
        target = {"boxes": boxes, "labels": torch.randint(1, 5, (3,), generator=generator), "image_id": index}
        return torch.rand(3, self.image_size, self.image_size, generator=generator), target


def train_one_epoch(model, optimizer, data_loader, device, epoch, print_freq, scaler=None):
    model.train()
    metric_logger = MetricLogger(delimiter="  ")
    lr_scheduler = None
    if epoch == 0:
        warmup_iters = min(1000, len(data_loader) - 1)
        lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1e-3, total_iters=warmup_iters)
    for images, targets in metric_logger.log_every(data_loader, print_freq, f"Epoch: [{epoch}]"):
        images = list(image.to(device) for image in images)
        targets = [{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in t.items()} for t in targets]
        with torch.amp.autocast(device.type, enabled=scaler is not None):
            loss_dict = model(images, targets)
            losses = sum(loss for loss in loss_dict.values())
        loss_dict_reduced = reduce_dict(loss_dict)
        losses_reduced = sum(loss for loss in loss_dict_reduced.values())
        loss_value = losses_reduced.item()
        if not math.isfinite(loss_value):
            print(f"Loss is {loss_value}, stopping training")
            print(loss_dict_reduced)
            sys.exit(1)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(losses).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            losses.backward()
            optimizer.step()
        if lr_scheduler is not None:
            lr_scheduler.step()
        metric_logger.update(loss=losses_reduced, **loss_dict_reduced)
        metric_logger.update(lr=optimizer.param_groups[0]["lr"])
    return metric_logger


def main():
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(
        Shapes(args.images, args.image_size),
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        collate_fn=lambda batch: tuple(zip(*batch, strict=True)),
    )
    model = torchvision.models.get_model(args.model, weights=None, weights_backbone=None, num_classes=5)
    model.to(device)
    norm = [p for n, p in model.named_parameters() if p.requires_grad and p.dim() == 1]
    other = [p for n, p in model.named_parameters() if p.requires_grad and p.dim() > 1]
    optimizer = torch.optim.SGD(
        [{"params": other, "weight_decay": 1e-4}, {"params": norm, "weight_decay": 0.0}], lr=args.lr, momentum=0.9
    )
    scaler = torch.amp.GradScaler(device.type) if args.amp and device.type == "cuda" else None
    start_time = time.time()
    for epoch in range(args.epochs):
        train_one_epoch(model, optimizer, loader, device, epoch, 1, scaler)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, "model.pth")
    print(f"Training time {datetime.timedelta(seconds=int(time.time() - start_time))}")


if __name__ == "__main__":
    main()
