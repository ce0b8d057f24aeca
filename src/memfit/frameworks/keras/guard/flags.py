"""What has to be set before a backend begins, for running out of memory to be an error and not the end.

TensorFlow takes all memory of a GPU when it first uses it, and JAX three quarters: others on the same device, and
memfit's own figures, then see nothing. oneDNN in TensorFlow ends the process when the host has no memory left, where
TensorFlow's own kernels raise an error. Each can be set only before the backend has begun.
"""

import os
import sys
from typing import Any

from memfit.core import env

_ONEDNN = "TF_ENABLE_ONEDNN_OPTS"
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"


def set_early(*, is_limited: bool) -> list[str]:
    """Sets what is still open in the environment; what was set, in words.

    `is_limited`: the run has a budget, or the host a limit, that it is likely to meet.
    """
    said = []
    if "tensorflow" not in sys.modules and _is_backend():
        if _GROWTH not in os.environ:
            os.environ[_GROWTH] = "true"
            said.append("TensorFlow takes GPU memory as it needs it")
        if is_limited and _ONEDNN not in os.environ:
            os.environ[_ONEDNN] = "0"
            said.append("TensorFlow runs without oneDNN, which ends the process when memory runs out")
    if is_limited and "jax" not in sys.modules and _PREALLOCATE not in os.environ:
        os.environ[_PREALLOCATE] = "false"
        said.append("JAX takes GPU memory as it needs it")
    return said


def set_late(*, is_limited: bool) -> list[str]:
    """Sets what can be set once TensorFlow is loaded and before it has begun; what was set or is too late, in words."""
    said = []
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and hasattr(tensorflow, "config"):
        try:
            devices = tensorflow.config.list_physical_devices("GPU")
            grown = [one for one in devices if not tensorflow.config.experimental.get_memory_growth(one)]
            for one in grown:
                tensorflow.config.experimental.set_memory_growth(one, True)
            if grown:
                said.append("TensorFlow takes GPU memory as it needs it")
        except (RuntimeError, ValueError):
            # It has begun, and took what it wanted.
            pass
        if is_limited and os.environ.get(_ONEDNN) != "0" and _is_backend():
            said.append(
                f"TensorFlow uses oneDNN, which ends the process when the host runs out of memory: set {_ONEDNN}=0 "
                "before TensorFlow is imported, or use `memfit run`"
            )
    return said


def _is_backend() -> bool:
    """Whether TensorFlow is what Keras computes with, or may be: other backends may have it loaded, too."""
    backend: Any = getattr(sys.modules.get("keras"), "backend", None)
    if hasattr(backend, "backend"):
        return bool(backend.backend() == "tensorflow")
    # Keras isn't loaded yet, or is just being.
    return env.keras_backend() in ("", "tensorflow")
