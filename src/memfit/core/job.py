"""A job: everything `memfit estimate FILE.py:function` needs to know about a training step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memfit.core.errors import BadInput

AUTOCASTS = ("amp-fp16", "amp-bf16")
PRECISIONS = ("fp32", "fp16", "bf16", *AUTOCASTS)
MODES = ("training", "inference")
OPTIMIZERS = ("none", "sgd", "sgd-momentum", "adam", "adamw", "rmsprop", "adagrad", "adadelta", "adafactor")
"""Optimizers that can be asked for by name."""


@dataclass(frozen=True, slots=True)
class Job:
    """A training or inference step, ready to be estimated.

    Args:
        model: a module, a callable that builds one (built without memory for its weights), a compiled `keras.Model`,
            or a training step of JAX.
        loss: takes the model and a batch and returns the scalar loss; or a criterion such as `nn.CrossEntropyLoss()`,
            for a batch (x, y). None where the model returns its loss, for Keras, which has it from `compile`, and for a
            step of JAX.
        batch: any nesting of tensors, or a callable that makes one for a given batch size; of a step of JAX, the tuple
            of its arguments.
        optimizer: an instance, a callable that takes parameters, or None.
        precision: "fp32", "fp16", "bf16", "amp-fp16", "amp-bf16", or None to leave the model as it is.
        mode: "training" or "inference".
        name: what to call it in reports; the model's class by default.
        set_to_none: gradients are freed before each step, as `optimizer.zero_grad()` does by default.
        num_workers: processes that load data.
        prefetch_factor: batches each of them holds ready.
        pin_memory: whether batches pass through pinned memory.
    """

    model: Any
    loss: Callable[[Any, Any], Any] | None = None
    batch: Any = None
    optimizer: Any = None
    precision: str | None = None
    mode: str = "training"
    name: str = ""
    set_to_none: bool = True
    num_workers: int = 0
    prefetch_factor: int = 2
    pin_memory: bool = False

    def __post_init__(self) -> None:
        if self.precision is not None and self.precision not in PRECISIONS:
            raise BadInput(f"precision must be one of {', '.join(PRECISIONS)}, but {self.precision!r} was given.")
        if self.mode not in MODES:
            raise BadInput(f"mode must be one of {', '.join(MODES)}, but {self.mode!r} was given.")
        if self.num_workers < 0 or self.prefetch_factor < 1:
            raise BadInput(
                f"num_workers must be at least 0 and prefetch_factor at least 1, "
                f"but {self.num_workers} and {self.prefetch_factor} were given."
            )
