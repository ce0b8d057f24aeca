"""What plans of steps and of scripts share: the device with its budget, and words for what else could be tried."""

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from memfit._estimator import resolve
from memfit.catalogue import find_device
from memfit.core.device import Device, Kind
from memfit.core.errors import BadInput
from memfit.core.plan import Refusal
from memfit.core.units import format_size, parse_size

KEEP, AUTO = "keep", "auto"
"""Values of `precision`: as the step has it, or autocast where it helps."""

_NUM_REFUSED = 8
# Whose rates are taken where the catalogue has none for the target.
_REFERENCE = "rtx-3090"


# Before Ampere, tensor cores know float16 alone.
_FIRST_WITH_BFLOAT16 = (8, 0)


class Patience:
    """How long a search may go on.

    Args:
        seconds: as for `plan`; None: as long as there is something to find.
    """

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


def reference() -> Device:
    """The device whose rates stand in for those that the catalogue doesn't have."""
    return find_device(_REFERENCE)


def target_within(device: Any, budget: str | int | None) -> Device:
    """The device with the budget as its capacity.

    Args:
        device: as for `estimate`; None with a budget: a device of which only the size is known.
        budget: "10GiB" or bytes; None: all of the device.
    """
    if budget is None:
        found = resolve(device)
        if found.usable_bytes is None:
            raise BadInput(f"the memory of {found.title} is unknown; give a budget such as budget='16GiB'.")
        return found
    if isinstance(budget, bool) or not isinstance(budget, str | int | float) or budget != budget:
        raise BadInput(f"a budget is a size such as '10GiB' or a number of bytes, but {budget!r} was given.")
    budget_bytes = parse_size(budget) if isinstance(budget, str) else int(min(budget, 2**60))
    if budget_bytes <= 0:
        raise BadInput(f"a budget must be more than nothing, but {budget!r} was given.")
    found = find_device(f"{budget_bytes}B") if device is None else resolve(device)
    if found.usable_bytes is not None and found.kind is Kind.CUDA and budget_bytes > found.usable_bytes:
        raise BadInput(
            f"the budget of {format_size(budget_bytes)} is more than {found.title} has "
            f"({format_size(found.usable_bytes)}). Give a smaller budget or a larger device."
        )
    return replace(found, usable_bytes=budget_bytes)


def hints(allowed: frozenset[str], refused: Iterable[Refusal], moves: Iterable[str]) -> str:
    """What else could be allowed, in words that go before "or" and something else to try; "" where there is nothing.

    Args:
        allowed: names of the moves that may be used.
        refused: moves that were allowed and can't be used.
        moves: names of those worth a word where they aren't allowed.
    """
    words = [f"{refusal.allowed_by} ({refusal.name})" for refusal in refused if refusal.allowed_by]
    words += [name for name in moves if name not in allowed]
    return f"to allow {', '.join(words)} as well, or " if words else ""


def not_considered(refused: Iterable[Refusal]) -> list[str]:
    """Lines on the moves that were allowed and can't be used, for those for whom nothing fits."""
    lines = [f"    {refusal.name}: {refusal.reason}" for refusal in dict.fromkeys(refused)]
    more = [f"    and {len(lines) - _NUM_REFUSED} more"] if len(lines) > _NUM_REFUSED else []
    return ["  not considered:", *lines[:_NUM_REFUSED], *more] if lines else []


def cheapest(needed_bytes: int) -> tuple[str, str]:
    """(words, name) of the cheapest device with so much memory; both "" where there is none."""
    from memfit.catalogue.prices import cheapest_device

    found = cheapest_device(needed_bytes)
    if found is None:
        return "", ""
    device, price = found
    cost = "" if price is None else f", {price.usd_per_hour:.2f} USD an hour on AWS ({price.instance}, {price.date})"
    return f" such as {device.name} ({format_size(device.usable_bytes or 0)}{cost})", device.name
