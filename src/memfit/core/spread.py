"""How far off an estimate may be: each assumed part with its own width, and what follows for the whole.

A width is that within which the truth lies in 19 of 20 cases. Parts are taken to be wrong independently of each other,
so that together their width is the root of the sum of their squares. What is left of the capacity, as a multiple of
that, gives the probability of fitting by the normal distribution.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memfit.core.device import Device, Kind, Origin
from memfit.core.replay import Replay
from memfit.core.typed_data import Count

COVERAGE = 0.95
"""Share of cases in which the truth lies within an interval."""

# 95% of a normal distribution lie within so many standard deviations.
_DEVIATIONS = 1.96
# No figure is surer than what it was checked on: a few hundred rows.
_SUREST = 0.99
# Half of the rows of docs/results/coverage.md settled this one; the other half checks it.
_UNEXPLAINED = 0.02
# Where cuDNN convolves, the same rows needed 2.1% less than estimated in the mean, with a deviation of 2.5%: that is
# 7.0% below to 2.8% above, of which `_UNEXPLAINED` is a part.
_CONVOLVED_BELOW, _CONVOLVED_ABOVE = 0.067, 0.02
# A T4's context grows from 105 to 135 MiB as libraries are loaded; contexts of other devices follow from three. Where
# 1.28 GiB are assumed for old stacks on an RTX 3090, messages of such runs leave up to 1.92 (docs/results).
_CONTEXT_SHARES = {Origin.MEASURED: 0.05, Origin.ASSUMED: 0.5}
# Usable shares of measured devices of one memory size differ by so much.
_USABLE_SHARE = 0.02

TENSORS = "tensors and scratch memory of kernels"
CACHE = "cache and fragmentation"
GROUPED = "cuDNN's scratch memory for grouped convolutions"
ORDER = "order of operators"
CONTEXT_SIZE = "size of the CUDA context"


@dataclass(frozen=True, slots=True)
class Spread:
    """An assumed part of an estimate.

    Args:
        name: what is assumed.
        below_bytes: in 19 of 20 cases, the need is no more below the estimate because of it.
        above_bytes: the same above it.
        source: where the widths come from.
        decides: whether the device can't run the step without it; what an allocator gives back and a library does
            without can't decide whether the step fits.
    """

    name: str
    below_bytes: Count
    above_bytes: Count
    source: str
    decides: bool = True


def combined(widths: Iterable[float]) -> float:
    """The width of several parts that are wrong independently of each other.

    >>> combined([3, 4])
    5.0
    """
    return math.hypot(*widths)


def probability(margin_bytes: float, width_bytes: float) -> float:
    """The probability that a need that is known within a width stays below a limit that is so much above it.

    >>> round(probability(0, 10), 2), round(probability(10, 10), 3), probability(99, 10)
    (0.5, 0.975, 0.99)
    """
    if width_bytes <= 0 or math.isinf(margin_bytes):
        return _SUREST if margin_bytes >= 0 else 1 - _SUREST
    share = (1 + math.erf(_DEVIATIONS * margin_bytes / width_bytes / math.sqrt(2))) / 2
    return min(_SUREST, max(1 - _SUREST, share))


def capacity_width(device: Device) -> float:
    """How far off the usable memory of a device may be."""
    return _USABLE_SHARE * (device.usable_bytes or 0) if device.usable_origin is Origin.ASSUMED else 0.0


def spreads_of(
    device: Device,
    replay: Replay,
    *,
    grouped_bytes: int = 0,
    orders: tuple[float, float] = (1.0, 1.0),
) -> tuple[Spread, ...]:
    """What is assumed of a replayed step, but for what its cache may differ by.

    Args:
        device: the target.
        replay: of the step.
        grouped_bytes: the most that a grouped convolution may take beside what was counted.
        orders: the least and the greatest peak of other orders of the operators, as multiples of the one taken.
    """
    reserved = replay.reserved_peak_bytes
    share = round(_UNEXPLAINED * reserved)
    spreads = [Spread(TENSORS, share, share, f"{_UNEXPLAINED:.0%}: what published runs were off by (docs/results)")]
    if grouped_bytes:
        told = "cuDNN may run one as a matrix product over all its windows; it publishes no sizes"
        spreads.append(Spread(GROUPED, 0, grouped_bytes, told, decides=False))
    least, most = (round(reserved * factor) for factor in orders)
    if (least, most) != (reserved, reserved):
        told = "the least and the most memory of the orders that the compiler allows"
        spreads.append(Spread(ORDER, max(0, reserved - least), max(0, most - reserved), told))
    if device.kind is Kind.CUDA and device.context_bytes:
        part = _CONTEXT_SHARES.get(device.context_origin, 0.0)
        width = round(part * device.context_bytes)
        told = f"{part:.0%} of a context that is {device.context_origin.value}"
        spreads.append(Spread(CONTEXT_SIZE, width, width, told))
    return tuple(spreads)


def cache_spread(replay: Replay, variants: Sequence[Replay]) -> Spread:
    """How far off the cache may be.

    Args:
        replay: of the step.
        variants: the same with other places, and where there are several with other sizes, of what libraries take.
    """
    reserved = replay.reserved_peak_bytes
    apart = math.sqrt(sum((one.reserved_peak_bytes - reserved) ** 2 for one in variants) / len(variants))
    told = "the allocator's replay with libraries' workspaces in other places and of other sizes"
    if len(variants) == 1:
        # One is as likely as the replay itself.
        below = above = round(_DEVIATIONS * apart)
    else:
        # They go from one end of what cuDNN may take to the other; which of its kernels run, nobody knows.
        below, above = (round(combined([apart, part * reserved])) for part in (_CONVOLVED_BELOW, _CONVOLVED_ABOVE))
        told += "; what published runs with convolutions were off by (docs/results)"
    return Spread(CACHE, min(below, reserved), above, told, decides=False)
