"""Packages that a script finds while it is simulated, in the place of some that only a machine with a GPU has."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

# PyTorch, whose compiler would take a stand-in for the real package.
_NOT_FOR = "torch"


@dataclass(frozen=True, slots=True)
class Package:
    """A stand-in for an installable package.

    Args:
        name: by which it is imported.
        version: that it says it has.
        modules: what its modules hold, by their full names; a module that isn't named can be imported only where
            `other` makes up what it holds.
        other: what a module answers for a name that it doesn't hold; None: it has no such name.
    """

    name: str
    version: str
    modules: Mapping[str, Mapping[str, Any]]
    other: Callable[[str], Any] | None = None


class _Module(ModuleType):
    """A module of a stand-in."""

    def __getattr__(self, name: str) -> Any:
        other: Callable[[str], Any] | None = vars(self).get("__other__")
        if name.startswith("__") or other is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        found = other(f"{self.__name__}.{name}")
        setattr(self, name, found)
        return found


class _Metadata(Distribution):
    """What `importlib.metadata` says of a stand-in: libraries ask it for versions."""

    def __init__(self, package: Package) -> None:
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {package.name.replace('_', '-')}\nVersion: {package.version}\n",
            "top_level.txt": f"{package.name}\n",
        }

    def read_text(self, filename: str) -> str | None:
        return self._texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        return Path(path)


class _StandInFinder(DistributionFinder, Loader):
    def __init__(self, package: Package) -> None:
        self._package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package = self._package
        if name.partition(".")[0] != package.name or (name not in package.modules and package.other is None):
            return None
        if _importer().partition(".")[0] == _NOT_FOR:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _Module(spec.name)
        vars(module).update(
            __version__=self._package.version, __other__=self._package.other, **self._package.modules.get(spec.name, {})
        )
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Loads what comes with the package itself."""
        for name in self._package.modules:
            # Not what it holds itself under that name, as Triton's `runtime.driver`.
            if name.rpartition(".")[0] == module.__name__ and name.rpartition(".")[2] not in vars(module):
                importlib.import_module(name)

    def find_distributions(self, context: Any = None) -> Iterable[Distribution]:
        wanted = getattr(context, "name", None)
        if wanted is None or wanted.replace("-", "_") == self._package.name:
            return [_Metadata(self._package)]
        return []


def _importer() -> str:
    """The module whose import this is."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] != "importlib" and name != __name__:
            return name
        frame = frame.f_back
    return ""


@contextmanager
def standing_in(package: Package) -> Iterator[None]:
    """While it lasts, the stand-in is found where no such package is installed."""
    # A module that a program has put there itself may have no specification, which `find_spec` refuses.
    if package.name in sys.modules or importlib.util.find_spec(package.name) is not None:
        yield
        return
    finder = _StandInFinder(package)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.meta_path.remove(finder)
        for name, module in list(sys.modules.items()):
            if isinstance(module, _Module) and name.partition(".")[0] == package.name:
                del sys.modules[name]


@contextmanager
def hidden() -> Iterator[None]:
    """While it lasts, stand-ins that were imported are gone: those still to be imported are never found by PyTorch."""
    imported = {name: module for name, module in sys.modules.items() if isinstance(module, _Module)}
    for name in imported:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.modules.update(imported)
