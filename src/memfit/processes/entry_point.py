"""The script or module to run, found before a process is started for it, and whether memory is enough to start it.

A dry run of a PyTorch script needs its simulated device before the script begins; one of a Keras script needs none. So
the script's text tells whether it trains with Keras, and on which backend.
"""

import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tokenize
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from memfit.core import env
from memfit.core.device import Device, Kind
from memfit.core.errors import BadInput, BadTarget
from memfit.core.units import MIB, format_size
from memfit.processes import process_tree
from memfit.processes.limits import has_devices

# No interpreter needs more before a script has begun; below it, what this one needs is measured.
_SURELY_ENOUGH_BYTES = 256 * MIB
# The caching allocators of PyTorch ask a device for no less.
_DEVICE_SEGMENT_BYTES = 2 * MIB
# Of anything that a script is asked for a number of.
_MOST = 2**31 - 1
_IMPORT = re.compile(r"^\s*(?:from\s+|import\s+(?:[\w.]+(?:\s+as\s+\w+)?\s*,\s*)*)(?:keras|tensorflow)\b", re.MULTILINE)
_CHOICE = re.compile(r"KERAS_BACKEND[\"']\]?\s*(?:,|=)\s*[\"'](\w+)[\"']")
_DEFAULT = "tensorflow"
# A script that trains with PyTorch, whatever it takes from Keras or TensorFlow: a tokenizer, a data set, a log.
_TORCH = re.compile(r"^\s*(?:from|import)\s+torch\b(?s:.*)\.backward\(", re.MULTILINE)
# One that may train with Keras as well runs until its first step; running it then tells whether it has one.
_KERAS_STEP = re.compile(r"GradientTape|value_and_grad|\.train_on_batch\(|\.fit\(|(?<!torch)(?<!\bre)\.compile\(")
# What starts a script, in a process that then says what it has mapped.
_MEASURE = """
import os, importlib, sys
importlib.import_module(sys.argv[1])
from memfit.processes.process_tree import held_by
held = held_by(os.getpid())
print(0 if held is None else held.data_bytes)
"""


def check_budget(budget_bytes: int) -> None:
    """Refuses a budget that no script could begin with."""
    if has_devices():
        needed, what = _DEVICE_SEGMENT_BYTES, "the smallest piece of device memory that PyTorch asks for"
    elif budget_bytes < _SURELY_ENOUGH_BYTES:
        needed, what = _interpreter_bytes(), "what Python itself takes here before the script begins (measured)"
    else:
        return
    if budget_bytes < needed:
        raise BadInput(
            f"a budget of {format_size(budget_bytes)} is less than {format_size(needed)}, {what}. "
            "Give a budget that holds the libraries, model and data of the script as well."
        )


def _interpreter_bytes() -> int:
    """What a process has mapped that is about to run a script; 0 where that can't be found out."""
    try:
        words = [sys.executable, "-c", _MEASURE, process_tree.SUPERVISED[-1]]
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
        return int(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0


def checked_arguments(arguments: Iterable[str], **least: tuple[int, int]) -> tuple[str, ...]:
    """The script's arguments; refuses a single text, and options (value, least) beyond what they can be."""
    for option, (value, smallest) in least.items():
        if value < smallest:
            raise BadInput(f"{option} must be at least {smallest}, but {value} was given.")
        if value > _MOST:
            raise BadInput(f"{option} must be at most {_MOST:,}, but {value} was given.")
    if isinstance(arguments, str):
        raise BadInput(f"arguments must be a list such as {arguments.split()!r}, but the text {arguments!r} was given.")
    return tuple(map(str, arguments))


def simulated(device: Device) -> Device:
    """The device; refuses one on which scripts can't be simulated."""
    if device.kind is not Kind.CUDA:
        raise BadInput(
            f"only CUDA devices can be simulated for a script, but {device.name!r} was given. "
            "Name one, such as device='rtx-3090' (--device rtx-3090); `memfit devices` lists all."
        )
    return device


def find_target(name: str, *, module: bool) -> str:
    """The module, or the path of the script, that a name means; refuses one that Python can't run.

    A bare name that is no file here may be that of an installed program of Python, such as `torchrun`.
    """
    if module:
        spec = _find(name)
        if spec is None:
            raise BadTarget(
                f"there is no module {name!r} in {os.getcwd()!r} or among the installed ones. "
                "Give -m a name that `python -m` knows, or the path of a script without -m."
            )
        if spec.submodule_search_locations is not None and _find(f"{name}.__main__") is None:
            raise BadTarget(f"{name!r} is a package without a __main__ module. Name the module in it that trains.")
        return name
    if not os.path.exists(name) and name == os.path.basename(name):
        # That of this environment, whether or not it is active in the shell.
        name = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name) or name
    if os.path.isdir(name):
        raise BadTarget(f"{name!r} is a folder. Give the path of a Python script, or -m with the name of a module.")
    if not os.path.isfile(name):
        raise BadTarget(f"there is no file {name!r} in {os.getcwd()!r}. Give the path of a Python script.")
    try:
        with tokenize.open(name) as file:
            text = file.read()
        # A script may have any name. One with the right name and a mistake in it is the script's own failure, which
        # Python shows with its line.
        if not name.endswith((".py", ".pyw")):
            compile(text, name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        message = f"{name!r} is not a Python script. Give the file that `python` itself would be given."
        raise BadTarget(message) from None
    except OSError as error:
        raise BadTarget(f"{name!r} can't be read: {error.strerror}. Give a file that can.") from None
    return name


def _find(name: str) -> ModuleSpec | None:
    """What `python -m` would run by that name; imports nothing to find out."""
    parts = name.split(".")
    if not all(parts):
        return None
    # `python -m` looks in the working folder first.
    spec = PathFinder.find_spec(parts[0], [os.getcwd()])
    if spec is None:
        try:
            spec = importlib.util.find_spec(parts[0])
        except ValueError:
            # Already loaded and without a spec, as __main__ is.
            spec = getattr(sys.modules.get(parts[0]), "__spec__", None)
    for depth in range(2, len(parts) + 1):
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(".".join(parts[:depth]), list(spec.submodule_search_locations))
    return spec


def keras_backend(script: str, *, module: bool = False) -> str:
    """The backend on which a script's Keras will run; "" for a script that doesn't train with it."""
    try:
        if module:
            spec = importlib.util.find_spec(script)
            script = "" if spec is None or spec.origin is None else spec.origin
        with tokenize.open(script) as file:
            text = file.read()
    except (ImportError, OSError, SyntaxError, UnicodeDecodeError, ValueError):
        return ""
    text = _without_comments(text)
    if not _IMPORT.search(text):
        return ""
    chosen = _CHOICE.search(text)
    if not chosen and _TORCH.search(text) and not _KERAS_STEP.search(text):
        return ""
    if chosen or env.keras_backend():
        return chosen[1] if chosen else env.keras_backend()
    # What Keras's own file says, as Keras reads it.
    folder = Path(env.keras_home() or os.path.join(os.path.expanduser("~"), ".keras"))
    try:
        configured = json.loads((folder / "keras.json").read_text(encoding="utf-8"))["backend"]
    except (OSError, ValueError, KeyError, TypeError):
        return _DEFAULT
    return configured if isinstance(configured, str) else _DEFAULT


def _without_comments(text: str) -> str:
    """The text of a script without its comments, as far as it is Python."""
    lines = list(io.StringIO(text))
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                lines[row - 1] = lines[row - 1][:column] + "\n"
    except (SyntaxError, tokenize.TokenError):
        # What follows a mistake stays as it is.
        pass
    return "".join(lines)
