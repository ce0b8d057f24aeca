"""What the benchmarks of plans share: trainings of the zoo's models, and processes of their own to run them in.

Batches are those of the zoo, repeated where a batch is so small that weights rather than activations fill the memory:
a plan can do little about weights, and nothing of a step would be left to plan.
"""

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks.measure_cpu import NUM_THREADS, make_optimizer
from benchmarks.zoo import CASES, Case

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Training:
    """A case of the zoo with its optimizer.

    Args:
        case: name in the zoo.
        optimizer: one of the zoo's names.
        repeats: how often the zoo's batch is repeated.
    """

    case: str
    optimizer: str = "adamw"
    repeats: int = 1

    @property
    def zoo(self) -> Case:
        """The case itself."""
        return CASES[self.case]

    @property
    def title(self) -> str:
        """Model and batch in words."""
        return f"{self.case} (batch x {self.repeats})" if self.repeats > 1 else self.case


@dataclass(frozen=True, slots=True)
class Made:
    """The live objects of a training."""

    model: nn.Module
    loss: Callable[[Any, Any], Any]
    batch: Any
    optimizer: torch.optim.Optimizer

    @property
    def tensors(self) -> list[Tensor]:
        """Everything that is there before the first step."""
        batch = [leaf for leaf in tree_leaves(self.batch) if isinstance(leaf, Tensor)]
        return [*self.model.parameters(), *self.model.buffers(), *batch]


def make(training: Training, seed: int = 0, dtype: torch.dtype | None = None) -> Made:
    """Builds a training, with equal values each time.

    Args:
        training: what to build.
        seed: of all values.
        dtype: of weights and floating-point inputs; None leaves them.
    """
    torch.set_num_threads(NUM_THREADS)
    torch.manual_seed(seed)
    case = training.zoo
    model = case.build()
    batch = tree_map(lambda leaf: _repeated(leaf, training.repeats, dtype), case.batch())
    if dtype is not None:
        model = model.to(dtype)
    return Made(model, case.loss, batch, make_optimizer(training.optimizer, model))


def _repeated(leaf: Any, repeats: int, dtype: torch.dtype | None) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if repeats > 1 and leaf.dim():
        leaf = torch.cat([leaf] * repeats)
    return leaf.to(dtype) if dtype is not None and leaf.is_floating_point() else leaf


def apart(work: Callable[[], Answer], what: str) -> Answer:
    """The answer of `work`, run in a forked process; the caller must never have run PyTorch, only imported it.

    Args:
        work: what to do; its answer must be plain data.
        what: its name, for the message of a failure.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(work()))
    process.start()
    sender.close()
    try:
        answer: Answer = receiver.recv()
    except EOFError:
        raise RuntimeError(f"{what} failed; its traceback is above") from None
    finally:
        process.join()
    return answer
