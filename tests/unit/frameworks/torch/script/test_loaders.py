from collections import UserDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from memfit.core.patching import replaced
from memfit.frameworks.torch.script.loaders import Arrivals, Loaders, arrays_in

LENGTHS = [3, 5, 2, 9, 4, 1]


class Sentences(Dataset):
    """Items of different lengths."""

    def __init__(self, lengths=tuple(LENGTHS)):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return torch.full((self.lengths[index],), index)


class Stream(IterableDataset):
    def __iter__(self):
        return (torch.zeros(length) for length in LENGTHS)


def pad(items):
    """One sentence per batch, under a name."""
    return {"input_ids": torch.stack(items), "label": torch.zeros(len(items))}


def loader(**options):
    return DataLoader(Sentences(), collate_fn=pad, **options)


def lengths(batches):
    return [batch["input_ids"].shape[1] for batch in batches]


def test_batches_are_the_loaders_own():
    watch = Loaders()
    with replaced(watch.replacements()):
        iterator = iter(loader())

        assert len(iterator) == 6
        assert iter(iterator) is iterator
        # Frameworks look at more than the protocol of iterators.
        assert iterator._num_workers == 0
        assert lengths(iterator) == LENGTHS
    assert watch.scan() is None


def test_the_loader_read_last_before_a_step_feeds_the_steps():
    # GIVEN a script that looks at its validation data, begins an epoch, and begins another iteration it doesn't read
    watch = Loaders()
    with replaced(watch.replacements()):
        list(loader())
        training = iter(loader())
        next(training)
        iter(loader())
        watch.settle()

        # WHEN later steps and evaluations follow
        list(loader())
        watch.settle()

    # THEN it is the second iteration, counted from 0
    assert watch.training == 1


@pytest.mark.parametrize("evaluates", ["without gradients", "to the end"])
def test_an_evaluation_between_a_batch_and_its_step_feeds_no_step(evaluates):
    # GIVEN a script that evaluates when it has its training batch, on batches of another size
    watch = Loaders()
    data = torch.utils.data.TensorDataset(torch.zeros(6, 3))
    with replaced(watch.replacements()):
        training = iter(DataLoader(data, batch_size=4))
        next(training)
        if evaluates == "to the end":
            list(DataLoader(data, batch_size=2))
        else:
            with torch.no_grad():
                next(iter(DataLoader(data, batch_size=2)))
        watch.settle()

    assert (watch.training, watch.batch_size) == (0, 4)


def test_a_script_that_reads_no_loader_has_none():
    watch = Loaders()
    watch.settle()

    assert watch.training is None
    assert watch.scan() is None


def test_the_largest_batch_stands_in_for_those_drawn_ahead_and_then_come_those_that_follow():
    watch = Loaders(num_scanned=5, scanned=0)
    with replaced(watch.replacements()):
        batches = list(loader())

    # As many batches as there would have been: an optimizer has its state only from the second step on.
    assert lengths(batches) == [9, 9, 9, 9, 9, 1]
    assert [int(batch["input_ids"][0, 0]) for batch in batches] == [3, 3, 3, 3, 3, 5]


def test_a_script_may_take_the_largest_batch_apart_each_time():
    watch = Loaders(num_scanned=3, scanned=0)
    with replaced(watch.replacements()):
        taken = [batch.pop("input_ids").shape[1] for batch in loader()]

    assert taken == [5, 5, 5, 9, 4, 1]


def test_only_the_iteration_asked_for_is_drawn_ahead():
    watch = Loaders(num_scanned=5, scanned=1)
    with replaced(watch.replacements()):
        assert lengths(loader()) == LENGTHS
        assert watch.scan() is None
        assert lengths(loader()) == [9, 9, 9, 9, 9, 1]
        assert lengths(loader()) == LENGTHS


def test_what_a_scan_tells():
    watch = Loaders(5, 0)
    with replaced(watch.replacements()):
        next(iter(loader()))

    scan = watch.scan()
    assert (scan.num_batches, scan.total) == (5, 6)
    assert [(leaf.name, leaf.dtype, leaf.smallest_shape, leaf.largest_shape) for leaf in scan.leaves] == [
        ("input_ids", "int64", (1, 2), (1, 9)),
        ("label", "float32", (1,), (1,)),
    ]
    sizes = [8 * length + 4 for length in LENGTHS[:5]]
    assert (scan.smallest_bytes, scan.median_bytes, scan.largest_bytes) == (min(sizes), sorted(sizes)[2], max(sizes))
    assert (scan.largest_index, scan.largest_tokens) == (3, 9)
    assert (scan.fits, scan.problem) == (None, "")


def test_of_batches_alike_the_first_is_the_largest():
    watch = Loaders(6, 0)
    with replaced(watch.replacements()):
        list(DataLoader(Sentences((4, 4, 4))))

    assert watch.scan().largest_index == 0


def test_a_loader_with_fewer_batches_than_asked_for_is_seen_whole():
    watch = Loaders(1000, 0)
    with replaced(watch.replacements()):
        assert lengths(loader())[0] == 9

    assert (watch.scan().num_batches, watch.scan().total) == (6, 6)


def test_a_loader_that_does_not_know_its_length():
    watch = Loaders(3, 0)
    with replaced(watch.replacements()):
        seen = [batch.shape[1] for batch in DataLoader(Stream())]

    assert seen == [5, 5, 5, 9, 4, 1]
    assert (watch.scan().num_batches, watch.scan().total) == (3, None)
    # No integers, so nothing to call tokens.
    assert watch.scan().largest_tokens is None


def test_an_empty_loader_has_no_scan():
    watch = Loaders(3, 0)
    with replaced(watch.replacements()):
        assert list(DataLoader(Sentences(()))) == []

    assert watch.scan() is None


@pytest.mark.parametrize("scanned", [None, 0], ids=["watched", "scanned"])
def test_workers_are_the_loaders_own(scanned):
    watch = Loaders(2, scanned)
    with replaced(watch.replacements()):
        seen = lengths(loader(num_workers=2))

    assert seen == (LENGTHS if scanned is None else [5, 5, 2, 9, 4, 1])


def test_loaders_are_themselves_afterwards():
    plain = DataLoader.__iter__
    with replaced(Loaders().replacements()):
        assert DataLoader.__iter__ is not plain

    assert DataLoader.__iter__ is plain


Pair = namedtuple("Pair", ["image", "label"])


@dataclass
class Item:
    image: torch.Tensor
    name: str = "a name"


class Mine:
    def __init__(self):
        self.points = torch.zeros(2)
        self.itself = self


@pytest.mark.parametrize(
    ("batch", "names"),
    [
        (torch.zeros(2), ["batch"]),
        ([torch.zeros(2), 3, torch.zeros(1)], ["0", "2"]),
        ({"image": torch.zeros(2), "meta": {"size": [torch.zeros(1)], "text": "a"}}, ["image", "meta.size.0"]),
        (UserDict(image=torch.zeros(2)), ["image"]),
        (Pair(torch.zeros(2), np.zeros(2)), ["0", "1"]),
        (Item(torch.zeros(2)), ["image"]),
        (SimpleNamespace(points=torch.zeros(2)), ["points"]),
        (np.zeros(2), ["batch"]),
        ("text", []),
        (None, []),
        ([None, "a", b"b", 1, 2.0, True], []),
        (Item, []),
    ],
    ids=str,
)
def test_arrays_are_found_however_batches_are_nested(batch, names):
    assert [name for name, _ in arrays_in(batch)] == names


def test_objects_that_know_each_other_come_to_an_end():
    assert next(iter(arrays_in(Mine())))[0] == "points"
    assert len(list(arrays_in(Mine()))) < 20


def test_the_size_of_the_first_training_batch_is_known():
    loaders = Loaders()
    with replaced(loaders.replacements()):
        data = torch.utils.data.TensorDataset(torch.zeros(6, 3), torch.zeros(6))
        for number, _ in enumerate(DataLoader(data, batch_size=4)):
            if number == 0:
                loaders.settle()

    # The last batch has two samples, and comes after the first step.
    assert loaders.batch_size == 4


def test_the_training_loader_s_batches_are_split_and_no_others():
    data = torch.utils.data.TensorDataset(torch.zeros(9, 3), torch.zeros(9))
    loaders = Loaders(parts=3, split=1)
    with replaced(loaders.replacements()):
        evaluation, training = DataLoader(data, batch_size=8), DataLoader(data, batch_size=8)
        sizes = [[len(x) for x, _ in loader] for loader in (evaluation, training, training, evaluation)]

    # The last batch has one sample, which can't be split.
    assert sizes == [[8, 1], [3, 3, 2, 1], [3, 3, 2, 1], [8, 1]]


def test_a_batch_without_a_common_size_stays_whole():
    batch = (torch.zeros(8, 3), torch.zeros(4))
    loaders = Loaders(parts=2, split=0)
    with replaced(loaders.replacements()):
        given = list(DataLoader([batch], batch_size=None))

    assert [[len(part) for part in one] for one in given] == [[8, 4]]
    assert loaders.batch_size is None


# Loops without a loader


class Loop:
    """Says where the script is."""

    line = "train.py:7"
    steps = 1

    def arrivals(self, **options):
        return Arrivals(lambda: self.line, lambda: self.steps, **options)


def test_what_every_step_copies_is_its_batch():
    loop = Loop()
    arrivals = loop.arrivals()
    for line, tensor in (("train.py:7", torch.zeros(8, 3)), ("train.py:9", torch.zeros(8)), ("a:1", torch.tensor(2.0))):
        loop.line = line
        assert arrivals(tensor) is tensor

    assert arrivals.batch_size == 8
    assert arrivals.lines == ("train.py:7", "train.py:9")


def test_what_comes_before_the_first_update_is_no_batch():
    loop = Loop()
    loop.steps = 0
    arrivals = loop.arrivals()
    arrivals(torch.zeros(5, 2))
    loop.steps = 1
    arrivals(torch.nn.Parameter(torch.zeros(6, 2)))

    assert arrivals.batch_size is None
    assert arrivals.lines == ()


def test_batches_of_several_sizes_have_no_size():
    arrivals = Loop().arrivals()
    arrivals(torch.zeros(8, 3))
    arrivals(torch.zeros(4, 3))

    assert arrivals.batch_size is None
    assert arrivals.lines == ()


def test_only_batches_are_cut_down():
    loop = Loop()
    arrivals = loop.arrivals(parts=3, split_at=("train.py:7",), split_size=8)

    assert arrivals(torch.zeros(8, 3)).shape == (3, 3)
    assert arrivals(torch.zeros(7, 3)).shape == (7, 3)
    assert arrivals(torch.nn.Parameter(torch.zeros(8, 3))).shape == (8, 3)
    loop.line = "train.py:1"
    assert arrivals(torch.zeros(8, 3)).shape == (8, 3)
