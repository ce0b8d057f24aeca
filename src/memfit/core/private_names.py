"""Names that a framework doesn't promise to keep: found wherever a version has them, or one clear error.

Each framework's `internals.py` is the one place that uses them.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from memfit.core.errors import MissingDependency


@dataclass(frozen=True)
class PrivateNames:
    """Private names of one framework.

    Args:
        framework: the package that has them, such as "keras".
        tested: versions in which memfit was seen to work, in words.
    """

    framework: str
    tested: str

    def find(self, *places: str) -> Any:
        """What is at the first place that there is.

        Args:
            places: where versions have had it, newest first: "module:name.of.attribute", or with dots alone.
        """
        for place in places:
            try:
                return pkgutil.resolve_name(place)
            except (ImportError, AttributeError):
                continue
        raise self.gone(places[0].replace(":", "."))

    def table(self, paths: Mapping[str, str], known: dict[str, Any]) -> Callable[[str], Any]:
        """The `__getattr__` of a module: looks a name of `paths` up when it is first used, and keeps it in `known`.

        `known` is the `globals()` of that module.
        """

        def look_up(name: str) -> Any:
            if name not in paths:
                raise AttributeError(f"module {known['__name__']!r} has no attribute {name!r}", name=name)
            value = known[name] = self.find(paths[name])
            return value

        return look_up

    def of(self, owner: Any, name: str) -> Any:
        """An attribute of an object of the framework."""
        try:
            return getattr(owner, name)
        except AttributeError:
            raise self.gone(f"{type(owner).__name__}.{name}") from None

    def gone(self, name: str) -> MissingDependency:
        """The error that says that this version lacks a name."""
        version = getattr(importlib.import_module(self.framework), "__version__", "of an unknown version")
        return MissingDependency(
            f"memfit uses {name} of {self.framework}, which is private, and {self.framework} {version} doesn't have "
            f"it. Install {self.framework} {self.tested}, or a later memfit."
        )
