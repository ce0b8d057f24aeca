"""Real runs of a user's model and loss that leave no trace in them.

For as long as such runs last, the model works on copies: of its buffers always, of its parameters where they are small
or where a forward pass is known to change them (`nn.Embedding(max_norm=...)`). Other parameters lend their memory to
twins without hooks and gradients, so that an optimizer that steps inside of backward isn't set off. Modules, tensors
and containers that the loss function holds (a teacher, centres of classes, a list of past losses) are treated alike.
"""

import functools
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

from memfit.core.units import MIB
from memfit.frameworks.torch.shapes.stand_in import ShapeCopies, refill, save_contents, swapped
from memfit.frameworks.torch.trace.trace import undisturbed

# Copying more than this would cost memory that a model of that size may not leave.
_COPIED_BYTES = 256 * MIB
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


@contextmanager
def restoring(model: torch.nn.Module, loss: Any = None) -> Iterator[None]:
    """Puts back whatever runs of `model` and `loss` change while it lasts."""
    held = list(held_by(loss))
    modules = [model, *(value for value in held if isinstance(value, torch.nn.Module))]
    copies = _ValueCopies(modules)
    parameters = {id(p): p for module in modules for p in module.parameters()}
    gradients = [(p, p.grad) for p in parameters.values()]
    with ExitStack() as stack:
        stack.enter_context(undisturbed())
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            stack.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
        # Wherever it is called from: this also switches gradients on.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(_kept([value for value in held if not isinstance(value, torch.nn.Module)]))
        for module in modules:
            stack.enter_context(swapped(module, copies))
        for parameter, gradient in gradients:
            stack.callback(setattr, parameter, "grad", gradient)
            parameter.grad = None
        yield


class _ValueCopies(ShapeCopies):
    """One copy with values for each tensor of some modules, keeping ties."""

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        super().__init__()
        self._twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._made: set[int] = set()
        parameters = {id(p): p for module in modules for p in module.parameters() if not _is_lazy(p)}
        total = sum(p.numel() * p.element_size() for p in parameters.values())
        # On a GPU, parameters of recurrent layers are views of one block, which copies wouldn't be.
        on_host = all(p.device.type == "cpu" for p in parameters.values())
        self._copies_all = on_host and total <= _COPIED_BYTES
        self._changing = {
            id(p)
            for module in modules
            for part in module.modules()
            if getattr(part, "max_norm", None) is not None
            for p in part.parameters(recurse=False)
        }

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy of `tensor`, or itself where it is a copy already or of a kind that can't be copied."""
        if id(tensor) in self._made or type(tensor) not in _PLAIN_TYPES or _is_lazy(tensor):
            return tensor
        if id(tensor) not in self._twins:
            twin = self._twin(tensor)
            self._twins[id(tensor)] = (tensor, twin)
            self._made.add(id(twin))
        return self._twins[id(tensor)][1]

    def known(self, tensor: Any) -> torch.Tensor | None:
        """The copy of `tensor` if one was made."""
        return self._twins.get(id(tensor), (None, None))[1]

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        value = tensor.detach()
        if not isinstance(tensor, torch.nn.Parameter):
            return value.clone().requires_grad_(tensor.requires_grad)
        value = value.clone() if self._copies_all or id(tensor) in self._changing else value
        twin = torch.nn.Parameter(value, requires_grad=tensor.requires_grad)
        twin.__dict__.update(tensor.__dict__)
        return twin


def _is_lazy(tensor: torch.Tensor) -> bool:
    return bool(torch.nn.parameter.is_lazy(tensor))


def held_by(value: Any, depth: int = 3) -> Iterator[Any]:
    """What a function can reach: its closure, defaults, the globals it names, the object it is bound to."""
    if isinstance(value, torch.nn.Module | torch.Tensor | dict | list | deque | set):
        yield value
        return
    if value is None or depth == 0 or isinstance(value, type):
        return
    for part in _parts(value):
        yield from held_by(part, depth - 1)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if hasattr(value, "__self__") and hasattr(value, "__func__"):
        return [value.__self__, value.__func__]
    code = getattr(value, "__code__", None)
    if code is None:
        attributes = getattr(value, "__dict__", None)
        is_plain = isinstance(attributes, dict) and not type(value).__module__.startswith(("torch", "builtins"))
        return [attributes, *attributes.values()] if is_plain and attributes is not None else []
    names = getattr(value, "__globals__", {})
    cells = getattr(value, "__closure__", None) or ()
    found = [names[name] for name in code.co_names if name in names]
    for cell in cells:
        with suppress(ValueError):  # not filled yet
            found.append(cell.cell_contents)
    return [*found, *(getattr(value, "__defaults__", None) or ())]


@contextmanager
def _kept(values: list[Any]) -> Iterator[None]:
    """Puts back the contents of containers and tensors."""
    saved: dict[int, tuple[Any, Any]] = {}
    tensors: list[tuple[torch.Tensor, torch.Tensor, Any]] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.numel() * value.element_size() <= _COPIED_BYTES and value.layout is torch.strided:
                tensors.append((value, value.detach().clone(), value.grad if value.is_leaf else None))
        else:
            save_contents(value, saved)
    try:
        yield
    finally:
        refill(saved)
        for tensor, before, gradient in tensors:
            if tensor.is_leaf:
                tensor.grad = gradient
            if not tensor.is_meta and not torch.equal(tensor, before):
                tensor.data.copy_(before)
