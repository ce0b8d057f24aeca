"""Fine-tunes a language model or a classifier with the Hugging Face Trainer."""

import argparse
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    set_seed,
)


def get_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=["gpt2", "bert"], default="gpt2")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--min-length", type=int, default=8)
    parser.add_argument("--max-length", type=int, default=32)
    parser.add_argument("--vocab-size", type=int, default=500)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--train-size", type=int, default=16)
    parser.add_argument("--eval-size", type=int, default=8)
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--num-train-epochs", type=float, default=1)
    parser.add_argument("--gradient-accumulation-steps", type=int, default=1)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--eval-steps", type=int, default=2)
    parser.add_argument("--save-steps", type=int, default=2)
    parser.add_argument("--output-dir", default="trainer-out")
    return parser


class TokenDataset(Dataset):
    """Random token ids of varying length, with a label each."""

    def __init__(self, size, min_length, max_length, vocab_size, seed):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(min_length, max_length + 1, size=size)
        self.samples = [rng.integers(3, vocab_size, size=length).tolist() for length in lengths]
        self.labels = rng.integers(2, size=size).tolist()

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return {"input_ids": self.samples[index], "label": self.labels[index]}


@dataclass
class PaddingCollator:
    """Pads a batch to its longest sample; language models predict their own inputs."""

    causal: bool
    pad_token_id: int = 0

    def __call__(self, features):
        longest = max(len(f["input_ids"]) for f in features)
        ids = torch.full((len(features), longest), self.pad_token_id)
        mask = torch.zeros((len(features), longest), dtype=torch.long)
        for row, feature in enumerate(features):
            n = len(feature["input_ids"])
            ids[row, :n] = torch.tensor(feature["input_ids"])
            mask[row, :n] = 1
        labels = ids.masked_fill(mask == 0, -100) if self.causal else torch.tensor([f["label"] for f in features])
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def build_model(args):
    if args.model == "gpt2":
        config = GPT2Config(
            vocab_size=args.vocab_size,
            n_positions=args.max_length,
            n_embd=args.hidden_size,
            n_layer=args.num_layers,
            n_head=args.num_heads,
            bos_token_id=1,
            eos_token_id=2,
        )
        return GPT2LMHeadModel(config)
    config = BertConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_heads,
        intermediate_size=4 * args.hidden_size,
        max_position_embeddings=args.max_length,
        num_labels=2,
    )
    return BertForSequenceClassification(config)


def preprocess_logits(logits, labels):
    return logits.argmax(dim=-1)


def main():
    args = get_parser().parse_args()
    set_seed(42)
    causal = args.model == "gpt2"
    train_dataset = TokenDataset(args.train_size, args.min_length, args.max_length, args.vocab_size, seed=0)
    eval_dataset = TokenDataset(args.eval_size, args.min_length, args.max_length, args.vocab_size, seed=1)

    def compute_metrics(eval_pred):
        predictions, labels = eval_pred
        if causal:
            predictions, labels = predictions[:, :-1], labels[:, 1:]
        kept = labels != -100
        return {"accuracy": float((predictions == labels)[kept].mean())}

    training_args = TrainingArguments(
        output_dir=args.output_dir,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        gradient_checkpointing=args.gradient_checkpointing,
        num_train_epochs=args.num_train_epochs,
        max_steps=args.max_steps,
        learning_rate=5e-4,
        weight_decay=0.01,
        warmup_steps=1,
        lr_scheduler_type="cosine",
        bf16=args.bf16,
        fp16=args.fp16,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=args.eval_steps,
        save_strategy="steps",
        save_steps=args.save_steps,
        save_total_limit=1,
        report_to="none",
    )
    trainer = Trainer(
        model=build_model(args),
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        data_collator=PaddingCollator(causal),
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits,
    )
    result = trainer.train()
    print(result.metrics)
    print(trainer.evaluate())
    trainer.save_model()


if __name__ == "__main__":
    main()
