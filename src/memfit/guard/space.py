"""The parameters that a search tries: a small language for ranges, and the points drawn from them.

Points don't depend on how many are asked for: the first ten of twenty are those of a search of ten. So a search that is
given more trials later goes on where it ended.
"""

import itertools
import json
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

from memfit.core.errors import BadInput

_DRAWS = 200
"""Draws of a point that has not come yet before the space counts as used up."""
_FORMS = (
    'Give a list of choices, (low, high), ("log", low, high), or a function that takes a random.Random and '
    "returns a value."
)


class Space:
    """What each parameter may be.

    Args:
        given: name to choices, range or function, as `memfit.search` takes them.
    """

    def __init__(self, given: Any) -> None:
        if not isinstance(given, Mapping) or not given:
            raise BadInput(
                f"space must be a dictionary such as {{'lr': ('log', 1e-4, 1e-1)}}, but {given!r} was given. {_FORMS}"
            )
        for name in given:
            if not isinstance(name, str):
                raise BadInput(f"names of parameters must be text, but space has {name!r}.")
        self._draws = {name: _drawn(name, value) for name, value in given.items()}
        self._choices = {name: list(value) for name, value in given.items() if isinstance(value, list)}
        self.described = {name: _described(name, value) for name, value in given.items()}
        """The space as JSON, to tell one search from another."""

    @property
    def grid_size(self) -> int | None:
        """How many points there are; None where a parameter isn't a list of choices."""
        if len(self._choices) < len(self._draws):
            return None
        return math.prod(len(choices) for choices in self._choices.values())

    def points(self, trials: int, seed: int) -> list[dict[str, Any]]:
        """All points where there are no more than `trials`; otherwise as many drawn ones, none of them twice."""
        size = self.grid_size
        if size is not None and size <= trials:
            values = itertools.product(*self._choices.values())
            return _distinct(dict(zip(self._choices, point, strict=True)) for point in values)
        generator = random.Random(seed)
        drawn = ({name: draw(generator) for name, draw in self._draws.items()} for _ in itertools.count())
        found: dict[str, dict[str, Any]] = {}
        in_vain = 0
        while len(found) < trials and in_vain < _DRAWS:
            point = next(drawn)
            key = key_of(point)
            in_vain = in_vain + 1 if key in found else 0
            found.setdefault(key, point)
        return list(found.values())


def key_of(point: Mapping[str, Any]) -> str:
    """The point as text that is the same in every run."""
    return json.dumps(described_point(point), sort_keys=True)


def described_point(point: Mapping[str, Any]) -> dict[str, Any]:
    """The point as JSON: values that JSON doesn't have are named."""
    return {name: _plain(name, value) for name, value in point.items()}


def _distinct(points: Any) -> list[dict[str, Any]]:
    return list({key_of(point): point for point in points}.values())


def _drawn(name: str, value: Any) -> Callable[[random.Random], Any]:
    """How a value is drawn."""
    match value:
        case list():
            if not value:
                raise BadInput(f"the list of choices of {name!r} is empty. {_FORMS}")
            choices = list(value)
            return lambda generator: generator.choice(choices)
        case ("log", low, high):
            return _range(name, value, low, high, logarithmic=True)
        case (low, high):
            return _range(name, value, low, high, logarithmic=False)
    if callable(value):
        draw: Callable[[random.Random], Any] = value
        return draw
    raise BadInput(f"{name!r} is {value!r}, which is none of the forms a parameter can have. {_FORMS}")


def _range(name: str, value: Any, low: Any, high: Any, *, logarithmic: bool) -> Callable[[random.Random], Any]:
    numbers = all(isinstance(end, int | float) and not isinstance(end, bool) for end in (low, high))
    if not numbers or not math.isfinite(low) or not math.isfinite(high) or not low < high:
        raise BadInput(
            f"the range of {name!r} must be two numbers, the lower one first, but {value!r} was given. {_FORMS}"
        )
    if logarithmic and low <= 0:
        raise BadInput(f"the range of {name!r} is logarithmic, so that it must begin above 0, but {value!r} was given.")
    whole = isinstance(low, int) and isinstance(high, int)
    if not logarithmic:
        return lambda generator: generator.randint(low, high) if whole else generator.uniform(low, high)

    def draw(generator: random.Random) -> int | float:
        found = math.exp(generator.uniform(math.log(low), math.log(high)))
        # Rounding may leave the range by one.
        found = float(min(max(found, low), high))
        return round(found) if whole else found

    return draw


def _described(name: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(name, part) for part in value]
    return _plain(name, value)


def _plain(name: str, value: Any) -> Any:
    """A value as JSON has it, or its name."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, list | tuple):
        return [_plain(name, part) for part in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(name, part) for key, part in value.items()}
    if getattr(value, "__qualname__", None) is not None:
        return f"{value.__module__}.{value.__qualname__}"
    text = repr(value)
    if " at 0x" in text:
        raise BadInput(
            f"a value of {name!r} is {text}, which has no name that is the same in the next run. "
            "Give names, and look up the objects in train."
        )
    return text
