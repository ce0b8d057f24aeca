"""The public verbs, composed from the parts: trace, replay, report."""

import operator
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memfit.allocator import parse_options, replay, replay_plain
from memfit.catalogue import find_device
from memfit.core import dryrun as dryrun_results
from memfit.core import env
from memfit.core.device import Device, Kind, Origin
from memfit.core.dryrun import DryRun, Request
from memfit.core.errors import BadBatch, BadInput, MissingDependency, StepFailed
from memfit.core.estimate import Estimate, HostMemory, Note, use_reporters
from memfit.core.job import Job
from memfit.core.replay import AllocatorOptions, Replay
from memfit.core.scaling import Family, fit, needs_third
from memfit.core.timeline import Timeline
from memfit.core.units import MIB
from memfit.reports import run_text, text

if TYPE_CHECKING:
    from memfit.adapters.torch.trace import Trace

# A second batch size is traced right away when the first trace took less than this.
_EAGER_SECONDS = 0.6
# What a process with PyTorch holds before any tensor, and what each loader worker adds (docs/estimate.md).
_PROCESS_BYTES = 600 * MIB
_WORKER_BYTES = 250 * MIB
_LARGEST_BATCH = 2**24

_CACHE_RELEASED = Note(
    "cache-released",
    "the device is so full that the allocator must return cached memory and ask again: it fits, but pauses cost time",
)
_WORKSPACE_DROPPED = Note(
    "workspace-dropped", "it fits only because cuDNN falls back to slower algorithms that need no workspace"
)


def _write_page(result: Estimate, path: str) -> None:
    from memfit.reports import page

    page.write_page(result, path)


def _write_run_page(result: DryRun, path: str) -> None:
    from memfit.reports import page

    page.write_run_page(result, path)


use_reporters(text.format_estimate, _write_page)
dryrun_results.use_reporters(run_text.format_run, _write_run_page)


def estimate(
    model: Any,
    loss: Callable[[Any, Any], Any] | None = None,
    batch: Any = None,
    *,
    optimizer: Any = None,
    device: str | Device | None = None,
    precision: str | None = None,
    mode: str | None = None,
    allocator: AllocatorOptions | None = None,
    batch_size: int | None = None,
) -> Estimate:
    """Peak memory of a training step on a device that need not be there.

    Args:
        model: an `nn.Module`, a callable that builds one (built without memory for its weights), or a `Job`.
        loss: takes the model and a batch and returns the scalar loss.
        batch: any nesting of tensors, meta tensors included.
        optimizer: an instance, a callable that takes parameters, a name such as "adamw", or None.
        device: a name of the catalogue ("rtx-3090"), "cpu", a size ("24GiB"); None means this machine's own GPU.
        precision: "fp32", "fp16", "bf16", "amp-fp16", "amp-bf16", or None to leave the model as it is.
        mode: "training" (the default), or "inference" for a forward pass without gradients.
        allocator: settings of PyTorch's caching allocator.
        batch_size: replaces the first dimension of the batch.

    Returns:
        The peak, where it goes, and whether it fits.
    """
    job = _as_job(model, loss, batch, optimizer=optimizer, precision=precision, mode=mode)
    size = None if batch_size is None else _checked_batch_size(batch_size)
    return _Estimator(job, _resolve(device), allocator or AllocatorOptions(), size).run()


@dataclass(frozen=True, slots=True)
class MaxBatch:
    """The largest batch that fits.

    Args:
        batch_size: the answer; None when not even the smallest fits.
        estimate: the estimate at that batch size, or at the smallest one tried when nothing fits.
        tried: (batch size, bytes needed where nothing limits the allocator, fits) of every size looked at, in order.
            A size may fit though it would take more than there is: the allocator then releases its cache.
    """

    batch_size: int | None
    estimate: Estimate
    tried: tuple[tuple[int, int, bool], ...]


def max_batch(
    model: Any,
    loss: Callable[[Any, Any], Any] | None = None,
    batch: Any = None,
    *,
    optimizer: Any = None,
    device: str | Device | None = None,
    precision: str | None = None,
    mode: str | None = None,
    allocator: AllocatorOptions | None = None,
    candidates: Iterable[int] | None = None,
) -> MaxBatch:
    """The largest batch that fits, from a handful of traces.

    Args:
        model: as for `estimate`.
        loss: as for `estimate`.
        batch: a batch of any size; its first dimension is varied.
        optimizer: as for `estimate`.
        device: as for `estimate`; its capacity must be known.
        precision: as for `estimate`.
        mode: as for `estimate`.
        allocator: as for `estimate`.
        candidates: sizes to choose from; every whole number by default.
    """
    sizes = None if candidates is None else _checked_candidates(candidates)
    job = _as_job(model, loss, batch, optimizer=optimizer, precision=precision, mode=mode)
    target = _resolve(device)
    if target.usable_bytes is None:
        raise BadInput(f"the memory of {target.title} is unknown; name a size such as device='16GiB'.")
    start = _Estimator(job, target, allocator or AllocatorOptions()).run()
    if start.batch_size is None:
        raise BadBatch(
            "the batch's tensors share no first dimension, so it can't be made larger or smaller. "
            "Give tensors whose first dimension is the batch."
        )
    return _Search(start).run(sizes)


def _checked_candidates(candidates: Iterable[int]) -> list[int]:
    given = list(candidates)
    message = f"candidates must be whole numbers from 1 up, such as [16, 32, 64], but {given} was given."
    if not given:
        raise BadInput(message)
    try:
        return sorted({_checked_batch_size(size) for size in given})
    except BadBatch:
        raise BadInput(message) from None


def _checked_batch_size(batch_size: Any) -> int:
    try:
        size = int(operator.index(batch_size))
    except TypeError:
        raise BadBatch(f"a batch size must be a whole number from 1 up, but {batch_size!r} was given.") from None
    if size < 1:
        raise BadBatch(f"a batch size must be at least 1, but {size} was given.")
    return size


def compare(
    jobs: Iterable[Job], *, device: str | Device | None = None, batch_size: int | None = None
) -> list[Estimate]:
    """Estimates of several jobs on one device, for a table side by side.

    Args:
        jobs: what to compare; the first is what the others are measured against.
        device: as for `estimate`.
        batch_size: the same for all; each job's own by default.
    """
    target = _resolve(device)
    return [estimate(job, device=target, batch_size=batch_size) for job in jobs]


def named_job(
    target: str, *, optimizer: str = "adamw", sequence_length: int | None = None, image_size: int | None = None
) -> Job:
    """The usual training job of a named model: "timm:resnet50", "torchvision:vgg16", "hf:GPT2LMHeadModel".

    Args:
        target: kind and name of the model.
        optimizer: "none", "sgd", "sgd-momentum", "adam", "adamw", "rmsprop", "adagrad", "adadelta" or "adafactor".
        sequence_length: tokens per sample, for language models.
        image_size: height and width, for vision models.
    """
    for option, value in (("sequence_length", sequence_length), ("image_size", image_size)):
        if value is not None and value < 1:
            raise BadInput(f"{option} must be at least 1, but {value} was given.")
    # Fails early on a name that isn't one.
    named_optimizer(optimizer)
    from memfit.adapters.torch import named

    return named.named_job(target, optimizer, sequence_length, image_size)


def named_optimizer(name: str) -> Any:
    """A callable that makes the optimizer called `name`, or None for "none"."""
    _torch_adapter()
    from memfit.adapters.torch import named

    return named.named_optimizer(name)


def mend_torchvision() -> None:
    """Lets torchvision be imported beside a build of PyTorch that its compiled operators don't match."""
    _torch_adapter()
    from memfit.adapters.torch.torchvision_operators import define_missing_operators

    define_missing_operators()


def dryrun(
    script: str | os.PathLike[str],
    arguments: Iterable[str] = (),
    *,
    device: str | Device | None = None,
    module: bool = False,
    count: int = 1,
    steps: int = 3,
    scan: int = 0,
    checkpoint_folder: str | os.PathLike[str] | None = None,
    quiet_output: bool = False,
) -> DryRun:
    """How an unmodified training script fares on a device that need not be there.

    The script runs in a process of its own, in which PyTorch sees the device. What it prints goes where ours goes.

    Args:
        script: path of the script, or dotted name of a module.
        arguments: what the script is given.
        device: as for `estimate`; a CUDA device.
        module: whether `script` is the name of a module, as for `python -m`.
        count: how many such devices PyTorch sees; the figures are those of one of them.
        steps: optimizer steps after which the script is ended.
        scan: batches of its loader to look at for the largest; 0: none.
        checkpoint_folder: where checkpoints go that the script writes; a temporary place by default.
        quiet_output: send what the script prints to standard error.
    """
    for option, value, least in (("count", count, 1), ("steps", steps, 1), ("scan", scan, 0)):
        if value < least:
            raise BadInput(f"{option} must be at least {least}, but {value} was given.")
    if isinstance(arguments, str):
        raise BadInput(f"arguments must be a list such as {arguments.split()!r}, but the text {arguments!r} was given.")
    target, name = _resolve(device), os.fspath(script)
    if target.kind is not Kind.CUDA:
        raise BadInput(
            f"only CUDA devices can be simulated for a script, but {target.name!r} was given. "
            "Name one, such as device='rtx-3090' (--device rtx-3090); `memfit devices` lists all."
        )
    # Refused here rather than by the script's process.
    parse_options(env.allocator_settings())
    # Processes and moves are of no use to anyone who doesn't run a script.
    from memfit.planner import advise
    from memfit.runs.sequence import dry_run
    from memfit.runs.target import check_module, check_script

    (check_module if module else check_script)(name)
    _require_torch()
    folder = "" if checkpoint_folder is None else os.path.abspath(checkpoint_folder)
    given = tuple(map(str, arguments))
    request = Request(name, module, given, target, count, steps, scan, checkpoint_folder=folder)
    run, too_large = dry_run(request, quiet_output=quiet_output, announce=_announce)
    if run.fits is not False or too_large is None:
        return run
    found = advise(
        too_large.timeline,
        too_large.replay,
        run.allocator,
        context_bytes=too_large.context_bytes,
        num_parameters=too_large.num_parameters,
        num_devices=count,
    )
    return replace(run, advice=found)


def _announce(text: str) -> None:
    print(f"memfit: {text}", file=sys.stderr, flush=True)


def _as_job(model: Any, loss: Any, batch: Any, **options: Any) -> Job:
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(given.get("optimizer"), str):
        given["optimizer"] = named_optimizer(given["optimizer"])
    if isinstance(model, Job):
        if loss is not None or batch is not None:
            raise BadInput("a Job brings its own loss and batch; give either a Job or a model with loss and batch.")
        return replace(model, **given)
    if loss is None:
        raise BadInput("loss is missing: give a function that takes (model, batch) and returns the scalar loss.")
    return Job(model, loss, batch, **given)


def _resolve(device: Any) -> Device:
    if isinstance(device, Device):
        return device
    if type(device).__module__ == "torch":
        # A torch.device: "cuda" and "cpu" mean this machine's own.
        device = str(device)
    if device is not None and not isinstance(device, str):
        raise BadInput(f"device must be a name such as 'rtx-3090' or a size such as '24GiB', but {device!r} was given.")
    if device is None or device.strip().lower() in ("cuda", "cuda:0", "gpu"):
        return _own_gpu()
    return find_device(device)


def _own_gpu() -> Device:
    adapter = _torch_adapter()
    own = adapter.own_gpu()
    if own is None:
        raise BadInput(
            "this machine has no CUDA device that PyTorch can use, so there is no default. "
            "Name the device to simulate, such as device='rtx-3090' (--device rtx-3090), or 'cpu'; "
            "`memfit devices` lists all."
        )
    name, total_bytes, capability = own
    try:
        return replace(find_device(name), usable_bytes=total_bytes, usable_origin=Origin.MEASURED)
    except BadInput:
        return Device(name, name, Kind.CUDA, None, total_bytes, Origin.MEASURED, capability, source="this machine")


def _require_torch() -> None:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise MissingDependency("PyTorch is not installed. Install it with `pip install 'memfit[torch]'`.")


def _torch_adapter() -> Any:
    _require_torch()
    from memfit.adapters.torch import job as adapter

    return adapter


class _Estimator:
    """Traces a job as often as needed and turns traces into estimates."""

    def __init__(self, job: Job, device: Device, options: AllocatorOptions, batch_size: int | None = None) -> None:
        self._job = job
        self._device = device
        self._options = options
        self._tracer = _torch_adapter().open_job(job, device, batch_size)
        self._traces: dict[int | None, Trace] = {}
        self._family: Family | None = None
        self._family_tried = False

    def run(self) -> Estimate:
        started = time.perf_counter()
        first = self._tracer.batch_size
        trace = self._trace(first)
        if first is not None and time.perf_counter() - started < _EAGER_SECONDS:
            self._fit()
        return self._estimate(trace.timeline, first, started)

    def at_batch(self, batch_size: int) -> Estimate:
        started = time.perf_counter()
        batch_size = _checked_batch_size(batch_size)
        known = self._traces.get(batch_size)
        if known is not None:
            return self._estimate(known.timeline, batch_size, started)
        # A batch of 1 tells nothing of larger ones, nor they of it: PyTorch treats dimensions of size 1 apart (they
        # broadcast, and any stride makes them contiguous), so that it may go through other operators.
        family = self._fit() if batch_size > 1 else None
        timeline = family.at(batch_size) if family is not None else self._trace(batch_size).timeline
        return self._estimate(timeline, batch_size, started)

    def _trace(self, batch_size: int | None) -> "Trace":
        if batch_size not in self._traces:
            self._traces[batch_size] = self._tracer.trace(batch_size)
        return self._traces[batch_size]

    def _fit(self) -> Family | None:
        if not self._family_tried:
            self._family_tried = True
            n: int = max(2, self._tracer.batch_size)
            try:
                first, second = (n, self._trace(n).timeline), (2 * n, self._trace(2 * n).timeline)
                family = fit(first, second)
                if family is not None and needs_third(first, second):
                    family = fit(first, second, (3 * n, self._trace(3 * n).timeline))
                self._family = family
            except (StepFailed, BadInput):
                # The step works at its own batch size only; other sizes will say why when they are asked for.
                self._family = None
        return self._family

    def _estimate(self, timeline: Timeline, batch_size: int | None, started: float) -> Estimate:
        trace = self._traces[self._tracer.batch_size]
        device = self._device
        context_bytes = device.context_bytes or 0
        floor = timeline.without_optional()
        timeline, answer, unbounded, notes = _replayed(timeline, floor, device, self._options)
        scale = 1 if not batch_size or not self._tracer.batch_size else batch_size / self._tracer.batch_size
        return Estimate(
            subject=self._tracer.name,
            device=device,
            mode=self._job.mode,
            precision=self._job.precision or "as given",
            batch_size=batch_size,
            timeline=timeline,
            replay=answer,
            context_bytes=context_bytes,
            lower_bytes=min(floor.peak()[1] + context_bytes, answer.reserved_peak_bytes + context_bytes),
            upper_bytes=max(answer.reserved_peak_bytes, unbounded.reserved_peak_bytes) + context_bytes,
            host=_host_memory(self._job, trace, device, scale),
            notes=(*trace.notes, *self._tracer.notes, *notes),
            num_parameters=trace.num_parameters,
            seconds=time.perf_counter() - started,
            rescale=self.at_batch if self._tracer.batch_size is not None else None,
        )


def _replayed(
    timeline: Timeline, floor: Timeline, device: Device, options: AllocatorOptions
) -> tuple[Timeline, Replay, Replay, tuple[Note, ...]]:
    """(the timeline as it runs, what the device makes of it, what an unlimited one would of the whole, remarks).

    Where the step doesn't fit, the second is the unlimited one with the failure noted: what would be needed says more
    than where it broke off.

    Args:
        timeline: with everything the step would like to have.
        floor: with only what it can't do without.
        device: the target.
        options: of its allocator.
    """
    if device.kind is Kind.HOST:
        free = replay_plain(timeline, None)
        capped = replay_plain(timeline, device.usable_bytes)
        return timeline, replace(free, out_of_memory=capped.out_of_memory), free, ()
    free = replay(timeline, options)
    context_bytes = device.context_bytes or 0
    if device.usable_bytes is None or free.reserved_peak_bytes + context_bytes <= device.usable_bytes:
        return timeline, free, free, ()
    capacity = max(1, device.usable_bytes - context_bytes)
    capped = replay(timeline, options, capacity)
    if capped.out_of_memory is None:
        return timeline, capped, free, (_CACHE_RELEASED,)
    lean = replay(floor, options, capacity)
    if lean.out_of_memory is None:
        return floor, lean, free, (_WORKSPACE_DROPPED,)
    return timeline, replace(free, out_of_memory=lean.out_of_memory), free, ()


def _host_memory(job: Job, trace: "Trace", device: Device, scale: float) -> HostMemory:
    """What the host holds beside the device: assumptions, each named."""
    batch_bytes = round(trace.batch_bytes * scale)
    parts = {"Python and PyTorch (assumed)": _PROCESS_BYTES}
    if device.kind is Kind.CUDA:
        parts["model while it is built, before it moves to the device"] = trace.parameter_bytes
    parts["batch being fed"] = batch_bytes
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


class _Search:
    """Looks for the largest batch that fits, on the scaled timelines."""

    def __init__(self, start: Estimate) -> None:
        self._start = start
        self._seen: dict[int, Estimate] = {}
        if start.batch_size is not None:
            self._seen[start.batch_size] = start

    def run(self, candidates: list[int] | None) -> MaxBatch:
        if candidates is not None:
            best = self._bisect(lambda i: self._fits(candidates[i]), len(candidates))
            size = candidates[best] if best is not None else None
        else:
            size = self._largest()
        tried = tuple((n, e.upper_bytes, bool(e.fits)) for n, e in sorted(self._seen.items()))
        return MaxBatch(size, self._seen[size if size is not None else min(self._seen)], tried)

    def _largest(self) -> int | None:
        high = max(1, self._start.batch_size or 1)
        while self._fits(high):
            if high >= _LARGEST_BATCH:
                return high
            high *= 2
        best = self._bisect(lambda i: self._fits(i + 1), high - 1)
        return best + 1 if best is not None else None

    @staticmethod
    def _bisect(fits: Callable[[int], bool], count: int) -> int | None:
        """Last index of `count` that fits; None when the first doesn't."""
        low, high = -1, count
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low if low >= 0 else None

    def _at(self, batch_size: int) -> Estimate:
        if batch_size not in self._seen:
            self._seen[batch_size] = self._start.at_batch(batch_size)
        return self._seen[batch_size]

    def _fits(self, batch_size: int) -> bool:
        try:
            return bool(self._at(batch_size).fits)
        except StepFailed:
            # Batch norm, for one, refuses to train on a single sample.
            if batch_size > 1:
                raise
            return False
