"""Functions of PyTorch that are replaced for the time of a simulation, and put back exactly."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from memfit.frameworks.torch import internals


class Replacement(NamedTuple):
    """`value` stands in for `owner.name`, an attribute of a module or a class that need not be there yet."""

    owner: Any
    name: str
    value: Any


def in_owner(owner: Any, values: Mapping[str, Any]) -> list[Replacement]:
    """Stand-ins for attributes of one owner."""
    return [Replacement(owner, name, value) for name, value in values.items()]


def around(
    owner: Any, name: str, other: Callable[..., Any], is_active: Callable[[], bool] = lambda: True
) -> Replacement:
    """A stand-in for the function `owner.name`: calls `other` with that function first, or the function itself."""
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        return other(plain, *args, **kwargs) if is_active() else plain(*args, **kwargs)

    return Replacement(owner, name, call)


def in_extension(functions: Mapping[str, Any]) -> list[Replacement]:
    """Stand-ins for functions of PyTorch's C extension, which a build without CUDA lacks."""
    return in_owner(internals.extension, functions)


_MISSING = object()


@contextmanager
def replaced(replacements: Iterable[Replacement]) -> Iterator[None]:
    """Puts the stand-ins in place; afterwards every attribute is what and where it was."""
    undone: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, value in replacements:
            # Not getattr: it finds inherited attributes, and gives the function inside a staticmethod.
            before = vars(owner).get(name, _MISSING)
            setattr(owner, name, value)
            undone.append((owner, name, before))
        yield
    finally:
        for owner, name, before in reversed(undone):
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
