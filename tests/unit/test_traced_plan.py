import time
from types import SimpleNamespace

import pytest

from memfit._traced_plan import Question, TracedPlanner
from memfit.core.device import Device, Kind, Origin
from memfit.core.errors import StepFailed
from memfit.core.estimate import Estimate, HostMemory
from memfit.core.plan import Plan, PlanNotFound
from memfit.core.replay import OutOfMemory, Replay
from memfit.core.settings import Keeps, Settings
from memfit.core.timeline import Block, Category, Phase, Timeline
from memfit.core.units import MIB
from memfit.planner.few_traces import Part, Search, Speed, Variant
from memfit.planner.moves import CHECKPOINT, MICRO_BATCH

STATE = {str(Category.PARAMETER): 10 * MIB, str(Category.GRADIENT): 10 * MIB, str(Category.OPTIMIZER_STATE): 20 * MIB}
PARTS = tuple(Part(f"block{number}", MIB, 1.0) for number in range(8))


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
        self.tracer = SimpleNamespace(batch_size=10)
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


def planned(budget, *, speed=None, allowed=(MICRO_BATCH, CHECKPOINT), approximate="", **options):
    device = Device("cpu", "CPU", Kind.HOST, None, round(budget * MIB), Origin.MEASURED)
    estimator = FakeEstimator(device, **options)
    plain = Variant(Settings(), 1.0, 1.0, 30 * MIB, 10 * MIB)
    question = Question(estimator, device, frozenset(allowed), Settings(), "keras:jax", approximate)

    def search(before):
        return Search(
            (plain,), before.reserved_peak_bytes, 10, PARTS, speed=speed,
            may_split=MICRO_BATCH in allowed, may_recompute=CHECKPOINT in allowed,
        )  # fmt: skip

    return TracedPlanner(question, search, time.perf_counter()).run(), estimator


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
    plan, _ = planned(90, allowed=(CHECKPOINT,), speed=Speed(1.0, 0.0))
    assert plan.fits and plan.settings.checkpoint and plan.settings.micro_batches == 1
    assert plan.keeps is Keeps.EXACT and plan.slowdown > 1
    assert plan.moves[0].costs_seconds > 0


def test_the_front_has_the_plan_and_what_was_traced():
    plan, _ = planned(90, speed=Speed(1.0, 0.1))
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
    with pytest.raises(PlanNotFound, match=r"the smallest that was traced needs 130\.0 MiB"):
        planned(35, fails=lambda settings: True)


def test_a_budget_below_the_weights_is_told():
    with pytest.raises(PlanNotFound, match=r"below the fixed cost of net: its weights take 10\.0 MiB"):
        planned(9)
