"""Keras runs on PyTorch in the process of the tests, which has it loaded; other backends get processes of their own."""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")
