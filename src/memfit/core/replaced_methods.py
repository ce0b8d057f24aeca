"""Methods of other libraries' classes that are replaced for the rest of the process."""

import functools
from collections.abc import Callable
from typing import Any

Instead = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
"""Takes the plain method, the object, and the arguments of the call."""


def replace_method(kind: type, name: str, instead: Instead) -> None:
    """Has a method of a class call `instead`, in the class that defines it; the first to ask wins."""
    owner = next((base for base in kind.__mro__ if name in vars(base)), None)
    if owner is None or hasattr(getattr(owner, name), "_memfit_plain"):
        return
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        return instead(plain, self, arguments, named)

    method._memfit_plain = plain  # type: ignore[attr-defined]
    setattr(owner, name, method)
