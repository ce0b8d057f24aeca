"""Keras, on whichever backend, behind the interface that all frameworks share."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memfit.core.device import Device, Kind
from memfit.core.errors import BadInput
from memfit.core.job import AUTOCASTS, Job
from memfit.core.plan import Plan
from memfit.core.progress import doing
from memfit.core.settings import Keeps
from memfit.core.step_facts import Part, StepFacts
from memfit.frameworks.keras.trace.job import OpenModel

if TYPE_CHECKING:
    from memfit.frameworks.keras.guard.loop import KerasLoop

name = "keras"
title = "Keras"


def open_job(job: Job, device: Device, batch_size: int | None = None) -> OpenModel:
    """The job, checked and ready to be traced, at its own batch size or the given one."""
    return OpenModel(job, device, batch_size)


def planned_job(job: Job, precision: str) -> Job:
    """The job with the mixed precision that must be used."""
    if precision not in ("keep", "auto", *AUTOCASTS):
        raise BadInput(
            f"a Keras model can be planned with precision keep, auto, {' or '.join(AUTOCASTS)}, but {precision!r} was "
            "given. Its own dtype comes from the policy that it was made under."
        )
    forced = precision if precision in AUTOCASTS else job.precision
    return replace(job, precision=forced if forced in AUTOCASTS else None)


def planning(tracer: OpenModel, target: Device) -> StepFacts:
    """What can be split and recomputed, and how fast the model is."""
    from memfit.frameworks.keras.trace import planning as questions

    model, batch = tracer.model, tracer.batch
    with doing("checking whether the batch can be split"):
        splitting = questions.splitting(model, batch)
    not_split = splitting.refused
    if not not_split and tracer.batch_size is None:
        not_split = "the arrays of the batch have no common first dimension"
    with doing("finding what can be recomputed"):
        units, not_recomputed = questions.recomputable(model, batch)
    return StepFacts(
        framework=f"keras:{tracer.backend}",
        precisions=AUTOCASTS,
        moves=frozenset({"lora", "qlora", *(("jit-compile",) if _may_compile(tracer, target) else ())}),
        parts=tuple(Part(one.path, one.kept_bytes_per_sample, one.flops_per_sample) for one in units),
        not_recomputed=not_recomputed,
        not_split=not_split,
        approximate=splitting.approximate,
        draws_random_numbers=splitting.random,
        loop_factor=questions.loop_factor(model, on_host=target.kind is Kind.HOST),
        time_forward=lambda: questions.time_forward(model, batch),
    )


def _may_compile(tracer: OpenModel, target: Device) -> bool:
    """Whether compiling the step as a whole would be a change that helps."""
    if tracer.backend != "tensorflow" or target.kind is not Kind.CUDA:
        return False
    from memfit.frameworks.keras.trace.tensorflow_backend import compiles_on

    is_compiled = tracer.model.jit_compile or compiles_on(tracer.model, target, None)
    return not is_compiled and not tracer.model.run_eagerly


def apply(plan: Plan, model: Any, optimizer: Any) -> Any:
    """A compiled model, run as a plan says."""
    from memfit.frameworks.keras.apply.fitted import FittedModel

    # Whoever planned has allowed it.
    approximate = any(move.name == "micro-batch" and move.keeps is Keeps.CHANGES for move in plan.moves)
    return FittedModel(plan.settings, model, approximate=approximate)


def named_job(name: str, optimizer: str, sequence_length: int | None, image_size: int | None) -> Job:
    """The usual job of a model of keras.applications."""
    from memfit.frameworks.keras import named

    return named.named_job(name.removeprefix("keras:"), optimizer, image_size)


def guarded_loop(*subject: Any, **options: Any) -> "KerasLoop":
    """The training loop of a compiled model; see `KerasLoop`."""
    from memfit.frameworks.keras.guard.loop import KerasLoop

    return KerasLoop(*subject, **options)
