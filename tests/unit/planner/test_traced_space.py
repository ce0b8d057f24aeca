from types import SimpleNamespace

import pytest

from memfit.core.device import Device, Kind, Origin
from memfit.core.settings import Settings
from memfit.core.step_facts import Part, StepFacts
from memfit.core.units import MIB
from memfit.planner.driver import Question
from memfit.planner.moves import allowed_moves
from memfit.planner.traced_space import TracedSpace

PARTS = (Part("block", MIB, 1e6),)
BEFORE = SimpleNamespace(
    state_bytes={"parameter": 4 * MIB, "gradient": 4 * MIB, "optimizer state": 8 * MIB},
    batch_bytes=MIB,
    reserved_peak_bytes=100 * MIB,
)


def opened(facts, allow=("exact", "rounding"), precision="keep", kind=Kind.CUDA, measure=None):
    device = Device("some", "Some", kind, (8, 0), 50 * MIB, Origin.MEASURED, flops={"float32": 1e12})
    question = Question(None, device, allowed_moves(allow), Settings(), "keras", batch_size=8)
    return TracedSpace(facts, question, precision, measure).search(BEFORE), question


def facts(**changes):
    return StepFacts(
        **{"framework": "keras:jax", "precisions": ("amp-bf16", "amp-fp16"), "moves": frozenset(), **changes}
    )


def test_the_step_as_it_is_comes_first_with_what_does_not_grow():
    search, question = opened(facts(parts=PARTS))

    assert search.variants[0].settings == Settings()
    assert search.variants[0].fixed_bytes == 13 * MIB
    assert question.framework == "keras:jax"
    assert search.has_times


def test_state_that_is_copied_counts_twice_unless_it_is_donated():
    search, _ = opened(facts(moves=frozenset({"donate"}), copies_state=True))

    assert [one.fixed_bytes for one in search.variants] == [25 * MIB, 13 * MIB]
    assert search.variants[1].settings.donate


@pytest.mark.parametrize(("precision", "expected"), [("keep", {None}), ("auto", {None, "amp-bf16"})])
def test_mixed_precision_is_tried_where_it_may_be(precision, expected):
    search, _ = opened(facts(), precision=precision)

    assert {one.settings.precision for one in search.variants} == expected


def test_moves_are_those_that_are_allowed_and_can_be_applied():
    able = facts(moves=frozenset({"lora", "jit-compile"}))

    search, _ = opened(able, allow=("exact", "rounding", "lora", "qlora"))

    assert {(one.settings.lora_rank > 0, bool(one.settings.jit_compile)) for one in search.variants} == {
        (False, False),
        (False, True),
        (True, False),
    }


def test_what_can_not_be_done_is_refused_with_the_reason():
    _, question = opened(facts(approximate="BatchNorm sees parts", not_recomputed="nothing is marked"))

    assert [(one.name, one.allowed_by) for one in question.refused] == [
        ("micro-batch", "approximate"),
        ("checkpoint", ""),
    ]


def test_forward_passes_are_timed_on_the_processor_alone():
    timed = facts(parts=PARTS, time_forward=lambda: (0.5, 0.0))

    search, question = opened(timed, kind=Kind.HOST)
    assert search.speed.sample_seconds == 0.5 and question.is_measured
    search, question = opened(timed, kind=Kind.HOST, measure=False)
    assert search.speed is None and not question.is_measured
