"""Whether a model is really gone: what a piece of work has left behind, by whom it is held, and all caches emptied.

Weak references to one model aren't enough. A training leaves an optimizer, a loss with its graph, or a list of
parameters behind, each of which holds the memory of a model that is itself gone. So everything that Python knows of is
looked at, before and after: modules, parameters, and tensors that have a graph. Tensors that are data are no concern:
a data set that is loaded once is there for the next trial.
"""

import gc
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memfit.core.oom import clear_frames, recognise
from memfit.core.units import format_size
from memfit.frameworks.torch.guard.available_memory import storage_bytes
from memfit.frameworks.torch.guard.holders import find_holder
from memfit.frameworks.torch.guard.parameters import read, write
from memfit.frameworks.torch.oom import release

__all__ = ["clear_frames", "read", "recognise", "seed", "watch", "write"]

_SMALL_BYTES = 64 * 1024  # less than this isn't worth a word: a cached layer of a library, a metric


def watch() -> Callable[[], str]:
    """Remembers what is there now; the function returned frees what it can, then says what is new and held, or ""."""
    # Weak references, for a number alone may be that of another object later.
    before = {id(held): weakref.ref(held) for held in _present()}

    def leftovers() -> str:
        release()
        left = [held for held in _present() if id(held) not in before or before[id(held)]() is not held]
        return _described(left) if left else ""

    return leftovers


def seed(value: int) -> None:
    """Seeds the generators of Python, of NumPy where it is loaded, and of PyTorch on all devices."""
    random.seed(value)
    torch.manual_seed(value)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(value)


def _present() -> Iterator[Any]:
    """Every module, parameter and tensor with a graph."""
    # There are a million objects and few types. isinstance would ask proxies, which may run code of their own.
    counts: dict[type, bool | None] = {}
    for held in gc.get_objects():
        kind = type(held)
        if kind not in counts:
            counts[kind] = issubclass(kind, (torch.nn.Module, torch.nn.Parameter))
            if not counts[kind] and issubclass(kind, torch.Tensor):
                counts[kind] = None  # those that have a graph
        if counts[kind] or (counts[kind] is None and held.grad_fn is not None):
            yield held


def _described(left: list[Any]) -> str:
    """The most telling of the objects left, with its holder."""
    modules = [held for held in left if isinstance(held, torch.nn.Module)]
    children = {id(child) for module in modules for child in module.modules() if child is not module}
    models = [module for module in modules if id(module) not in children]
    graphs = [held for held in left if isinstance(held, torch.Tensor) and held.grad_fn is not None]
    parameters = [held for held in left if isinstance(held, torch.nn.Parameter)]
    held_bytes = storage_bytes([*parameters, *graphs])
    if held_bytes < _SMALL_BYTES:
        return ""
    subject: Any
    if models:
        subject = max(models, key=lambda model: storage_bytes(model.parameters()))
        what = f"its model {type(subject).__name__}"
        advice = "Keep results, not the model; trial.keep(model) keeps the best parameters on disk."
    elif graphs:
        subject = graphs[0]
        what = f"a tensor of shape {tuple(subject.shape)} with the graph that made it"
        advice = "Keep tensor.item() or tensor.detach() instead."
    else:
        subject = max(parameters, key=lambda parameter: parameter.numel())
        what = f"a parameter of shape {tuple(subject.shape)}"
        advice = "An optimizer or a list of parameters may be what was kept."
    del models
    holder = find_holder(subject, [left, modules, graphs, parameters]) or "nothing that Python knows of"
    return f"{what} is still in memory ({format_size(held_bytes)} of parameters): {holder} holds it. {advice}"
