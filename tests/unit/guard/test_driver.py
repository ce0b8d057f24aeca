"""The driver of guarded training, with a loop of no framework."""

import gc
import json
import logging

import pytest

from memfit.core import env, run_events
from memfit.core.adapter import GuardedLoop, SingleProcess
from memfit.core.errors import BadInput
from memfit.core.guarding import (
    AUTO,
    BatchSize,
    Blame,
    BrokenUpdate,
    CannotFit,
    Fallbacks,
    GuardOptions,
    MemoryFailure,
    Splitting,
    Where,
)
from memfit.core.plan import PlanNotFound
from memfit.core.settings import Settings
from memfit.core.units import InvalidSize
from memfit.guard.attempts import Ceilings
from memfit.guard.driver import Driver, Terms

FULL = MemoryFailure(Where.HOST, "test", 1000, text="full")


class Loop(GuardedLoop):
    """Batches are numbers of samples, of which memory holds `room` at once, or more where blocks are recomputed."""

    model_name = "Numbers"
    owner = None

    def __init__(self, room=8, errors=(), fallbacks=None, refused=""):
        self.room, self.errors, self.refused = room, list(errors), refused
        self._fallbacks = fallbacks or Fallbacks()
        self.tried, self.total, self.happened, self.batch = [], 0, None, None
        self.planned, self.blamed = Settings(), None
        self.rolled_back = self.closed = 0

    def size_of(self, batch):
        return BatchSize(batch)

    def identity(self, batch, host_bytes):
        return ("numbers",)

    def fallbacks(self):
        return self._fallbacks

    def attempt(self, settings_of, *, again):
        self.happened = None
        settings = settings_of(self.batch)
        self.tried.append(settings.micro_batch_size or self.batch)
        if self.errors:
            raise self.errors.pop(0)
        if self.tried[-1] > self.room * (2 if settings.checkpoint else 1):
            return FULL
        self.total += self.batch
        self.happened = True
        return None

    def roll_back(self):
        self.rolled_back += 1

    def blame(self, error, *, again):
        return self.blamed

    def splitting(self):
        return Splitting(refused=self.refused)

    def why_not_split(self):
        return "it has no samples"

    def differences(self, settings):
        return ""

    def explain(self, failure, settings, why_whole):
        return f"tried {settings.micro_batch_size}; {why_whole}"

    def usable_bytes(self, budget_bytes, share):
        return int(budget_bytes * share)

    def room_bytes(self, host_bytes, budget_bytes):
        return budget_bytes

    def plan(self, make_plan, budget_bytes):
        return make_plan(budget_bytes)

    def write_state(self, directory, progress):
        (directory / "state.json").write_text(json.dumps({**progress, "total": self.total}))

    def read_state(self, directory, check):
        progress = json.loads((directory / "state.json").read_text())
        check(progress)
        self.total = progress["total"]
        return progress

    def resumed(self, directory):
        return [f"resumed at {self.total}"]

    def close(self):
        self.closed += 1


def guarded(loop=None, folder=None, ceilings=None, **terms):
    loop = loop or Loop()
    terms = {"plan": None, "options": GuardOptions(remember=False), **terms}
    return loop, Driver(loop, Terms(**terms), folder, ceilings)


def train(driver, *batches):
    failures = []
    for batch in batches:
        driver.check()
        driver.loop.batch = batch
        failures.append(len(driver.step(batch)))
    return failures


@pytest.fixture
def supervised(monkeypatch, tmp_path):
    """Makes this process one of a supervised run; returns a function that reads its events."""

    def begin(**request):
        folder = tmp_path / "attempt-1"
        folder.mkdir()
        (folder / "request.json").write_text(json.dumps(run_events.RunRequest(**request).to_json()))
        monkeypatch.setenv(env.RUN_REQUEST, str(folder / "request.json"))
        return lambda: [(event["event"], event) for event in run_events.read_events(folder)]

    return begin


def test_a_step_is_halved_until_it_fits_and_that_is_kept(caplog):
    loop, driver = guarded(Loop(room=2))

    assert train(driver, 8, 8) == [2, 0]
    assert loop.tried == [8, 4, 2, 2]
    assert (driver.num_updates, loop.rolled_back, loop.total) == (2, 2, 16)
    assert caplog.messages == ["memory ran out; going on with micro-batches of 2"]


def test_stronger_moves_follow_where_a_single_sample_does_not_fit():
    _loop, driver = guarded(Loop(room=0.5, fallbacks=Fallbacks(stronger=({"checkpoint": ("a",)},))))

    assert train(driver, 2) == [2]
    assert driver.settings_of(2).checkpoint == ("a",)


def test_where_nothing_is_left_it_is_said_what_was_tried():
    _, driver = guarded(Loop(room=0))
    with pytest.raises(CannotFit, match="tried 1; ") as caught:
        train(driver, 4)
    assert caught.value.failure is FULL


def test_batches_that_may_not_be_split_stay_whole():
    loop, driver = guarded(Loop(room=2, refused="samples see each other."))
    with pytest.raises(CannotFit, match="samples see each other"):
        train(driver, 4)
    assert loop.tried == [4]


def test_micro_batches_that_are_asked_for_and_can_not_be_are_left_out(caplog):
    options = GuardOptions(remember=False, micro_batch_size=2)
    loop, driver = guarded(Loop(refused="samples see each other."), options=options)

    train(driver, 4)

    assert loop.tried == [4]
    assert caplog.messages == ["samples see each other. Batches are run as a whole."]


@pytest.mark.parametrize(
    ("blame", "said"),
    [(Blame.PARTS, "Batches are run as a whole."), (Blame.MOVES, "The guard continues without it."), (None, "")],
)
def test_settings_that_an_error_is_about_are_left_out(blame, said, caplog):
    loop = Loop(room=2, fallbacks=Fallbacks(stronger=({"checkpoint": ("a",)},), whole_first=True))
    loop, driver = guarded(loop)
    assert train(driver, 4) == [1]
    loop.errors, loop.blamed = [BadInput("odd")], blame
    caplog.clear()

    if blame is None:
        with pytest.raises(BadInput, match="odd"):
            train(driver, 4)
    else:
        train(driver, 4)
        assert caplog.messages[0] == f"odd {said}"


def test_a_step_that_can_not_be_undone_ends_the_run():
    loop, driver = guarded(Loop(room=1))

    def fail():
        raise BrokenUpdate("half an update")

    loop.roll_back = fail
    for _ in range(2):
        with pytest.raises(BrokenUpdate, match="half an update"):
            train(driver, 4)
    assert loop.tried == [4]


def test_a_run_goes_on_from_its_checkpoint(tmp_path, caplog):
    options = GuardOptions(remember=False, checkpoint_every=2)
    loop, driver = guarded(Loop(room=2), tmp_path, options=options)
    train(driver, 4, 4, 4)
    driver.close()
    assert loop.closed

    again, driver = guarded(Loop(room=2), tmp_path, options=options)
    assert (driver.resumed_from, driver.num_updates, again.total) == (2, 2, 8)
    assert "resumed at 8" in caplog.messages
    # AND what was found out is not found out again
    assert train(driver, 4) == [0]
    driver.save_last()
    driver.close()

    last, driver = guarded(Loop(), tmp_path)
    assert (driver.num_updates, last.total) == (3, 12)
    driver.close()


def test_findings_are_not_those_of_a_run_with_other_terms(tmp_path):
    options = GuardOptions(remember=False, checkpoint_every=1)
    _, driver = guarded(Loop(room=2), tmp_path, options=options)
    train(driver, 4)
    driver.close()

    _, driver = guarded(Loop(room=2), tmp_path, options=options, plan=Settings(kernels="single"))
    assert train(driver, 4) == [1]
    driver.close()


def test_a_checkpoint_that_is_refused_leaves_the_folder(tmp_path):
    options = GuardOptions(remember=False, checkpoint_every=1)
    _, driver = guarded(folder=tmp_path, options=options)
    train(driver, 4)
    driver.close()

    class Other(Loop):
        def read_state(self, directory, check):
            check({"update": "three"})

    with pytest.raises(BadInput, match="update is 'three'"):
        guarded(Other(), tmp_path)
    guarded(folder=tmp_path)[1].close()


def test_findings_are_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    for failures in (1, 0):
        _, driver = guarded(Loop(room=2), options=GuardOptions())
        assert train(driver, 4) == [failures]


def test_a_budget_is_planned_for(caplog):
    asked = []

    def make_plan(budget):
        asked.append(budget)
        return Settings(micro_batches=2, micro_batch_size=2)

    loop, driver = guarded(plan=AUTO, budget="1KiB", make_plan=make_plan)
    train(driver, 4)

    assert (asked, loop.tried) == ([1024], [2])
    assert caplog.messages == ["planned for 1.00 KiB with micro-batches of 2"]


def test_where_no_plan_can_be_made_it_is_found_out(caplog):
    def make_plan(budget):
        raise KeyError("no such operator")

    _loop, driver = guarded(Loop(room=2), plan=AUTO, budget="1KiB", make_plan=make_plan)

    assert train(driver, 4) == [1]
    assert "no plan could be made for 1.00 KiB; what fits is found out step by step" in caplog.messages[0]


def test_a_plan_is_made_when_memory_first_runs_out():
    plans = iter([Settings(micro_batches=4, micro_batch_size=1)])
    loop, driver = guarded(Loop(room=1), plan=AUTO, make_plan=lambda budget: next(plans))
    loop.room_bytes = lambda host, budget: 77

    assert train(driver, 4) == [1]
    assert loop.tried == [4, 1]


class Smallest:
    settings = Settings(micro_batches=4, micro_batch_size=1)


def test_under_a_supervisor_the_smallest_plan_is_tried(supervised):
    def make_plan(budget):
        error = PlanNotFound("nothing fits")
        error.smallest = Smallest
        raise error

    read = supervised(budget_bytes=1000, share=0.5)
    loop, driver = guarded(plan=AUTO, make_plan=make_plan)
    train(driver, 4)

    assert loop.tried == [1]
    assert [name for name, _ in read()] == ["guard", "step", "settings", "step"]


def test_a_budget_that_nothing_fits_into_ends_the_run(supervised):
    def make_plan(budget):
        raise PlanNotFound("nothing fits")

    read = supervised()
    _, driver = guarded(plan=AUTO, budget="1KiB", make_plan=make_plan)
    with pytest.raises(CannotFit, match="nothing fits"):
        train(driver, 4)
    assert read()[-1][1]["planned"] is True


def test_a_supervisor_is_told_and_asked(supervised, tmp_path):
    read = supervised(micro_batch_size=4, checkpoint=str(tmp_path / "kept"), budget_bytes=5)
    terms = Terms(plan=None, options=GuardOptions(remember=False, checkpoint_every=1))
    assert (terms.folder, terms.budget_bytes, Terms(budget="1KiB").budget_bytes) == (str(tmp_path / "kept"), 5, 1024)
    loop = Loop(room=2)
    driver = Driver(loop, terms, terms.folder)
    train(driver, 8)
    driver.close()

    assert loop.tried == [4, 2]
    assert [name for name, _ in read()] == ["guard", "step", "oom", "step", "settings", "checkpoint"]
    assert [event["micro_batch_size"] for name, event in read() if name == "step"] == [4, 2]


def test_nobody_looks_at_a_model_before_memory_runs_out():
    class Late(Loop):
        learns_from_start = False

        def fallbacks(self):
            self.looked = True
            return Fallbacks(one_size=True)

    loop, driver = guarded(Late(room=3))
    train(driver, 2)
    assert not hasattr(loop, "looked")
    train(driver, 4, 2)
    # One setting serves batches of all sizes.
    assert loop.looked and loop.tried == [2, 4, 2, 2]


@pytest.mark.parametrize(
    ("terms", "error", "text"),
    [
        ({"plan": "fast"}, BadInput, "plan must be 'auto', a Plan or None, but 'fast' was given"),
        ({"budget": "much"}, InvalidSize, "much"),
        ({"options": {}}, BadInput, r"options must be memfit.GuardOptions\(...\), but \{\} was given"),
    ],
)
def test_terms_that_can_not_be_used_are_refused(terms, error, text):
    with pytest.raises(error, match=text):
        Terms(**terms)


def test_other_processes_do_not_wait_for_one_that_is_ending(tmp_path):
    loop, driver = guarded(Loop(), tmp_path, options=GuardOptions(remember=False, checkpoint_every=100))
    train(driver, 4)
    loop.ranks = SingleProcess()
    loop.ranks.num_ranks = 2
    driver.save_last()
    driver.save_last_alone()
    loop.ranks.num_ranks = 1
    driver.close()
    assert not list(tmp_path.glob("step-*"))


def test_nothing_is_said_twice(caplog):
    _, driver = guarded()
    with caplog.at_level(logging.WARNING, "memfit"):
        driver.say("once", "once")
    assert caplog.messages == ["once"]


def test_after_its_end_nothing_is_written_to_a_folder_that_may_be_anothers(tmp_path):
    # GIVEN an update without a checkpoint, and a driver that was closed without a last save
    _, driver = guarded(Loop(), tmp_path, options=GuardOptions(remember=False, checkpoint_every=1000))
    train(driver, 4)
    driver.close()

    # WHEN nothing holds it any more
    del driver
    gc.collect()

    assert list(tmp_path.glob("step-*")) == []


def test_a_loop_is_closed_though_the_last_checkpoint_was_interrupted(tmp_path, monkeypatch):
    loop, driver = guarded(Loop(), tmp_path)

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(driver.checkpointing, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        driver.close()
    assert loop.closed


def test_a_resumed_run_that_knows_what_fits_is_not_planned_again(tmp_path):
    # GIVEN a run that planned when memory first ran out, and remembers what fits
    terms = {"plan": AUTO, "options": GuardOptions(checkpoint_every=1)}
    plans = iter([Settings(micro_batches=2, micro_batch_size=2)])

    def run(loop, make_plan):
        loop.room_bytes = lambda host, budget: 77
        cache = Ceilings(tmp_path / "cache")
        return guarded(loop, tmp_path / "run", cache, make_plan=make_plan, **terms)[1]

    driver = run(Loop(room=2), lambda budget: next(plans))
    assert train(driver, 4) == [1]
    driver.close()

    # WHEN it is resumed and runs out again
    loop = Loop(room=1)
    driver = run(loop, lambda budget: pytest.fail("planned again"))
    assert driver.resumed_from == 1
    assert train(driver, 4) == [1]

    # THEN it shrinks, as without the interruption
    assert loop.tried == [2, 1]
    driver.close()
