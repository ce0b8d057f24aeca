"""A script that knows nothing of memfit's guards: a Trainer of transformers that writes checkpoints.

With `--fail` memory ends it once, after four steps, outside of a step.
"""

import os
import sys

import torch

from memfit.frameworks.torch.kernels.torchvision_operators import define_missing_operators

define_missing_operators()

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

LENGTH, VOCABULARY = 16, 50


class Fail(TrainerCallback):
    """Runs out of memory once."""

    def on_step_begin(self, args, state, control, **named):
        if state.global_step == 4 and "--fail" in sys.argv and not os.path.exists("failed"):
            with open("failed", "w", encoding="ascii"):
                raise MemoryError


torch.manual_seed(0)
config = GPT2Config(
    n_layer=2, n_head=2, n_embd=16, vocab_size=VOCABULARY, n_positions=LENGTH, bos_token_id=0, eos_token_id=0,
    resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,  # drawn otherwise for micro-batches
)  # fmt: skip
model = GPT2LMHeadModel(config)
tokens = torch.randint(VOCABULARY, (48, LENGTH), generator=torch.Generator().manual_seed(1))
arguments = TrainingArguments(
    "out", per_device_train_batch_size=8, num_train_epochs=1, report_to=[], save_steps=1, disable_tqdm=True,
    use_cpu=True,
)  # fmt: skip
trainer = Trainer(
    model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in tokens], callbacks=[Fail()]
)
trainer.train()
kind = "guarded" if any(base.__name__ == "GuardedTrainerMixin" for base in type(trainer).__mro__) else "plain"
print("finished", kind, sum(float(parameter.detach().double().square().sum()) for parameter in model.parameters()))
