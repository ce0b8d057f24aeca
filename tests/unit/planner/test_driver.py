import time

import pytest

from memfit.core.device import Device, Kind, Origin
from memfit.core.errors import BadInput, StepFailed
from memfit.core.estimate import Estimate, HostMemory
from memfit.core.plan import Plan, PlanNotFound, Refusal
from memfit.core.replay import OutOfMemory, Replay
from memfit.core.settings import Keeps, Settings
from memfit.core.step_facts import StepPart
from memfit.core.timeline import Block, Category, Phase, Timeline
from memfit.core.units import MIB
from memfit.planner.driver import Patience, Planner, Question
from memfit.planner.moves import CHECKPOINT, MICRO_BATCH
from memfit.planner.traced_search import ForwardSpeed, TracedSearch, TracedVariant

STATE = {str(Category.PARAMETER): 10 * MIB, str(Category.GRADIENT): 10 * MIB, str(Category.OPTIMIZER_STATE): 20 * MIB}
PARTS = tuple(StepPart(f"block{number}", MIB, 1.0) for number in range(8))


def estimate(size_bytes, device):
    timeline = Timeline((Block(size_bytes, 0, None, Category.ACTIVATION, Phase.FORWARD),), 1)
    over = device.usable_bytes is not None and size_bytes > device.usable_bytes
    failure = OutOfMemory(0, size_bytes, 0, 0) if over else None
    replay = Replay((size_bytes,), (size_bytes,), size_bytes, size_bytes, size_bytes, 1, 0, failure)
    return Estimate(
        "net", device, "training", "as given", 10, timeline, replay, 0, size_bytes, size_bytes, HostMemory({}),
        state_bytes=STATE,
    )  # fmt: skip


class FakeEstimator:
    """A step of which everything is known: the truth that the planner has to find out by asking."""

    def __init__(self, device, fails=lambda settings: False, overhead=0):
        self.device, self.fails, self.overhead = device, fails, overhead
        self.asked = []

    def truth(self, settings):
        spared = 10 * (len(settings.checkpoint) - 1) * MIB if settings.checkpoint else 0
        growing = (100 * MIB - spared) / settings.micro_batches
        sums = (10 * MIB if settings.micro_batches > 1 else 0) + self.overhead * (settings != Settings())
        return round(30 * MIB + sums + growing)

    def run(self, *, eager):
        assert not eager
        return estimate(self.truth(Settings()), self.device)

    def with_settings(self, settings):
        self.asked.append(settings)
        if self.fails(settings):
            raise StepFailed("no such luck\nand more")
        return estimate(self.truth(settings), self.device), 0


def planned(
    budget, *, speed=None, allowed=(MICRO_BATCH, CHECKPOINT), approximate="", refused=(), kind=Kind.HOST, **options
):
    device = Device("some", "Some", kind, None, round(budget * MIB), Origin.MEASURED)
    estimator = FakeEstimator(device, **options)
    plain = TracedVariant(Settings(), 1.0, 1.0, 30 * MIB, 10 * MIB)
    question = Question(
        estimator, device, frozenset(allowed), Settings(), "keras:jax", batch_size=10, approximate=approximate,
        refused=list(refused),
    )  # fmt: skip

    def search(before):
        return TracedSearch(
            (plain,), before.reserved_peak_bytes, 10, PARTS, speed=speed,
            may_split=MICRO_BATCH in allowed, may_recompute=CHECKPOINT in allowed,
        )  # fmt: skip

    return Planner(question, search, time.perf_counter()).run(), estimator


def test_what_fits_is_left_as_it_is_without_another_trace():
    plan, estimator = planned(200)
    assert plan.settings == Settings() and plan.moves == () and estimator.asked == []


def test_the_fastest_that_fits_is_proven():
    plan, estimator = planned(90)
    assert plan.settings.micro_batches == 3 and not plan.settings.checkpoint
    assert plan.fits and plan.after.peak_bytes == estimator.truth(plan.settings)
    assert len(estimator.asked) == 1
    [move] = plan.moves
    assert (move.name, move.keeps, move.saves_origin) == (MICRO_BATCH, Keeps.ROUNDING, Origin.SIMULATED)
    assert move.saves_bytes == plan.before.peak_bytes - plan.after.peak_bytes
    assert plan.seconds_after.seconds is None is move.costs_seconds


def test_a_computation_that_was_too_hopeful_is_corrected():
    plan, estimator = planned(90, overhead=20 * MIB)
    assert plan.fits and plan.settings.micro_batches > 3
    assert 2 <= len(estimator.asked) <= 6


def test_what_fails_is_told_and_left_out():
    plan, _ = planned(90, fails=lambda settings: settings.micro_batches == 3)
    assert plan.fits and plan.settings.micro_batches != 3
    assert any(
        one.name == "proof" and "no such luck" in one.reason and "more" not in one.reason for one in plan.refused
    )


def test_recomputation_where_batches_stay_whole():
    plan, _ = planned(90, allowed=(CHECKPOINT,), speed=ForwardSpeed(1.0, 0.0))
    assert plan.fits and plan.settings.checkpoint and plan.settings.micro_batches == 1
    assert plan.keeps is Keeps.EXACT and plan.slowdown > 1
    assert plan.moves[0].costs_seconds > 0


def test_the_front_has_the_plan_and_what_was_traced():
    plan, _ = planned(90, speed=ForwardSpeed(1.0, 0.1))
    sizes = [point.peak_bytes for point in plan.front]
    assert sizes == sorted(sizes, reverse=True)
    chosen = next(point for point in plan.front if point.settings == plan.settings)
    assert chosen.verified and chosen.peak_bytes == plan.after.peak_bytes and chosen.seconds > 0


def test_why_parts_only_approximate_goes_with_the_move():
    plan, _ = planned(90, approximate="'norm' sees parts")
    assert plan.moves[0].keeps is Keeps.CHANGES and "'norm' sees parts" in plan.moves[0].caveat


def test_a_plan_survives_a_file(tmp_path):
    plan, _ = planned(90)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert plan.framework == "keras:jax"


def test_where_nothing_fits_the_smallest_is_shown():
    with pytest.raises(
        PlanNotFound, match=r"(?s)no plan fits `net` into 35.0 MiB; the smallest .* with: .*larger"
    ) as found:
        planned(35)
    assert found.value.smallest.after.peak_bytes <= 52 * MIB
    with pytest.raises(PlanNotFound, match="Try to allow checkpoint, micro-batch"):
        planned(35, allowed=())


def test_where_the_smallest_cannot_be_traced_it_says_why():
    with pytest.raises(PlanNotFound, match=r"the smallest needs 130\.0 MiB"):
        planned(35, fails=lambda settings: True)


def test_a_budget_below_the_weights_is_told():
    with pytest.raises(PlanNotFound, match=r"below the fixed cost of net: its weights take 10\.0 MiB"):
        planned(9)


def test_what_was_not_considered_is_listed_once_and_cut():
    refused = [Refusal("checkpoint", f"layer {number}") for number in (*range(10), 0)]
    with pytest.raises(PlanNotFound) as found:
        planned(35, refused=refused)

    lines = str(found.value).splitlines()
    first = lines.index("  not considered:")
    assert lines[first + 1] == "    checkpoint: layer 0"
    assert lines[first + 9] == "    and 2 more"


def test_micro_batches_are_hinted_at_where_a_word_would_let_them_in():
    refused = [Refusal("micro-batch", "batch norm", "approximate"), Refusal("checkpoint", "random numbers")]
    with pytest.raises(PlanNotFound, match=r"Try to allow approximate \(micro-batch\) as well, or a larger budget\."):
        planned(35, refused=refused)


def test_the_cheapest_device_has_a_price():
    with pytest.raises(PlanNotFound, match=r"device such as \S+ \(.* USD an hour on AWS \(") as found:
        planned(35, kind=Kind.CUDA)
    assert found.value.device_name in str(found.value)


def test_patience_ends():
    assert Patience(0).is_over
    assert Patience(0).left(20.0) == 0.0
    assert 0 < Patience(3600).left(20.0) <= 20.0
    assert not Patience().is_over
    assert Patience().left(20.0) == 20.0


@pytest.mark.parametrize("seconds", [-1, "5", True, float("nan")])
def test_patience_is_a_number_of_seconds(seconds):
    with pytest.raises(BadInput, match="seconds must be a number from 0 up, such as seconds=10, but"):
        Patience(seconds)
