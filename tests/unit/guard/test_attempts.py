"""What is tried next when memory runs out, played through without any framework."""

import json

import pytest

from memfit.core.guarding import BadCheckpoint, BatchSize, Fallbacks, MemoryFailure, Where
from memfit.core.settings import OptimizerKernels, Settings, Weighting
from memfit.guard.attempts import Attempts, Ceilings, key_of

FAILURE = MemoryFailure(Where.HOST, "torch")
BLOCKS = {"checkpoint": ("layers.0", "layers.1")}


def play(attempts, size, limit, *, most=50):
    """Runs one step against a memory of `limit` elements for a micro-batch; settings tried until it went well."""
    tried = []
    for _ in range(most):
        settings = attempts.settings(size)
        tried.append(settings)
        samples = settings.micro_batch_size or size.num_samples
        room = limit * (4 if settings.checkpoint else 1)
        if samples * size.elements_per_sample <= room:
            attempts.succeeded(size)
            return tried
        if not attempts.failed(size, FAILURE, in_update=False):
            return [*tried, None]
    raise AssertionError("no end")


def test_a_batch_that_fits_is_left_whole():
    attempts = Attempts(Settings())

    assert play(attempts, BatchSize(32), 32) == [Settings()]
    assert not attempts.changed


@pytest.mark.parametrize("times", [2, 4, 8, 16])
def test_halving_wastes_as_many_steps_as_there_are_halves(times):
    attempts = Attempts(Settings())

    tried = play(attempts, BatchSize(64), 64 // times)

    assert len(tried) - 1 == times.bit_length() - 1
    assert tried[-1].micro_batches == times
    assert tried[-1].micro_batch_size == 64 // times


def test_a_plan_wastes_one_step():
    attempts = Attempts(Settings())
    attempts.replan = lambda: Settings(8, micro_batch_size=8)

    assert [settings.micro_batches for settings in play(attempts, BatchSize(64), 8)] == [1, 8]


def test_a_plan_that_fails_is_followed_by_halving_and_not_asked_for_again():
    asked = []
    attempts = Attempts(Settings())
    attempts.replan = lambda: asked.append(1) or Settings(2, micro_batch_size=32)

    assert [settings.micro_batch_size for settings in play(attempts, BatchSize(64), 8)] == [0, 32, 16, 8]
    assert asked == [1]


def test_what_was_found_holds_for_the_next_step_and_for_other_shapes():
    attempts = Attempts(Settings())
    play(attempts, BatchSize(64, 10.0), 160.0)

    # Half as large samples: twice as many of them.
    assert attempts.settings(BatchSize(64, 5.0)).micro_batch_size == 32
    assert attempts.settings(BatchSize(10, 10.0)) == Settings()
    # A sample that is too large by itself is run alone.
    assert attempts.settings(BatchSize(4, 1000.0)).micro_batch_size == 1


def test_stronger_moves_come_when_the_micro_batch_can_not_be_smaller():
    attempts = Attempts(Settings(), Fallbacks(stronger=(BLOCKS,)))

    tried = play(attempts, BatchSize(4, 8.0), 4.0)

    assert [(s.micro_batch_size, bool(s.checkpoint)) for s in tried] == [(0, 0), (2, 0), (1, 0), (1, 1)]


def test_stronger_moves_come_first_where_parts_differ_from_the_whole():
    attempts = Attempts(Settings(), Fallbacks(stronger=(BLOCKS,), whole_first=True))

    tried = play(attempts, BatchSize(4, 8.0), 4.0)

    assert [(s.micro_batch_size, bool(s.checkpoint)) for s in tried] == [(0, 0), (0, 1), (2, 1)]


def test_at_last_nothing_is_left():
    attempts = Attempts(Settings(), Fallbacks(stronger=(BLOCKS,)))

    assert play(attempts, BatchSize(4, 8.0), 1.0)[-1] is None


def test_a_batch_that_can_not_be_split_gets_the_stronger_moves_at_once():
    attempts = Attempts(Settings(), Fallbacks(stronger=(BLOCKS,)))

    assert attempts.failed(BatchSize(None), FAILURE, in_update=False)
    assert attempts.settings(BatchSize(None)).checkpoint == BLOCKS["checkpoint"]
    assert not attempts.failed(BatchSize(None), FAILURE, in_update=False)


def test_moves_that_can_not_be_put_on_are_left_out():
    attempts = Attempts(Settings(), Fallbacks(stronger=(BLOCKS,)))
    attempts.failed(BatchSize(None), FAILURE, in_update=False)

    assert attempts.without_level()
    assert attempts.settings(BatchSize(None)) == Settings()
    assert not attempts.without_level()


def test_an_update_is_tried_once_more_as_it_is_then_with_kernels_that_need_less():
    attempts = Attempts(Settings())
    size = BatchSize(8)

    assert attempts.failed(size, FAILURE, in_update=True)
    assert attempts.settings(size) == Settings()
    assert attempts.failed(size, FAILURE, in_update=True)
    assert attempts.settings(size) == Settings(kernels=OptimizerKernels.SINGLE)
    assert not attempts.failed(size, FAILURE, in_update=True)


def test_it_grows_back_when_memory_allows():
    attempts = Attempts(Settings(), Fallbacks(grow_after=3))
    size = BatchSize(64)
    play(attempts, size, 8)

    sizes = [attempts.settings(size).micro_batch_size]
    for _ in range(20):
        play(attempts, size, 64)
        sizes.append(attempts.settings(size).micro_batch_size or 64)

    assert sizes[0] == 8
    assert sizes[-1] == 64
    assert sizes == sorted(sizes)


def test_growing_in_vain_costs_less_and_less():
    attempts = Attempts(Settings(), Fallbacks(grow_after=2))
    size = BatchSize(64)
    play(attempts, size, 8)

    wasted = [len(play(attempts, size, 8)) - 1 for _ in range(400)]

    assert max(wasted) == 1
    assert sum(wasted[:50]) <= 5
    assert sum(wasted) <= 9
    assert attempts.settings(size).micro_batch_size == 8


def test_between_the_good_and_the_bad_a_larger_size_is_found():
    attempts = Attempts(Settings(), Fallbacks(grow_after=1))
    size = BatchSize(64)

    for _ in range(200):
        play(attempts, size, 13)

    assert attempts.settings(size).micro_batch_size in (12, 13)


def test_findings_last():
    attempts = Attempts(Settings(), Fallbacks(stronger=(BLOCKS,)))
    size = BatchSize(4, 8.0)
    play(attempts, size, 4.0)

    later = Attempts(Settings(), Fallbacks(stronger=(BLOCKS,)))
    later.load(json.loads(json.dumps(attempts.to_json())))

    assert later.settings(size) == attempts.settings(size)


def test_a_supervisor_bounds_the_micro_batch():
    attempts = Attempts(Settings())
    attempts.bound(BatchSize(64, 2.0), 16)

    assert attempts.settings(BatchSize(64, 2.0)).micro_batch_size == 16


def test_a_supervisor_bounds_a_trial_that_a_resumed_run_goes_on_with():
    size = BatchSize(64, 2.0)
    killed, later = (Attempts(Settings(), Fallbacks(grow_after=2)) for _ in range(2))
    play(killed, size, 16)
    while killed.to_json()["trial"] is None:
        killed.succeeded(size)
    on_trial = killed.settings(size).micro_batch_size
    later.load(json.loads(json.dumps(killed.to_json())), resumes=True)

    later.bound(size, 10)

    assert on_trial > 10
    assert later.settings(size).micro_batch_size <= 10


def test_what_another_run_has_found_out_ends_a_trial():
    size = BatchSize(64)
    attempts = Attempts(Settings(), Fallbacks(grow_after=2))
    play(attempts, size, 16)
    finding = attempts.to_json()
    while attempts.to_json()["trial"] is None:
        attempts.succeeded(size)

    attempts.load(finding)

    assert attempts.settings(size).micro_batch_size == 16


def test_the_neediest_process_decides():
    needy, other = (
        Attempts(Settings(), Fallbacks(stronger=(BLOCKS,))),
        Attempts(Settings(), Fallbacks(stronger=(BLOCKS,))),
    )
    size = BatchSize(4, 8.0)
    play(needy, size, 4.0)

    least = [min(pair) for pair in zip(needy.votes(), other.votes(), strict=True)]
    for attempts in (needy, other):
        attempts.settle(least)

    assert other.settings(size) == needy.settings(size)


def test_the_weighting_of_losses_stays_with_all_settings():
    attempts = Attempts(Settings())
    attempts.weigh(Weighting("sum"))

    assert play(attempts, BatchSize(8), 2)[-1].weighting == Weighting("sum")


def test_weaker_moves_are_tried_again_where_whole_batches_fit():
    attempts = Attempts(Settings(), Fallbacks(stronger=(BLOCKS,), whole_first=True, grow_after=3))
    size = BatchSize(8)
    attempts.failed(size, FAILURE, in_update=False)
    assert attempts.settings(size).checkpoint

    # GIVEN a trial that fails
    for _ in range(3):
        attempts.succeeded(size)
    assert not attempts.settings(size).checkpoint
    assert attempts.to_json()["level"] == 1
    attempts.failed(size, FAILURE, in_update=False)
    assert attempts.settings(size).checkpoint

    # WHEN, after twice as many steps, it goes well
    for _ in range(7):
        attempts.succeeded(size)

    # THEN
    assert not attempts.settings(size).checkpoint
    assert attempts.to_json()["level"] == 0


def test_a_micro_batch_has_the_samples_that_a_norm_needs():
    attempts = Attempts(Settings())
    attempts.bound(BatchSize(8), 1)

    assert attempts.need_samples(2)
    assert not attempts.need_samples(2)

    assert [attempts.settings(BatchSize(n)).micro_batches for n in (8, 5, 3, 2, 1)] == [4, 2, 1, 1, 1]
    assert attempts.settings(BatchSize(5)).micro_batch_size == 3
    assert not attempts.failed(BatchSize(8), FAILURE, in_update=False)


def test_what_is_on_trial_is_no_finding():
    attempts = Attempts(Settings(), Fallbacks(grow_after=2))
    size = BatchSize(8)
    play(attempts, size, 4)
    while attempts.to_json()["trial"] is None:
        attempts.succeeded(size)
    later = Attempts(Settings())

    later.load(json.loads(json.dumps(attempts.to_json())))

    assert attempts.settings(size).micro_batch_size > 4
    assert later.settings(size).micro_batch_size == 4


@pytest.mark.parametrize("num_steps", range(12))
def test_a_resumed_run_grows_when_the_uninterrupted_one_does(num_steps):
    size = BatchSize(16)

    def steps(attempts, number):
        return [play(attempts, size, 5)[-1].micro_batches for _ in range(number)]

    whole = Attempts(Settings(), Fallbacks(stronger=(BLOCKS,), grow_after=2))
    expected = steps(whole, 24)
    first, second = (Attempts(Settings(), Fallbacks(stronger=(BLOCKS,), grow_after=2)) for _ in range(2))
    done = steps(first, num_steps)
    second.load(json.loads(json.dumps(first.to_json())), resumes=True)

    assert done + steps(second, 24 - num_steps) == expected


def test_the_micro_batches_of_a_plan_last():
    planned = Settings(micro_batches=4, micro_batch_size=2)
    later = Attempts(planned)

    later.load(json.loads(json.dumps(Attempts(planned).to_json())), resumes=True)

    assert later.settings(BatchSize(8)).micro_batches == 4


def test_sizes_that_are_no_whole_numbers_of_elements_are_kept():
    attempts = Attempts(Settings())
    size = BatchSize(8, 10.125)
    attempts.bound(size, 4)

    attempts.settle(attempts.votes())

    assert attempts.settings(size).micro_batch_size == 4


def test_progress_without_attempts_is_refused():
    with pytest.raises(BadCheckpoint, match="has no attempts"):
        Attempts.check_progress({"update": 3})


# Findings that last from run to run.


def test_what_is_kept_is_found_again(tmp_path):
    key = key_of(("model", (3, 4), "cpu"))
    Ceilings(tmp_path).put(key, {"most": 8.0})

    assert Ceilings(tmp_path).get(key) == {"most": 8.0}
    assert Ceilings(tmp_path).get(key_of(("model", (3, 5), "cpu"))) is None


def test_without_a_folder_nothing_is_kept():
    ceilings = Ceilings(None)
    ceilings.put("key", {"most": 8.0})

    assert Ceilings(None).get("key") is None
    # But for those who share it.
    assert ceilings.get("key", only_own=True) == {"most": 8.0}


def test_findings_of_earlier_runs_can_be_left_out(tmp_path):
    Ceilings(tmp_path).put("key", {"most": 8.0})

    assert Ceilings(tmp_path).get("key", only_own=True) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 99, "entries": {"key": {}}}', '{"version": 1}', "\x00"])
def test_a_damaged_file_counts_as_empty(tmp_path, text):
    (tmp_path / "ceilings.json").write_text(text, encoding="utf-8")

    assert Ceilings(tmp_path).get("key") is None
    Ceilings(tmp_path).put("key", {"most": 1.0})
    assert Ceilings(tmp_path).get("key") == {"most": 1.0}


def test_the_oldest_go_when_there_are_many(tmp_path):
    ceilings = Ceilings(tmp_path)
    for number in range(300):
        ceilings.put(f"key {number}", {"most": number})

    assert Ceilings(tmp_path).get("key 0") is None
    assert Ceilings(tmp_path).get("key 299") == {"most": 299}
    assert [path.name for path in tmp_path.iterdir()] == ["ceilings.json"]


def test_a_folder_that_can_not_be_made_is_no_reason_to_fail(tmp_path):
    (tmp_path / "file").write_text("")

    Ceilings(tmp_path / "file" / "folder").put("key", {"most": 1.0})
