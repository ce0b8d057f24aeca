"""The time model: how long a step takes on a device, from the work of its operators.

Each operator takes the longest of three times: its floating-point operations at the device's rate, the bytes it moves
at the memory's bandwidth, and the time to launch a kernel. Rates of a catalogue are peaks; programs reach a share of
them. Where the target is the machine in hand, measured times of a few short steps replace the sum, and the model only
fills in between them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memfit.catalogue import find_device
from memfit.core.device import Device, Kind
from memfit.core.profile import Measurement, Profile, Work
from memfit.core.settings import OptimizerKernels, OptimizerState, Settings
from memfit.core.timeline import Category, Phase, Timeline

# Shares of the peak rates that well-written training code reaches (assumed; docs/howto/plan.md).
_FLOPS_SHARE = 0.6
_BANDWIDTH_SHARE = 0.75
# Time between two kernels that PyTorch launches from Python (assumed).
_LAUNCH_SECONDS = {Kind.CUDA: 6e-6, Kind.HOST: 4e-6}
# Host to device and back, pinned memory: PCIe 3, 4 and 5 with 16 lanes (assumed), by compute capability.
_TRANSFER = ((9, 50e9), (8, 24e9), (0, 12e9))
# An update in host memory moves about 7 numbers for each parameter; bandwidth of a host's memory (assumed).
_HOST_BANDWIDTH = 20e9
# Traffic of a 16-bit convolution that isn't channels_last, which is turned over before and after (assumed).
_TRANSPOSED = 3.0
# Kernels of one parameter's update, by itself: of Adam in several kernels, or in one, with what Python adds.
_LAUNCHES_SINGLE = 10
_LAUNCHES_FUSED = 4
# An 8-bit update on a processor, in 32-bit ones: codes are looked up and searched (assumed).
_EIGHT_BIT_ON_HOST = 3.0
# What a fused update reads and writes, in parameters: parameter, gradient, two states; all but the gradient written.
_FUSED_ACCESSES = 7
_NARROW = {"amp-bf16": "bfloat16", "amp-fp16": "float16"}
# Whose rates are taken where the catalogue has none for the target.
_REFERENCE = "rtx-3090"
# Between devices, bytes per second each way: NVLink where capability says data centre, else PCIe (assumed).
_INTERCONNECT = 50e9


@dataclass(frozen=True, slots=True)
class Rates:
    """Speed of a device, in operations and bytes per second; `reference` names the device whose rates were taken."""

    flops: dict[str, float]
    bandwidth: float
    launch_seconds: float
    transfer: float
    reference: str = ""


def rates_of(device: Device) -> Rates:
    """Rates of a device; those of an RTX 3090 where the catalogue has none for it."""
    known = device if device.flops and device.bandwidth_bytes_per_second else find_device(_REFERENCE)
    capability = device.capability or (8, 0)
    transfer = next(rate for least, rate in _TRANSFER if capability[0] >= least)
    return Rates(
        {name: rate * _FLOPS_SHARE for name, rate in known.flops.items()},
        (known.bandwidth_bytes_per_second or 1e11) * _BANDWIDTH_SHARE,
        _LAUNCH_SECONDS[device.kind],
        transfer,
        "" if known is device else known.title,
    )


class StepSpeed:
    """Seconds of a step under any settings.

    Args:
        profile: of the step at some batch size.
        larger: of the same step at another size, or None.
        rates: of the device.
        measured: real steps of the same model, where the device is in hand.
        update_seconds: measured time of an update by kind of kernels.
        plain: the speed of the step as it is, whose ratio of measured to computed time holds here too; None for itself.
        channels_last: whether convolutions have that memory format.
    """

    def __init__(
        self,
        profile: Profile,
        larger: Profile | None,
        rates: Rates,
        measured: Sequence[Measurement] = (),
        update_seconds: dict[str, float] | None = None,
        plain: "StepSpeed | None" = None,
        channels_last: bool = False,
    ) -> None:
        self.profile = profile
        self.rates = rates
        self._measured = sorted(measured, key=lambda one: one.batch_size)
        self._plain = plain
        self.update_seconds: dict[str, float] = update_seconds or (plain.update_seconds if plain is not None else {})
        self._own = profile.batch_size or 0
        self._flops, self._flops_slope = _line(profile, larger, "flops")
        self._bytes, self._bytes_slope = _line(profile, larger, "moved_bytes")
        if not channels_last:
            # A library turns inputs and output of a convolution over to compute it on tensor cores.
            narrow = ("float16", "bfloat16")
            again = np.array(["convolution" in work.op and work.dtype in narrow for work in profile.work], dtype=bool)
            self._bytes[again] *= _TRANSPOSED
            self._bytes_slope[again] *= _TRANSPOSED
        self._rate = np.array([rate_of(work, rates) for work in profile.work])
        self._passes = np.array([work.phase is not Phase.OPTIMIZER for work in profile.work], dtype=bool)
        self._calls = {
            unit.path: tuple(call.operations for call in unit.calls) for unit in profile.units if not unit.refused
        }
        timeline = profile.timeline
        num_passes = sum(mark.phase is Phase.BACKWARD for mark in timeline.marks)
        gradients = sum(b.size_bytes for b in timeline.blocks if b.category is Category.GRADIENT)
        self._gradient_bytes = gradients / max(1, num_passes)
        parameters = [b.size_bytes for b in timeline.blocks if b.category is Category.PARAMETER]
        self._parameter_bytes, self._num_tensors = float(sum(parameters)), len(parameters)
        self._cache: dict[int, NDArray[np.float64]] = {}

    def is_measured(self, batch_size: int | None) -> bool:
        """Whether a plain step of this size was timed, passes and update: any other is computed."""
        return bool(self.update_seconds) and any(one.batch_size == batch_size for one in self._measured)

    def _operators(self, micro: int | None) -> NDArray[np.float64]:
        """Seconds of each operator for a micro-batch."""
        size = self._own if micro is None else micro
        if size not in self._cache:
            flops = np.maximum(0.0, self._flops + self._flops_slope * size)
            moved = np.maximum(0.0, self._bytes + self._bytes_slope * size)
            busy = np.maximum(flops / self._rate, moved / self.rates.bandwidth)
            self._cache[size] = np.maximum(busy, self.rates.launch_seconds)
        return self._cache[size]

    def _computed(self, micro: int | None) -> float:
        return float(self._operators(micro)[self._passes].sum())

    def ratio(self, micro: int | None) -> float:
        """Measured over computed time of forward and backward pass; 1 where nothing was measured."""
        if self._plain is not None:
            return self._plain.ratio(micro)
        if not self._measured or micro is None:
            return 1.0
        sizes = [one.batch_size for one in self._measured]
        ratios = [
            (one.forward_seconds + one.backward_seconds) / max(1e-12, self._computed(one.batch_size))
            for one in self._measured
        ]
        # Between two measured sizes the ratio is interpolated; beyond, it is kept.
        return float(np.interp(np.log(micro), np.log(sizes), ratios))

    def passes(self, micro: int | None) -> float:
        """Seconds of one forward and backward pass."""
        return self._computed(micro) * self.ratio(micro)

    def recomputation(self, path: str, micro: int | None) -> float:
        """Seconds to compute a module again for one micro-batch."""
        computed = sum(float(self._operators(micro)[first:last].sum()) for first, last in self._calls.get(path, ()))
        return computed * self._unit_ratio(path, micro)

    def _unit_ratio(self, path: str, micro: int | None) -> float:
        """Measured over computed time of a module's forward pass."""
        if self._plain is not None:
            return self._plain._unit_ratio(path, micro)
        if not self._measured or micro is None:
            return 1.0
        nearest = min(self._measured, key=lambda one: abs(np.log(one.batch_size / micro)))
        operators = self._operators(nearest.batch_size)
        computed = sum(float(operators[first:last].sum()) for first, last in self._calls.get(path, ()))
        if path not in nearest.unit_seconds or computed <= 0:
            return self.ratio(micro)
        return nearest.unit_seconds[path] / computed * self.ratio(micro) / self.ratio(nearest.batch_size)

    def offload(self, hosted_bytes: float) -> float:
        """Seconds to move activations to the host and back."""
        return 2 * hosted_bytes / self.rates.transfer

    def update(self, settings: Settings) -> float:
        """Seconds of one optimizer update."""
        shards, single = settings.num_devices, settings.kernels is OptimizerKernels.SINGLE
        one_by_one = settings.step_in_backward or settings.state is not OptimizerState.KEEP or settings.shard_offload
        # Kernels, and times that Python takes as long, of each parameter that is updated by itself.
        launches = 0
        if settings.kernels is OptimizerKernels.FUSED or settings.state is OptimizerState.EIGHT_BIT:
            launches = _LAUNCHES_FUSED if one_by_one else 0
        elif (one_by_one or single) and "foreach" in self.profile.features:
            launches = _LAUNCHES_SINGLE
        each = launches * self.rates.launch_seconds * self._num_tensors
        parameter_bytes = self._gradient_bytes / shards
        if settings.state is OptimizerState.HOST or settings.shard_offload:
            # Gradients and values go down, values come up.
            moved = 3 * parameter_bytes / self.rates.transfer
            return moved + 7 * parameter_bytes / _HOST_BANDWIDTH + each
        if self.update_seconds:
            measured = self.update_seconds.get(settings.kernels.value, self.update_seconds.get("keep", 0.0))
            if settings.step_in_backward and settings.kernels is not OptimizerKernels.FUSED:
                measured = max(measured, self.update_seconds.get(OptimizerKernels.SINGLE.value, 0.0))
            wide = settings.state is OptimizerState.EIGHT_BIT
            return (measured * (_EIGHT_BIT_ON_HOST if wide else 1.0) + each) / shards
        plain = float(self._operators(None)[~self._passes].sum()) / shards
        if settings.kernels is OptimizerKernels.FUSED:
            plain = min(plain, _FUSED_ACCESSES * parameter_bytes / self.rates.bandwidth + self.rates.launch_seconds)
        return plain + each

    def step(self, settings: Settings, batch_size: int | None, hosted_bytes: float = 0.0) -> float:
        """Seconds of a whole step; `hosted_bytes` of one micro-batch wait in host memory."""
        parts, shards = settings.micro_batches, settings.num_devices
        micro = None if batch_size is None else -(-batch_size // parts)
        again = sum(self.recomputation(path, micro) for path in settings.checkpoint)
        # Gathering parameters twice and scattering gradients once, half of it hidden.
        communication = 0.5 * 3 * self._parameter_bytes * (shards - 1) / shards / _INTERCONNECT
        each = self.passes(micro) + again + self.offload(hosted_bytes) + communication
        # The last parts may be smaller than the first.
        share = min(1.0, batch_size / (micro * parts)) if batch_size and micro else 1.0
        # Gradients of every part but the first are added to those that are there: two are read, one is written.
        added = 3 * (parts - 1) * self._gradient_bytes / self.rates.bandwidth
        return parts * each * share + added + self.update(settings)


def _line(profile: Profile, larger: Profile | None, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(constant, slope in the batch size) of a figure of each operator."""
    values = np.array([getattr(work, name) for work in profile.work], dtype=np.float64)
    if larger is None or len(larger.work) != len(profile.work) or not profile.batch_size or not larger.batch_size:
        return values, np.zeros_like(values)
    others = np.array([getattr(work, name) for work in larger.work], dtype=np.float64)
    slope = (others - values) / (larger.batch_size - profile.batch_size)
    return values - slope * profile.batch_size, slope


def rate_of(work: Work, rates: Rates) -> float:
    """Floating-point operations per second at which an operator runs."""
    dtype = work.dtype or "float32"
    if dtype == "float32" and "convolution" in work.op:
        # PyTorch lets convolutions, not matrix products, use TF32.
        dtype = "tf32" if "tf32" in rates.flops else dtype
    if dtype == "float64":
        return rates.flops.get("float64", rates.flops.get("float32", 1e12) / 32)
    return rates.flops.get(dtype) or rates.flops.get("float32") or 1e12


class ScriptSpeed:
    """Seconds of a script's step by settings, from the work of its operators in one dry run.

    Computing modules again costs their forward operators once more; autocast runs products and convolutions at the
    16-bit rate; micro-batches divide operations and bytes, but not launches, and add to gradients once more for each.
    Where no work was seen, the bytes that the forward pass writes stand in for it: good enough to rank by, and no
    seconds are shown.
    """

    def __init__(self, work: Sequence[Work], timeline: Timeline, rates: Rates) -> None:
        self.is_known = bool(work)
        # One operator for each block of the first step, which reads twice what it writes.
        self._work = list(work) or [
            Work(block.module, block.phase, block.op, 0, 3 * block.size_bytes, "")
            for block in timeline.blocks
            if block.phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
            and timeline.mark_at(block.start).step <= 1
        ]
        self._rates = rates
        weights = [block.size_bytes for block in timeline.blocks if block.category is Category.PARAMETER]
        self._parameter_bytes, self._num_tensors = sum(weights), len(weights)
        self._kept: dict[tuple[str, int, str | None], float] = {}

    def step(self, settings: Settings) -> float:
        """Seconds of one update with all its passes."""
        count, precision = settings.micro_batches, settings.precision
        again = sum(self.module(path, count, precision) for path in settings.checkpoint)
        accumulation = 3 * (count - 1) * self._parameter_bytes / self._rates.bandwidth
        return count * (self._passes(count, precision) + again) + accumulation + self._update(settings)

    def module(self, path: str, count: int = 1, precision: str | None = None) -> float:
        """Seconds of one module's forward pass on one of `count` micro-batches."""
        key = (path, count, precision)
        if key not in self._kept:
            inside = (
                work
                for work in self._work
                if work.phase is Phase.FORWARD and (work.module == path or work.module.startswith(f"{path}."))
            )
            self._kept[key] = sum(self._seconds(work, count, precision) for work in inside)
        return self._kept[key]

    def _passes(self, count: int, precision: str | None) -> float:
        key = ("", count, precision)
        if key not in self._kept:
            passes = [work for work in self._work if work.phase in (Phase.FORWARD, Phase.BACKWARD)]
            casts = 0.0 if precision is None else 1.5 * self._parameter_bytes / self._rates.bandwidth
            self._kept[key] = casts + sum(self._seconds(work, count, precision) for work in passes)
        return self._kept[key]

    def _seconds(self, work: Work, count: int, precision: str | None) -> float:
        rate, moved = rate_of(work, self._rates), float(work.moved_bytes)
        if precision is not None and work.flops and work.dtype == "float32":
            rate = self._rates.flops.get(_NARROW.get(precision, ""), rate)
            moved /= 2
        busy = max(work.flops / rate, moved / self._rates.bandwidth)
        return max(busy / count, self._rates.launch_seconds)

    def _update(self, settings: Settings) -> float:
        plain = sum(self._seconds(work, 1, None) for work in self._work if work.phase is Phase.OPTIMIZER)
        rates = self._rates
        if settings.kernels is OptimizerKernels.FUSED:
            return min(plain, _FUSED_ACCESSES * self._parameter_bytes / rates.bandwidth + rates.launch_seconds)
        if settings.kernels is OptimizerKernels.SINGLE:
            return plain + _LAUNCHES_SINGLE * self._num_tensors * rates.launch_seconds
        return plain
