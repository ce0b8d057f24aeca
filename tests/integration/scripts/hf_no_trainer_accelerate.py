"""Trains a text classifier with a plain loop and accelerate: accumulation, clipping, metrics gathered from all."""

import argparse
import math
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import DistilBertConfig, DistilBertForSequenceClassification, get_scheduler

try:
    from tqdm.auto import tqdm
except ImportError:
    tqdm = None

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--gradient-accumulation-steps", type=int, default=2)
parser.add_argument("--mixed-precision", default="no", choices=["no", "fp16", "bf16"])
parser.add_argument("--max-length", type=int, default=32)
parser.add_argument("--min-length", type=int, default=8)
parser.add_argument("--vocab-size", type=int, default=500)
parser.add_argument("--hidden-size", type=int, default=64)
parser.add_argument("--num-layers", type=int, default=2)
parser.add_argument("--num-heads", type=int, default=4)
parser.add_argument("--train-size", type=int, default=16)
parser.add_argument("--eval-size", type=int, default=10)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--learning-rate", type=float, default=5e-5)
parser.add_argument("--max-grad-norm", type=float, default=1.0)
parser.add_argument("--lr-scheduler-type", default="linear")
parser.add_argument("--output-dir", default="accelerate-out")
parser.add_argument("--seed", type=int, default=42)


class Sentences(Dataset):
    def __init__(self, size, args):
        generator = torch.Generator().manual_seed(size)
        lengths = torch.randint(args.min_length, args.max_length + 1, (size,), generator=generator)
        self.samples = [torch.randint(1, args.vocab_size, (int(n),), generator=generator) for n in lengths]
        self.labels = torch.randint(2, (size,), generator=generator)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index], self.labels[index]


def collate_fn(samples):
    ids = torch.nn.utils.rnn.pad_sequence([tokens for tokens, _ in samples], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.stack([y for _, y in samples])}


def build_model(args):
    config = DistilBertConfig(
        vocab_size=args.vocab_size,
        dim=args.hidden_size,
        hidden_dim=4 * args.hidden_size,
        n_layers=args.num_layers,
        n_heads=args.num_heads,
        max_position_embeddings=args.max_length,
        num_labels=2,
    )
    return DistilBertForSequenceClassification(config)


def build_optimizer(model, learning_rate):
    no_decay = ["bias", "LayerNorm.weight", "layer_norm.weight"]
    groups = [
        {
            "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
            "weight_decay": 0.01,
        },
        {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate)


def main():
    args = parser.parse_args()
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision, gradient_accumulation_steps=args.gradient_accumulation_steps
    )
    accelerator.print(accelerator.state)
    set_seed(args.seed)
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)
    accelerator.wait_for_everyone()

    train_dataloader = DataLoader(
        Sentences(args.train_size, args), shuffle=True, collate_fn=collate_fn, batch_size=args.batch_size
    )
    eval_dataloader = DataLoader(Sentences(args.eval_size, args), collate_fn=collate_fn, batch_size=args.batch_size)
    model = build_model(args)
    optimizer = build_optimizer(model, args.learning_rate)
    steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    lr_scheduler = get_scheduler(
        name=args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=1,
        num_training_steps=args.epochs * steps_per_epoch,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    progress = None
    if tqdm is not None:
        progress = tqdm(total=args.epochs * steps_per_epoch, disable=not accelerator.is_local_main_process)

    completed_steps = 0
    for epoch in range(args.epochs):
        model.train()
        total_loss = 0
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                outputs = model(**batch)
                loss = outputs.loss
                total_loss += loss.detach().float()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                completed_steps += 1
                if progress is not None:
                    progress.update(1)
                    progress.set_postfix(loss=f"{loss.item():.3f}")

        model.eval()
        correct, seen, losses = 0, 0, []
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            correct += (predictions == references).sum().item()
            seen += references.shape[0]
            losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(args.batch_size)))
        eval_loss = torch.mean(torch.cat(losses))
        try:
            perplexity = math.exp(eval_loss)
        except OverflowError:
            perplexity = float("inf")
        accelerator.print(
            f"epoch {epoch}: train loss {total_loss.item() / len(train_dataloader):.4f} accuracy {correct / seen:.3f} "
            f"eval loss {eval_loss:.4f} perplexity {perplexity:.2f} steps {completed_steps}"
        )
        accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))

    accelerator.wait_for_everyone()
    unwrapped_model = accelerator.unwrap_model(model)
    unwrapped_model.save_pretrained(
        args.output_dir, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
