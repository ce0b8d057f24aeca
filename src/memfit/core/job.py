"""A job: everything `memfit estimate FILE.py:function` needs to know about a training step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memfit.core.errors import BadInput
from memfit.core.shown import Shown

AUTOCASTS = ("amp-fp16", "amp-bf16")
PRECISIONS = ("fp32", "fp16", "bf16", *AUTOCASTS)
MODES = ("training", "inference")
OPTIMIZERS = ("none", "sgd", "sgd-momentum", "adam", "adamw", "rmsprop", "adagrad", "adadelta", "adafactor")
"""Optimizers that can be asked for by name."""

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""Modes of `torch.compile`."""

_OTHER_PRECISIONS = {
    "fp32": "32 32-true float32 float full no",
    "fp16": "16-true float16 half",
    "bf16": "bf16-true bfloat16",
    "amp-fp16": "16 16-mixed fp16-mixed mixed-fp16 float16-mixed mixed-float16 amp amp-float16 amp-16 autocast-fp16",
    "amp-bf16": "bf16-mixed mixed-bf16 bfloat16-mixed mixed-bfloat16 amp-bfloat16 autocast-bf16",
}
# More processes than anybody starts would take as long to list as they are many.
_MOST_DEVICES = 2**20
_PRECISION_OF = {other: name for name, others in _OTHER_PRECISIONS.items() for other in others.split()}


def read_precision(given: str) -> str:
    """The precision that is called so by PyTorch, Lightning, Keras or transformers; other texts as they are.

    "fp16" and "bf16" are weights of that type, as everywhere in memfit, though accelerate means autocast by them.

    >>> read_precision("bf16-mixed"), read_precision("torch.float16"), read_precision("fp16"), read_precision("fp7")
    ('amp-bf16', 'fp16', 'fp16', 'fp7')
    """
    name = given.strip().lower().removeprefix("torch.").replace("_", "-")
    return name if name in PRECISIONS else _PRECISION_OF.get(name, given)


@dataclass(frozen=True, slots=True, repr=False)
class Job(Shown):
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
        set_to_none: gradients are freed before each step; None: as `optimizer.zero_grad()` does in the PyTorch that
            the step runs on.
        num_workers: processes that load data.
        prefetch_factor: batches each of them holds ready.
        pin_memory: whether batches pass through pinned memory.
        keep_outputs: the loop holds what the model returned (`outputs = model(...)`) until it returns the next; by
            default it holds what the loss function does.
        data_parallel: devices over which `DistributedDataParallel` trains, with its default buckets for gradients.
        compile: whether `torch.compile` compiles the model, or the mode in which it does: "default", "reduce-overhead",
            "max-autotune" or "max-autotune-no-cudagraphs". A model that is compiled already needs neither.
    """

    model: Any
    loss: Callable[[Any, Any], Any] | None = None
    batch: Any = None
    optimizer: Any = None
    precision: str | None = None
    mode: str = "training"
    name: str = ""
    set_to_none: bool | None = None
    num_workers: int = 0
    prefetch_factor: int = 2
    pin_memory: bool = False
    keep_outputs: bool = False
    data_parallel: int = 1
    compile: bool | str = False

    def __post_init__(self) -> None:
        if isinstance(self.precision, str):
            object.__setattr__(self, "precision", read_precision(self.precision))
        if self.precision is not None and self.precision not in PRECISIONS:
            raise BadInput(f"precision must be one of {', '.join(PRECISIONS)}, but {self.precision!r} was given.")
        if self.mode not in MODES:
            raise BadInput(f"mode must be one of {', '.join(MODES)}, but {self.mode!r} was given.")
        if not isinstance(self.data_parallel, int) or not 1 <= self.data_parallel <= _MOST_DEVICES:
            raise BadInput(
                f"data_parallel is a number of devices, from 1 to {_MOST_DEVICES:,}, but {self.data_parallel!r} was "
                "given. "
                "Leave it out for a single device."
            )
        if not isinstance(self.compile, bool) and self.compile not in COMPILE_MODES:
            raise BadInput(
                f"compile must be True, False or one of {', '.join(COMPILE_MODES)}, but {self.compile!r} was given."
            )
        if self.num_workers < 0 or self.prefetch_factor < 1:
            raise BadInput(
                f"num_workers must be at least 0 and prefetch_factor at least 1, "
                f"but {self.num_workers} and {self.prefetch_factor} were given."
            )

    def summary(self) -> str:
        """Model, mode and precision in one line."""
        name = self.name or getattr(self.model, "__name__", "") or type(self.model).__name__
        name = "a function" if name == "<lambda>" else name
        return f"of {name}: {self.mode}, precision {self.precision or 'as given'}"
