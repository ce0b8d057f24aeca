"""Stand-ins for functions of PyTorch's C extension; of all others, see `memfit.core.patching`."""

from collections.abc import Mapping
from typing import Any

from memfit.core.patching import Replacement, in_owner
from memfit.frameworks.torch import internals


def in_extension(functions: Mapping[str, Any]) -> list[Replacement]:
    """Stand-ins for functions of PyTorch's C extension, which a build without CUDA lacks."""
    return in_owner(internals.extension, functions)
