"""Lets plain code import torchvision in the development environment, whose PyTorch may be another build than it wants.

torchvision's wheels are compiled against the build of PyTorch with CUDA. Beside the CPU build its extension can't be
loaded, `import torchvision` fails, and so do libraries that import it (transformers, timm, lightning). setup.sh puts
this module into the environment's site-packages and has it imported whenever Python starts; nothing is loaded before
torchvision is.
"""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class _Loader:
    """torchvision's own loader, whose second try has the operators that the first one lacked."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._plain.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        from memfit.frameworks.torch.kernels.torchvision_operators import import_with_operators

        import_with_operators(lambda: self._plain.exec_module(module))


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torchvision":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
        return spec


sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
