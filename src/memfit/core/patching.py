"""Attributes of other people's modules and classes that are replaced for a time, and put back exactly."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

Instead = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
"""Takes the plain method, the object, and the arguments of the call."""


class Replacement(NamedTuple):
    """`value` stands in for `owner.name`, an attribute of a module, a class or an object that need not be there yet."""

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


def put_in_front(owner: Any, name: str, other: Callable[..., Any]) -> None:
    """Has the function `owner.name` call `other`, as `around` does, for as long as the process lives."""
    setattr(*around(owner, name, other))


def replace_method(kind: type, name: str, instead: Instead) -> None:
    """Has a method call `instead` for as long as the process lives, in the class that defines it; the first wins."""
    owner = next((base for base in kind.__mro__ if name in vars(base)), None)
    if owner is not None and not hasattr(vars(owner)[name], "_memfit_is_replaced"):
        put_in_front(owner, name, lambda plain, self, *arguments, **named: instead(plain, self, arguments, named))
        vars(owner)[name]._memfit_is_replaced = True


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
