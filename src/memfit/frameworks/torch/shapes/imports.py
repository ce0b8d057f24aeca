"""Acts when the script imports a library: what isn't imported costs nothing, and may not be installed."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

Before = Callable[[], None]
After = Callable[[ModuleType], None]


class _Loader(importlib.abc.Loader):
    """A module's own loader, with an action before the module is there and one after its code has run."""

    def __init__(self, plain: Any, before: dict[str, Before], after: After | None) -> None:
        self._plain = plain
        self._before = before
        self._after = after
        self._was_imported = False

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        # Taken out first: the action may import the module itself, whose code must not run twice.
        self._before.pop(spec.name, lambda: None)()
        module = sys.modules.get(spec.name)
        self._was_imported = module is not None
        return self._plain.create_module(spec) if module is None else module

    def exec_module(self, module: ModuleType) -> None:
        # From here on the module is what it is without us.
        module.__loader__ = self._plain
        if module.__spec__ is not None:
            module.__spec__.loader = self._plain
        if not self._was_imported:
            self._plain.exec_module(module)
            after, self._after = self._after, None
            if after is not None:
                after(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


class _ImportWatch(importlib.abc.MetaPathFinder):
    def __init__(self, before: dict[str, Before], after: dict[str, After]) -> None:
        self._before = before
        self._after = after

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        # Libraries ask whether others are there without importing them, so that this may be one of many times.
        if name in sys.modules or (name not in self._before and name not in self._after):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._before, self._after.get(name))
        return spec


def watch_imports(
    after: Mapping[str, After], *, before: Mapping[str, Before] | None = None
) -> importlib.abc.MetaPathFinder:
    """Calls `after[name](module)` when a module has been imported, and `before[name]()` when it is about to be.

    Where it has been imported already, `after` is called at once. It lasts until what is returned is taken out of
    `sys.meta_path`.
    """
    late = {name: action for name, action in after.items() if name not in sys.modules}
    for name in after.keys() - late.keys():
        after[name](sys.modules[name])
    finder = _ImportWatch(dict(before or {}), late)
    sys.meta_path.insert(0, finder)
    return finder


@contextmanager
def on_import(before: Mapping[str, Before], after: Mapping[str, After]) -> Iterator[None]:
    """`watch_imports` while it lasts."""
    finder = watch_imports(after, before=before)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
