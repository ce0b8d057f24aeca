"""Time of a script's step under other settings, from the work of its operators in one dry run.

The model is that of `speed`: an operator takes the longest of its operations, its bytes and a launch. Settings change
it by plain rules. Computing modules again costs their forward operators once more; autocast runs products and
convolutions at the 16-bit rate; micro-batches divide operations and bytes, but not launches, and add to gradients once
more for each. Where no work was seen, the bytes that the forward pass writes stand in for it: good enough to rank by,
and no seconds are shown.
"""

from collections.abc import Sequence

from memfit.core.profile import Work
from memfit.core.settings import OptimizerKernels, Settings
from memfit.core.timeline import Category, Phase, Timeline
from memfit.planner.speed import Rates, rate_of

# What a fused update reads and writes, in parameters: parameter, gradient, two states; all but the gradient written.
_FUSED_ACCESSES = 7
# Kernels of an update for each parameter, where parameters are updated one at a time.
_KERNELS_EACH = 10
_NARROW = {"amp-bf16": "bfloat16", "amp-fp16": "float16"}


class ScriptSpeed:
    """Seconds of a step by settings.

    Args:
        work: operators of one whole step; where there are none, those that `timeline` hints at are taken.
        timeline: of the run.
        rates: of the device.
    """

    def __init__(self, work: Sequence[Work], timeline: Timeline, rates: Rates) -> None:
        self.is_known = bool(work)
        self._work = list(work) or _guessed(timeline)
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
            return plain + _KERNELS_EACH * self._num_tensors * rates.launch_seconds
        return plain


def _guessed(timeline: Timeline) -> list[Work]:
    """Operators as the blocks of the first step hint at them: one for each, which reads twice what it writes."""
    passes = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
    return [
        Work(block.module, block.phase, block.op, 0, 3 * block.size_bytes, "")
        for block in timeline.blocks
        if block.phase in passes and timeline.mark_at(block.start).step <= 1
    ]
