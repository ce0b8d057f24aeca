"""A Trainer of transformers without a limit, under one, and under one with a guard; prints how each ends."""

import json

import torch
from forks import forked

from memfit.frameworks.torch.kernels.torchvision_operators import define_missing_operators

define_missing_operators()

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments  # noqa: E402

from memfit.integrations import GuardedTrainerMixin  # noqa: E402

BATCH, LENGTH, VOCABULARY = 32, 64, 4000


class GuardedTrainer(GuardedTrainerMixin, Trainer):
    """What a user writes."""


def train(kind):
    """Trains two steps; a sum over the weights."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=64, vocab_size=VOCABULARY, n_positions=LENGTH, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (2 * BATCH, LENGTH), generator=generator)
    arguments = TrainingArguments(
        "out", per_device_train_batch_size=BATCH, num_train_epochs=1, report_to=[], save_strategy="no",
        disable_tqdm=True, use_cpu=True, learning_rate=1e-2, log_level="error",
    )  # fmt: skip
    kind(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in tokens]).train()
    return sum(float(parameter.detach().double().square().sum()) for parameter in model.parameters())


if __name__ == "__main__":
    # The first run is in this process: libraries import more when they are used for the first time.
    headroom = 64 << 20
    answers = {
        "plain": train(Trainer),
        "plain under the limit": forked(lambda: train(Trainer), headroom),
        "guarded under the limit": forked(lambda: train(GuardedTrainer), headroom),
    }
    print(json.dumps(answers))
