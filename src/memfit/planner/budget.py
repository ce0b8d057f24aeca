"""What a plan may be told: the precision to use, and how long to look for something faster."""

import time

from memfit.core.device import Device
from memfit.core.errors import BadInput

KEEP, AUTO = "keep", "auto"
"""Values of `precision`: as the step has it, or autocast where it helps."""

# Before Ampere, tensor cores know float16 alone.
_FIRST_WITH_BFLOAT16 = (8, 0)


class Patience:
    """How long a search may go on, in seconds; None: as long as there is something to find."""

    def __init__(self, seconds: float | None = None) -> None:
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if seconds is not None and not (is_number and seconds >= 0):
            raise BadInput(f"seconds must be a number from 0 up, such as seconds=10, but {seconds!r} was given.")
        self._end = None if seconds is None else time.perf_counter() + seconds

    def left(self, most: float) -> float:
        """Seconds that are left, up to `most`."""
        return most if self._end is None else max(0.0, min(most, self._end - time.perf_counter()))

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return self._end is not None and time.perf_counter() >= self._end


def autocast_of(device: Device) -> str:
    """The precision of autocast that a device is good at."""
    known = device.capability is None or device.capability >= _FIRST_WITH_BFLOAT16
    return "amp-bf16" if known else "amp-fp16"
