"""Attributes of other people's modules and classes that are replaced for a time, and put back exactly."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple


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


def put_in_front_once(owner: Any, name: str, other: Callable[..., Any]) -> None:
    """As `put_in_front`; the first to ask wins."""
    if not hasattr(getattr(owner, name), "_memfit_is_in_front"):
        put_in_front(owner, name, other)
        getattr(owner, name)._memfit_is_in_front = True


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
