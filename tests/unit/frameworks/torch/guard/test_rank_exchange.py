import pytest
import torch
import torch.distributed as dist
from torch import nn

from memfit.core import oom
from memfit.frameworks.torch.guard import rank_exchange
from memfit.frameworks.torch.guard.rank_exchange import (
    Counter,
    Done,
    ExchangingRanks,
    OtherRankOutOfMemory,
    num_begun,
    surely,
)
from tests.unit.frameworks.torch.guard.faults import allocation_error

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.fixture
def others(monkeypatch):
    """Stands in for what other processes add to an exchange."""
    added = {}

    def all_reduce(tensor, operation=None, group=None):
        for index, number in enumerate(added.get("numbers", [])[: len(tensor)]):
            pick = max if operation == dist.ReduceOp.MAX else min
            tensor[index] = pick(int(tensor[index]), number)

    monkeypatch.setattr(rank_exchange, "_all_reduce", all_reduce)
    return added


def exchange():
    return ExchangingRanks(nn.Linear(1, 1))


def test_numbers_of_one_process_come_back():
    assert exchange().agree([5, -3, 2**62]) == [5, -3, 2**62]
    assert exchange().total(2.5) == 2.5
    assert (exchange().agreed(True), exchange().agreed(False), exchange().share("text")) == (True, False, "text")


def test_more_numbers_than_fit_into_one_exchange():
    assert ExchangingRanks(nn.Linear(1, 1), most=4).agree(list(range(11))) == list(range(11))


def test_the_least_number_of_all_counts(others):
    others["numbers"] = [3, 9]

    assert exchange().agree([4, 8]) == [3, 8]


def test_a_vote_is_lost_where_one_process_failed(others):
    numbers = exchange()
    assert not numbers.any(False)

    others["numbers"] = [1, 0]

    assert numbers.any(False)


def test_a_check_that_finds_a_failure_decides_the_next_vote_and_no_other(others):
    # GIVEN a process that met another's failure in a check
    numbers = exchange()
    others["numbers"] = [1, 1]
    assert numbers.check(False) == (True, True)

    # WHEN it comes to the vote, where the other process is no more
    others["numbers"] = []

    # THEN the vote is lost, without an exchange, and the next one is open again
    assert numbers.any(False)
    assert not numbers.any(False)


def test_what_fails_elsewhere_fails_here(others):
    others["numbers"] = [1, 0]

    with pytest.raises(OtherRankOutOfMemory) as caught:
        exchange().together(lambda: None)

    assert oom.recognise(caught.value) is not None


def test_what_fails_here_is_raised_here():
    def fail():
        raise allocation_error()

    with pytest.raises(RuntimeError, match="can't allocate"):
        exchange().together(fail)


def test_a_collective_that_had_no_memory_to_begin_is_tried_again():
    tries = []

    def collective():
        tries.append(None)
        if len(tries) < 3:
            raise allocation_error()

    surely(collective, None)

    assert len(tries) == 3


def test_a_collective_that_has_begun_is_never_tried_again():
    def collective():
        dist.all_reduce(torch.ones(1))
        raise allocation_error()

    before = num_begun(None)
    with pytest.raises(RuntimeError):
        surely(collective, None)

    assert num_begun(None) == before + 1


def test_a_collective_without_memory_gives_up_in_the_end():
    def collective():
        raise allocation_error()

    with pytest.raises(RuntimeError):
        surely(collective, None)


# Passes that communicate.


class Passes:
    """Passes of four collective operations, of which the third part of one can fail."""

    def __init__(self):
        self.begun = []
        self.fails_after = None
        self.smallest_failures = 0
        self.resets = self.times_ready = 0
        self.norm = nn.BatchNorm1d(3)
        self.was_training = []

    def run(self, num_passes=1):
        ranks = ExchangingRanks(self.norm)
        ranks.ready, ranks.reset = self._get_ready, self._reset
        ranks.run_collective(num_passes, self._one, self._smallest)

    def _get_ready(self):
        self.times_ready += 1

    def _reset(self):
        self.resets += 1

    def _one(self, index):
        for number in range(4):
            if number == self.fails_after:
                raise allocation_error()
            self._collective(f"{index}.{number}")

    def _smallest(self):
        self.was_training.append(self.norm.training)
        for number in range(4):
            if number == 3 and self.smallest_failures:
                self.smallest_failures -= 1
                raise allocation_error()
            self._collective(f"stand-in.{number}")

    def _collective(self, name):
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        if tensor[0]:
            self.begun.append(name)


def test_passes_run_one_after_another():
    passes = Passes()

    passes.run(2)

    assert passes.begun == [f"{index}.{number}" for index in range(2) for number in range(4)]
    assert passes.times_ready == 2


@pytest.mark.parametrize("fails_after", range(4))
def test_a_stand_in_performs_what_the_failed_pass_left(fails_after):
    # GIVEN a pass that fails after so many collective operations
    passes = Passes()
    passes.fails_after = fails_after

    # WHEN it is run, with another that is to follow
    with pytest.raises(RuntimeError, match="can't allocate"):
        passes.run(2)

    # THEN each operation of the first happened once, and the second pass was left out
    done = [f"0.{number}" for number in range(fails_after)]
    assert passes.begun == done + [f"stand-in.{number}" for number in range(fails_after, 4)]
    assert passes.resets == 2


def test_a_stand_in_that_fails_is_followed_by_another():
    passes = Passes()
    passes.fails_after = 1
    passes.smallest_failures = 1

    with pytest.raises(RuntimeError, match="can't allocate"):
        passes.run()

    assert passes.begun == ["0.0", "stand-in.1", "stand-in.2", "stand-in.3"]


def test_stand_ins_that_always_fail_end_the_job_with_a_word():
    passes = Passes()
    passes.fails_after = 1
    passes.smallest_failures = 99

    with pytest.raises(RuntimeError) as caught:
        passes.run()

    assert "resume from the last checkpoint" in caught.value.__notes__[0]


def test_a_stand_in_leaves_statistics_of_norms_alone():
    passes = Passes()
    passes.fails_after = 0

    with pytest.raises(RuntimeError):
        passes.run()

    assert passes.was_training == [False]
    assert passes.norm.training


def test_an_ordinary_exception_is_raised_at_once():
    def one(_):
        raise KeyError("labels")

    ran = []
    with pytest.raises(KeyError):
        ExchangingRanks(nn.Linear(1, 1)).run_collective(1, one, lambda: ran.append(None))

    assert not ran


def test_an_operation_that_fails_after_it_began_counts_as_done(monkeypatch):
    real = dist.all_reduce

    def failing(*args, **kwargs):
        real(*args, **kwargs)
        raise allocation_error()

    monkeypatch.setattr(dist, "all_reduce", failing)
    counter = Counter()

    with pytest.raises(RuntimeError), counter.counting():
        dist.all_reduce(torch.ones(1))

    assert counter.num_done == 1


def test_skipped_operations_give_zeros_and_a_handle_that_is_done():
    counter = Counter(num_skipped=2)
    gathered, tensors = torch.full((2,), float("nan")), [torch.full((2,), float("nan"))]

    with counter.counting():
        work = dist.all_gather_into_tensor(gathered, torch.ones(2), async_op=True)
        dist.all_gather(tensors, torch.ones(2))

    assert isinstance(work, Done)
    assert work.wait()
    assert work.is_completed()
    assert not gathered.any()
    assert not tensors[0].any()


def test_functions_are_themselves_again_afterwards():
    before = dist.all_reduce

    with Counter().counting():
        assert dist.all_reduce is not before

    assert dist.all_reduce is before
