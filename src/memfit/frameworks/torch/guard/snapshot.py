"""What a replay of a step needs back: random states, and the buffers and attributes that a forward pass changes.

Parameters and the optimizer's state don't change before the update, gradients are made again, and most buffers are
constants. So a snapshot is some kilobytes: until a step has gone well, all buffers are copied, for any may be one that
changes; afterwards those that have changed, the statistics of norms, and of the others as many as cost next to nothing,
for a buffer may change for the first time late. Whether one has changed is seen by its values in the first step:
PyTorch's own count of writes misses those of some kernels and those through `.data`.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from memfit.core.guarding import BrokenUpdate
from memfit.frameworks.torch import internals

# Of the memory of the parameters, what copies of buffers that have not changed so far may take.
_SPARE_SHARE = 0.002
_SPARE_BYTES = 64 * 1024
_CONTAINERS = (list, dict, set, deque)
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.Tensor, tuple, *_CONTAINERS)


def _cuda_states() -> list[torch.Tensor]:
    has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.cuda.get_rng_state_all() if has_cuda else []


def _set_cuda_states(states: list[torch.Tensor]) -> None:
    """Sets the generators of the devices that are here; there may be fewer than when the states were read."""
    present = states[: torch.cuda.device_count() if torch.cuda.is_available() else 0]
    if present:
        torch.cuda.set_rng_state_all(present)


_GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "python": (random.getstate, random.setstate),
    "torch_cpu": (torch.get_rng_state, torch.set_rng_state),
    "cuda": (_cuda_states, _set_cuda_states),
    "numpy": (numpy.random.get_state, numpy.random.set_state),
}
"""All that a training step may draw from: (what reads the state, what sets it)."""


@dataclass(frozen=True, slots=True)
class RandomState:
    """The states of all generators that a training step may draw from, as plain data and tensors, by their names."""

    states: dict[str, Any]

    @classmethod
    def now(cls) -> "RandomState":
        """The states at this moment."""
        return cls({name: read() for name, (read, _) in _GENERATORS.items()})

    def restore(self, but: frozenset[str] = frozenset()) -> None:
        """Sets all generators back, but for those named."""
        for name, (_, write) in _GENERATORS.items():
            if name not in but:
                write(self.states[name])

    def unchanged_since(self, earlier: "RandomState") -> frozenset[str]:
        """Names of the generators that nobody has drawn from since then."""
        return frozenset(name for name, state in self.states.items() if _is_same(state, earlier.states[name]))


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and {*map(type, one)} != {int}:
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return numpy.array_equal(one, other) if isinstance(one, numpy.ndarray) else bool(one == other)


class Buffers:
    """The buffers of a model, and copies of those that change."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._changing: set[str] | None = None
        """Names of buffers that have changed so far; None until a step has gone well."""
        self._copies: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._versions: dict[str, tuple[torch.Tensor, int]] = {}
        self._changed: set[str] = set()  # in the last step

    def remember(self) -> None:
        """A step begins."""
        present = dict(self._model.named_buffers())
        copied = set(present)
        if self._changing is not None:
            copied = self._changing | self._smallest(present) | self._of_norms()
        self._copies = {name: (buffer, buffer.detach().clone()) for name, buffer in present.items() if name in copied}
        self._versions = {name: (buffer, internals.version_of(buffer)) for name, buffer in present.items()}

    @property
    def size_bytes(self) -> int:
        """Bytes of the copies."""
        return sum(copy.numel() * copy.element_size() for _, copy in self._copies.values())

    def restore(self) -> None:
        """Gives all buffers their values of then; one that changed and never did before is a BrokenUpdate."""
        present = dict(self._model.named_buffers())
        with torch.no_grad():
            for name, (buffer, copy) in self._copies.items():
                if present.get(name) is not buffer:
                    # The module has put another tensor in its place.
                    owner, _, last = name.rpartition(".")
                    internals.buffers_of(self._model.get_submodule(owner))[last] = buffer
                buffer.copy_(copy)
        lost = next((name for name in self._written(present) if name not in self._copies), None)
        if lost is not None:
            self._changing = (self._changing or set()) | {lost}
            raise BrokenUpdate(
                f"memory ran out in a step that changed the buffer {lost!r} for the first time, so that its value "
                "before the step is lost. Resume from the last checkpoint; from then on it is kept."
            )
        # What the copies restore has been written to, which is no change.
        self._versions = {name: (buffer, internals.version_of(buffer)) for name, (buffer, _) in self._versions.items()}

    def forget(self) -> None:
        """The step went well."""
        changed = set(self._written(dict(self._model.named_buffers())))
        if self._changing is None:
            # What can't be compared counts as changed.
            changed |= {
                name
                for name, (left, right) in self._copies.items()
                if left.layout is not torch.strided or left.shape != right.shape or not torch.equal(left, right)
            }
        self._changed, self._changing = changed, changed | (self._changing or set())
        self._copies.clear()
        self._versions.clear()

    def changed(self) -> set[str]:
        """Names of the buffers that the step, or the last one, has changed, but for the statistics of norms."""
        return (set(self._written(dict(self._model.named_buffers()))) or self._changed) - self._of_norms()

    def _of_norms(self) -> set[str]:
        norms = ((path, part) for path, part in self._model.named_modules() if isinstance(part, internals.NormBase))
        return {f"{path}.{name}".lstrip(".") for path, norm in norms for name in internals.buffers_of(norm)}

    def _written(self, present: dict[str, torch.Tensor]) -> Iterator[str]:
        """Names of buffers that were written to or replaced since the step began, as far as PyTorch counts."""
        for name, (buffer, version) in self._versions.items():
            if internals.version_of(buffer) != version or present.get(name) is not buffer:
                yield name

    def _smallest(self, present: dict[str, torch.Tensor]) -> set[str]:
        """The smallest buffers, as many as are worth their memory."""
        left = max(_SPARE_BYTES, _SPARE_SHARE * sum(p.numel() * p.element_size() for p in self._model.parameters()))
        names = set()
        for size, name in sorted((b.numel() * b.element_size(), name) for name, b in present.items()):
            left -= size
            if left < 0:
                break
            names.add(name)
        return names


class Attributes:
    """Plain attributes of a model's modules: the hidden state of the last batch, a counter, a list of losses.

    Values are kept by reference and containers by shallow copies, which take hardly any memory. PyTorch's
    own modules have none that a pass changes.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._values: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._changed: set[str] = set()  # in the last step

    def remember(self) -> None:
        """A step begins."""
        own = (module for module in self._model.modules() if not type(module).__module__.startswith("torch."))
        self._values = [(vars(module), dict(_plain(vars(module)))) for module in own]
        containers = {id(v): v for _, values in self._values for v in values.values() if isinstance(v, _CONTAINERS)}
        self._contents = [(container, container.copy()) for container in containers.values()]

    def restore(self) -> None:
        """All attributes have the values they had when the step began."""
        for own, values in self._values:
            for name, value in list(_plain(own)):
                if name not in values:
                    del own[name]
                elif values[name] is not value:
                    own[name] = values[name]
        for container, contents in self._contents:
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(contents)

    def forget(self) -> None:
        """The step went well."""
        self._changed = self._counted()
        self._values, self._contents = [], []

    def changed(self) -> set[str]:
        """Names of the numbers that the step, or the last one, has changed."""
        return self._counted() or self._changed

    def _counted(self) -> set[str]:
        numbers = ((own, n, v) for own, values in self._values for n, v in values.items() if type(v) in (int, float))
        # What has become a tensor is no counter, and comparing it would wait for the device.
        return {
            name
            for own, name, value in numbers
            if own.get(name) is not value and type(own.get(name)) in (int, float) and own[name] != value
        }


class WindowSnapshot:
    """What a window changes in a model, and in modules that only the loss knows: a discriminator, learned centres."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._known = {model: (Buffers(model), Attributes(model))}
        self._begun: set[torch.nn.Module] = set()

    def begin(self) -> None:
        """A window begins."""
        self._forget_others()
        for part in self._known[self._model]:
            part.remember()
        self._begun.add(self._model)

    def include(self, modules: Iterable[torch.nn.Module]) -> None:
        """These take part in the window from here on."""
        new = {module for module in modules if module not in self._begun}
        for module in new.difference(self._model.modules()) if new else ():
            parts = self._known.get(module) or (Buffers(module), Attributes(module))
            for part in parts:
                part.remember()
            self._known[module] = parts
            self._begun.add(module)

    @property
    def size_bytes(self) -> int:
        """Bytes of the copies."""
        return sum(self._known[module][0].size_bytes for module in self._begun)

    def changed(self) -> list[str]:
        """Names of what passes of the window, or of the last one, have changed, but for the statistics of norms."""
        return sorted(name for parts in self._known.values() for part in parts for name in part.changed())

    def restore(self) -> None:
        """All is as it was when the window began, or when a module came into it."""
        for module in self._begun:
            for part in self._known[module]:
                part.restore()

    def forget(self) -> None:
        """The window went well."""
        if self._model in self._begun:
            for part in self._known[self._model]:
                part.forget()
        self._forget_others()

    def _forget_others(self) -> None:
        others = self._begun - {self._model}
        for module in others:
            for part in self._known[module]:
                part.forget()
        # What has taken no part in the window may be gone for good.
        self._known = {module: self._known[module] for module in (self._model, *others)}
        self._begun = set()


def _plain(own: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The attributes of a module that its code may change, without those that belong to every module."""
    return ((name, value) for name, value in own.items() if name not in _OF_ALL_MODULES and isinstance(value, _PLAIN))


_OF_ALL_MODULES = frozenset(vars(torch.nn.Module()))
