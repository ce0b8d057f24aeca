"""Whether a model is really gone: what a piece of work has left behind, by whom it is held, and all caches emptied.

Weak references to one model aren't enough. A training leaves an optimizer, a loss with its graph, or a list of
parameters behind, each of which holds the memory of a model that is itself gone. So everything that Python knows of is
looked at, before and after: modules, parameters, and tensors that have a graph. Tensors that are data are no concern:
a data set that is loaded once is there for the next trial.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memfit.adapters.torch import oom
from memfit.adapters.torch.guarding.holders import find_holder
from memfit.core.units import format_size

_SMALL_BYTES = 64 * 1024
"""Less than this isn't worth a word: a cached layer of a library, a metric."""


def watch() -> Callable[[], str]:
    """Remembers what is there now; the function returned frees what it can, then says what is new and held, or ""."""
    # Weak references, for a number alone may be that of another object later.
    before = {id(found): weakref.ref(found) for found in _present()}

    def leftovers() -> str:
        oom.release()
        left = [found for found in _present() if id(found) not in before or before[id(found)]() is not found]
        return _described(left) if left else ""

    return leftovers


def manual_seed(value: int) -> None:
    """Seeds PyTorch's generators, on all devices."""
    torch.manual_seed(value)


def _present() -> Iterator[Any]:
    """Every module, parameter and tensor with a graph."""
    # There are a million objects and few types. isinstance would ask proxies, which may run code of their own.
    counts: dict[type, bool | None] = {}
    for found in gc.get_objects():
        kind = type(found)
        known = counts.get(kind, ...)
        if known is ...:
            known = counts[kind] = _counts(kind)
        if known or (known is None and found.grad_fn is not None):
            yield found


def _counts(kind: type) -> bool | None:
    """Whether objects of a type count; None: those that have a graph."""
    if issubclass(kind, (torch.nn.Module, torch.nn.Parameter)):
        return True
    return None if issubclass(kind, torch.Tensor) else False


def _described(left: list[Any]) -> str:
    """The most telling of the objects left, with its holder."""
    modules = [found for found in left if isinstance(found, torch.nn.Module)]
    children = {id(child) for module in modules for child in module.modules() if child is not module}
    models = [module for module in modules if id(module) not in children]
    graphs = [found for found in left if isinstance(found, torch.Tensor) and found.grad_fn is not None]
    parameters = [found for found in left if isinstance(found, torch.nn.Parameter)]
    held_bytes = _size_bytes([*parameters, *graphs])
    if held_bytes < _SMALL_BYTES:
        return ""
    subject: Any
    if models:
        subject = max(models, key=lambda model: _size_bytes(model.parameters()))
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


def _size_bytes(tensors: Any) -> int:
    sizes = {}
    for tensor in tensors:
        if tensor.layout is torch.strided and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
