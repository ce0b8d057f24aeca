"""A transformers Trainer that finishes with too little memory: `python examples/trainers/with_transformers.py`.

`--plain` leaves the guard out. `--memory 500` allows 500 MiB, not 80, on top of what Python and the libraries hold.
"""

import argparse
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from memfit.integrations import GuardedTrainerMixin

BATCH, LENGTH, VOCABULARY, STEPS = 32, 64, 4000, 4


class GuardedTrainer(GuardedTrainerMixin, Trainer):
    """All that changes in a script."""


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
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=64, vocab_size=VOCABULARY, n_positions=LENGTH, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, loss_type="ForCausalLM",
    )  # fmt: skip
    tokens = torch.randint(VOCABULARY, (STEPS * BATCH, LENGTH))
    arguments = TrainingArguments(
        "out/trainer", per_device_train_batch_size=BATCH, num_train_epochs=1, learning_rate=1e-2, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no", log_level="error",
    )  # fmt: skip
    kind = Trainer if options.plain else GuardedTrainer
    trainer = kind(
        GPT2LMHeadModel(config), arguments, train_dataset=[{"input_ids": row, "labels": row} for row in tokens]
    )
    if sys.platform == "linux":
        limit_memory(options.memory)
    result = trainer.train()
    print(f"{result.global_step} steps, mean loss {result.training_loss:.4f}")


if __name__ == "__main__":
    main()
