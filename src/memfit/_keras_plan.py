"""`memfit.plan` for compiled Keras models, on whichever backend."""

import time
from dataclasses import replace
from typing import Any

from memfit._estimator import Estimator
from memfit._plan_target import AUTO, KEEP, Patience
from memfit._traced_plan import Question, TracedPlanner
from memfit.core.device import Device, Kind
from memfit.core.errors import BadInput
from memfit.core.estimate import Estimate
from memfit.core.job import AUTOCASTS, Job
from memfit.core.plan import Plan, Refusal
from memfit.core.progress import doing
from memfit.core.replay import AllocatorOptions
from memfit.core.settings import Settings
from memfit.core.timeline import Category
from memfit.planner.few_traces import Part, Search, Speed, Variant
from memfit.planner.moves import (
    APPROXIMATE,
    AUTOCAST,
    CHECKPOINT,
    LORA,
    MICRO_BATCH,
    QLORA,
    WHOLE_COMPILE,
)

_LORA_RANK = 16
# What grows with the batch, and time, in 16 bits, before a trace tells (assumed).
_NARROW_MEMORY = 0.6
_NARROW_SPEED = {Kind.CUDA: 0.6, Kind.HOST: 1.1}
# Compiled as a whole, fewer intermediate results are there; the time is taken to be about the same.
_WHOLE_MEMORY, _WHOLE_SPEED = 0.85, 1.02
# Adapters: no gradients of the layers under them.
_ADAPTED_SPEED = 0.85
# Compute capability from which GPUs have bfloat16.
_BFLOAT16_FROM = (8, 0)
# Part of a GPU's rate that steps reach (assumed), and what starting a pass costs.
_REACHED = 0.4
_CALL_SECONDS = 2e-3


def plan_keras(
    job: Job,
    target: Device,
    batch_size: int | None,
    allowed: frozenset[str],
    precision: str,
    measure: bool | None,
    patience: Patience,
) -> Plan:
    """The fastest way to run the training step of a Keras model within a budget.

    Args:
        job: a compiled model and a batch.
        target: the device, with the budget as its capacity.
        batch_size: samples of one update, where that isn't the size of the batch.
        allowed: names of the moves that may be used.
        precision: "keep", "auto", or mixed precision by its name.
        measure: whether to time short forward passes on the device in hand; None: if it can be done.
        patience: how long it may look for something faster once a plan fits.
    """
    started = time.perf_counter()
    if precision not in (KEEP, AUTO, *AUTOCASTS):
        raise BadInput(
            f"a Keras model can be planned with precision keep, auto, {' or '.join(AUTOCASTS)}, but {precision!r} was "
            "given. Its own dtype comes from the policy that it was made under."
        )
    return _KerasPlanner(job, target, batch_size, allowed, precision, measure, patience).run(started)


class _KerasPlanner:
    """One question about a Keras model."""

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
        forced = precision if precision in AUTOCASTS else job.precision
        self._forced = forced if forced in AUTOCASTS else None
        self._may_narrow = precision == AUTO and AUTOCAST in allowed and not self._forced
        job = replace(job, precision=self._forced)
        self._estimator = Estimator(job, target, AllocatorOptions(), batch_size)
        self._tracer: Any = self._estimator.tracer
        self._plain = Settings(precision=self._forced)
        self._refused: list[Refusal] = []
        self._parts: tuple[Part, ...] = ()

    def run(self, started: float) -> Plan:
        from memfit.adapters.keras import planning

        tracer = self._tracer
        with doing("looking at whether the batch can be split"):
            splitting = planning.splitting(tracer.model, tracer.batch)
        reason, allowed_by = splitting.refused, ""
        if splitting.approximate and APPROXIMATE not in self._allowed:
            reason, allowed_by = f"{splitting.approximate}; allow 'approximate' if that is fine", APPROXIMATE
        elif tracer.batch_size is None:
            reason = "the arrays of the batch have no common first dimension"
        self._may_split = MICRO_BATCH in self._allowed and not reason
        if reason and MICRO_BATCH in self._allowed:
            self._refused.append(Refusal(MICRO_BATCH, reason, allowed_by))
        if CHECKPOINT in self._allowed:
            with doing("looking at what can be computed again"):
                found, reason = planning.recomputable(tracer.model, tracer.batch)
            self._parts = tuple(Part(one.path, one.kept_bytes_per_sample, one.flops_per_sample) for one in found)
            if reason:
                self._refused.append(Refusal(CHECKPOINT, reason))
        question = Question(
            self._estimator,
            self._target,
            self._allowed,
            self._plain,
            f"keras:{tracer.backend}",
            splitting.approximate,
            splitting.random,
            self._refused,
            patience=self._patience,
        )
        return TracedPlanner(question, self._search, started).run()

    def _search(self, before: Estimate) -> Search:
        from memfit.adapters.keras import planning

        return Search(
            self._variants(before),
            before.reserved_peak_bytes,
            self._tracer.batch_size,
            self._parts,
            speed=self._speed(),
            may_split=self._may_split,
            may_recompute=bool(self._parts),
            loop_factor=planning.loop_factor(self._tracer.model, on_host=self._target.kind is Kind.HOST),
        )

    def _variants(self, before: Estimate) -> tuple[Variant, ...]:
        state = {name: before.state_bytes.get(str(name), 0) for name in Category}
        weights = state[Category.PARAMETER] + state[Category.BUFFER]
        batch = before.host.parts.get("batch being fed", 0)
        gradients = state[Category.GRADIENT]
        fixed = min(weights + state[Category.OPTIMIZER_STATE] + batch, before.reserved_peak_bytes)
        plain = Variant(self._plain, 1.0, 1.0, fixed, gradients)
        found = [plain]
        if self._may_narrow:
            found.append(self._narrowed(plain))
        if WHOLE_COMPILE in self._allowed and self._may_compile():
            whole = replace(self._plain, jit_compile=True)
            found.append(Variant(whole, _WHOLE_MEMORY, _WHOLE_SPEED, fixed, gradients))
        if LORA in self._allowed:
            adapted = replace(self._plain, lora_rank=_LORA_RANK)
            found.append(Variant(adapted, 1.0, _ADAPTED_SPEED, weights + batch, 0))
        if QLORA in self._allowed:
            small = replace(self._plain, lora_rank=_LORA_RANK, quantized_base=True)
            found.append(Variant(small, 1.0, 1.0, weights / 4 + batch, 0))
        return tuple(found)

    def _may_compile(self) -> bool:
        """Whether compiling the step as a whole would be a change that helps."""
        tracer = self._tracer
        if tracer.backend != "tensorflow" or self._target.kind is not Kind.CUDA:
            return False
        from memfit.adapters.keras.tensorflow_backend import compiles_on

        is_compiled = tracer.model.jit_compile or compiles_on(tracer.model, self._target, None)
        return not is_compiled and not tracer.model.run_eagerly

    def _narrowed(self, plain: Variant) -> Variant:
        capability = self._target.capability
        is_new = self._target.kind is Kind.HOST or capability is None or capability >= _BFLOAT16_FROM
        settings = replace(plain.settings, precision="amp-bf16" if is_new else "amp-fp16")
        speed = _NARROW_SPEED.get(self._target.kind, 1.0)
        return replace(plain, settings=settings, memory_factor=_NARROW_MEMORY, speed_factor=speed)

    def _speed(self) -> Speed | None:
        if self._target.kind is Kind.HOST:
            if self._measure is False or self._patience.is_over:
                return None
            from memfit.adapters.keras import planning

            with doing("timing forward passes on this machine"):
                times = planning.time_forward(self._tracer.model, self._tracer.batch)
            return None if times is None else Speed(times[0], max(times[1], _CALL_SECONDS), is_measured=True)
        rate = self._target.flops.get("float32")
        work = sum(part.work for part in self._parts)
        return Speed(work / (rate * _REACHED), _CALL_SECONDS) if rate and work else None
