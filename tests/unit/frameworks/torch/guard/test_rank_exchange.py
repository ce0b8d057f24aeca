import pytest
import torch
import torch.distributed as dist

from memfit.core import oom
from memfit.frameworks.torch.guard import rank_exchange
from memfit.frameworks.torch.guard.rank_exchange import Exchange, OtherRankOutOfMemory, num_begun, surely
from tests.unit.frameworks.torch.guard.faults import allocation_error


@pytest.fixture(autouse=True)
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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
    return Exchange(None, torch.device("cpu"))


def test_numbers_of_one_process_come_back():
    assert exchange().least([5, -3, 2**62]) == [5, -3, 2**62]
    assert exchange().sum(2.5) == 2.5


def test_more_numbers_than_fit_into_one_exchange():
    assert Exchange(None, torch.device("cpu"), most=4).least(list(range(11))) == list(range(11))


def test_the_least_number_of_all_counts(others):
    others["numbers"] = [3, 9]

    assert exchange().least([4, 8]) == [3, 8]


def test_a_vote_is_lost_where_one_process_failed(others):
    numbers = exchange()
    assert not numbers.vote(False)

    others["numbers"] = [1, 0]

    assert numbers.vote(False)


def test_a_check_that_finds_a_failure_decides_the_next_vote_and_no_other(others):
    # GIVEN a process that met another's failure in a check
    numbers = exchange()
    others["numbers"] = [1, 1]
    assert numbers.check(False) == (True, True)

    # WHEN it comes to the vote, where the other process is no more
    others["numbers"] = []

    # THEN the vote is lost, without an exchange, and the next one is open again
    assert numbers.vote(False)
    assert not numbers.vote(False)


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
