"""The environment variables that memfit reads or sets, in one place."""

import os


def allocator_settings() -> str:
    """The settings of PyTorch's caching allocator, in PyTorch's own syntax; the newer name counts first."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


def set_allocator_settings(text: str) -> None:
    """Gives PyTorch's caching allocator these settings, as long as it hasn't started yet; "" takes them back."""
    name = "PYTORCH_ALLOC_CONF" if "PYTORCH_ALLOC_CONF" in os.environ else "PYTORCH_CUDA_ALLOC_CONF"
    if text:
        os.environ[name] = text
    else:
        os.environ.pop(name, None)
