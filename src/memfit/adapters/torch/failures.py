"""Failures of the user's own step, told in one message with the user's own line."""

import linecache
import os
import re
import textwrap
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memfit.adapters.torch.origin import HIDDEN_FOLDERS, SourceNames
from memfit.adapters.torch.value_flow import may_reach
from memfit.core.errors import BadLoss, MemfitError, StepFailed

_MAX_CHARACTERS = 300
# What to do about failures of a single step, whose tensors memfit moves; a script moves its own.
_STEP_HINTS = {
    "Expected all tensors to be on the same device": (
        "Everything the step uses must be on the simulated device: put teachers, class weights and the like into the "
        "model or the batch, and write x.device instead of the name of a device."
    ),
}
# What to do about failures that the simulation, not the user's code, is the reason of.
_HINTS = {
    "no fake impl": (
        "An operator without a shape rule can't be simulated: register one with torch.library.register_fake."
    ),
    "'LOCAL_RANK'": "A script that torchrun starts needs --count, as in --count 2.",
    "HigherOrderOperator": "Higher-order operators (flex_attention, torch.cond) can't be run on shapes yet.",
}
# PyTorch's name of the device that shape-only tensors are on; no script meets it on a GPU.
_SHAPE_ONLY = re.compile(
    r"'?meta'? (tensor|device|backend)|(on|device|device type) '?meta\b|no fake impl|HigherOrderOperator", re.IGNORECASE
)
# Errors that a program may raise because of a value that it has read.
_ABOUT_VALUES = (AssertionError, ValueError, ArithmeticError, LookupError, StopIteration)


@contextmanager
def explained(part: str) -> Iterator[None]:
    """Turns any exception of the user's code into `StepFailed` with the line that raised it."""
    try:
        yield
    except MemfitError:
        raise
    except (Exception, SystemExit) as error:
        where, line = _user_line(error)
        text = " ".join(str(error).split()) or "no message"
        message = f"the step failed in its {part}{where}: {type(error).__name__}: {text}"
        hint = next((hint for sign, hint in (_STEP_HINTS | _HINTS).items() if sign in text), "")
        raise StepFailed(message + (f"\n    {line}" if line else "") + (f"\n{hint}" if hint else "")) from error


def one_line(error: BaseException) -> str:
    """The error, where the user's code met it, and what to do where the simulation is the reason."""
    where, _ = _user_line(error)
    text = " ".join(str(error).split()) or "no message"
    hint = next((f" {hint}" for sign, hint in _HINTS.items() if sign in text), "")
    return f"{type(error).__name__}: {textwrap.shorten(text, _MAX_CHARACTERS, placeholder=' ...')}{where}{hint}"


def suspicion(error: BaseException, stand_ins: Iterable[str]) -> str:
    """Why the simulation may be the reason of a script's failure, or "".

    Args:
        error: what ended the script.
        stand_ins: lines at which values were read that stand in for the device's.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or isinstance(error, MemfitError):
        return ""
    last = frames[-1]
    if os.path.abspath(last.filename).startswith(HIDDEN_FOLDERS[1]):
        line = (last.line or "").strip()
        if line.startswith("raise"):
            return "memfit's simulated device refused it, as it takes a GPU to do"
        if "func(" not in line and "plain" not in line:
            return "the error arose in memfit's own code"
    if isinstance(error, RuntimeError | ValueError | TypeError | BufferError) and _SHAPE_ONLY.search(str(error)):
        return "PyTorch can't do this with tensors that have a shape and no values, which memfit simulates with"
    if isinstance(error, _ABOUT_VALUES):
        read = _read_before(frames, stand_ins)
        if read:
            return f"it had read values that stand in for the device's ({read})"
    return ""


def _read_before(frames: Iterable[traceback.FrameSummary], stand_ins: Iterable[str]) -> str:
    """The last line at which a value was read that may decide what the failing lines do, or ""."""
    names = SourceNames()
    failing: dict[str, set[int]] = {}
    for frame in frames:
        failing.setdefault(frame.filename, set()).add(frame.lineno or 0)
    files = {names.short(path): path for path in failing}
    for source in reversed(list(stand_ins)):
        name, _, line = source.rpartition(":")
        path = files.get(name)
        if path and line.isdigit() and may_reach("".join(linecache.getlines(path)), [int(line)], failing[path]):
            return source
    return ""


def _user_line(error: BaseException) -> tuple[str, str]:
    """(" at file.py:31 in forward", the code of that line) of the innermost frame outside of the framework."""
    names = SourceNames()
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith("<frozen"):
            continue
        if not os.path.abspath(frame.filename).startswith(HIDDEN_FOLDERS):
            return f" at {names.short(frame.filename)}:{frame.lineno} in {frame.name}", frame.line or ""
    return "", ""


def check_loss(value: Any) -> None:
    """Refuses what can't be differentiated."""
    if not isinstance(value, torch.Tensor):
        raise BadLoss(
            f"the loss function returned {type(value).__name__}, not a tensor. "
            "It must return the scalar loss itself, such as `output.loss`."
        )
    if value.numel() != 1:
        raise BadLoss(
            f"the loss has shape {tuple(value.shape)}, but a scalar is needed to differentiate. "
            "Reduce it, for example with .mean()."
        )
    if not value.requires_grad:
        raise BadLoss(
            "the loss does not depend on any parameter that requires a gradient. "
            "Check for torch.no_grad(), .detach() or .item() on its way, or use mode='inference'."
        )
