"""Keras runs on PyTorch in the process of the tests, which has it loaded; other backends get processes of their own."""

import importlib.util
import os

os.environ.setdefault("KERAS_BACKEND", "torch")

_NEEDS = {
    "test_batch.py": ("keras",),
    "test_job.py": ("keras",),
    "test_jax_backend.py": ("keras", "jax"),
    "test_model.py": ("keras",),
    "test_named.py": ("keras",),
    "test_tensorflow_backend.py": ("keras", "tensorflow"),
    "test_torch_backend.py": ("keras", "torch"),
    "test_untouched.py": ("keras",),
}
collect_ignore = [
    name for name, packages in _NEEDS.items() if any(importlib.util.find_spec(package) is None for package in packages)
]
