"""Plans for scripts; in place of a child process, runs are made by hand from the timeline of a script."""

import dataclasses
import json
from dataclasses import replace
from itertools import pairwise

import pytest

from memfit import plan_script
from memfit.core.device import Origin
from memfit.core.dryrun import DryRun, Outcome, ProgramFacts
from memfit.core.errors import StepFailed
from memfit.core.plan import Plan, PlanNotFound, Refusal
from memfit.core.settings import Keeps, OptimizerKernels, OptimizerState, Settings
from memfit.core.units import MIB, format_size
from memfit.planner.moves import allowed_moves
from memfit.planner.script_space import BATCH_NORM, ScriptSearch, computed_part, provable_part
from memfit.planner.timeline_moves import AS_IT_IS
from memfit.processes import launch, sequence
from tests.unit.planner.script_builders import NUM_LAYERS, estimate_of, memory_of, speed_of, stack, work

PLAIN_BYTES = estimate_of(stack(hidden=128 * MIB)).peak_bytes
SEEN = ProgramFacts(models=("GPT",), optimizers=("AdamW",), fusable=True, batch_size=16, work=work())


class Children:
    """Stands in for `run_child`: what each run would need, and what it was asked."""

    def __init__(self) -> None:
        """A script of eight layers whose moves do what they promise."""
        self.timeline = stack(hidden=128 * MIB)
        self.asked = []
        self.seen = SEEN
        self.error_of = lambda settings: 1.0
        self.outcome_of = lambda settings: Outcome.COMPLETED
        self.never_called = ()
        self.loader_ordinal = 0

    def __call__(self, request, **options):
        self.asked.append((request, options))
        settings = request.settings
        outcome = self.outcome_of(settings)
        estimate, seen = estimate_of(self.timeline), self.seen
        if settings is not None:
            estimate = memory_of(self.timeline).estimate(settings)
            reserved = int(estimate.replay.reserved_peak_bytes * self.error_of(settings))
            estimate = replace(estimate, replay=replace(estimate.replay, reserved_peak_bytes=reserved))
            seen = replace(seen, recomputed=tuple(set(settings.checkpoint) - set(self.never_called)))
        took = request.steps if outcome is Outcome.COMPLETED else 0
        error = "" if took else "ValueError: no (train.py:3)"
        run = DryRun(request.script, request.arguments, estimate, outcome, took, request.steps, error=error, seen=seen)
        return {**json.loads(json.dumps(run.to_json())), "loader_ordinal": self.loader_ordinal}


@pytest.fixture
def children(monkeypatch):
    made = Children()
    monkeypatch.setattr(launch, "run_child", made)
    monkeypatch.setattr(sequence, "run_child", made)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    return made


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("")
    return path


def planned(script, share, **options):
    return plan_script(script, ["--lr", 1], device="a100-40gb", budget=int(PLAIN_BYTES * share), **options)


def test_a_script_that_fits_is_left_alone(script, children):
    plan = planned(script, 1.1)

    assert plan.fits
    assert plan.moves == ()
    assert plan.settings == Settings()
    assert plan.before.peak_bytes == plan.after.peak_bytes == PLAIN_BYTES
    assert len(children.asked) == 1
    assert children.asked[0][0].arguments == ("--lr", "1")
    assert plan.slowdown == 1


def test_the_plan_is_proven_by_a_run_with_its_moves(script, children, capsys):
    plan = planned(script, 0.7)

    # The first run watches, on a device without a limit; the second has the settings in force.
    (first, _), (second, options) = children.asked
    assert (first.unlimited, first.watch, first.settings) == (True, True, None)
    assert (second.unlimited, second.settings.micro_batches, second.loader_ordinal) == (True, 2, 0)
    assert options["silent"] is True
    assert plan.fits
    assert plan.settings.micro_batches == 2
    assert plan.batch_size == 16
    assert plan.seconds_after.seconds > plan.seconds_before.seconds
    assert plan.seconds_after.origin is Origin.SIMULATED
    assert [point.settings for point in plan.front if point.verified] == [plan.settings]
    assert "proven" in {note.code for note in plan.notes}
    assert "running the script once more with the plan's moves (2 micro-batches)" in capsys.readouterr().err


def test_dropout_in_micro_batches_is_said(script, children):
    assert "dropout" not in str(planned(script, 0.7))
    children.timeline = stack(hidden=128 * MIB, op="aten.native_dropout")

    plan = planned(script, 0.7)

    (move,) = plan.moves
    assert (move.name, move.caveat) == ("micro-batch", "dropout masks are drawn for each part anew")
    assert "the same up to floating-point rounding except for dropout masks" in str(plan)


def test_each_move_says_what_it_saves_and_costs(script, children):
    plan = planned(script, 0.7)

    (move,) = plan.moves
    assert (move.name, move.keeps) == ("micro-batch", Keeps.ROUNDING)
    assert move.saves_bytes == PLAIN_BYTES - plan.after.peak_bytes
    assert move.costs_seconds == pytest.approx(plan.seconds_after.seconds - plan.seconds_before.seconds)


def test_a_promise_that_does_not_hold_is_not_made(script, children):
    # GIVEN moves that save less than computed
    children.error_of = lambda settings: 1.15
    plan = planned(script, 0.6, allow=["exact"])

    # THEN more is computed again until a run stays within the budget
    counts = [len(request.settings.checkpoint) for request, _ in children.asked[1:]]
    assert counts == sorted(counts)
    assert len(counts) >= 2
    assert plan.fits
    assert len(plan.settings.checkpoint) == counts[-1]


def test_moves_that_save_more_than_promised_are_used_less(script, children):
    children.error_of = lambda settings: 0.8
    plan = planned(script, 0.6, allow=["exact"])

    counts = [len(request.settings.checkpoint) for request, _ in children.asked[1:]]
    assert plan.fits
    assert len(plan.settings.checkpoint) == min(counts) < counts[0]


def test_what_makes_the_script_fail_is_refused(script, children):
    def outcome(settings):
        return Outcome.FAILED if settings is not None and settings.checkpoint else Outcome.COMPLETED

    children.outcome_of = outcome
    with pytest.raises(PlanNotFound) as raised:
        planned(script, 0.6, allow=["exact"])

    refused = {refusal.name: refusal.reason for refusal in raised.value.smallest.refused}
    assert refused["checkpoint"] == "the script failed with it: ValueError: no (train.py:3)"


def test_modules_that_are_never_called_are_left_out(script, children):
    children.never_called = ("layers.0",)
    plan = planned(script, 0.6, allow=["exact"])

    assert plan.fits
    assert "layers.0" not in plan.settings.checkpoint
    assert "layers.0 is no module that is called" in [refusal.reason for refusal in plan.refused]


def test_what_a_run_cannot_show_is_computed_and_said_to_be(script, children):
    # GIVEN a script without a loader whose batches could be split
    children.seen = replace(SEEN, batch_size=None)
    plan = planned(script, 0.5)

    assert plan.fits
    assert plan.settings.micro_batches > 1
    assert len(children.asked) == 1
    assert not any(point.verified for point in plan.front)
    texts = {note.code: note.text for note in plan.notes}
    assert "computed from the script's timeline" in texts["computed-part"]
    assert "batch-size-unknown" in texts


def test_a_figure_is_promised_as_simulated_only_where_a_run_gave_it(script, children):
    proven = planned(script, 0.7)
    assert proven.after.origin is Origin.SIMULATED
    assert f"-> {format_size(proven.after.peak_bytes)} (simulated), budget" in str(proven)
    assert proven.moves[0].saves_origin is Origin.SIMULATED

    children.seen = replace(SEEN, batch_size=None)
    computed = planned(script, 0.7)
    assert computed.after.origin is Origin.ASSUMED
    assert f"-> {format_size(computed.after.peak_bytes)} (assumed), budget" in str(computed)
    assert computed.moves[0].saves_origin is Origin.ASSUMED
    # What is computed leaves room for what it is off by.
    assert computed.after.peak_bytes <= 0.92 * computed.budget_bytes


def test_batches_that_a_loop_draws_itself_are_split_where_they_are_copied(script, children):
    children.loader_ordinal = None
    children.seen = replace(SEEN, batch_lines=("train.py:67",))
    plan = planned(script, 0.7)

    asked, _ = children.asked[1]
    assert (asked.batch_lines, asked.batch_size) == (("train.py:67",), 16)
    assert plan.after.origin is Origin.SIMULATED
    (text,) = [note.text for note in plan.notes if note.code == "split-batches"]
    assert text.endswith("copied to the device at train.py:67")


def test_where_nothing_fits_what_was_not_considered_is_said(script, children):
    children.seen = replace(SEEN, batch_size=1, autocast=True)
    with pytest.raises(PlanNotFound) as raised:
        planned(script, 0.1, precision="auto")

    text = str(raised.value)
    assert "  not considered:\n" in text
    assert "    micro-batch: the batch has one sample" in text
    assert "    autocast: parameters aren't in 32 bits, or the script uses autocast already" in text
    # THEN nothing is suggested that can't be done
    last = text.splitlines()[-1]
    assert "approximate" not in last
    assert "autocast" not in last
    assert "8-bit-optimizer" in last


def test_batches_that_run_out_leave_micro_batches_to_computation(script, children):
    def outcome(settings):
        return Outcome.NO_STEP if settings is not None and settings.micro_batches > 1 else Outcome.COMPLETED

    children.outcome_of = outcome
    plan = planned(script, 0.7)

    assert plan.fits
    assert plan.settings.micro_batches == 2
    assert not any(point.verified for point in plan.front)


def test_where_nothing_fits_the_message_says_what_is_left(script, children):
    with pytest.raises(PlanNotFound) as raised:
        planned(script, 0.1)

    message = str(raised.value)
    smallest = raised.value.smallest
    first, *rest = message.splitlines()
    assert first.startswith("no plan fits `train.py` into ")
    assert "; the smallest needs " in first
    assert any(line.startswith("  optimizer state ") for line in rest)
    assert rest[-1].startswith(
        "Try to allow autocast, 8-bit-optimizer, shard as well, or a larger budget or device such as "
    )
    assert not smallest.fits
    assert smallest.after.peak_bytes < PLAIN_BYTES
    assert raised.value.device_name
    assert raised.value.exit_code == 3


def test_precision_stays_unless_it_may_change(script, children):
    assert planned(script, 0.7).settings.precision is None
    assert planned(script, 0.7, precision="auto").settings.precision == "amp-bf16"
    assert planned(script, 0.7, allow=["autocast"]).settings.precision == "amp-bf16"
    older = plan_script(script, device="t4", budget=int(PLAIN_BYTES * 0.7), precision="auto")
    assert older.settings.precision == "amp-fp16"


def test_a_second_device_only_where_it_is_asked_for(script, children):
    # GIVEN a script whose weights, gradients and states are most of it
    children.timeline = stack(weight=256 * MIB, hidden=MIB)
    budget = int(estimate_of(children.timeline).peak_bytes * 0.8)
    plan = plan_script(script, device="a100-40gb", budget=budget, allow=["exact", "shard"])

    assert plan.settings.num_devices == 2
    assert "computed-part" in {note.code for note in plan.notes}
    with pytest.raises(PlanNotFound):
        plan_script(script, device="a100-40gb", budget=budget, allow=["exact"])


def test_what_is_computed_not_to_fit_may_be_proven_to(script, children):
    # GIVEN a budget just below what the smallest is computed to need, and moves that save more than computed
    with pytest.raises(PlanNotFound) as raised:
        planned(script, 0.1, allow=["exact"])
    children.error_of = lambda settings: 0.8
    smallest = raised.value.smallest.after.peak_bytes
    plan = planned(script, 0.95 * smallest / PLAIN_BYTES, allow=["exact"])

    assert plan.fits


def test_without_work_there_are_no_seconds(script, children):
    children.seen = replace(SEEN, work=())
    plan = planned(script, 0.7)

    assert plan.fits
    assert plan.seconds_before.seconds is None
    assert plan.moves[0].costs_seconds is None
    assert "no-times" in {note.code for note in plan.notes}


def test_a_plan_survives_json(script, children):
    plan = planned(script, 0.6, allow=["exact"])

    assert Plan.from_json(json.dumps(plan.to_json())) == dataclasses.replace(
        plan, estimate_before=None, estimate_after=None
    )


@pytest.mark.parametrize(
    ("outcome", "exit_code", "text"),
    [
        (Outcome.FAILED, 4, "train.py failed before it could be planned: ValueError"),
        (Outcome.NO_STEP, 5, "train.py took no optimizer step"),
        (Outcome.INTERRUPTED, 130, "train.py interrupted"),
    ],
)
def test_a_script_that_does_not_train_has_no_plan(script, children, outcome, exit_code, text):
    children.outcome_of = lambda settings: outcome
    with pytest.raises(StepFailed, match=text) as raised:
        planned(script, 0.5)

    assert raised.value.exit_code == exit_code
    assert StepFailed.exit_code == 2


def test_a_budget_alone_is_a_device(script, children):
    plan = plan_script(script, budget="2GiB")

    assert plan.budget_bytes == plan.device.usable_bytes == 2048 * MIB


EXACT = ("exact",)
DEFAULT = ("exact", "rounding", "-autocast", "-shard")


def search(timeline=None, allow=DEFAULT, splits=True, **options):
    timeline = timeline or stack()
    seen = ProgramFacts(**{"batch_size": 16, "fusable": True, **options})
    found = ScriptSearch(memory_of(timeline), speed_of(timeline), allowed_moves(allow), seen, "amp-bf16")
    found.splits = splits
    return found


def share(found, part):
    return int(found.evaluate(AS_IT_IS).computed_bytes * part)


def test_what_fits_is_left_alone():
    found = search()

    assert found.fastest(share(found, 1)).settings == AS_IT_IS


def test_no_more_units_than_needed_are_computed_again():
    # GIVEN moves that keep every number
    found = search(allow=EXACT)
    target = share(found, 0.8)

    # WHEN something has to go
    best = found.fastest(target)

    # THEN the first layers are computed again, and with one less it would not fit
    chosen = best.settings.checkpoint
    assert chosen == tuple(f"layers.{number}" for number in range(len(chosen)))
    assert 0 < len(chosen) < NUM_LAYERS
    assert best.computed_bytes <= target
    assert found.evaluate(replace(best.settings, checkpoint=chosen[:-1])).computed_bytes > target


def test_micro_batches_are_cheaper_than_computing_again():
    found = search(stack(hidden=128 * MIB))
    best = found.fastest(share(found, 0.7))

    assert best.settings.micro_batches == 2
    assert best.settings.checkpoint == ()


def test_where_parts_cannot_be_proven_an_equal_plan_that_can_is_taken():
    # GIVEN segments that grow cost nothing, nor do gradients freed early, while micro-batches cost a little
    timeline = stack(zero_late=True)
    found = search(timeline, splits=False)
    best = found.fastest(share(found, 0.97))

    assert best.settings.micro_batches == 1


def test_moves_that_are_not_needed_are_taken_back():
    found = search(allow=EXACT)
    best = found.fastest(share(found, 0.8))

    assert found.free.expandable_segments
    kept = [
        replace(best.settings, expandable_segments=False),
        replace(best.settings, set_to_none=False),
    ]
    for less in kept:
        assert less == best.settings or found.evaluate(less).computed_bytes > share(found, 0.8)


def test_where_nothing_fits_the_smallest_is_known():
    found = search(allow=EXACT)

    assert found.fastest(50 * MIB) is None
    (smallest,) = found.smallest(1)
    assert smallest.computed_bytes > 50 * MIB
    assert all(smallest.computed_bytes <= one.computed_bytes for one in found.front())


def test_the_front_has_nothing_that_another_beats():
    found = search(allow=("exact", "rounding", "changes training"))
    front = found.front()

    assert len(front) > 3
    for larger, smaller in pairwise(front):
        assert larger.computed_bytes > smaller.computed_bytes
        assert larger.seconds < smaller.seconds


def test_the_same_question_has_the_same_answer():
    one, other = search(), search()

    assert one.fastest(share(one, 0.7)) == other.fastest(share(one, 0.7))
    assert one.front() == other.front()


@pytest.mark.parametrize(
    ("fusable", "allow", "kernels"),
    [
        (True, DEFAULT, OptimizerKernels.FUSED),
        (False, DEFAULT, OptimizerKernels.SINGLE),
        (True, EXACT, OptimizerKernels.KEEP),
    ],
)
def test_kernels_are_those_that_the_optimizer_has(fusable, allow, kernels):
    assert search(allow=allow, fusable=fusable).free.kernels is kernels


def test_only_what_is_allowed_is_chosen():
    narrow = search(allow=EXACT)
    wide = search(allow=("exact", "rounding", "changes training"))

    assert (narrow.parts, narrow.precisions, narrow.free.num_devices) == ([1], (None,), 1)
    assert narrow.free.state is OptimizerState.KEEP
    assert (wide.parts, wide.precisions, wide.free.num_devices) == ([1, 2, 4, 8, 16], (None, "amp-bf16"), 2)
    assert wide.free.state is OptimizerState.EIGHT_BIT


@pytest.mark.parametrize(("batch_size", "parts"), [(None, [1, 2, 4, 8]), (6, [1, 2, 4]), (1, [1])])
def test_a_batch_has_no_more_parts_than_samples(batch_size, parts):
    assert search(batch_size=batch_size).parts == parts


def test_batch_norm_keeps_the_batch_whole():
    timeline = stack(op="aten.native_batch_norm")
    strict = search(timeline)
    lenient = search(timeline, allow=(*DEFAULT, "approximate"))

    assert strict.parts == [1]
    assert Refusal("micro-batch", BATCH_NORM, "approximate") in strict.refused
    assert lenient.parts == [1, 2, 4, 8, 16]


def test_settings_fall_into_what_a_run_can_show_and_the_rest():
    settings = replace(AS_IT_IS, micro_batches=4, checkpoint=("layers.0",), state=OptimizerState.EIGHT_BIT)

    assert provable_part(settings, splits=True) == replace(settings, state=OptimizerState.KEEP)
    assert computed_part(settings, splits=True) == replace(AS_IT_IS, state=OptimizerState.EIGHT_BIT)
    assert provable_part(settings, splits=False) == replace(AS_IT_IS, checkpoint=("layers.0",))
    assert computed_part(settings, splits=False).micro_batches == 4
