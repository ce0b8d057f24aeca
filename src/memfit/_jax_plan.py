"""`memfit.plan` for JAX: a loss function, parameters, a batch and an optimizer of optax."""

import time
from dataclasses import replace
from typing import Any

from memfit._estimator import Estimator
from memfit._plan_target import AUTO, KEEP, Patience
from memfit._traced_plan import Question, TracedPlanner
from memfit.core.device import Device, Kind
from memfit.core.errors import BadInput
from memfit.core.estimate import Estimate, Note
from memfit.core.job import Job
from memfit.core.plan import Plan, Refusal
from memfit.core.progress import doing
from memfit.core.replay import AllocatorOptions
from memfit.core.settings import Settings
from memfit.core.timeline import Category
from memfit.planner.few_traces import Part, Search, Speed, Variant
from memfit.planner.moves import AUTOCAST, CHECKPOINT, DONATE, MICRO_BATCH

_NARROW = "amp-bf16"
# What 16 bits make of memory and time before a trace tells (assumed).
_NARROW_MEMORY = 0.6
_NARROW_SPEED = {Kind.CUDA: 0.6, Kind.HOST: 1.1}
# Part of a GPU's rate that programs reach (assumed), and what starting a program costs.
_REACHED = 0.4
_CALL_SECONDS = 2e-4

_UNMARKED = (
    "no block of the loss is marked: wrap what should be computed again in memfit.jax.block, as in "
    "x = memfit.jax.block(layer)(weights, x)"
)


def plan_jax(
    job: Job,
    target: Device,
    batch_size: int | None,
    allowed: frozenset[str],
    precision: str,
    measure: bool | None,
    patience: Patience,
) -> Plan:
    """The fastest way to run a training step of JAX within a budget.

    Args:
        job: model: the loss function, a function of (params, batch); batch: the two; optimizer: of optax.
        target: the device, with the budget as its capacity.
        batch_size: samples of one update, where that isn't the size of the batch.
        allowed: names of the moves that may be used.
        precision: "keep", "auto", or "amp-bf16".
        measure: whether to time short real passes on the device in hand; None: if it can be done.
        patience: how long it may look for something faster once a plan fits.
    """
    started = time.perf_counter()
    if job.optimizer is None:
        raise BadInput(
            "a plan makes the training step itself, from a loss and an optimizer, but no optimizer was given: "
            "memfit.plan(loss, params, batch, optimizer=optax.adam(1e-3), budget='8GiB'), where loss(params, batch) "
            "returns a scalar."
        )
    if precision not in (KEEP, AUTO, _NARROW):
        raise BadInput(
            f"a step of JAX can be planned with precision keep, auto or {_NARROW}, but {precision!r} was given. Make "
            "the parameters of another dtype where the whole model should have it."
        )
    return _JaxPlanner(job, target, batch_size, allowed, precision, measure, patience).run(started)


class _JaxPlanner:
    """One question about a step of JAX."""

    def __init__(
        self,
        job: Job,
        target: Device,
        batch_size: int | None,
        allowed: frozenset[str],
        precision: str,
        measure: bool | None,
        patience: Patience,
    ) -> None:
        self._target = target
        self._patience = patience
        self._allowed = allowed
        self._measure = measure
        self._forced = _NARROW if precision == _NARROW else None
        self._may_narrow = precision == AUTO and AUTOCAST in allowed
        self._estimator = Estimator(job, target, AllocatorOptions(), batch_size)
        self._tracer: Any = self._estimator.tracer
        self._look = self._tracer.look()
        self._notes: list[Note] = []

    def run(self, started: float) -> Plan:
        question = Question(
            self._estimator,
            self._target,
            self._allowed,
            Settings(),
            "jax",
            refused=self._refused(),
            notes=(*self._notes,),
            hinted=(CHECKPOINT, MICRO_BATCH),
            patience=self._patience,
        )
        return TracedPlanner(question, self._search, started).run()

    def _refused(self) -> list[Refusal]:
        refused = []
        if CHECKPOINT in self._allowed and not self._look.blocks:
            refused.append(Refusal(CHECKPOINT, _UNMARKED))
        if MICRO_BATCH in self._allowed and self._tracer.batch_size is None:
            refused.append(Refusal(MICRO_BATCH, "the arrays of the batch have no dimension of samples"))
        return refused

    def _search(self, before: Estimate) -> Search:
        size = self._tracer.batch_size
        blocks = self._look.blocks
        return Search(
            self._variants(before),
            before.reserved_peak_bytes,
            size,
            tuple(Part(call.name, call.kept_bytes / (size or 1), call.flops / (size or 1)) for call in blocks),
            self._look.flops / (size or 1),
            self._speed(size or 1),
            may_split=MICRO_BATCH in self._allowed and size is not None,
            may_recompute=CHECKPOINT in self._allowed and bool(blocks),
        )

    def _variants(self, before: Estimate) -> tuple[Variant, ...]:
        state = before.state_bytes
        held = sum(state.get(str(name), 0) for name in (Category.PARAMETER, Category.OPTIMIZER_STATE, Category.BUFFER))
        gradients = state.get(str(Category.GRADIENT), 0)
        batch = before.host.parts.get("batch being fed", 0)
        base = Settings()
        # Without donation old and new parameters and state are there at once.
        twice = 2 * held + batch
        found = [Variant(base, 1.0, 1.0, min(twice, before.reserved_peak_bytes), gradients)]
        if DONATE in self._allowed:
            found.append(Variant(replace(base, donate=True), 1.0, 1.0, held + batch, gradients))
        if self._forced or self._may_narrow:
            speed = _NARROW_SPEED.get(self._target.kind, 1.0)
            narrow = [
                replace(
                    one,
                    settings=replace(one.settings, precision=_NARROW),
                    memory_factor=_NARROW_MEMORY,
                    speed_factor=speed,
                )
                for one in found
            ]
            found = narrow if self._forced else [*found, *narrow]
        return tuple(found)

    def _speed(self, size: int) -> Speed | None:
        if self._target.kind is Kind.HOST:
            if self._measure is False or self._patience.is_over:
                return None
            with doing("timing forward passes on this machine"):
                sample_seconds, call_seconds = self._tracer.time_forward()
            return Speed(sample_seconds, max(call_seconds, _CALL_SECONDS), is_measured=True)
        rate = self._target.flops.get("float32")
        if not rate or not self._look.flops:
            return None
        return Speed(self._look.flops / size / (rate * _REACHED), _CALL_SECONDS)
