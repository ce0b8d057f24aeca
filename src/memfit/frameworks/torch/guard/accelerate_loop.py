"""What `accelerator.prepare` makes of a loop's objects, as a guard needs them.

A prepared model is the user's own, whose forward pass runs under autocast, or that model in `DistributedDataParallel`:
both are what a guard takes. A prepared optimizer hides the user's, and leaves `step` and `zero_grad` out in the middle
of `accelerator.accumulate`; a guard has windows of its own and needs the optimizer itself. The accelerator's gradient
scaler hangs on it. A prepared scheduler steps once for each process, which its user has counted on, and stays.
"""

from typing import Any


def unwrapped(optimizer: Any, scaler: Any) -> tuple[Any, Any]:
    """The user's own optimizer, and the gradient scaler: the one that was given or else the accelerator's.

    Args:
        optimizer: any optimizer, also one that `accelerator.prepare` returned.
        scaler: that was given, or None.
    """
    while _is_prepared(optimizer):
        scaler = getattr(optimizer, "scaler", None) if scaler is None else scaler
        optimizer = optimizer.optimizer
    return optimizer, scaler


def _is_prepared(optimizer: Any) -> bool:
    return type(optimizer).__module__.partition(".")[0] == "accelerate" and hasattr(optimizer, "optimizer")
