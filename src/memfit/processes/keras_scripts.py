"""Which scripts train with Keras, and on which backend, told from their text before a process is started for them.

A dry run of a PyTorch script needs its simulated device before the script begins; one of a Keras script needs none.
"""

import importlib.util
import json
import os
import re
import tokenize
from pathlib import Path

from memfit.core import env

_IMPORT = re.compile(r"^\s*(?:from\s+|import\s+(?:[\w.]+(?:\s+as\s+\w+)?\s*,\s*)*)(?:keras|tensorflow)\b", re.MULTILINE)
_CHOICE = re.compile(r"KERAS_BACKEND[\"']\]?\s*(?:,|=)\s*[\"'](\w+)[\"']")
_DEFAULT = "tensorflow"


def keras_backend(script: str, *, module: bool = False) -> str:
    """The backend on which a script's Keras will run; "" for a script that imports neither Keras nor TensorFlow."""
    try:
        if module:
            spec = importlib.util.find_spec(script)
            script = "" if spec is None or spec.origin is None else spec.origin
        with tokenize.open(script) as file:
            text = file.read()
    except (ImportError, OSError, SyntaxError, UnicodeDecodeError, ValueError):
        return ""
    if not _IMPORT.search(text):
        return ""
    chosen = _CHOICE.search(text)
    if chosen or env.keras_backend():
        return chosen[1] if chosen else env.keras_backend()
    # What Keras's own file says, as Keras reads it.
    folder = Path(env.keras_home() or os.path.join(os.path.expanduser("~"), ".keras"))
    try:
        configured = json.loads((folder / "keras.json").read_text(encoding="utf-8"))["backend"]
    except (OSError, ValueError, KeyError, TypeError):
        return _DEFAULT
    return configured if isinstance(configured, str) else _DEFAULT
