"""A Trainer of transformers on several processes, of which the last runs out of memory; each prints what it came to."""

import json
import os
from contextlib import nullcontext

import torch

from benchmarks.guard_cases import Faults, Schedule, largest_difference
from memfit import GuardOptions
from memfit.frameworks.torch.kernels.torchvision_operators import define_missing_operators

define_missing_operators()

from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from memfit.integrations import guard_trainer  # noqa: E402

LENGTH, VOCABULARY = 12, 40


def samples():
    generator = torch.Generator().manual_seed(1)
    for _ in range(64):
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        labels = tokens.clone()
        labels[int(torch.randint(2, LENGTH, (1,), generator=generator)) :] = -100
        yield {"input_ids": tokens, "labels": labels}


def train(*, guarded, faults=None):
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=VOCABULARY, n_positions=LENGTH, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).double()
    arguments = TrainingArguments(
        "out", per_device_train_batch_size=8, gradient_accumulation_steps=2, num_train_epochs=2, report_to=[],
        save_strategy="no", disable_tqdm=True, learning_rate=1e-2, optim="sgd", max_grad_norm=0.5, use_cpu=True,
        ddp_backend="gloo", log_level="error",
    )  # fmt: skip

    class Steps(TrainerCallback):
        def on_step_begin(self, args, state, control, **named):
            if faults is not None:
                faults.begin(state.global_step)

    trainer = Trainer(model, arguments, train_dataset=list(samples()), callbacks=[Steps()])
    trainer.remove_callback(PrinterCallback)
    if guarded:
        guard_trainer(trainer, options=GuardOptions(remember=False))
    with faults or nullcontext():
        trainer.train()
    return model


if __name__ == "__main__":
    is_last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
    faults = Faults(Schedule(4, 4, rate=0.2, phases=("forward", "backward")) if is_last else Schedule(0, 0))
    plain = train(guarded=False)
    answer = {
        "without failures": largest_difference(plain, train(guarded=True)),
        "with failures": largest_difference(plain, train(guarded=True, faults=faults)),
        "failures": len(faults.raised),
    }
    # One write, so that lines of processes don't mix.
    os.write(1, (json.dumps(answer) + "\n").encode())
