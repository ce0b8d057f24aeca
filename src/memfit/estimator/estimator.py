"""Traces made into estimates: replayed by an allocator, at any batch size, under any settings."""

import operator
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from memfit.allocator import replay, replay_best_fit, replay_plain, replay_variants
from memfit.core.device import Device, Kind
from memfit.core.errors import BadBatch, BadInput, StepFailed
from memfit.core.estimate import (
    CACHE_RELEASED,
    PAGED_STATE,
    WORKSPACE_DROPPED,
    Estimate,
    HostMemory,
    Note,
    StepTime,
    at_most_notes,
)
from memfit.core.job import Job
from memfit.core.progress import doing
from memfit.core.replay import AllocatorOptions, OutOfMemory, Replay
from memfit.core.settings import Settings
from memfit.core.spread import spreads_of
from memfit.core.timeline import Category, Timeline
from memfit.core.trace import Serving, Trace, Tracer
from memfit.core.units import MIB
from memfit.estimator.scaling import Family, fit

# A second batch size is traced right away when the first trace took less than this.
_EAGER_SECONDS = 0.6
# Three settle what grows with the cube of the batch.
_MOST_FURTHER = 3
# What a process with a framework holds before any tensor, and what each loader worker adds (docs/howto/estimate.md).
_PROCESS_BYTES = 600 * MIB
_WORKER_BYTES = 250 * MIB

# More samples than this have tensors of more bytes than PyTorch can count.
_LARGEST_BATCH = 2**31

_CACHE_RELEASED = Note(
    CACHE_RELEASED,
    "the device is nearly full: the allocator must free its cache and retry, which fits but costs time",
)
# How exactly the least memory that a step runs in is looked for, as a share of the capacity.
_SCARCE_STEP = 0.005
_WORKSPACE_DROPPED = Note(
    WORKSPACE_DROPPED, "it fits only because cuDNN falls back to slower algorithms that need no workspace"
)


def checked_batch_size(batch_size: Any) -> int:
    """A batch size that is one."""
    # To Python, true and false are numbers.
    given: Any = None if isinstance(batch_size, bool) else batch_size
    try:
        size = int(operator.index(given))
    except TypeError:
        raise BadBatch(f"a batch size must be a whole number from 1 up, but {batch_size!r} was given.") from None
    if size < 1:
        raise BadBatch(f"a batch size must be at least 1, but {size} was given.")
    if size > _LARGEST_BATCH:
        raise BadBatch(f"a batch size must be at most {_LARGEST_BATCH:,}, but {size:,} was given.")
    return size


class Estimator:
    """Traces a job as often as needed and turns traces into estimates.

    The tracer is the job, open; the framework is the title of the one that runs it.
    """

    def __init__(self, job: Job, device: Device, options: AllocatorOptions, tracer: Tracer, framework: str) -> None:
        self.job = job
        self.device = device
        self._options = options
        self.tracer: Any = tracer
        self._framework = framework
        self._traces: dict[int | None, Trace] = {}
        self._families: dict[tuple[int, int], Family | None] = {}
        self._settled: set[int] = set()
        """Sizes next to which others are told from their trace."""
        self._fitted: dict[Settings, Trace] = {}

    def run(self, *, eager: bool = True) -> Estimate:
        """The estimate at the job's own batch size; with `eager`, other sizes are prepared for where that is quick."""
        started = time.perf_counter()
        first = self.tracer.batch_size
        trace = self._trace(first)
        if eager and first is not None and time.perf_counter() - started < _EAGER_SECONDS:
            self._family(max(2, first), most_further=0)
        return self._estimate(trace.timeline, first, started)

    def at_batch(self, batch_size: int) -> Estimate:
        """The estimate at another batch size."""
        started = time.perf_counter()
        batch_size = checked_batch_size(batch_size)
        # A batch of 1 tells nothing of larger ones, nor they of it: PyTorch treats dimensions of size 1 apart (they
        # broadcast, and any stride makes them contiguous), so that it may go through other operators.
        is_single = batch_size == 1
        if not is_single and batch_size in self._ends(batch_size):
            self._trace(batch_size)
        known = self._traces.get(batch_size)
        if known is not None:
            return self._estimate(known.timeline, batch_size, started)
        family = None if is_single else self._family(batch_size)
        # Below the sizes that it has seen, a compiler may lay things out in another way.
        least = min(
            (size for size, trace in self._traces.items() if size and trace.assigned_bytes is not None), default=0
        )
        if family is None or batch_size < least:
            trace = self._trace(batch_size)
            self._settled.add(batch_size)
            return self._estimate(trace.timeline, batch_size, started)
        timeline = family.at(batch_size)
        return self._estimate(timeline, batch_size, started, assigned_bytes=self._assigned(batch_size, timeline))

    def traced_at(self, batch_size: int) -> Estimate:
        """The estimate at a batch size, from a trace of that very size where other sizes may not tell all."""
        if self._has_regimes:
            self._trace(batch_size)
            self._settled.add(batch_size)
        return self.at_batch(batch_size)

    @property
    def _has_regimes(self) -> bool:
        return self._traces[self.tracer.batch_size].has_regimes

    def scales(self, batch_size: int) -> bool:
        """Whether sizes next to this one take no further trace."""
        return self.tracer.batch_size is not None and self._family(max(2, batch_size)) is not None

    def with_settings(self, settings: Settings) -> tuple[Estimate, int]:
        """(the estimate of the step as settings run it, bytes that wait in host memory)."""
        started = time.perf_counter()
        size = self.tracer.batch_size
        # What the allocator does with a trace is no part of it.
        traced = replace(settings, expandable_segments=False)
        if traced not in self._fitted:
            with doing(f"tracing {self.tracer.name} as a plan runs it"):
                self._fitted[traced] = self.tracer.trace(size, traced)
        trace = self._fitted[traced]
        options = replace(self._options, expandable_segments=True) if settings.expandable_segments else self._options
        return self._estimate(trace.timeline, size, started, trace, options), trace.host_bytes

    def _trace(self, batch_size: int | None) -> Trace:
        if batch_size not in self._traces:
            size = "" if batch_size is None else f" at batch size {batch_size}"
            with doing(f"tracing {self.tracer.name}{size}"):
                self._traces[batch_size] = self.tracer.trace(batch_size)
        return self._traces[batch_size]

    def _family(self, batch_size: int, most_further: int = _MOST_FURTHER) -> Family | None:
        """The step at the sizes around one, by two traces and up to so many more; None where they don't tell all."""
        ends = self._ends(batch_size)
        if ends not in self._families:
            family = None
            # A step that works at its own batch size only says why when another is asked for.
            with suppress(StepFailed, BadInput):
                traces = [(size, self._trace(size).timeline) for size in ends]
                family = fit(*traces)
                for size in self._further(*ends)[:most_further]:
                    if family is None or family.is_settled:
                        break
                    traces.append((size, self._trace(size).timeline))
                    family = fit(*traces)
            is_settled = family is not None and family.is_settled
            if not is_settled and not most_further:
                return None
            self._families[ends] = family if is_settled else None
        return self._families[ends]

    def _further(self, n: int, m: int) -> list[int]:
        """Sizes whose traces settle what two of them leave open, those that have been traced first.

        Where kernels have regimes they lie between the two, as far as there are any.
        """
        quarter = (m - n) // 4
        between = (n + 2 * quarter, n + quarter, m - quarter) if self._has_regimes else ()
        sizes = dict.fromkeys((*between, n + m, 2 * m, 2 * m + n))
        others = [size for size in sizes if size not in (n, m)]
        return sorted(others, key=lambda size: size not in self._traces)

    def _ends(self, batch_size: int) -> tuple[int, int]:
        """Two sizes whose traces tell of the one between them.

        Where kernels have regimes, these are the job's own size, doubled or halved as often as needed, or nearer
        ones that have been traced. Elsewhere it and its double tell of all.
        """
        own: int = max(2, self.tracer.batch_size)
        n, m = own, 2 * own
        if self._has_regimes:
            while m < batch_size:
                n, m = m, 2 * m
            while n > batch_size:
                n, m = max(2, n // 2), n
            n = max((size for size in self._settled if n < size <= batch_size), default=n)
            m = min((size for size in self._settled if max(n + 1, batch_size) <= size < m), default=m)
        return n, m

    def _assigned(self, batch_size: int, timeline: Timeline) -> int | None:
        """What a compiler would lay out at a size between, or beyond, those that it was asked about.

        What lives at once is known at any size; what is laid out beyond that, such as results that wait for their
        values, grows evenly.
        """
        beyond = sorted(
            (size, None if trace.assigned_bytes is None else trace.assigned_bytes - trace.timeline.peak()[1])
            for size, trace in self._traces.items()
            if size
        )
        if len(beyond) < 2 or any(extra is None for _, extra in beyond):
            return None
        (n, least), (m, most) = beyond[0], beyond[-1]
        assert least is not None and most is not None
        return timeline.peak()[1] + max(0, round(least + (most - least) * (batch_size - n) / (m - n)))

    def _estimate(
        self,
        timeline: Timeline,
        batch_size: int | None,
        started: float,
        fitted: Trace | None = None,
        options: AllocatorOptions | None = None,
        *,
        assigned_bytes: int | None = None,
    ) -> Estimate:
        trace = self._traces[self.tracer.batch_size] if fitted is None else fitted
        exact = self._traces.get(batch_size) if fitted is None else fitted
        if exact is not None:
            assigned_bytes = exact.assigned_bytes
        device = self.device
        context_bytes = device.context_bytes or 0
        live_bytes = timeline.without_optional().peak()[1]
        replays: _Replays = (lambda timeline, limit: replay(timeline, options or self._options, limit)), replay_plain
        if assigned_bytes is not None:
            # A compiler laid out the whole step.
            replays = (lambda timeline, limit: _laid_out(timeline, assigned_bytes, limit),) * 2
        elif trace.serving is Serving.BEST_FIT:
            replays = replay_best_fit, replay_plain
        answer, least_bytes, notes = _replayed(timeline, live_bytes, device, replays)
        reserved = answer.reserved_peak_bytes
        is_cached = device.kind is Kind.CUDA and assigned_bytes is None and trace.serving is Serving.CACHING
        scale = 1 if not batch_size or not self.tracer.batch_size else batch_size / self.tracer.batch_size
        return Estimate(
            subject=self.tracer.name,
            device=device,
            mode=self.job.mode,
            precision=self.job.precision or "as given",
            batch_size=batch_size,
            timeline=timeline,
            replay=answer,
            context_bytes=context_bytes,
            certain_bytes=min(timeline.certain().peak()[1], reserved) + context_bytes,
            tight_bytes=min(least_bytes, reserved) + context_bytes,
            host=_host_memory(self.job, trace, device, scale, self._framework),
            notes=(*trace.notes, *self.tracer.notes, *notes, *at_most_notes(timeline)),
            spreads=spreads_of(
                device,
                answer,
                grouped_bytes=round((exact or trace).grouped_bytes * (1 if exact else scale)),
                orders=(exact or trace).spread,
            ),
            num_parameters=trace.num_parameters,
            state_bytes={str(category): size for category, size in (trace.state_bytes or state_of(timeline)).items()},
            batch_bytes=round(trace.batch_bytes * scale),
            time=self._time(batch_size) if fitted is None else None,
            seconds=time.perf_counter() - started,
            vary=partial(replay_variants, timeline, options or self._options) if is_cached else None,
            rescale=self.at_batch if self.tracer.batch_size is not None and fitted is None else None,
        )

    def _time(self, batch_size: int | None) -> StepTime | None:
        """How long the step takes, from the traces at the nearest sizes."""
        # It computes with numpy, which `import memfit` does without.
        from memfit.timing import step_time

        traced = sorted(
            (size, trace.work) for size, trace in self._traces.items() if size is not None and batch_size is not None
        )
        exact = self._traces.get(batch_size)
        if exact is not None or len(traced) < 2:
            return step_time((exact or self._traces[self.tracer.batch_size]).work, self.device, self.job.mode)
        assert batch_size is not None
        size: int = batch_size
        traced.sort(key=lambda pair: abs(pair[0] - size))
        return step_time(traced[0][1], self.device, self.job.mode, at=(size, traced[0][0], traced[1]))


_Replays = tuple[Callable[[Timeline, int | None], Replay], Callable[[Timeline, int | None], Replay]]
"""What a GPU and what the host make of a timeline under a limit, or without one."""


def _laid_out(timeline: Timeline, assigned_bytes: int, limit: int | None) -> Replay:
    """The memory of a step that was laid out ahead of time: all of it is taken for as long as the step runs."""
    live = replay_plain(timeline)
    # What lies in one place one after the other is counted once by the compiler; its own total is the truth.
    total = max(assigned_bytes, 1)
    allocated = tuple(min(size, total) for size in live.allocated)
    peak = max(allocated, default=0)
    failure = None
    if limit is not None and total > limit:
        failure = OutOfMemory(live.allocated.index(max(live.allocated)) if live.allocated else 0, total, 0, 0)
    return Replay(allocated, (total,) * len(allocated), peak, total, live.requested_peak_bytes, 1, 0, failure)


def state_of(timeline: Timeline) -> dict[Category, int]:
    """Parameters, buffers, gradients and optimizer state: the most that lives of each at once."""
    categories = (Category.PARAMETER, Category.BUFFER, Category.GRADIENT, Category.OPTIMIZER_STATE)
    of_category = {each: tuple(block for block in timeline.blocks if block.category is each) for each in categories}
    peaks = {each: Timeline(blocks, timeline.num_ticks).peak()[1] for each, blocks in of_category.items()}
    return {category: size for category, size in peaks.items() if size}


def _replayed(
    timeline: Timeline, live_bytes: int, device: Device, replays: _Replays
) -> tuple[Replay, int, tuple[Note, ...]]:
    """(what the device makes of a step, the least memory that the step runs in, remarks).

    Where the step doesn't fit, the first is the unlimited replay with the failure noted: what would be needed says more
    than where it broke off. The least is `live_bytes`, unless room is scarce: then it matters where there are holes.
    """
    on_gpu, on_host = replays
    if device.kind is Kind.HOST:
        free = on_host(timeline, None)
        capped = on_host(timeline, device.usable_bytes)
        return replace(free, out_of_memory=capped.out_of_memory), free.reserved_peak_bytes, ()
    free = on_gpu(timeline, None)
    context_bytes = device.context_bytes or 0
    if device.usable_bytes is None or free.reserved_peak_bytes + context_bytes <= device.usable_bytes:
        return free, live_bytes, ()
    capacity = max(1, device.usable_bytes - context_bytes)
    capped = on_gpu(timeline, capacity)
    enough = free.reserved_peak_bytes if capped.out_of_memory is not None else capped.reserved_peak_bytes
    short = live_bytes if capped.out_of_memory is None else max(live_bytes, capacity)
    while enough - short > _SCARCE_STEP * capacity and live_bytes <= capacity:
        middle = (short + enough) // 2
        short, enough = (short, middle) if on_gpu(timeline, middle).out_of_memory is None else (middle, enough)
    least_bytes = enough if live_bytes <= capacity else live_bytes
    if capped.out_of_memory is not None:
        return replace(free, out_of_memory=capped.out_of_memory), least_bytes, ()
    return capped, least_bytes, (_WORKSPACE_DROPPED if capped.num_left_out else _CACHE_RELEASED,)


def _host_memory(job: Job, trace: Trace, device: Device, scale: float, framework: str) -> HostMemory:
    """What the host holds beside the device: assumptions, each named."""
    batch_bytes = round(trace.batch_bytes * scale)
    parts = {f"Python and {framework} (assumed)": _PROCESS_BYTES}
    if device.kind is Kind.CUDA:
        parts["model while it is built, before it moves to the device"] = trace.parameter_bytes
    parts["batch being fed"] = batch_bytes
    if trace.managed_bytes:
        parts[PAGED_STATE] = trace.managed_bytes
    ahead = job.num_workers * job.prefetch_factor
    if job.num_workers:
        parts[f"{job.num_workers} loader workers (assumed 250 MiB each)"] = job.num_workers * _WORKER_BYTES
    if job.num_workers and not job.pin_memory:
        parts[f"{job.num_workers} x {job.prefetch_factor} prefetched batches, in shared memory (/dev/shm)"] = (
            ahead * batch_bytes
        )
    if job.pin_memory:
        # A thread moves each batch out of shared memory as it arrives, so that prefetched batches wait pinned.
        parts["prefetched batches, pinned"] = max(1, ahead) * batch_bytes
        if job.num_workers:
            parts["batches on their way, in shared memory (/dev/shm)"] = job.num_workers * batch_bytes
    return HostMemory(parts)
