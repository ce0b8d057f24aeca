"""Stand-ins for functions of PyTorch; see `memfit.core.patching`."""

from collections.abc import Mapping
from typing import Any

from memfit.core.patching import Replacement, around, in_owner, replaced
from memfit.frameworks.torch import internals

__all__ = ["Replacement", "around", "in_extension", "in_owner", "replaced"]


def in_extension(functions: Mapping[str, Any]) -> list[Replacement]:
    """Stand-ins for functions of PyTorch's C extension, which a build without CUDA lacks."""
    return in_owner(internals.extension, functions)
