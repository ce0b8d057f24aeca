"""Acts when the script imports a library: what isn't imported costs nothing, and may not be installed."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from types import ModuleType
from typing import Any

After = Callable[[ModuleType], None]


class _Loader(importlib.abc.Loader):
    """A module's own loader, and an action afterwards."""

    def __init__(self, plain: Any, action: After | None) -> None:
        self._plain = plain
        self._action = action

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._plain.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        # From here on the module is what it is without us.
        module.__loader__ = self._plain
        if module.__spec__ is not None:
            module.__spec__.loader = self._plain
        self._plain.exec_module(module)
        action, self._action = self._action, None
        if action is not None:
            action(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


class _Imported(importlib.abc.Loader):
    """Gives a module that was imported while it was looked for: its code must not run twice."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spec.loader if self._spec else None, name)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, before: Mapping[str, Callable[[], None]], after: dict[str, After]) -> None:
        self._before = dict(before)
        self._after = after

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        early = self._before.pop(name, None)
        if early is not None:
            early()
            module = sys.modules.get(name)
            if module is not None and module.__spec__ is not None:
                # The import goes on with the specification that the module has by now.
                module.__spec__, loader = copy(module.__spec__), _Imported(module)
                module.__spec__.loader = loader
                return module.__spec__
        # Libraries ask whether others are there without importing them, so that this may be one of many times.
        late = None if name in sys.modules else self._after.get(name)
        if late is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, late)
        return spec


def watch_imports(
    after: Mapping[str, After], *, before: Mapping[str, Callable[[], None]] | None = None
) -> importlib.abc.MetaPathFinder:
    """Calls `after[name](module)` when a module has been imported, and `before[name]()` when it is about to be.

    Where it has been imported already, `after` is called at once. It lasts until what is returned is taken out of
    `sys.meta_path`.
    """
    late = {name: action for name, action in after.items() if name not in sys.modules}
    for name in after.keys() - late.keys():
        after[name](sys.modules[name])
    finder = _Finder(before or {}, late)
    sys.meta_path.insert(0, finder)
    return finder


@contextmanager
def on_import(before: Mapping[str, Callable[[], None]], after: Mapping[str, After]) -> Iterator[None]:
    """`watch_imports` while it lasts."""
    finder = watch_imports(after, before=before)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
