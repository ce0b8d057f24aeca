"""Failures of the user's own step, told in one message with the user's own line."""

import os
import textwrap
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memfit.adapters.torch.origin import HIDDEN_FOLDERS, SourceNames
from memfit.core.errors import BadLoss, MemfitError, StepFailed

_MAX_CHARACTERS = 300
# What to do about failures that the simulation, not the user's code, is the reason of.
_HINTS = {
    "Expected all tensors to be on the same device": (
        "Everything the step uses must be on the simulated device: put teachers, class weights and the like into the "
        "model or the batch, and write x.device instead of the name of a device."
    ),
    "no fake impl": (
        "An operator without a shape rule can't be simulated: register one with torch.library.register_fake."
    ),
    "'LOCAL_RANK'": "A script that torchrun starts needs --count, as in --count 2.",
    "HigherOrderOperator": "Higher-order operators (flex_attention, torch.cond) can't be run on shapes yet.",
}


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
        hint = next((hint for sign, hint in _HINTS.items() if sign in text), "")
        raise StepFailed(message + (f"\n    {line}" if line else "") + (f"\n{hint}" if hint else "")) from error


def one_line(error: BaseException) -> str:
    """The error, where the user's code met it, and what to do where the simulation is the reason."""
    where, _ = _user_line(error)
    text = " ".join(str(error).split()) or "no message"
    hint = next((f" {hint}" for sign, hint in _HINTS.items() if sign in text), "")
    return f"{type(error).__name__}: {textwrap.shorten(text, _MAX_CHARACTERS, placeholder=' ...')}{where}{hint}"


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
