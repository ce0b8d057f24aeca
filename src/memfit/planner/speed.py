"""How long a step takes under any settings, from the time of its operators (`memfit.timing`).

Where the target is the machine in hand, measured times of a few short steps replace the sum, and the model only fills
in between them.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from memfit.core.device import Kind
from memfit.core.profile import Measurement, Profile, Work
from memfit.core.settings import OptimizerKernels, OptimizerState, Settings
from memfit.core.timeline import Category, Phase, Timeline
from memfit.timing.fitted import fitted
from memfit.timing.rates import Rates
from memfit.timing.step import launch_seconds, operator_seconds, queued
from memfit.timing.table import DTYPES, Table, between, table_of

# An update in host memory moves about 7 numbers for each parameter; bandwidth of a host's memory (assumed).
_HOST_BANDWIDTH = 20e9
# Kernels of one parameter's update, by itself: of Adam in several kernels, or in one, with what Python adds.
_LAUNCHES_SINGLE = 10
_LAUNCHES_FUSED = 4
# An 8-bit update on a processor, in 32-bit ones: codes are looked up and searched (assumed).
_EIGHT_BIT_ON_HOST = 3.0
# What a fused update reads and writes, in parameters: parameter, gradient, two states; all but the gradient written.
_FUSED_ACCESSES = 7
_NARROW = {"amp-bf16": "bfloat16", "amp-fp16": "float16"}
# Between devices, bytes per second each way: NVLink where capability says data centre, else PCIe (assumed).
_INTERCONNECT = 50e9


class StepSpeed:
    """Seconds of a step under any settings.

    Args:
        profile: of the step at some batch size.
        larger: of the same step at another size, or None.
        rates: of the device.
        measured: real steps of the same model, where the device is in hand.
        update_seconds: measured time of an update by kind of kernels.
        plain: the speed of the step as it is, whose ratio of measured to computed time holds here too; None for itself.
    """

    def __init__(
        self,
        profile: Profile,
        larger: Profile | None,
        rates: Rates,
        measured: Sequence[Measurement] = (),
        update_seconds: dict[str, float] | None = None,
        plain: "StepSpeed | None" = None,
    ) -> None:
        self.profile = profile
        self.rates = rates
        self._measured = sorted(measured, key=lambda one: one.batch_size)
        self._plain = plain
        self.update_seconds: dict[str, float] = update_seconds or (plain.update_seconds if plain is not None else {})
        self._own = profile.batch_size or 0
        self._table = table_of(profile.work)
        self._larger = None
        if larger is not None and larger.batch_size and len(larger.work) == len(profile.work):
            self._larger = (larger.batch_size, table_of(larger.work))
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
        self._cache: dict[int, _Operators] = {}

    def is_measured(self, batch_size: int | None) -> bool:
        """Whether a plain step of this size was timed, passes and update: any other is computed."""
        return bool(self.update_seconds) and any(one.batch_size == batch_size for one in self._measured)

    def _operators(self, micro: int | None) -> "_Operators":
        """Seconds of each operator for a micro-batch."""
        size = self._own if micro is None else micro
        if size not in self._cache:
            table = between((self._own, self._table), self._larger, size)
            self._cache[size] = _Operators(table, self.rates, self._passes)
        return self._cache[size]

    def _computed(self, micro: int | None) -> float:
        return self._operators(micro).passes

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
        return self._operators(micro).of(self._calls.get(path, ())) * self._unit_ratio(path, micro)

    def _unit_ratio(self, path: str, micro: int | None) -> float:
        """Measured over computed time of a module's forward pass."""
        if self._plain is not None:
            return self._plain._unit_ratio(path, micro)
        if not self._measured or micro is None:
            return 1.0
        nearest = min(self._measured, key=lambda one: abs(np.log(one.batch_size / micro)))
        computed = self._operators(nearest.batch_size).of(self._calls.get(path, ()))
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
        each = launches * _launch(self.rates) * self._num_tensors
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
        plain = self._operators(None).update / shards
        if settings.kernels is OptimizerKernels.FUSED:
            plain = min(plain, _FUSED_ACCESSES * parameter_bytes / self.rates.bandwidth + _launch(self.rates))
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


class _Operators:
    """Seconds of the operators of one micro-batch, and of an update.

    Where launches take longer than kernels, an operator costs its launch.
    """

    def __init__(self, table: Table, rates: Rates, in_passes: NDArray[np.bool_], parts: int = 1) -> None:
        kernels, launches = operator_seconds(table, rates), launch_seconds(table, rates)
        if parts > 1:
            # As if every kernel had that share of its work; those of the update have all of it.
            least = rates.launch_seconds if rates.kind is Kind.HOST else 0.0
            kernels = np.where(in_passes, np.maximum(kernels / parts, least), kernels)
        self.passes = queued(kernels[in_passes], launches[in_passes])
        whole = queued(kernels, launches)
        # Launches of the update run ahead while the device is busy with the backward pass.
        self.update = whole - self.passes
        is_launch_bound = launches[in_passes].sum() > kernels[in_passes].sum()
        self.seconds = launches if is_launch_bound else kernels

    def of(self, calls: Sequence[tuple[int, int]]) -> float:
        """Of some ranges of operators."""
        return sum(float(self.seconds[first:last].sum()) for first, last in calls)


def _launch(rates: Rates) -> float:
    """Seconds to launch a kernel of an update."""
    return rates.launch_seconds if rates.kind is Kind.HOST else fitted().parameters["launch_optimizer"]


class ScriptSpeed:
    """Seconds of a script's step by settings, from the work of its operators in one dry run.

    Computing modules again costs their forward operators once more; autocast runs products and convolutions at the
    16-bit rate; micro-batches divide operations and bytes, but not launches, and add to gradients once more for each.
    Where no work was seen, the bytes that the forward pass writes stand in for it: good enough to rank by, and no
    seconds are shown.
    """

    def __init__(self, work: Sequence[Work], timeline: Timeline, rates: Rates) -> None:
        self.seconds_origin = rates.origin if work else None
        """How the times are known; None where they aren't in seconds."""
        # One operator for each block of the first step, which reads twice what it writes.
        self._work = list(work) or [
            Work(block.module, block.phase, block.op, 0, 3 * block.size_bytes, "")
            for block in timeline.blocks
            if block.phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
            and timeline.mark_at(block.start).step <= 1
        ]
        self._rates = rates
        self._table = table_of(self._work)
        phases = [work.phase for work in self._work]
        self._forward = np.array([phase is Phase.FORWARD for phase in phases], dtype=bool)
        self._passes = self._forward | np.array([phase is Phase.BACKWARD for phase in phases], dtype=bool)
        weights = [block.size_bytes for block in timeline.blocks if block.category is Category.PARAMETER]
        self._parameter_bytes, self._num_tensors = sum(weights), len(weights)
        self._known: dict[tuple[int, str | None], _Operators] = {}
        self._kept: dict[tuple[str, int, str | None], float] = {}

    def step(self, settings: Settings) -> float:
        """Seconds of one update with all its passes."""
        count, precision = settings.micro_batches, settings.precision
        again = sum(self.module(path, count, precision) for path in settings.checkpoint)
        accumulation = 3 * (count - 1) * self._parameter_bytes / self._rates.bandwidth
        casts = 0.0 if precision is None else 1.5 * self._parameter_bytes / self._rates.bandwidth
        passes = self._operators(count, precision).passes + casts
        return count * (passes + again) + accumulation + self._update(settings)

    def module(self, path: str, count: int = 1, precision: str | None = None) -> float:
        """Seconds of one module's forward pass on one of `count` micro-batches."""
        key = (path, count, precision)
        if key not in self._kept:
            inside = np.array(
                [work.module == path or work.module.startswith(f"{path}.") for work in self._work], dtype=bool
            )
            self._kept[key] = float(self._operators(count, precision).seconds[inside & self._forward].sum())
        return self._kept[key]

    def _operators(self, count: int, precision: str | None) -> _Operators:
        key = (count, precision)
        if key not in self._known:
            table, name = self._table, _NARROW.get(precision or "", "")
            if name:
                chosen = (table.flops > 0) & (table.dtype == DTYPES.index("float32"))
                dtype = np.where(chosen, DTYPES.index(name), table.dtype)
                table = replace(table, dtype=dtype, moved=np.where(chosen, table.moved / 2, table.moved))
            self._known[key] = _Operators(table, self._rates, self._passes, count)
        return self._known[key]

    def _update(self, settings: Settings) -> float:
        plain, launch = self._operators(1, None).update, _launch(self._rates)
        if settings.kernels is OptimizerKernels.FUSED:
            return min(plain, _FUSED_ACCESSES * self._parameter_bytes / self._rates.bandwidth + launch)
        if settings.kernels is OptimizerKernels.SINGLE:
            return plain + _LAUNCHES_SINGLE * self._num_tensors * launch
        return plain
