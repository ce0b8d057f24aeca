"""The `Trainer` of transformers under a guard.

Its `training_step` runs forward and backward pass of one batch and weighs the loss within the accumulation window by
itself. So it is called as it is, with parts of the batch; the only thing added is a factor on the loss of a part, put
on where every trainer hands its loss to autograd: `accelerator.backward`. Where the trainer divides by the items of the
whole window, the losses of parts add up and the factor is 1. Clipping and the optimizer's step, which come later, are
protected where the trainer calls them, too.
"""

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

from memfit.core import run_events
from memfit.core.errors import BadInput
from memfit.core.settings import Weighting
from memfit.frameworks.torch.guard.library_steps import (
    LibraryLoop,
    MakeGuard,
    StepGuard,
    copied,
    last_checkpoint,
    unwrapped,
    weighed,
)

_log = logging.getLogger("memfit")

# Engines that keep parameters, gradients or updates to themselves.
_ENGINES = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA", "TPU")


class TrainerGuard(LibraryLoop):
    """Guards one `transformers.Trainer`."""

    def __init__(self, trainer: Any, make_guard: MakeGuard) -> None:
        super().__init__(trainer, make_guard)
        self._is_off = False
        self._factor: float | None = None  # by which the loss of the part in work counts; None between two parts
        self._was_weighed = False
        self.is_training = False

    # What the trainer calls.

    def train(self, train: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Runs the trainer's own `train`, from the last checkpoint where a supervisor has started it again."""
        if self.is_training:
            return train(*arguments, **named)
        resumes_from = arguments[0] if arguments else named.get("resume_from_checkpoint")
        if resumes_from in (None, False):
            path = last_checkpoint("the trainer", "Set save_steps in its TrainingArguments to lose less.")
            if path is not None:
                by_place = dict(zip(_TRAIN_ARGUMENTS, arguments, strict=False))
                arguments, named = (), {**named, **by_place, "resume_from_checkpoint": path}
        self.is_training = True
        try:
            return train(*arguments, **named)
        finally:
            self.is_training = False
            self.close()

    def training_step(
        self, step: Callable[..., Any], model: Any, inputs: Any, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """Forward and backward pass of one batch, by the trainer's own `training_step` of its parts."""
        if self._factor is not None:
            return step(model, inputs, *arguments, **named)
        model.train()
        guard = self._guard_of(model)
        if guard is None:
            return step(model, inputs, *arguments, **named)
        num_items = arguments[0] if arguments else named.get("num_items_in_batch")

        def loss(plain: Any, batch: Any) -> Any:
            trainer = self._trainer
            with trainer.compute_loss_context_manager():
                return trainer.compute_loss(plain, trainer._prepare_inputs(copied(batch)), num_items_in_batch=num_items)

        def run(part: Any, factor: float) -> Any:
            self._factor, self._was_weighed = factor, False
            try:
                value = step(model, copied(part), *arguments, **named)
            finally:
                self._factor = None
            if factor != 1.0 and not self._was_weighed:
                raise BadInput(
                    "the trainer's training_step doesn't call accelerator.backward, so that the losses of "
                    "micro-batches can't be weighed. Have it call self.accelerator.backward(loss)."
                )
            return value

        value = guard.passes(
            loss,
            inputs,
            run,
            is_last=bool(self._trainer.accelerator.sync_gradients),
            weighting=_likely_weighting(self._trainer, model, inputs, num_items),
        )
        # A loss of nothing, where the model is.
        return next(model.parameters()).detach().new_zeros(()) if value is None else value

    def saved(self, trial: Any = None) -> None:
        """The trainer has written a checkpoint."""
        trainer = self._trainer
        step = trainer.state.global_step
        path = os.path.join(trainer._get_output_dir(trial=trial), f"checkpoint-{step}")
        if os.path.isdir(path):
            run_events.note("checkpoint", step=step, update=step, path=os.path.abspath(path))

    def close(self) -> None:
        """Leaves the trainer as it was."""
        super().close()
        self._is_off = False

    def _guard_of(self, model: Any) -> StepGuard | None:
        guard, optimizer = self._guard, self._trainer.optimizer
        if guard is not None and guard.model is model and guard.optimizer is unwrapped(optimizer, None)[0]:
            return guard
        if guard is not None:
            # The trainer begins anew, with another model or optimizer.
            self.close()
        if self._is_off:
            return None
        reason = _why_not(self._trainer)
        if reason:
            self._is_off = True
            _log.warning("the trainer is not guarded: %s", reason)
            return None
        accelerator = self._trainer.accelerator
        self._guard = guard = self._make_guard(model, optimizer, scaler=getattr(accelerator, "scaler", None))
        backward = accelerator.backward

        @functools.wraps(backward)
        def weighed_backward(loss: Any, **options: Any) -> Any:
            if self._factor is not None:
                self._was_weighed = True
                loss = weighed(loss, self._factor)
            return backward(loss, **options)

        self.replace(accelerator, "backward", weighed_backward)

        def protected(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            with guard.retrying():
                return function(*arguments, **named)

        for name in ("clip_grad_norm_", "clip_grad_value_"):
            plain = getattr(accelerator, name)
            self.replace(accelerator, name, functools.wraps(plain)(functools.partial(protected, plain)))
        step = optimizer.step

        @functools.wraps(step)
        def guarded_step(*arguments: Any, **named: Any) -> Any:
            if not accelerator.sync_gradients:
                return step(*arguments, **named)
            results = []
            guard.update(lambda: results.append(step(*arguments, **named)), replay=False)
            return results[-1]

        self.replace(optimizer, "step", guarded_step)
        return guard


_TRAIN_ARGUMENTS = ("resume_from_checkpoint", "trial", "ignore_keys_for_eval")


def _why_not(trainer: Any) -> str:
    """Why this trainer can't be guarded, or ""."""
    kind = getattr(trainer.accelerator.distributed_type, "name", "NO")
    if kind in _ENGINES:
        return f"{kind} runs passes and updates by itself."
    if "lomo" in str(getattr(trainer.args, "optim", "")).lower():
        return "LOMO updates parameters in the backward pass."
    return ""


def _likely_weighting(trainer: Any, model: Any, inputs: Any, num_items: Any) -> Weighting:
    """How losses of parts add up, as far as the trainer tells, for where it can't be tried out."""
    divides = getattr(trainer, "model_accepts_loss_kwargs", False) or getattr(trainer, "compute_loss_func", None)
    if num_items is not None and divides:
        return Weighting("sum")
    labels = inputs.get("labels") if hasattr(inputs, "get") else None
    if labels is None or getattr(labels, "dim", lambda: 0)() < 2 or labels.is_floating_point():
        return Weighting()
    name = type(trainer.accelerator.unwrap_model(model)).__name__
    return Weighting("count", "['labels']", -100, 1 if "CausalLM" in name or "LMHead" in name else 0)
