"""A run that is interrupted anywhere goes on with the batches that would have come next."""

import gc
import random
import warnings
import weakref

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from memfit.core.errors import BadInput
from memfit.core.units import MIB
from memfit.data import stream as data
from memfit.data.geometry import Geometry
from memfit.frameworks.torch.guard.batches import Batches
from memfit.frameworks.torch.guard.snapshot import RandomState
from memfit.frameworks.torch.streaming import StreamLoader, TorchStream
from tests.sources import ArraySource

EPOCHS = 3


class Numbers(Dataset):
    """Samples that say which they are; `loaded` counts how many were read in this process."""

    def __init__(self, length=23):
        self.length = length
        self.loaded = 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.loaded += 1
        return torch.tensor(index)


class Noisy(Numbers):
    """Draws a random number for each sample, as an augmentation does."""

    def __getitem__(self, index):
        return super().__getitem__(index) + torch.rand(()) / 2


class Stream(IterableDataset):
    def __init__(self, shuffled=True):
        self.shuffled = shuffled

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        order = torch.randperm(23) if self.shuffled else torch.arange(23)
        yield from (torch.tensor(n) for n in order[start::step].tolist())


class StatefulStream(IterableDataset):
    def __init__(self):
        self.at = 0
        self.read = 0

    def __iter__(self):
        while self.at < 23:
            self.at += 1
            self.read += 1
            yield torch.tensor(self.at)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class StatefulLoader:
    """As torchdata's: a state that is loaded applies to the next iteration."""

    def __init__(self):
        self.given = 0
        self.order = []

    def __iter__(self):
        if not self.given:
            self.order = torch.randperm(8).tolist()
        while self.given < len(self.order):
            self.given += 1
            yield self.order[self.given - 1]
        self.given = 0

    def state_dict(self):
        return {"given": self.given, "order": list(self.order)}

    def load_state_dict(self, state):
        self.given, self.order = state["given"], list(state["order"])


class Reshuffled:
    """Any object that gives its batches in a new order each time."""

    def __iter__(self):
        order = list(range(9))
        random.shuffle(order)
        numpy.random.shuffle(order)
        yield from order


class OwnRandom(Sampler):
    """A sampler with a generator of NumPy's and one of Python's, which draws at once rather than lazily."""

    def __init__(self, length):
        self.length = length
        self.array_generator = numpy.random.default_rng(3)
        self.plain_generator = random.Random(4)

    def __len__(self):
        return self.length

    def __iter__(self):
        order = self.array_generator.permutation(self.length).tolist()
        self.plain_generator.shuffle(order)
        return iter(order)


class EagerGlobal(Sampler):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(torch.randperm(self.length).tolist())


class SelfCounting(Sampler):
    """Counts its own epochs, and is never told."""

    def __init__(self, length):
        self.length = length
        self.epoch = 0

    def __len__(self):
        return self.length

    def __iter__(self):
        generator = torch.Generator()
        generator.manual_seed(self.epoch)
        self.epoch += 1
        return iter(torch.randperm(self.length, generator=generator).tolist())


def seeded(seed=5):
    generator = torch.Generator()
    generator.manual_seed(seed)
    return generator


def streamed(num_samples=23, source=None):
    """A stream in several lanes, so that several workers have something to do."""
    source = ArraySource(numpy.arange(num_samples)) if source is None else source
    stream = data.ArrayStream(source, batch_size=4, memory_bytes=MIB)
    stream.geometry = Geometry(num_samples, 4, 4, 6, 2)
    return stream


def with_workers(dataset, workers=2, **options):
    return DataLoader(dataset, num_workers=workers, multiprocessing_context="fork", **options)


LOADERS = {
    "in order": lambda: DataLoader(Numbers(), batch_size=4),
    "shuffled": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True),
    "last dropped": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, drop_last=True),
    "generator": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, generator=seeded()),
    "augmented": lambda: DataLoader(Noisy(), batch_size=4, shuffle=True),
    "no batches": lambda: DataLoader(Numbers(7), batch_size=None, shuffle=True),
    "no batches, eager": lambda: DataLoader(Numbers(7), batch_size=None, sampler=EagerGlobal(7)),
    "replacement": lambda: DataLoader(
        Numbers(), batch_size=4, sampler=RandomSampler(Numbers(), replacement=True, num_samples=40, generator=seeded())
    ),
    "several passes": lambda: DataLoader(Numbers(), batch_size=4, sampler=RandomSampler(Numbers(), num_samples=50)),
    "weighted": lambda: DataLoader(Numbers(), batch_size=4, sampler=WeightedRandomSampler([1.0] * 23, 23)),
    "batch sampler": lambda: DataLoader(Numbers(), batch_sampler=BatchSampler(RandomSampler(Numbers()), 5, False)),
    "own random": lambda: DataLoader(Numbers(), batch_size=4, sampler=OwnRandom(23)),
    "self-counting": lambda: DataLoader(Numbers(), batch_size=4, sampler=SelfCounting(23)),
    "distributed": lambda: DataLoader(Numbers(), batch_size=4, sampler=DistributedSampler(Numbers(), 2, 1, seed=3)),
    "iterable": lambda: DataLoader(Stream(), batch_size=4),
    "stateful dataset": lambda: DataLoader(StatefulStream(), batch_size=4),
    "stateful loader": StatefulLoader,
    "memfit stream": streamed,
    "memfit loader": lambda: StreamLoader(streamed()),
    "memfit dataset": lambda: DataLoader(TorchStream(streamed()), batch_size=None),
    "list": lambda: list(range(6)),
    "object": Reshuffled,
}
WITH_WORKERS = {
    "workers": lambda: with_workers(Numbers(), batch_size=4, shuffle=True),
    "kept workers": lambda: with_workers(Numbers(), batch_size=4, shuffle=True, persistent_workers=True),
    "kept workers, generator": lambda: with_workers(
        Numbers(), batch_size=4, shuffle=True, persistent_workers=True, generator=seeded()
    ),
    "kept workers, eager": lambda: with_workers(
        Numbers(7), batch_size=None, sampler=EagerGlobal(7), persistent_workers=True
    ),
    "memfit loader, workers": lambda: StreamLoader(streamed(), 2, persistent_workers=False),
    "memfit loader, kept workers": lambda: StreamLoader(streamed(), 2),
    "memfit dataset, workers": lambda: with_workers(TorchStream(streamed()), batch_size=None),
    "memfit dataset, kept workers": lambda: with_workers(
        TorchStream(streamed()), batch_size=None, persistent_workers=True
    ),
    "iterable, workers": lambda: with_workers(Stream(), batch_size=4),
    "iterable, kept workers": lambda: with_workers(Stream(shuffled=False), batch_size=4, persistent_workers=True),
}


def warn(text):
    """What is said is an error here unless a test expects it."""
    warnings.warn(text, RuntimeWarning, stacklevel=2)


class Run:
    """A training loop with dropout: every step draws a random number."""

    def __init__(self, make):
        self.batches = Batches(lambda: None, warn)
        self.loader = make()
        self.seen = []

    def train(self, stop_at=None, save_at=None, save_after=None):
        """Runs to the end, or stops after some steps; gives the state after `save_at` steps, or after an epoch."""
        saved, num_steps = None, 0
        if save_at == 0:
            saved = self.batches.state(), RandomState.now()
        for epoch in range(EPOCHS):
            for batch in self.batches.over(self.loader):
                self.seen.append((torch.as_tensor(batch).tolist(), torch.rand(()).item(), random.random()))
                num_steps += 1
                if num_steps == save_at:
                    saved = self.batches.state(), RandomState.now()
                if num_steps == stop_at:
                    return saved
            # Code between epochs, such as a validation, which is run again for epochs that are over.
            torch.rand(3)
            if epoch == save_after:
                return self.batches.state(), RandomState.now()
        return saved


def interrupted(make, save_at=None, stop_at=None, save_after=None, then=None):
    """What a run sees after it was resumed from where it was saved, in a program that has begun anew.

    With `then` it goes on with another loader.
    """
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    first = Run(make)
    position, random_state = first.train(stop_at, save_at, save_after)
    del first  # its workers end
    torch.manual_seed(99)
    random.seed(99)
    second = Run(then or make)
    random_state.restore()
    second.batches.load(position)
    torch.rand(5)  # whatever a program draws before its loop
    second.train()
    return second


def uninterrupted(make):
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    run = Run(make)
    run.train()
    return run.seen


@pytest.mark.parametrize("name", LOADERS)
def test_resumed_anywhere_the_rest_is_the_same(name):
    make = LOADERS[name]
    whole = uninterrupted(make)
    per_epoch = len(whole) // EPOCHS
    for save_at in {0, 1, per_epoch - 1, per_epoch, per_epoch + 1, 2 * per_epoch, len(whole) - 1, len(whole)}:
        # WHEN the run dies some steps after a checkpoint, or at once
        resumed = interrupted(make, save_at, stop_at=min(len(whole), save_at + 1))

        # THEN data and random numbers are those that would have come
        assert resumed.seen == whole[save_at:], save_at
        assert resumed.batches.epoch == EPOCHS


@pytest.mark.parametrize("name", [*LOADERS, "kept workers", "kept workers, generator"])
def test_resumed_between_epochs_the_rest_is_the_same(name):
    make = {**LOADERS, **WITH_WORKERS}[name]
    whole = uninterrupted(make)
    per_epoch = len(whole) // EPOCHS
    for epoch in range(EPOCHS):
        assert interrupted(make, save_after=epoch).seen == whole[(epoch + 1) * per_epoch :], epoch


@pytest.mark.parametrize("name", WITH_WORKERS)
def test_with_workers_what_was_fetched_ahead_is_not_lost(name):
    make = WITH_WORKERS[name]
    whole = uninterrupted(make)
    per_epoch = len(whole) // EPOCHS
    for save_at in (2, per_epoch, per_epoch + 1):
        assert interrupted(make, save_at, stop_at=save_at).seen == whole[save_at:], save_at


@examples(max_examples=25)
@given(st.sampled_from(sorted(LOADERS)), st.integers(min_value=0, max_value=21), st.integers(min_value=0, max_value=4))
def test_random_points(name, save_at, later):
    make = LOADERS[name]
    whole = uninterrupted(make)
    save_at = min(save_at, len(whole))

    assert interrupted(make, save_at, stop_at=min(len(whole), save_at + later) or None).seen == whole[save_at:]


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_WORKERS)
def test_random_points_with_workers(name):
    make = WITH_WORKERS[name]
    whole = uninterrupted(make)
    for save_at in range(len(whole) + 1):
        assert interrupted(make, save_at).seen == whole[save_at:], save_at


MEMFIT = ["memfit stream", "memfit loader, workers", "memfit loader, kept workers", "memfit loader"]


@pytest.mark.parametrize(("before", "after"), [(MEMFIT[0], MEMFIT[1]), (MEMFIT[2], MEMFIT[0]), (MEMFIT[1], MEMFIT[3])])
def test_a_stream_goes_on_with_another_number_of_workers(before, after):
    makes = LOADERS | WITH_WORKERS
    whole = uninterrupted(makes[before])
    per_epoch = len(whole) // EPOCHS
    for save_at in (1, per_epoch, per_epoch + 2):
        resumed = interrupted(makes[before], save_at, stop_at=save_at, then=makes[after])
        # THEN not only the batches but the program's random numbers are the same
        assert resumed.seen == whole[save_at:], save_at


def test_a_stream_goes_on_with_another_number_of_ranks():
    # GIVEN two ranks that have each given two batches
    states = [state_after(streamed().split(rank, 2), 2) for rank in range(2)]
    assert states[0]["loader"] == states[1]["loader"]
    resumed = Batches(lambda: None, pytest.fail)
    resumed.load(states[0])

    # THEN one rank gives the rest
    whole = [batch.tolist() for batch in streamed()]
    assert [batch.tolist() for batch in resumed.over(streamed())] == whole[4:]


def test_a_stream_reads_nothing_again():
    source = ArraySource(numpy.arange(23))
    resumed = Batches(lambda: None, warn)
    resumed.load(state_after(streamed(), 3))
    assert len(resumed.over(streamed())) == 3
    given = torch.cat(list(resumed.over(streamed(source=source)))).tolist()

    # What is in the windows of the lanes is read; of what was given out, only what lies between.
    assert sorted(given) == sorted(set(given))
    assert source.reads[given].tolist() == [1] * len(given)


def test_other_data_is_refused():
    resumed = Batches(lambda: None, warn)
    resumed.load(state_after(streamed(), 3))

    with pytest.raises(
        BadInput, match=r"the state is of other data: it was taken with 23 samples of x int64 .*, and arrays has 24"
    ):
        next(resumed.over(streamed(24)))


def test_a_loader_of_another_kind_before_a_stream_is_said():
    said = []
    resumed = Batches(lambda: None, said.append)
    resumed.load(state_after([1, 2, 3, 4], 2))

    assert len(list(resumed.over(streamed()))) == 4
    assert "it had 4 batches (sequence), and now has 6 batches (stateful)" in said[0]


def test_a_run_may_be_interrupted_again_and_again():
    # GIVEN a run that dies after every two batches
    make = LOADERS["shuffled"]
    whole = uninterrupted(make)
    torch.manual_seed(0)
    random.seed(0)
    position, random_state, seen = None, RandomState.now(), []

    for _ in range(len(whole) // 2 + 1):
        run = Run(make)
        random_state.restore()
        if position is not None:
            run.batches.load(position)
        saved = run.train(stop_at=2, save_at=2)
        seen += run.seen
        if saved is None:
            break
        position, random_state = saved

    # THEN it sees what it would have seen
    assert seen == whole


def test_a_state_that_was_loaded_can_be_saved_again_before_the_first_batch():
    batches = Batches(lambda: None, warn)
    state = {"epoch": 2, "batch": 3, "is_running": True, "told": {}, "begin": {}, "order": None}
    batches.load(state)

    assert batches.state() == state


def test_left_out_batches_are_not_loaded():
    # GIVEN a run that died after 4 batches of 4 samples
    loader = DataLoader(Numbers(), batch_size=4, shuffle=True)
    batches = Batches(lambda: None, warn)
    iterator = iter(batches.over(loader))
    for _ in range(4):
        next(iterator)
    position = batches.state()

    # WHEN it goes on
    fresh = DataLoader(Numbers(), batch_size=4, shuffle=True)
    resumed = Batches(lambda: None, warn)
    resumed.load(position)
    rest = list(resumed.over(fresh))

    # THEN only what is left is read
    assert fresh.dataset.loaded == 23 - 16
    assert sum(len(batch) for batch in rest) == 7


def test_a_dataset_with_a_state_reads_nothing_again():
    loader = LOADERS["stateful dataset"]()
    batches = Batches(lambda: None, warn)
    iterator = iter(batches.over(loader))
    for _ in range(4):
        next(iterator)

    fresh = LOADERS["stateful dataset"]()
    resumed = Batches(lambda: None, warn)
    resumed.load(batches.state())

    assert [batch.tolist() for batch in resumed.over(fresh)] == [[17, 18, 19, 20], [21, 22, 23]]
    assert fresh.dataset.read == 7


def test_the_loader_is_left_as_it_was():
    loader = DataLoader(Numbers(), batch_size=4, shuffle=True)
    before = dict(vars(loader))

    list(Batches(lambda: None, warn).over(loader))

    assert vars(loader) == before


def test_workers_end_with_their_loader_though_the_guard_lives_on():
    # GIVEN loaders whose workers are kept, and no garbage collector
    batches = Batches(lambda: None, warn)
    gc.collect()
    gc.disable()
    try:
        loader = WITH_WORKERS["kept workers"]()
        for _ in range(2):
            list(batches.over(loader))
        watched = weakref.ref(loader._iterator)

        # WHEN the user's code lets go of it
        del loader

        # THEN it is gone
        assert watched() is None
    finally:
        gc.enable()


def test_a_generator_is_said_to_be_lost():
    position = state_after(iter(range(9)), 4)
    resumed = Batches(lambda: None, warn)
    resumed.load(position)

    with pytest.warns(RuntimeWarning, match=r"a range_iterator, which can't be begun again: its first 4 items"):
        assert list(resumed.over(iter(range(9)))) == [4, 5, 6, 7, 8]


def state_after(loader, num_batches):
    batches = Batches(lambda: None, warn)
    iterator = iter(batches.over(loader))
    for _ in range(num_batches):
        next(iterator)
    return batches.state()


def test_another_loader_is_said():
    said = []
    resumed = Batches(lambda: None, said.append)
    resumed.load(state_after(DataLoader(Numbers(), batch_size=4), 2))
    list(resumed.over(DataLoader(Numbers(), batch_size=2)))

    assert "it had 6 batches (ordered), and now has 12 batches (ordered)" in said[0]
    assert "the order of the data can't be restored" in said[1]


def test_another_kind_of_loader_is_said():
    said = []
    resumed = Batches(lambda: None, said.append)
    resumed.load(state_after([1, 2, 3, 4, 5, 6, 7, 8], 3))
    loader = StatefulLoader()

    assert len(list(resumed.over(loader))) == 5
    assert "8 batches (sequence), and now has an unknown number of batches (stateful)" in said[0]


def test_a_loader_in_a_wrapper_without_a_state_is_one_without():
    class Wrapper(Reshuffled):
        def state_dict(self):
            raise AttributeError("what is wrapped has none")

        def load_state_dict(self, state):
            raise AssertionError

    whole = uninterrupted(Wrapper)

    assert interrupted(Wrapper, 4).seen == whole[4:]


def test_a_sampler_that_draws_in_the_middle_of_an_epoch_is_found_out():
    class Drawing(EagerGlobal):
        def __iter__(self):
            for _ in range(self.length):
                yield int(torch.randint(self.length, ()))

    def make():
        return DataLoader(Numbers(), batch_size=4, sampler=Drawing(23))

    with pytest.warns(RuntimeWarning, match="draws random numbers in the middle of an epoch"):
        interrupted(make, 4)


def test_distributed_samplers_are_told_the_epoch_unless_the_user_tells_them():
    quiet = DataLoader(Numbers(), batch_size=4, sampler=DistributedSampler(Numbers(), 2, 0))
    batches = Batches(lambda: None, warn)
    for epoch in range(3):
        list(batches.over(quiet))
        assert quiet.sampler.epoch == epoch

    told = DataLoader(Numbers(), batch_size=4, sampler=DistributedSampler(Numbers(), 2, 0))
    batches = Batches(lambda: None, warn)
    for epoch in range(3):
        told.sampler.set_epoch(epoch + 40)
        list(batches.over(told))
        assert told.sampler.epoch == epoch + 40


def test_the_window_is_finished_at_the_end_of_each_epoch_and_where_one_is_left():
    calls = []
    batches = Batches(lambda: calls.append((batches.epoch, batches.batch)), warn)
    list(batches.over([1, 2, 3]))
    for _ in batches.over([1, 2, 3]):
        break
    list(batches.over([1, 2, 3]))

    # An epoch that was left is over when the next begins.
    assert calls == [(0, 3), (1, 1), (2, 3)]
    assert (batches.epoch, batches.batch) == (3, 0)


def test_one_object_can_serve_all_epochs():
    batches = Batches(lambda: None, warn)
    train = batches.over([1, 2])

    assert [list(train), list(train)] == [[1, 2], [1, 2]]
    assert batches.epoch == 2


def test_length_is_what_is_left():
    resumed = Batches(lambda: None, warn)
    assert len(resumed.over([1, 2, 3])) == 3
    resumed.load({**state_after([1, 2, 3], 1), "epoch": 1})
    assert len(resumed.over([1, 2, 3])) == 0
    assert list(resumed.over([1, 2, 3])) == []
    assert len(resumed.over([1, 2, 3])) == 2
    assert next(resumed.over([1, 2, 3])) == 2


def test_epochs_that_are_over_can_be_left_out_of_the_loop():
    position = {**state_after([1, 2, 3], 1), "epoch": 2}
    resumed = Batches(lambda: None, warn)
    resumed.load(position)

    assert [(epoch, list(resumed.over([1, 2, 3]))) for epoch in resumed.epochs(4)] == [(2, [2, 3]), (3, [1, 2, 3])]


def test_nothing_is_said_where_nothing_is_lost():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        interrupted(LOADERS["shuffled"], 3)
