"""Seconds of a step: kernels one after the other, and a processor that launches them.

The processor runs ahead of the device: a kernel begins when the one before is done and it has been launched. Where
kernels are short, the device waits for launches; where they are long, only the first ones count.
"""

import math
from collections.abc import Sequence

import numpy as np

from memfit.core.device import Device, Origin
from memfit.core.device import Kind as DeviceKind
from memfit.core.estimate import StepTime
from memfit.core.profile import Work
from memfit.timing.fitted import fitted
from memfit.timing.kernels import Parameters, kernel_seconds
from memfit.timing.rates import Rates, rates_of
from memfit.timing.table import DTYPES, Numbers, Table, between, table_of

COMPILED = "compiled"
# The interval of a device that nothing was fitted to, in that of the others (assumed).
_OTHER_DEVICES = 1.5


def operator_seconds(table: Table, rates: Rates, parameters: Parameters | None = None) -> Numbers:
    """Seconds of each operator's kernel."""
    if rates.kind is DeviceKind.HOST:
        flops = np.array([rates.flops.get(name) or rates.flops.get("float32", 1e12) for name in DTYPES])
        busy = np.maximum(table.flops / flops[table.dtype], table.moved / rates.bandwidth)
        seconds: Numbers = np.maximum(busy, rates.launch_seconds)
        return seconds
    return kernel_seconds(table, rates, fitted().parameters if parameters is None else parameters)


def launch_seconds(table: Table, rates: Rates, parameters: Parameters | None = None) -> Numbers:
    """Seconds that the processor takes for each operator before its kernel is launched."""
    if rates.kind is DeviceKind.HOST:
        return np.zeros(len(table))
    p = fitted().parameters if parameters is None else parameters
    eager = np.array([p["launch_forward"], p["launch_backward"], p["launch_optimizer"]])[table.phase]
    return np.where(table.compiled, p["launch_compiled"], eager)


def queued(kernels: Numbers, launches: Numbers) -> float:
    """Seconds from the first launch until the last kernel is done."""
    if not len(kernels):
        return 0.0
    return float((np.cumsum(launches) + np.cumsum(kernels[::-1])[::-1]).max())


def pass_seconds(table: Table, rates: Rates, parameters: Parameters | None = None) -> float:
    """Seconds of some operators one after the other."""
    return queued(operator_seconds(table, rates, parameters), launch_seconds(table, rates, parameters))


def step_time(
    work: Sequence[Work],
    device: Device,
    mode: str,
    *,
    at: tuple[int, int, tuple[int, Sequence[Work]]] | None = None,
) -> StepTime | None:
    """How long a whole step takes, with its interval; None where nobody knows what it runs, or how fast the device is.

    Args:
        work: every operator of the step.
        device: where it runs.
        mode: "training" or "inference".
        at: (the batch size wanted, that of `work`, another size and its operators), where `work` is of another size.
    """
    rates = rates_of(device)
    if not work or rates.origin is not Origin.SIMULATED:
        return None
    table = table_of(work)
    if at is not None:
        size, own, (other, others) = at
        table = between((own, table), (other, table_of(others)), size)
    return with_interval(table, rates, device, mode)


def with_interval(table: Table, rates: Rates, device: Device, mode: str) -> StepTime:
    """The time of some operators with the interval that its errors on other models give."""
    known = fitted()
    seconds = pass_seconds(table, rates)
    low, high = known.spreads[COMPILED if table.compiled.any() else mode]
    # Rates of devices that no parameter was fitted to carry over less well.
    wider = 1.0 if device.name in known.devices else _OTHER_DEVICES
    return StepTime(seconds, seconds * math.exp(low * wider), seconds * math.exp(high * wider))
