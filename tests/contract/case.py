"""What the contract asks of a framework: one small network, built, estimated and trained in the framework's own way.

The network has 5 inputs, 7 hidden units (ReLU) and 3 outputs, in float32; its loss is the mean squared error. All
frameworks begin with the same weights and see the same batches.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import numpy as np

import memfit

INPUTS, HIDDEN, OUTPUTS = 5, 7, 3
NUM_PARAMETERS = INPUTS * HIDDEN + HIDDEN + HIDDEN * OUTPUTS + OUTPUTS
ROWS = 4
# More than any address space has, and less than the exabytes that only damaged sizes ask for.
TOO_MANY_ELEMENTS = 2**46

Data = tuple[np.ndarray, np.ndarray]
Step = Callable[[Data], float]
"""Makes one update with a batch, and returns its loss."""


def data(rows: int = ROWS, seed: int = 0) -> Data:
    """A batch of inputs and targets."""
    generator = np.random.default_rng(seed)
    return tuple(generator.normal(size=(rows, width)).astype("float32") for width in (INPUTS, OUTPUTS))


def first_weights() -> list[np.ndarray]:
    """What training begins with: kernels as (inputs, outputs), each followed by its bias."""
    generator = np.random.default_rng(17)
    shapes = ((INPUTS, HIDDEN), (HIDDEN,), (HIDDEN, OUTPUTS), (OUTPUTS,))
    return [(generator.normal(size=shape) / 2).astype("float32") for shape in shapes]


class Case:
    """The network in one framework, with the user's own objects: a model, an optimizer, a loss function.

    Args:
        optimizer: "adam", or "sgd" with momentum, whose updates don't magnify rounding.
        broken: whether the loss function raises a KeyError.
    """

    lacks: ClassVar[dict[str, str]] = {}
    """Tests that are skipped, by name: what the framework has no notion of."""
    layout_slack: ClassVar[float] = 0.0
    """By how much a step may differ from what two other sizes say of it: a compiler lays out each size for itself."""
    counter_bytes: ClassVar[int] = 0
    """What the optimizer may hold beside two numbers for each parameter: counters, the learning rate."""
    out_of_memory: ClassVar[type[Exception]]
    """What the framework raises when it asks for memory that isn't there."""
    misspelt_job: ClassVar[tuple[str, str]] = ("", "")
    """A name of no job, and the name that is meant."""

    def __init__(self, optimizer: str = "adam", *, broken: bool = False) -> None:
        self.room: int | None = None
        """Samples that memory holds: a pass over more asks for memory that isn't there. None: all."""
        self.fault: Exception | None = None
        """What the next pass raises, once."""

    # Questions.

    def asked(self, batch: Data) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of `memfit.estimate` and `memfit.max_batch`, by place and by name."""
        raise NotImplementedError

    def asked_to_plan(self, batch: Data) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of `memfit.plan`; of `memfit.estimate` for a step whose precision can be chosen."""
        return self.asked(batch)

    def asked_for_inference(self, inputs: np.ndarray) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of `memfit.estimate` for a forward pass."""
        raise NotImplementedError

    def estimate(self, device: Any = "cpu", batch: Data | None = None, **options: Any) -> memfit.Estimate:
        arguments, given = self.asked(data() if batch is None else batch)
        return memfit.estimate(*arguments, **given, device=device, **options)

    def estimate_narrow(self, device: Any) -> memfit.Estimate:
        """Of the step with weights in bfloat16, which is said in the framework's own way."""
        raise NotImplementedError

    def estimate_inference(self, device: Any = "cpu") -> memfit.Estimate:
        arguments, given = self.asked_for_inference(data()[0])
        return memfit.estimate(*arguments, **given, device=device)

    def max_batch(self, device: Any, **options: Any) -> memfit.MaxBatch:
        arguments, given = self.asked(data())
        return memfit.max_batch(*arguments, **given, device=device, **options)

    def plan(self, batch: Data, budget: str | int) -> memfit.Plan:
        arguments, given = self.asked_to_plan(batch)
        return memfit.plan(*arguments, **given, device="cpu", budget=budget, options=memfit.PlanOptions(measure=False))

    # Training.

    def plain(self) -> Step:
        """The framework's own update, without memfit."""
        raise NotImplementedError

    def fitted(self, plan: memfit.Plan) -> Step:
        """The update that a plan was applied to."""
        raise NotImplementedError

    def guarded(self) -> AbstractContextManager[Step]:
        """The update under a guard."""
        raise NotImplementedError

    def make_bad_guard(self) -> None:
        """Asks for a guard whose micro-batches are empty."""
        raise NotImplementedError

    def weights(self) -> list[np.ndarray]:
        """Copies of the weights, in the order and layout of `first_weights`."""
        raise NotImplementedError

    def numbers(self) -> list[bytes]:
        """Every number of the user's: weights, gradients and optimizer state."""
        raise NotImplementedError

    def identities(self) -> list[Any]:
        """Which objects the user's are, and what can be seen of their state."""
        raise NotImplementedError

    # Errors.

    def oom_errors(self) -> list[Exception]:
        """Errors that say that memory ran out, as the framework words them."""
        raise NotImplementedError

    def impostors(self) -> list[Exception]:
        """Errors of the framework's own types that talk of resources, and aren't about memory."""
        raise NotImplementedError

    def raise_fault(self) -> None:
        """At the beginning of a pass: raises what was asked for."""
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault

    def is_too_much(self, rows: int) -> bool:
        return self.room is not None and rows > self.room
