"""The space of plans of a step that is slow to trace, from the facts that an adapter found out about it."""

from dataclasses import replace

from memfit.core.device import Kind
from memfit.core.estimate import Estimate
from memfit.core.plan import Refusal
from memfit.core.progress import doing
from memfit.core.step_facts import StepFacts
from memfit.core.timeline import Category
from memfit.planner.budget import AUTO, autocast_of
from memfit.planner.driver import Question
from memfit.planner.moves import APPROXIMATE, AUTOCAST, CHECKPOINT, DONATE, LORA, MICRO_BATCH, QLORA, WHOLE_COMPILE
from memfit.planner.traced_search import Search, Speed, Variant

_LORA_RANK = 16
# What grows with the batch, and time, in 16 bits, before a trace tells (assumed).
_NARROW_MEMORY = 0.6
_NARROW_SPEED = {Kind.CUDA: 0.6, Kind.HOST: 1.1}
# Compiled as a whole, fewer intermediate results are there; the time is taken to be about the same.
_WHOLE_MEMORY, _WHOLE_SPEED = 0.85, 1.02
# Adapters: no gradients of the layers under them.
_ADAPTED_SPEED = 0.85
# Part of a GPU's rate that steps reach (assumed).
_REACHED = 0.4


class TracedSpace:
    """Completes a question, from what an adapter found out, and opens its search.

    With `measure`, short forward passes are timed on the device in hand; None: if that can be done.
    """

    def __init__(self, facts: StepFacts, question: Question, precision: str, measure: bool | None) -> None:
        self._facts = facts
        self._question = question
        self._narrow = precision == AUTO and AUTOCAST in question.allowed and not question.plain.precision
        self._measure = measure
        allowed, reason, allowed_by = question.allowed, facts.not_split, ""
        if facts.approximate and APPROXIMATE not in allowed:
            reason, allowed_by = f"{facts.approximate}; allow {APPROXIMATE!r} if that is fine", APPROXIMATE
        if reason and MICRO_BATCH in allowed:
            question.refused.append(Refusal(MICRO_BATCH, reason, allowed_by))
        if facts.not_recomputed and CHECKPOINT in allowed:
            question.refused.append(Refusal(CHECKPOINT, facts.not_recomputed))
        self._may_split = MICRO_BATCH in allowed and not reason
        question.approximate, question.dropout = facts.approximate, facts.draws_random_numbers
        question.framework = facts.framework
        question.hinted += tuple(name for name in (LORA,) if name in facts.moves)

    def search(self, before: Estimate) -> Search:
        """The candidates, from the estimate of the plain step."""
        facts, question = self._facts, self._question
        return Search(
            self._variants(before),
            before.reserved_peak_bytes,
            question.batch_size,
            facts.parts,
            facts.work,
            self._speed(),
            may_split=self._may_split,
            may_recompute=CHECKPOINT in question.allowed and bool(facts.parts),
            loop_factor=facts.loop_factor,
        )

    def _variants(self, before: Estimate) -> tuple[Variant, ...]:
        question, facts = self._question, self._facts
        usable = question.allowed & facts.moves
        state = {name: before.state_bytes.get(str(name), 0) for name in Category}
        weights = state[Category.PARAMETER] + state[Category.BUFFER]
        batch, gradients = before.batch_bytes, state[Category.GRADIENT]
        held = weights + state[Category.OPTIMIZER_STATE]
        fixed = min((2 if facts.copies_state else 1) * held + batch, before.reserved_peak_bytes)
        variants = [Variant(question.plain, 1.0, 1.0, fixed, gradients)]
        if DONATE in usable:
            variants.append(Variant(replace(question.plain, donate=True), 1.0, 1.0, held + batch, gradients))
        if self._narrow:
            speed = _NARROW_SPEED.get(question.target.kind, 1.0)
            name = next((one for one in facts.precisions if one == autocast_of(question.target)), facts.precisions[0])
            variants += [
                replace(
                    one,
                    settings=replace(one.settings, precision=name),
                    memory_factor=_NARROW_MEMORY,
                    speed_factor=speed,
                )
                for one in variants
            ]
        if WHOLE_COMPILE in usable:
            whole = replace(question.plain, jit_compile=True)
            variants.append(Variant(whole, _WHOLE_MEMORY, _WHOLE_SPEED, fixed, gradients))
        if LORA in usable:
            adapted = replace(question.plain, lora_rank=_LORA_RANK)
            variants.append(Variant(adapted, 1.0, _ADAPTED_SPEED, weights + batch, 0))
        if QLORA in usable:
            small = replace(question.plain, lora_rank=_LORA_RANK, quantized_base=True)
            variants.append(Variant(small, 1.0, 1.0, weights / 4 + batch, 0))
        return tuple(variants)

    def _speed(self) -> Speed | None:
        facts, target = self._facts, self._question.target
        if target.kind is Kind.HOST:
            if self._measure is False or self._question.patience.is_over:
                return None
            with doing("timing forward passes on this machine"):
                times = facts.time_forward()
            if times is None:
                return None
            self._question.is_measured = True
            return Speed(times[0], max(times[1], facts.call_seconds))
        rate = target.flops.get("float32")
        work = facts.work or sum(part.work for part in facts.parts)
        return Speed(work / (rate * _REACHED), facts.call_seconds) if rate and work else None
