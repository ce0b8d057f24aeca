"""The device that the caller means, and the budget on it."""

import importlib.util
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from memfit.api.jobs import torch_adapter
from memfit.catalogue import find_device, on_stack
from memfit.core import env
from memfit.core.device import Device, Kind, Origin
from memfit.core.errors import BadInput
from memfit.core.units import format_size, parse_size
from memfit.core.verification import Verification

_CALIBRATION = ".json"


def resolve(device: Any, stack: str | None = None) -> Device:
    """The device that the caller means, on a stack of that name, as `memfit.calibrate` measured it where it has."""
    if isinstance(device, str | os.PathLike) and os.fspath(device).endswith(_CALIBRATION):
        # The file brings the stack of the machine on which it was made.
        calibration = Verification.load(device)
        known = find_device(calibration.device.name)
        known = replace(known, stack=calibration.device.stack) if stack is None else on_stack(known, stack)
        return calibration.calibrated(known)
    known = _resolve(device, stack)
    path = calibration_path(known)
    if isinstance(device, Device) or not os.path.exists(path):
        return known
    return Verification.load(path).calibrated(known)


def calibration_path(device: Device) -> Path:
    """Where this machine's calibration of a device is kept."""
    return calibration_folder() / f"{device.name}{_CALIBRATION}"


def calibration_folder() -> Path:
    """Where this machine's calibrations are kept."""
    return Path(env.cache_folder()) / "calibrations"


def _resolve(device: Any, stack: str | None) -> Device:
    if isinstance(device, Device):
        return on_stack(device, stack)
    if type(device).__module__ == "torch":
        # A torch.device: "cuda" and "cpu" mean this machine's own.
        device = str(device)
    if device is not None and not isinstance(device, str):
        raise BadInput(f"device must be a name such as 'rtx-3090' or a size such as '24GiB', but {device!r} was given.")
    if device is None or device.strip().lower() in ("cuda", "cuda:0", "gpu"):
        return on_stack(own_gpu(), stack)
    return find_device(device, stack=stack)


def own_gpu() -> Device:
    """This machine's GPU."""
    # Other frameworks name no default.
    lacks_torch = importlib.util.find_spec("torch") is None and {"keras", "jax"} & set(sys.modules)
    own = None if lacks_torch else torch_adapter().own_gpu()
    if own is None:
        raise BadInput(
            "this machine has no CUDA device that PyTorch can use, so there is no default. "
            "Name the device to simulate, such as device='rtx-3090' (--device rtx-3090); `memfit devices` lists all. "
            "Models, unlike scripts, can also be estimated and planned for 'cpu'."
        )
    name, total_bytes, capability = own
    try:
        return replace(find_device(name), usable_bytes=total_bytes, usable_origin=Origin.MEASURED)
    except BadInput:
        return Device(name, name, Kind.CUDA, None, total_bytes, Origin.MEASURED, capability, source="this machine")


def target_within(device: Any, budget: str | int | None) -> Device:
    """The device with the budget as its capacity.

    Args:
        device: as for `estimate`; None with a budget: a device of which only the size is known.
        budget: "10GiB" or bytes; None: all of the device.
    """
    if budget is None:
        target = resolve(device)
        if target.usable_bytes is None:
            raise BadInput(f"the memory of {target.title} is unknown; give a budget such as budget='16GiB'.")
        return target
    if isinstance(budget, bool) or not isinstance(budget, str | int | float) or budget != budget:
        raise BadInput(f"a budget is a size such as '10GiB' or a number of bytes, but {budget!r} was given.")
    budget_bytes = parse_size(budget) if isinstance(budget, str) else int(min(budget, 2**60))
    if budget_bytes <= 0:
        raise BadInput(f"a budget must be positive, but {budget!r} was given.")
    target = find_device(f"{budget_bytes}B") if device is None else resolve(device)
    if target.usable_bytes is not None and target.kind is Kind.CUDA and budget_bytes > target.usable_bytes:
        raise BadInput(
            f"the budget of {format_size(budget_bytes)} is more than {target.title} has "
            f"({format_size(target.usable_bytes)}). Give a smaller budget or a larger device."
        )
    return replace(target, usable_bytes=budget_bytes)
