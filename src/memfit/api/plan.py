"""`memfit.plan`: checks what was asked, and has the planner answer it with the adapter of the framework."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from memfit.api.devices import target_within
from memfit.api.jobs import (
    adapter_of,
    as_job,
    is_keras_model,
    jax_adapter,
    keras_adapter,
    open_estimator,
    torch_adapter,
)
from memfit.core.device import Device
from memfit.core.errors import BadInput
from memfit.core.job import AUTOCASTS, PRECISIONS, read_precision
from memfit.core.plan import Plan
from memfit.core.progress import doing
from memfit.core.settings import Settings
from memfit.core.step_facts import StepFacts
from memfit.estimator.estimator import checked_batch_size
from memfit.planner.driver import Patience, Planner, Question
from memfit.planner.moves import AUTO, DEFAULT_ALLOW, KEEP, SHARD, allowed_moves
from memfit.planner.traced_search import open_traced_search


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of a plan that are rarely needed.

    Args:
        effective_batch: samples of one update, where that isn't the size of the batch.
        measure: whether to time short real steps when the device is the one in hand; None: if it can be done.
        seconds: about how long to look for a faster plan once one fits, and to time real steps; None: until nothing
            better is in sight, and up to 20 s of timing plans against each other.
        script_steps: optimizer steps after which a script is ended.
        quiet_output: send what a script prints to standard error.
    """

    effective_batch: int | None = None
    measure: bool | None = None
    seconds: float | None = None
    script_steps: int = 3
    quiet_output: bool = False


NO_OPTIONS = PlanOptions()


def plan(
    model: Any,
    *arguments: Any,
    loss: Callable[[Any, Any], Any] | None = None,
    batch: Any = None,
    optimizer: Any = None,
    device: str | Device | None = None,
    budget: str | int | None = None,
    precision: str = KEEP,
    allow: Iterable[str] = DEFAULT_ALLOW,
    count: int = 1,
    options: PlanOptions = NO_OPTIONS,
) -> Plan:
    """The fastest way to run a training step within a budget of memory, proven on a simulated device.

    Args:
        model: an `nn.Module`, a callable that builds one, a compiled `keras.Model`, a `Job`, or a loss function of
            JAX, followed by its parameters and batch.
        arguments: loss and batch by their place.
        loss: takes the model and a batch and returns the scalar loss, or (loss, weight), where the weight is the
            loss's true denominator, such as the number of tokens; or as for `estimate`.
        batch: any nesting of tensors; the batch of one update.
        optimizer: an instance, a callable that takes parameters, a name such as "adamw", or None.
        device: as for `estimate`.
        budget: what the step may take, "10GiB" or bytes; all of the device by default.
        precision: "keep", "auto" (autocast where it helps), or as for `estimate`.
        allow: "exact", "rounding", "changes training", names of moves such as "lora", and "approximate", which lets
            micro-batches in where samples of a batch see each other. A minus sign leaves a move out.
        count: devices to shard over; `batch` and the figures are then those of one of them.
        options: what is rarely asked, such as `PlanOptions(seconds=10)`.

    Raises:
        PlanNotFound: nothing that is allowed fits.
    """
    started = time.perf_counter()
    precision = read_precision(precision)
    if precision not in (KEEP, AUTO, *PRECISIONS):
        raise BadInput(f"precision must be keep, auto or one of {', '.join(PRECISIONS)}, but {precision!r} was given.")
    allowed = allowed_moves(allow)
    if not isinstance(count, int) or count < 1:
        raise BadInput(f"count must be a whole number from 1 up, but {count!r} was given.")
    if count > 1 and SHARD not in allowed:
        raise BadInput(f"count={count} shards over several devices, but 'shard' is not allowed. Add it to allow.")
    patience = Patience(options.seconds)
    job = as_job(model, arguments, loss, batch, optimizer=optimizer)
    if job.mode != "training":
        raise BadInput("a plan is for training; the job is one of inference.")
    size = None if options.effective_batch is None else checked_batch_size(options.effective_batch)
    target = target_within(device, budget)
    adapter = adapter_of(job)
    with doing("planning"):
        job = adapter.planned_job(job, precision)
        estimator = open_estimator(job, target, batch_size=size)
        target = estimator.device
        step = adapter.planning(estimator.tracer, target)
        frees = estimator.job.set_to_none is not False
        plain = Settings(set_to_none=frees, precision=job.precision if job.precision in AUTOCASTS else None)
        question = Question(
            estimator,
            target,
            allowed,
            plain,
            adapter.name,
            batch_size=estimator.tracer.batch_size,
            patience=patience,
            num_devices=count,
        )
        if isinstance(step, StepFacts):
            search = partial(open_traced_search, step, question, precision, options.measure)
            return Planner(question, search, started).run()
        # What it takes to solve integer programmes loads when it is needed.
        from memfit.planner.profiled_space import ProfiledSpace

        return Planner(question, ProfiledSpace(step, question, job, precision, options.measure).search, started).run()


def apply_plan(plan: Plan, model: Any, optimizer: Any) -> Any:
    """What `plan.apply` returns: the model and optimizer, run as the plan says."""
    adapter = (
        keras_adapter() if is_keras_model(model) else jax_adapter() if plan.framework == "jax" else torch_adapter()
    )
    return adapter.apply(plan, model, optimizer)


def load_plan(path: Any) -> Plan:
    """The plan that `plan.save` wrote."""
    return Plan.load(path)
