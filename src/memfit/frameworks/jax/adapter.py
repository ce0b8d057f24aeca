"""JAX behind the interface that all frameworks share."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memfit.core.device import Device
from memfit.core.errors import BadInput
from memfit.core.job import Job
from memfit.core.plan import Plan
from memfit.core.step_facts import StepFacts, StepPart
from memfit.frameworks.jax.trace import job as jobs

if TYPE_CHECKING:
    from memfit.frameworks.jax.guard.loop import JaxLoop

name = "jax"
title = "JAX"
is_step = jobs.is_step
open_job = jobs.open_job


def stack() -> None:
    """None: it doesn't run on PyTorch."""


_NARROW = "amp-bf16"
_CALL_SECONDS = 2e-4
_UNMARKED = (
    "no block of the loss is marked: wrap what may be recomputed in memfit.jax.block, as in "
    "x = memfit.jax.block(layer)(weights, x)"
)


def planned_job(job: Job, precision: str) -> Job:
    """The job, whose step is made from a loss and an optimizer, with the precision that must be used."""
    if job.optimizer is None:
        raise BadInput(
            "a plan makes the training step itself, from a loss and an optimizer, but no optimizer was given: "
            "memfit.plan(loss, params, batch, optimizer=optax.adam(1e-3), budget='8GiB'), where loss(params, batch) "
            "returns a scalar."
        )
    if precision not in ("keep", "auto", _NARROW):
        raise BadInput(
            f"a step of JAX can be planned with precision keep, auto or {_NARROW}, but {precision!r} was given. Make "
            "the parameters of another dtype where the whole model should have it."
        )
    return replace(job, precision=_NARROW) if precision == _NARROW else job


def planning(tracer: Any, target: Device) -> StepFacts:
    """What the marked blocks keep and compute, and how fast the loss is."""
    (flops, blocks), size = tracer.look(), tracer.batch_size or 1
    return StepFacts(
        framework=name,
        precisions=(_NARROW,),
        moves=frozenset({"donate"}),
        parts=tuple(StepPart(call.name, call.kept_bytes / size, call.flops / size) for call in blocks),
        not_recomputed="" if blocks else _UNMARKED,
        not_split="" if tracer.batch_size is not None else "the arrays of the batch have no dimension of samples",
        work=flops / size,
        call_seconds=_CALL_SECONDS,
        # Without donation old and new parameters and state are there at once.
        copies_state=True,
        time_forward=tracer.time_forward,
    )


def apply(plan: Plan, model: Any, optimizer: Any) -> Any:
    """A training step of a loss function and an optimizer, run as a plan says."""
    from memfit.frameworks.jax.apply.training import TrainStep

    return TrainStep(model, optimizer, plan.settings)


def named_job(name: str, optimizer: str, sequence_length: int | None, image_size: int | None) -> Job:
    """JAX has no models by name."""
    raise BadInput(f"JAX has no models by name, but {name!r} was given.")


def guarded_loop(*subject: Any, **options: Any) -> "JaxLoop":
    """The training loop of a loss function and an optimizer; see `JaxLoop`."""
    from memfit.frameworks.jax.guard.loop import JaxLoop

    return JaxLoop(*subject, **options)
