"""The environment variables that memfit reads, in one place."""

import os


def allocator_settings() -> str:
    """The settings of PyTorch's caching allocator, in PyTorch's own syntax; the newer name counts first."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
