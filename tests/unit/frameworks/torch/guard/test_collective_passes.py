import pytest
import torch
import torch.distributed as dist
from torch import nn

from memfit.frameworks.torch.guard.collective_passes import CollectivePasses, Counter, Done
from memfit.frameworks.torch.guard.rank_exchange import Exchange
from tests.unit.frameworks.torch.guard.faults import allocation_error


@pytest.fixture(autouse=True)
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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
        exchange = Exchange(None, torch.device("cpu"))
        CollectivePasses(exchange, self.norm, self._get_ready, self._reset).run(num_passes, self._one, self._smallest)

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
        CollectivePasses(Exchange(None, torch.device("cpu")), nn.Linear(1, 1)).run(1, one, lambda: ran.append(None))

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
