"""Image classification in timm's training style: its loader, mixup, optimizer, schedule, scaler, EMA and meters."""

import argparse
import logging
import time
from collections import OrderedDict
from contextlib import suppress
from functools import partial

import numpy as np
import torch
import torch.nn as nn
from PIL import Image
from timm.data import FastCollateMixup, Mixup, create_loader, resolve_data_config
from timm.layers import set_layer_config
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.models import create_model, model_parameters
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import (
    AverageMeter,
    CheckpointSaver,
    ModelEmaV3,
    NativeScaler,
    accuracy,
    dispatch_clip_grad,
    random_seed,
    setup_default_logging,
)

_logger = logging.getLogger("train")

parser = argparse.ArgumentParser(description="timm training")
parser.add_argument("--model", default="resnet18")
parser.add_argument("--num-classes", type=int, default=10)
parser.add_argument("--img-size", type=int, default=64)
parser.add_argument("-b", "--batch-size", type=int, default=8)
parser.add_argument("--train-size", type=int, default=32)
parser.add_argument("--val-size", type=int, default=16)
parser.add_argument("--channels-last", action="store_true")
parser.add_argument("--grad-accum-steps", type=int, default=1)
parser.add_argument("--grad-checkpointing", action="store_true")
parser.add_argument("--opt", default="sgd")
parser.add_argument("--opt-eps", type=float, default=None)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--weight-decay", type=float, default=2e-5)
parser.add_argument("--clip-grad", type=float, default=None)
parser.add_argument("--clip-mode", default="norm")
parser.add_argument("--sched", default="cosine")
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--warmup-epochs", type=int, default=0)
parser.add_argument("--mixup", type=float, default=0.0)
parser.add_argument("--cutmix", type=float, default=0.0)
parser.add_argument("--reprob", type=float, default=0.0)
parser.add_argument("--smoothing", type=float, default=0.1)
parser.add_argument("--no-prefetcher", action="store_true")
parser.add_argument("-j", "--workers", type=int, default=1)
parser.add_argument("--amp", action="store_true")
parser.add_argument("--amp-dtype", default="float16", choices=["float16", "bfloat16"])
parser.add_argument("--model-ema", action="store_true")
parser.add_argument("--model-ema-decay", type=float, default=0.9998)
parser.add_argument("--log-interval", type=int, default=1)
parser.add_argument("--seed", type=int, default=42)


class SyntheticImages(torch.utils.data.Dataset):
    """Noise as PIL images, so that timm's own transforms apply."""

    def __init__(self, size, image_size, num_classes):
        self.size, self.image_size, self.num_classes = size, image_size, num_classes
        self.transform = None

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        pixels = np.random.default_rng(index).integers(256, size=(self.image_size, self.image_size, 3), dtype=np.uint8)
        image = Image.fromarray(pixels)
        if self.transform is not None:
            image = self.transform(image)
        return image, index % self.num_classes


def build_model(args):
    with set_layer_config(scriptable=False):
        model = create_model(args.model, pretrained=False, num_classes=args.num_classes)
    if args.grad_checkpointing:
        model.set_grad_checkpointing(enable=True)
    return model


def build_optimizer(model, args):
    options = {"lr": args.lr, "weight_decay": args.weight_decay, "momentum": args.momentum}
    if args.opt_eps is not None:
        options["eps"] = args.opt_eps
    return create_optimizer_v2(model, opt=args.opt, **options)


def build_loss(args):
    if args.mixup > 0 or args.cutmix > 0:
        return SoftTargetCrossEntropy()
    return LabelSmoothingCrossEntropy(smoothing=args.smoothing) if args.smoothing else nn.CrossEntropyLoss()


def main():
    setup_default_logging()
    args = parser.parse_args()
    args.prefetcher = not args.no_prefetcher
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
    random_seed(args.seed, 0)

    model = build_model(args)
    _logger.info(f"Model {args.model} created, param count:{sum(m.numel() for m in model.parameters())}")
    data_config = resolve_data_config({"img_size": args.img_size}, model=model, verbose=False)
    model.to(device=device)
    if args.channels_last:
        model.to(memory_format=torch.channels_last)
    optimizer = build_optimizer(model, args)

    amp_autocast = suppress
    loss_scaler = None
    if args.amp:
        amp_dtype = torch.bfloat16 if args.amp_dtype == "bfloat16" else torch.float16
        amp_autocast = partial(torch.autocast, device_type=device.type, dtype=amp_dtype)
        if device.type == "cuda" and amp_dtype == torch.float16:
            loss_scaler = NativeScaler(device=device.type)
    model_ema = None
    if args.model_ema:
        model_ema = ModelEmaV3(model, decay=args.model_ema_decay, use_warmup=True)

    dataset_train = SyntheticImages(args.train_size, args.img_size, args.num_classes)
    dataset_eval = SyntheticImages(args.val_size, args.img_size, args.num_classes)
    collate_fn, mixup_fn = None, None
    if args.mixup > 0 or args.cutmix > 0:
        mixup_args = {
            "mixup_alpha": args.mixup,
            "cutmix_alpha": args.cutmix,
            "label_smoothing": args.smoothing,
            "num_classes": args.num_classes,
        }
        if args.prefetcher:
            collate_fn = FastCollateMixup(**mixup_args)
        else:
            mixup_fn = Mixup(**mixup_args)
    loader_train = create_loader(
        dataset_train,
        input_size=data_config["input_size"],
        batch_size=args.batch_size,
        is_training=True,
        re_prob=args.reprob,
        mean=data_config["mean"],
        std=data_config["std"],
        num_workers=args.workers,
        collate_fn=collate_fn,
        pin_memory=True,
        device=device,
        use_prefetcher=args.prefetcher,
    )
    loader_eval = create_loader(
        dataset_eval,
        input_size=data_config["input_size"],
        batch_size=args.batch_size,
        is_training=False,
        mean=data_config["mean"],
        std=data_config["std"],
        num_workers=args.workers,
        pin_memory=True,
        device=device,
        use_prefetcher=args.prefetcher,
    )
    train_loss_fn = build_loss(args).to(device=device)
    validate_loss_fn = nn.CrossEntropyLoss().to(device=device)
    saver = CheckpointSaver(model, optimizer, args=args, model_ema=model_ema, amp_scaler=loss_scaler, max_history=1)
    updates_per_epoch = (len(loader_train) + args.grad_accum_steps - 1) // args.grad_accum_steps
    lr_scheduler, num_epochs = create_scheduler_v2(
        optimizer,
        sched=args.sched,
        num_epochs=args.epochs,
        warmup_epochs=args.warmup_epochs,
        updates_per_epoch=updates_per_epoch,
    )
    _logger.info(f"Scheduled epochs: {num_epochs}.")

    best_metric = None
    for epoch in range(args.epochs):
        train_metrics = train_one_epoch(
            epoch,
            model,
            loader_train,
            optimizer,
            train_loss_fn,
            args,
            device=device,
            lr_scheduler=lr_scheduler,
            amp_autocast=amp_autocast,
            loss_scaler=loss_scaler,
            model_ema=model_ema,
            mixup_fn=mixup_fn,
        )
        eval_metrics = validate(model, loader_eval, validate_loss_fn, args, device=device, amp_autocast=amp_autocast)
        if model_ema is not None:
            validate(model_ema, loader_eval, validate_loss_fn, args, device=device, amp_autocast=amp_autocast)
        best_metric, _ = saver.save_checkpoint(epoch, metric=eval_metrics["top1"])
        lr_scheduler.step(epoch + 1, eval_metrics["top1"])
        _logger.info(f"epoch {epoch}: {train_metrics} {eval_metrics}")
    _logger.info(f"*** Best metric: {best_metric}")


def train_one_epoch(
    epoch,
    model,
    loader,
    optimizer,
    loss_fn,
    args,
    device=None,
    lr_scheduler=None,
    amp_autocast=suppress,
    loss_scaler=None,
    model_ema=None,
    mixup_fn=None,
):
    batch_time_m = AverageMeter()
    losses_m = AverageMeter()
    model.train()
    accum_steps = args.grad_accum_steps
    num_batches_per_epoch = len(loader)
    updates_per_epoch = (num_batches_per_epoch + accum_steps - 1) // accum_steps
    num_updates = epoch * updates_per_epoch
    end = time.time()
    optimizer.zero_grad()
    for batch_idx, (input, target) in enumerate(loader):
        last_batch = batch_idx == num_batches_per_epoch - 1
        need_update = last_batch or (batch_idx + 1) % accum_steps == 0
        if not args.prefetcher:
            input, target = input.to(device), target.to(device)
            if mixup_fn is not None:
                input, target = mixup_fn(input, target)
        if args.channels_last:
            input = input.contiguous(memory_format=torch.channels_last)

        with amp_autocast():
            output = model(input)
            loss = loss_fn(output, target)
        if accum_steps > 1:
            loss /= accum_steps
        if loss_scaler is not None:
            loss_scaler(
                loss,
                optimizer,
                clip_grad=args.clip_grad,
                clip_mode=args.clip_mode,
                parameters=model_parameters(model, exclude_head="agc" in args.clip_mode),
                need_update=need_update,
            )
        else:
            loss.backward()
            if need_update:
                if args.clip_grad is not None:
                    dispatch_clip_grad(model_parameters(model), value=args.clip_grad, mode=args.clip_mode)
                optimizer.step()
        losses_m.update(loss.item() * accum_steps, input.size(0))
        if not need_update:
            continue
        num_updates += 1
        optimizer.zero_grad()
        if model_ema is not None:
            model_ema.update(model, step=num_updates)
        if device.type == "cuda":
            torch.cuda.synchronize()
        batch_time_m.update(time.time() - end)
        end = time.time()
        if last_batch or batch_idx % args.log_interval == 0:
            lr = sum(param_group["lr"] for param_group in optimizer.param_groups) / len(optimizer.param_groups)
            _logger.info(
                f"Train: {epoch} [{batch_idx:>4d}/{num_batches_per_epoch}] Loss: {losses_m.val:#.3g} "
                f"({losses_m.avg:#.3g}) Time: {batch_time_m.val:.3f}s LR: {lr:.3e}"
            )
        lr_scheduler.step_update(num_updates=num_updates, metric=losses_m.avg)
    return OrderedDict([("loss", losses_m.avg)])


def validate(model, loader, loss_fn, args, device=None, amp_autocast=suppress):
    losses_m, top1_m, top5_m = AverageMeter(), AverageMeter(), AverageMeter()
    model.eval()
    with torch.inference_mode():
        for input, target in loader:
            if not args.prefetcher:
                input, target = input.to(device), target.to(device)
            if args.channels_last:
                input = input.contiguous(memory_format=torch.channels_last)
            with amp_autocast():
                output = model(input)
                if isinstance(output, (tuple, list)):
                    output = output[0]
                loss = loss_fn(output, target)
            acc1, acc5 = accuracy(output, target, topk=(1, 5))
            if device.type == "cuda":
                torch.cuda.synchronize()
            losses_m.update(loss.data.item(), input.size(0))
            top1_m.update(acc1.item(), output.size(0))
            top5_m.update(acc5.item(), output.size(0))
    return OrderedDict([("loss", losses_m.avg), ("top1", top1_m.avg), ("top5", top5_m.avg)])


if __name__ == "__main__":
    main()
