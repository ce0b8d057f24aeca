"""Choices made above autograd: what CUDA would do where shape-only tensors would do something else.

PyTorch decides some things by device before autograd sees them: which attention kernel runs, how dropout keeps its
mask, what autocast casts. Shape-only tensors are on no such device. So while a simulation runs, a dispatch key that
nothing else uses (`AutocastPrivateUse1`) is switched on for this thread, and Python kernels registered there stand in
front of those operators, whether Python or C++ calls them. Switched off, the registrations are inert.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memfit.frameworks.torch import internals
from memfit.frameworks.torch.shapes.shapes import Operator

_KEY = internals.DispatchKey.AutocastPrivateUse1
_KEYSET = internals.DispatchKeySet(_KEY)
_BELOW = internals.keyset_after(_KEY)

# An interceptor takes the operator and its arguments and returns the result.
Interceptor = Callable[..., Any]

_library: torch.library.Library | None = None
_fallthrough: torch.library.Library | None = None
_registered: set[str] = set()
_active: dict[str, Interceptor] = {}


def uninterrupted() -> Any:
    """A context in which no operator of this thread is intercepted."""
    return internals.exclude_dispatch_keys(_KEYSET)


def call_plain(op: Operator, *args: Any, **kwargs: Any) -> Any:
    """Calls `op` with the interception off, for the operators it calls in turn as well."""
    with uninterrupted():
        return op(*args, **kwargs)


def overload(name: str) -> Operator:
    """The operator called "linear" or "norm.Scalar"; None where this PyTorch has none."""
    packet, _, suffix = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), suffix or "default", None)


def _register(names: list[str]) -> None:
    global _library, _fallthrough
    if _library is None:
        _library = torch.library.Library("aten", "IMPL")
        _fallthrough = torch.library.Library("_", "IMPL")
        _fallthrough.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in names:
        if name in _registered:
            continue
        op = overload(name)

        def kernel(keys: Any, *args: Any, _name: str = name, _op: Operator = op, **kwargs: Any) -> Any:
            interceptor = _active.get(_name)
            # As in dispatch: tensors are to be seen as what they are.
            with internals.disable_torch_function():
                if interceptor is None:
                    # Registered for another device: the operators it calls in turn may have interceptors on this one.
                    return _op.redispatch(keys & _BELOW, *args, **kwargs)
                return interceptor(_op, *args, **kwargs)

        _library.impl(name, kernel, "AutocastPrivateUse1", with_keyset=True)
        _registered.add(name)


@contextmanager
def intercepting(interceptors: dict[str, Interceptor]) -> Iterator[None]:
    """Puts the interceptors in front of their operators, for this thread and those that are `switched_on`."""
    usable = {name: f for name, f in interceptors.items() if overload(name) is not None}
    _register(list(usable))
    before = dict(_active)
    _active.clear()
    _active.update(usable)
    try:
        with switched_on():
            yield
    finally:
        _active.clear()
        _active.update(before)


@contextmanager
def switched_on() -> Iterator[None]:
    """Lets this thread's operators meet the interceptors."""
    was_excluded = internals.is_dispatch_key_excluded(_KEY)
    internals.set_dispatch_key_excluded(_KEY, False)
    try:
        with internals.include_dispatch_key(_KEY):
            yield
    finally:
        internals.set_dispatch_key_excluded(_KEY, was_excluded)


def switch_off() -> None:
    """Ends the interception in this thread for good, as in a process that was forked off."""
    internals.set_dispatch_key_included(_KEY, False)
    internals.set_dispatch_key_excluded(_KEY, True)
