"""What the public verbs share: what users give made into jobs and devices, and traces made into estimates."""

import importlib
import importlib.util
import operator
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from memfit.allocator import replay, replay_best_fit, replay_plain
from memfit.catalogue import find_device
from memfit.core.device import Device, Kind, Origin
from memfit.core.errors import BadBatch, BadInput, MissingDependency, StepFailed
from memfit.core.estimate import Estimate, HostMemory, Note, at_most_notes
from memfit.core.job import Job
from memfit.core.progress import doing
from memfit.core.replay import AllocatorOptions, OutOfMemory, Replay
from memfit.core.scaling import Family, fit, needs_third
from memfit.core.settings import Settings
from memfit.core.timeline import Category, Timeline
from memfit.core.trace import Serving, Trace, Tracer
from memfit.core.units import MIB

# A second batch size is traced right away when the first trace took less than this.
_EAGER_SECONDS = 0.6
# What a process with a framework holds before any tensor, and what each loader worker adds (docs/estimate.md).
_PROCESS_BYTES = 600 * MIB
_WORKER_BYTES = 250 * MIB

_CACHE_RELEASED = Note(
    "cache-released",
    "the device is so full that the allocator must return cached memory and ask again: it fits, but pauses cost time",
)
_WORKSPACE_DROPPED = Note(
    "workspace-dropped", "it fits only because cuDNN falls back to slower algorithms that need no workspace"
)


def as_job(model: Any, arguments: tuple[Any, ...], loss: Any, batch: Any, **options: Any) -> Job:
    """A job from what the caller gave: one already, or its parts.

    Args:
        model: a job, a model, or a training step of JAX.
        arguments: what followed it: loss and batch, or what the step takes.
        loss: given by name.
        batch: given by name.
        options: of the job; those that are None are left as they are.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(model, str):
        raise BadInput(
            f"a model was expected, but the text {model!r} was given. For a name: memfit.named_job({model!r})."
        )
    if not isinstance(model, Job) and not is_keras_model(model) and _is_jax_step(model, arguments):
        if loss is not None or (batch is not None and arguments):
            raise BadInput("a step of JAX takes its arguments one after the other: memfit.estimate(step, *arguments).")
        return Job(model, None, arguments or batch, **given)
    loss, batch = _loss_and_batch(arguments, loss, batch)
    if isinstance(model, Job):
        if loss is not None or batch is not None:
            raise BadInput("a Job brings its own loss and batch; give either a Job or a model with loss and batch.")
        if framework_of(model) == TORCH and isinstance(given.get("optimizer"), str):
            given["optimizer"] = named_optimizer(given["optimizer"])
        return replace(model, **given)
    if is_keras_model(model):
        if loss is not None and batch is None:
            # memfit.estimate(model, (x, y))
            loss, batch = None, loss
        if loss is not None and is_torch_module(model):
            # Trained as a module of PyTorch, in a loop of one's own.
            return Job(model, loss, batch, **given)
        if loss is not None or given.get("optimizer") is not None:
            raise BadInput(
                "a Keras model brings its loss and optimizer from compile(); give the model and the batch only: "
                "memfit.estimate(model, batch=(x, y))."
            )
        return Job(model, None, batch, **given)
    if isinstance(given.get("optimizer"), str):
        given["optimizer"] = named_optimizer(given["optimizer"])
    if batch is None and loss is not None and not callable(loss):
        # memfit.estimate(model, batch): the model returns its loss itself.
        loss, batch = None, loss
    if loss is None:
        if batch is None:
            raise BadInput(
                "loss and batch are missing: give a function that takes (model, batch) and returns the scalar loss, "
                "and a batch; or the batch alone where the model returns its loss. Where the first is a training step "
                "of JAX, give its arguments as arrays or shapes."
            )
        loss = torch_adapter().as_loss(None)
    return Job(model, loss, batch, **given)


def _loss_and_batch(arguments: tuple[Any, ...], loss: Any, batch: Any) -> tuple[Any, Any]:
    """Loss and batch, given by place or by name."""
    if len(arguments) > 2:
        raise BadInput(
            f"a model is followed by loss and batch, but {len(arguments)} arguments were given. "
            "Where the first is a training step of JAX, import jax and give its arguments as arrays or shapes."
        )
    by_place = dict(zip(("loss", "batch"), arguments, strict=False))
    for name, value in (("loss", loss), ("batch", batch)):
        if value is not None and name in by_place:
            raise BadInput(f"{name} was given twice, by its place and by its name.")
    return by_place.get("loss", loss), by_place.get("batch", batch)


TORCH, KERAS, JAX = "torch", "keras", "jax"
"""Frameworks, whose adapters open jobs."""
_TITLES = {TORCH: "PyTorch", KERAS: "Keras", JAX: "JAX"}


def is_keras_model(model: Any) -> bool:
    """Whether it is one of Keras, on whichever backend."""
    keras = sys.modules.get("keras")
    return keras is not None and hasattr(keras, "Model") and isinstance(model, keras.Model)


def is_torch_module(model: Any) -> bool:
    """Whether it is one of PyTorch, as models of Keras on PyTorch are, too."""
    torch = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "nn") and isinstance(model, torch.nn.Module)


def _is_jax_step(model: Any, arguments: tuple[Any, ...]) -> bool:
    """Whether a function and its arguments are a step of JAX."""
    if "jax" not in sys.modules or not callable(model):
        return False
    if is_torch_module(model):
        return False
    from memfit.adapters.jax import job

    return job.is_step(model, arguments)


def framework_of(job: Job) -> str:
    """The framework that runs a job."""
    if job.loss is not None or (is_torch_module(job.model) and not is_keras_model(job.model)):
        # A model of Keras on PyTorch is a module of PyTorch, too, and a loop of one's own may train it as such.
        return TORCH
    # A turn of a loop in a script with Keras has no model that could be named.
    return KERAS if job.model is None or is_keras_model(job.model) else JAX


def open_job(job: Job, device: Device, batch_size: int | None = None) -> Any:
    """The job, checked and ready to be traced, at its own batch size or the given one."""
    framework = framework_of(job)
    if framework == KERAS:
        from memfit.adapters.keras import job as keras_jobs

        return keras_jobs.open_job(job, device, batch_size)
    if framework == JAX:
        if importlib.util.find_spec("jax") is None:
            raise MissingDependency("JAX is not installed. Install it with `pip install jax`.")
        from memfit.adapters.jax import job as jax_jobs

        return jax_jobs.open_job(job, device, batch_size)
    return torch_adapter().open_job(job, device, batch_size)


def resolve(device: Any) -> Device:
    """The device that the caller means."""
    if isinstance(device, Device):
        return device
    if type(device).__module__ == "torch":
        # A torch.device: "cuda" and "cpu" mean this machine's own.
        device = str(device)
    if device is not None and not isinstance(device, str):
        raise BadInput(f"device must be a name such as 'rtx-3090' or a size such as '24GiB', but {device!r} was given.")
    if device is None or device.strip().lower() in ("cuda", "cuda:0", "gpu"):
        return own_gpu()
    return find_device(device)


def own_gpu() -> Device:
    """This machine's GPU."""
    # Others name no default.
    own = (
        None
        if importlib.util.find_spec("torch") is None and {"keras", "jax"} & set(sys.modules)
        else torch_adapter().own_gpu()
    )
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


def require_torch() -> None:
    """Refuses to go on without PyTorch."""
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency("PyTorch is not installed. Install it with `pip install torch`.")


def require_keras() -> None:
    """Refuses to go on without Keras, or without the backend that it is set to run on."""
    if importlib.util.find_spec("keras") is None:
        raise MissingDependency("Keras is not installed. Install it with `pip install keras`.")
    try:
        importlib.import_module("memfit.adapters.keras.model")
    except ValueError as error:
        # Keras has no such backend; it asks the environment, then its own file of settings.
        raise BadInput(
            f"Keras can't be imported: {error}. Set KERAS_BACKEND to tensorflow, jax or torch, and install that one."
        ) from None
    except ImportError as error:
        backend = (error.name or "").partition(".")[0]
        if backend not in ("tensorflow", "jax", "torch"):
            raise
        raise MissingDependency(
            f"Keras is set to run on {backend}, which is not installed. Install it with "
            f"`pip install {backend}`, or set KERAS_BACKEND to one that is: tensorflow, jax or torch."
        ) from None


def torch_adapter() -> Any:
    """The adapter for PyTorch."""
    require_torch()
    from memfit.adapters.torch import job as adapter

    return adapter


def named_optimizer(name: str) -> Any:
    """A callable that makes the optimizer called `name`, or None for "none"."""
    torch_adapter()
    from memfit.adapters.torch import named

    return named.named_optimizer(name)


def checked_batch_size(batch_size: Any) -> int:
    """A batch size that is one."""
    try:
        size = int(operator.index(batch_size))
    except TypeError:
        raise BadBatch(f"a batch size must be a whole number from 1 up, but {batch_size!r} was given.") from None
    if size < 1:
        raise BadBatch(f"a batch size must be at least 1, but {size} was given.")
    return size


class Estimator:
    """Traces a job as often as needed and turns traces into estimates."""

    def __init__(
        self,
        job: Job,
        device: Device,
        options: AllocatorOptions,
        batch_size: int | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._job = job
        self._device = device
        self._options = options
        with doing("opening the model"):
            self.tracer: Any = open_job(job, device, batch_size) if tracer is None else tracer
        self._traces: dict[int | None, Trace] = {}
        self._family: Family | None = None
        self._family_tried = False
        self._fitted: dict[Settings, Trace] = {}

    def run(self, *, eager: bool = True) -> Estimate:
        """The estimate at the job's own batch size; with `eager`, other sizes are prepared for where that is quick."""
        started = time.perf_counter()
        first = self.tracer.batch_size
        trace = self._trace(first)
        if eager and first is not None and time.perf_counter() - started < _EAGER_SECONDS:
            self._fit()
        return self._estimate(trace.timeline, first, started)

    def at_batch(self, batch_size: int) -> Estimate:
        """The estimate at another batch size."""
        started = time.perf_counter()
        batch_size = checked_batch_size(batch_size)
        known = self._traces.get(batch_size)
        if known is not None:
            return self._estimate(known.timeline, batch_size, started)
        # A batch of 1 tells nothing of larger ones, nor they of it: PyTorch treats dimensions of size 1 apart (they
        # broadcast, and any stride makes them contiguous), so that it may go through other operators.
        family = self._fit() if batch_size > 1 else None
        # Below the sizes that it has seen, a compiler may lay things out in another way.
        least = min(
            (size for size, trace in self._traces.items() if size and trace.assigned_bytes is not None), default=0
        )
        if family is None or batch_size < least:
            return self._estimate(self._trace(batch_size).timeline, batch_size, started)
        timeline = family.at(batch_size)
        return self._estimate(timeline, batch_size, started, assigned_bytes=self._assigned(batch_size, timeline))

    @property
    def scales(self) -> bool:
        """Whether other batch sizes take no further trace."""
        return self.tracer.batch_size is not None and self._fit() is not None

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

    def _fit(self) -> Family | None:
        if not self._family_tried:
            self._family_tried = True
            n: int = max(2, self.tracer.batch_size)
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
        device = self._device
        context_bytes = device.context_bytes or 0
        floor = timeline.without_optional()
        replays = _replays(trace.serving, options or self._options, assigned_bytes)
        timeline, answer, unbounded, notes = _replayed(timeline, floor, device, replays)
        reserved = answer.reserved_peak_bytes
        least, most = (round(reserved * factor) for factor in (exact or trace).spread)
        scale = 1 if not batch_size or not self.tracer.batch_size else batch_size / self.tracer.batch_size
        return Estimate(
            subject=self.tracer.name,
            device=device,
            mode=self._job.mode,
            precision=self._job.precision or "as given",
            batch_size=batch_size,
            timeline=timeline,
            replay=answer,
            context_bytes=context_bytes,
            lower_bytes=min(timeline.certain().peak()[1], reserved, least) + context_bytes,
            upper_bytes=max(reserved, unbounded.reserved_peak_bytes, most) + context_bytes,
            host=_host_memory(self._job, trace, device, scale),
            notes=(*trace.notes, *self.tracer.notes, *notes, *at_most_notes(timeline)),
            num_parameters=trace.num_parameters,
            state_bytes={str(category): size for category, size in (trace.state_bytes or state_of(timeline)).items()},
            seconds=time.perf_counter() - started,
            rescale=self.at_batch if self.tracer.batch_size is not None and fitted is None else None,
        )


_Replays = tuple[Callable[[Timeline, int | None], Replay], Callable[[Timeline, int | None], Replay]]
"""What a GPU and what the host make of a timeline under a limit, or without one."""


def _replays(serving: Serving, options: AllocatorOptions, assigned_bytes: int | None) -> _Replays:
    """Who hands out memory for a step.

    Args:
        serving: on a GPU.
        options: of PyTorch's allocator.
        assigned_bytes: what a compiler laid out for the whole step; None where there was none.
    """
    if assigned_bytes is not None:
        return (lambda timeline, limit: _laid_out(timeline, assigned_bytes, limit),) * 2
    if serving is Serving.BEST_FIT:
        return replay_best_fit, replay_plain
    return (lambda timeline, limit: replay(timeline, options, limit)), replay_plain


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
    found = {}
    for category in (Category.PARAMETER, Category.BUFFER, Category.GRADIENT, Category.OPTIMIZER_STATE):
        size = Timeline(
            tuple(block for block in timeline.blocks if block.category is category), timeline.num_ticks
        ).peak()[1]
        if size:
            found[category] = size
    return found


def _replayed(
    timeline: Timeline, floor: Timeline, device: Device, replays: _Replays
) -> tuple[Timeline, Replay, Replay, tuple[Note, ...]]:
    """(the timeline as it runs, what the device makes of it, what an unlimited one would of the whole, remarks).

    Where the step doesn't fit, the second is the unlimited one with the failure noted: what would be needed says more
    than where it broke off.

    Args:
        timeline: with everything the step would like to have.
        floor: with only what it can't do without.
        device: the target.
        replays: what its GPU and what the host make of a timeline.
    """
    on_gpu, on_host = replays
    if device.kind is Kind.HOST:
        free = on_host(timeline, None)
        capped = on_host(timeline, device.usable_bytes)
        return timeline, replace(free, out_of_memory=capped.out_of_memory), free, ()
    free = on_gpu(timeline, None)
    context_bytes = device.context_bytes or 0
    if device.usable_bytes is None or free.reserved_peak_bytes + context_bytes <= device.usable_bytes:
        return timeline, free, free, ()
    capacity = max(1, device.usable_bytes - context_bytes)
    capped = on_gpu(timeline, capacity)
    if capped.out_of_memory is None:
        return timeline, capped, free, (_CACHE_RELEASED,)
    lean = on_gpu(floor, capacity)
    if lean.out_of_memory is None:
        return floor, lean, free, (_WORKSPACE_DROPPED,)
    return timeline, replace(free, out_of_memory=lean.out_of_memory), free, ()


def _host_memory(job: Job, trace: Trace, device: Device, scale: float) -> HostMemory:
    """What the host holds beside the device: assumptions, each named."""
    batch_bytes = round(trace.batch_bytes * scale)
    parts = {f"Python and {_TITLES[framework_of(job)]} (assumed)": _PROCESS_BYTES}
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
