"""The order of a loader comes again from the states that it was drawn from."""

import random

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from memfit.frameworks.torch.guard.sample_order import Indices, Sources, is_warm, open_at


class Drawing(Sampler):
    """Draws from three generators of its own, and from the program's, when its iterator is made and later."""

    def __init__(self):
        self.tensors = torch.Generator()
        self.arrays = numpy.random.default_rng(1)
        self.plain = random.Random(2)
        self.shared = torch.default_generator
        self.epoch = 0

    def __len__(self):
        return 6

    def __iter__(self):
        self.epoch += 1
        first = torch.randint(100, (), generator=self.tensors).item()
        return self.rest(first)

    def rest(self, first):
        yield first + torch.randint(100, ()).item()
        for _ in range(5):
            yield int(self.arrays.integers(100)) + self.plain.randrange(100) + self.epoch


def make(**options):
    return DataLoader(range(1000), batch_size=2, sampler=Drawing(), **options)


def test_states_are_read_and_written_back():
    loader = make(generator=torch.Generator())
    sources = Sources(loader)
    states = sources.read()
    first = list(loader.batch_sampler)
    assert list(loader.batch_sampler) != first

    sources.write(states)

    assert list(loader.batch_sampler) == first
    assert set(states["own"]) == {
        "loader.generator",
        "sampler.tensors",
        "sampler.arrays",
        "sampler.plain",
        "sampler.epoch",
        "batch_sampler.sampler.tensors",
        "batch_sampler.sampler.arrays",
        "batch_sampler.sampler.plain",
        "batch_sampler.sampler.epoch",
    }


def test_things_that_are_no_loaders_have_no_sources_of_their_own():
    assert Sources([1, 2]).read_own() == {}
    assert Sources(iter([1])).counts() == {}


def test_epochs_are_told_once_and_users_are_respected():
    loader = DataLoader(range(8), sampler=DistributedSampler(range(8), 2, 0))
    sources = Sources(loader)
    told = sources.set_epoch(0, {})
    told = sources.set_epoch(1, told)
    assert loader.sampler.epoch == 1

    loader.sampler.set_epoch(70)
    told = sources.set_epoch(2, told)
    assert loader.sampler.epoch == 70
    # Told nothing since: the guard's turn again.
    sources.set_epoch(3, told)
    assert loader.sampler.epoch == 3


def test_epochs_of_samplers_that_are_told_can_be_left_alone():
    loader = DataLoader(range(8), sampler=DistributedSampler(range(8), 2, 0))
    sources = Sources(loader)
    loader.sampler.set_epoch(5)
    states = sources.read_own()
    loader.sampler.set_epoch(6)

    sources.write_own(states, epochs=False)
    assert loader.sampler.epoch == 6
    sources.write_own(states)
    assert loader.sampler.epoch == 5


@pytest.mark.parametrize("skip", [0, 1, 3, 5])
def test_indices_begin_later_and_tell_what_was_given(skip):
    # GIVEN the whole order with its checksums
    whole = Indices([[0, 1], [2, 3], [4]], 0, Sources([]), rewinds=False, draws_seed=False)
    numbers = iter(whole)
    sums, batches = [whole.begin()], []
    for batch in numbers:
        whole.give_out()
        sums.append(whole.checksum)
        batches.append(batch)
    assert len(set(sums)) == 4

    # WHEN it begins later
    later = Indices([[0, 1], [2, 3], [4]], skip, Sources([]), rewinds=False, draws_seed=False)
    rest = iter(later)

    # THEN the rest comes, and the checksum is that of the order up to there; past the end it is another
    assert later.begin() == (sums[skip] if skip <= 3 else later.checksum)
    assert list(rest) == batches[skip:]
    assert len(later) == 3
    assert skip <= 3 or later.checksum not in sums


def test_what_is_fetched_ahead_is_not_given_out():
    indices = Indices([[0], [1], [2]], 0, Sources([]), rewinds=False, draws_seed=False)
    numbers = iter(indices)
    fetched = [next(numbers), next(numbers)]
    before = indices.checksum
    indices.give_out()

    assert fetched == [[0], [1]]
    assert before == 0
    assert indices.checksum != before


class Batch(Sampler):
    """Draws when its iterator is made and with its first number."""

    def __len__(self):
        return 4

    def __iter__(self):
        return self.rest(torch.randint(10, ()).item())

    def rest(self, first):
        yield first
        yield from torch.randint(10, (3,)).tolist()


@pytest.mark.parametrize("generator", [None, 3])
def test_workers_that_are_there_and_such_that_are_not_draw_alike(generator):
    # GIVEN a loader that keeps its workers
    def make():
        own = None if generator is None else torch.Generator().manual_seed(generator)
        return DataLoader(
            range(10),
            batch_size=None,
            sampler=Batch(),
            num_workers=1,
            persistent_workers=True,
            multiprocessing_context="fork",
            generator=own,
        )

    def order(loader, warm, skip=0):
        torch.manual_seed(1)
        if loader.generator is not None:
            loader.generator.manual_seed(2)
        iterator, indices = open_at(loader, skip, warm=warm, sources=Sources(loader))
        indices.begin()
        return [int(value) for value in iterator], torch.rand(()).item()

    # WHEN its epochs are drawn with and without workers
    kept = make()
    assert not is_warm(kept)
    cold = order(kept, warm=False)
    assert is_warm(kept)
    warm = order(kept, warm=True)
    assert cold != warm

    # THEN either can be had from a loader in the other state
    assert order(make(), warm=True) == warm
    assert order(kept, warm=False) == cold
    assert order(kept, warm=True, skip=2) == (warm[0][2:], warm[1])
    assert isinstance(kept.sampler, Batch)
    assert isinstance(kept._iterator._index_sampler, Batch)
