"""Streams in DataLoaders: the same batches in the same order, whoever makes them, and a position that is exact."""

import copy
import gc
import json
import logging
import multiprocessing
import os
import pickle
import random
import signal
import threading
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from memfit.core.errors import BadFile, BadInput, MemfitError
from memfit.core.units import KIB, MIB
from memfit.data.geometry import Geometry
from memfit.frameworks.torch import streaming
from memfit.frameworks.torch.streaming import (
    CountedLoader,
    SharedEpochs,
    StreamLoader,
    TorchRandomness,
    TorchStream,
    to_tensors,
)
from tests.sources import ArraySource, stream_over

NUM_SAMPLES = 230

# Said by PyTorch where there are more workers than processors.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def stream_of(num_samples=NUM_SAMPLES, *, lanes=12, source=ArraySource, **options):
    """Several lanes, which real budgets have from some 40 MiB on, so that several workers have something to do."""
    x = np.arange(num_samples, dtype=np.int64)
    options = {"batch_size": 10, "memory_bytes": MIB} | options
    stream = stream_over(source(x.astype(np.float32)[:, None], x, labels=1), **options)
    stream.geometry = Geometry(num_samples, stream.batch_size, lanes, 40, 5)
    return stream


def numbers(batches):
    return [labels.tolist() for _, labels in batches]


def flat(batches):
    return [number for batch in batches for number in batch]


def epochs(count, **options):
    stream = stream_of(**options)
    return [numbers(stream) for _ in range(count)]


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    # How long PyTorch waits for a worker to end before it ends it.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5)


def num_frozen(features):
    return np.full_like(features, gc.get_freeze_count())


def add_noise(features):
    return features + torch.rand(1).numpy() + np.random.rand() + random.random()


class TestDataset:
    def test_batches_are_tensors_that_share_the_arrays_memory(self):
        features, labels = next(iter(TorchStream(stream_of())))

        assert (features.dtype, features.shape, labels.dtype) == (torch.float32, (10, 1), torch.int64)
        array = np.arange(3.0)
        to_tensors(array)[0] = 7
        assert array[0] == 7

    @pytest.mark.parametrize("persistent", [False, True])
    @pytest.mark.parametrize("num_workers", [0, 1, 2, 4])
    def test_epochs_in_a_dataloader_are_those_of_the_stream(self, num_workers, persistent):
        if persistent and num_workers == 0:
            pytest.skip("nothing to keep")
        expected = epochs(3)
        torch.manual_seed(0)
        loader = DataLoader(
            TorchStream(stream_of()), batch_size=None, num_workers=num_workers, persistent_workers=persistent
        )
        found = []
        for _ in range(3):
            # Programs that seed before each epoch give workers of all epochs the same seed.
            torch.manual_seed(0)
            found.append(numbers(loader))

        assert found == expected
        assert len(loader) == len(expected[0])

    @pytest.mark.parametrize("persistent", [False, True])
    def test_an_epoch_that_is_left_is_counted(self, persistent):
        expected = epochs(3)
        loader = DataLoader(TorchStream(stream_of()), batch_size=None, num_workers=2, persistent_workers=persistent)
        for _, labels in loader:
            assert labels.tolist() == expected[0][0]
            break

        assert numbers(loader) == expected[1]
        loader.dataset.set_epoch(0)
        assert numbers(loader) == expected[0]

    @pytest.mark.slow
    def test_workers_look_past_what_was_there_before_them_and_not_past_later_garbage(self):
        before = gc.get_freeze_count()
        stream = stream_of(transform=num_frozen)
        loader = DataLoader(TorchStream(stream), batch_size=None, num_workers=1, persistent_workers=True)
        first, later = ({int(x[0, 0]) for x, _ in loader} for _ in range(2))

        assert gc.get_freeze_count() <= before
        assert min(first) > 0
        # Some of them go; none are added.
        assert max(later) <= max(first)

    def test_processes_that_are_started_anew(self):
        expected = epochs(2)
        loader = DataLoader(TorchStream(stream_of()), batch_size=None, num_workers=2, multiprocessing_context="spawn")

        assert [numbers(loader) for _ in range(2)] == expected

    def test_a_state_reaches_workers_that_were_there_before(self):
        expected = epochs(2, seed=5)
        dataset = TorchStream(stream_of(seed=5))
        loader = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True)
        assert numbers(loader) == expected[0]
        dataset.load_state_dict(stream_of(seed=5).state_after(4))

        assert numbers(loader) == expected[0][4:]
        assert numbers(loader) == expected[1]

    def test_the_state_is_that_of_the_stream(self):
        expected = epochs(2)
        dataset = TorchStream(stream_of())
        batches = iter(dataset)
        given = [next(batches)[1].tolist() for _ in range(5)]
        state = json.loads(json.dumps(dataset.state_dict()))
        twin = TorchStream(stream_of())
        twin.load_state_dict(state)

        assert given + numbers(twin) == expected[0]
        assert numbers(twin) == expected[1]
        assert state == stream_of().state_after(5)
        # WHEN the first goes on, it isn't disturbed; and its end is the next epoch's beginning
        assert given + numbers(batches) == expected[0]
        assert dataset.state_dict()["epoch"] == 1

    def test_it_begins_where_the_stream_is(self):
        expected = epochs(1)[0]
        stream = stream_of()
        batches = iter(stream)
        given = [next(batches)[1].tolist() for _ in range(3)]

        assert given + numbers(TorchStream(stream)) == expected
        assert stream.state_dict() == stream_of().state_after(3)

    def test_a_worker_knows_its_own_position(self):
        # As loaders that ask each worker for its state do.
        dataset = TorchStream(stream_of())
        loader = DataLoader(Reporting(dataset), batch_size=None, num_workers=2)

        assert list(loader)[:4] == [2 * 10, 2 * 10, 4 * 10, 4 * 10]

    def test_a_worker_can_be_given_its_own_position(self):
        expected = epochs(1)[0]
        dataset = TorchStream(stream_of())
        # GIVEN two workers, of which one has given two batches and the other one
        states = [stream_of().state_after(4), stream_of().state_after(2)]
        loader = DataLoader(
            dataset,
            batch_size=None,
            num_workers=2,
            worker_init_fn=lambda worker: dataset.load_state_dict(states[worker]),
        )

        # THEN each goes on where it was
        assert numbers(loader) == flat(zip(expected[4::2], expected[3::2], strict=True))
        assert loader.dataset.next_state()["epoch"] == 1

    def test_what_only_the_loader_knows_is_not_guessed(self):
        dataset = TorchStream(stream_of())
        batches = iter(DataLoader(dataset, batch_size=None, num_workers=1))
        next(batches)

        with pytest.raises(BadInput, match=r"doesn't know how many were given out\. Use `stream\.loader\(num_workers"):
            dataset.state_dict()

    # PyTorch takes five seconds to end a worker that has raised an exception.
    @pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
    def test_batches_of_batches_are_refused(self, num_workers):
        with pytest.raises(BadInput, match=r"would make batches of them\. Give the DataLoader batch_size=None"):
            list(DataLoader(TorchStream(stream_of()), num_workers=num_workers))

    def test_copies_are_datasets_of_their_own(self):
        expected = epochs(2)
        dataset = TorchStream(stream_of())
        for twin in (copy.deepcopy(dataset), pickle.loads(pickle.dumps(dataset))):
            assert [numbers(twin), numbers(twin)] == expected
        assert numbers(dataset) == expected[0]

    def test_a_damaged_file_is_named_by_the_worker(self):
        stream = stream_of(source=lambda *arrays, labels: ArraySource(*arrays, labels=labels, fails_at=0))

        with pytest.raises(BadFile, match="arrays is damaged at sample 0"):
            list(DataLoader(TorchStream(stream), batch_size=None, num_workers=1))

    def test_batches_of_workers_are_shared_before_pytorch_would(self):
        loader = DataLoader(Sharing(TorchStream(stream_of())), batch_size=None, num_workers=1)
        assert all(loader)

    def test_a_worker_without_room_for_its_batch_says_so(self, monkeypatch):
        def full(tensor):
            raise RuntimeError("unable to allocate shared memory(shm) for file: No space left on device (28)")

        monkeypatch.setattr(torch.Tensor, "share_memory_", full)
        monkeypatch.setattr(streaming, "_free_shared_bytes", lambda: 30)
        with pytest.raises(
            MemfitError, match=r"no room for an array of 40 B in the memory .*: /dev/shm has 30 B free\."
        ):
            to_tensors(np.zeros(5), is_shared=True)


class Reporting(torch.utils.data.IterableDataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        assert get_worker_info() is not None
        for _ in self.dataset:
            yield self.dataset.state_dict()["samples"]


class Sharing(Reporting):
    def __iter__(self):
        return (features.is_shared() and labels.is_shared() for features, labels in self.dataset)


class TestRanks:
    def test_ranks_of_a_launcher_split_the_batches(self, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "3")
        found = []
        for rank in range(3):
            monkeypatch.setenv("RANK", str(rank))
            loader = StreamLoader(stream_of(), num_workers=rank)
            found.append(numbers(loader))
            assert len(loader) == len(found[-1])

        assert len({len(batches) for batches in found}) == 1
        assert sorted(number for batches in found for number in flat(batches)) == list(range(NUM_SAMPLES))

    def test_a_split_by_hand_stays(self, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "3")
        monkeypatch.setenv("RANK", "2")
        split = stream_of().split(0, 2)

        assert numbers(TorchStream(split)) == numbers(stream_of().split(0, 2))

    def test_a_process_group_counts_before_the_environment(self, monkeypatch):
        monkeypatch.setattr(streaming.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(streaming.distributed, "get_rank", lambda: 1)
        monkeypatch.setattr(streaming.distributed, "get_world_size", lambda: 2)
        assert numbers(TorchStream(stream_of())) == numbers(stream_of().split(1, 2))

        monkeypatch.setattr(streaming.distributed, "get_world_size", lambda: 1)
        monkeypatch.setenv("WORLD_SIZE", "3")
        monkeypatch.setenv("RANK", "2")
        assert numbers(TorchStream(stream_of())) == numbers(stream_of())


class TestLoader:
    @pytest.mark.parametrize("options", [{}, {"persistent_workers": False}])
    @pytest.mark.parametrize("num_workers", [0, 3])
    def test_epochs_are_those_of_the_stream(self, num_workers, options):
        expected = epochs(3)
        before = torch.get_rng_state()
        loader = StreamLoader(stream_of(), num_workers, **options)

        assert [numbers(loader) for _ in range(3)] == expected
        assert (len(loader), loader.epoch) == (len(expected[0]), 3)
        assert torch.equal(torch.get_rng_state(), before)

    def test_pairs_stay_pairs(self):
        assert type(next(iter(StreamLoader(stream_of())))) is tuple

    def test_the_state_is_what_was_given_out_not_what_workers_have_ready(self):
        loader = StreamLoader(stream_of(), 2)
        batches = iter(loader)
        for count in range(1, 6):
            next(batches)
            assert loader.state_dict() == stream_of().state_after(count)
        assert loader.epoch == 0

    def test_resuming_anywhere_with_other_workers_gives_the_next_batch(self):
        expected = epochs(2)
        generator = random.Random(0)
        loaders = [StreamLoader(stream_of(), count) for count in (0, 2, 4)]
        for _ in range(10):
            before, after = generator.choice(loaders), generator.choice(loaders)
            count = generator.randint(0, len(expected[0]))
            before.set_epoch(0)
            batches = iter(before)
            given = [next(batches)[1].tolist() for _ in range(count)]
            state = json.loads(json.dumps(before.state_dict()))
            del batches
            after.load_state_dict(state)
            assert after.state_dict() == state
            assert given + numbers(after) == expected[0]
            assert numbers(after) == expected[1]

    def test_an_epoch_that_is_left_is_over_and_its_state_is_kept_until_the_next(self):
        expected = epochs(2)
        loader = StreamLoader(stream_of(), 2)
        for _ in loader:
            break

        assert loader.state_dict() == stream_of().state_after(1)
        assert numbers(loader) == expected[1]

    def test_an_epoch_that_is_left_at_once_is_counted(self):
        loader = StreamLoader(stream_of(), 2)
        held = iter(loader)
        found = numbers(loader)
        del held

        assert found == epochs(2)[1]

    def test_a_state_between_epochs_is_the_beginning_of_the_next(self):
        loader = StreamLoader(stream_of(), 2)
        assert loader.state_dict() == stream_of().state_dict()
        list(loader)
        expected = stream_of()
        expected.set_epoch(1)

        assert loader.state_dict() == expected.state_dict()

    def test_transforms_draw_the_same_numbers_in_any_worker(self):
        def make():
            return stream_of(transform=add_noise, randomness=[TorchRandomness()])

        one, other = [features for features, _ in StreamLoader(make())], []
        torch.manual_seed(3)
        before = torch.rand(2).tolist()
        torch.manual_seed(3)
        other.append(torch.rand(1).item())
        found = [features for features, _ in StreamLoader(make(), 3)]
        other.append(torch.rand(1).item())

        assert all(torch.equal(left, right) for left, right in zip(one, found, strict=True))
        assert other == before
        noise = torch.cat(one).flatten() - torch.tensor(flat(epochs(1)[0]))
        assert len(noise.unique()) > NUM_SAMPLES // 2

    def test_batches_that_are_ready_fit_into_the_budget(self, caplog):
        def ahead(num_workers, **options):
            loader = StreamLoader(stream_of(**options), num_workers)
            return loader.num_workers, loader.prefetch_factor

        assert ahead(1) == (1, 4)
        assert ahead(2) == (2, 4)
        assert ahead(4) == (4, 3)
        assert not caplog.records
        # A quarter of 4 KiB has room for 4 batches of 240 bytes, of which two are the program's.
        with caplog.at_level(logging.WARNING):
            assert ahead(4, batch_size=20, memory_bytes=4 * KIB, lanes=4) == (2, 1)
        assert "2 of 4 workers are used: the stream's budget has room for no more batches of 240 B" in caplog.text

    def test_no_more_workers_than_have_something_to_do(self):
        assert StreamLoader(stream_of(lanes=3), 4).num_workers == 3
        assert StreamLoader(stream_of(lanes=1), 4).num_workers == 1

    def test_a_small_shared_memory_is_not_overrun(self, monkeypatch, caplog):
        monkeypatch.setattr(streaming, "_free_shared_bytes", lambda: 370)
        loader = StreamLoader(stream_of(), 4)
        assert (loader.num_workers, loader.prefetch_factor) == (1, 1)
        assert "1 of 4 workers are used: /dev/shm, which has 370 B free, has room" in caplog.text
        assert "--shm-size" in caplog.text
        monkeypatch.setattr(streaming, "_free_shared_bytes", lambda: 250)
        assert StreamLoader(stream_of(), 4).num_workers == 0

    def test_where_there_is_no_shared_memory_of_that_kind(self, monkeypatch):
        monkeypatch.delattr(os, "statvfs")
        assert streaming._free_shared_bytes() is None

    @pytest.mark.parametrize("value", [-1, 1.5, True, "2"])
    def test_a_bad_number_of_workers(self, value):
        with pytest.raises(BadInput, match="num_workers must be a whole number of at least 0, but"):
            StreamLoader(stream_of(), value)

    @pytest.mark.parametrize(
        ("name", "reason"), [("batch_size", r"give it to `memfit\.stream`"), ("sampler", "the stream decides it")]
    )
    def test_options_that_the_stream_decides(self, name, reason):
        with pytest.raises(BadInput, match=f"a loader of a stream takes no {name}: {reason}"):
            StreamLoader(stream_of(), **{name: 3})


Pair = namedtuple("Pair", "left right")


class TestTensors:
    def test_any_nesting(self):
        left, right = np.zeros(2), np.ones(3, np.int16)
        found = to_tensors({"a": [left, "text"], "b": Pair(right, np.float32(2)), "c": torch.zeros(1)})

        assert found["a"][0].dtype == torch.float64
        assert found["a"][1] == "text"
        assert isinstance(found["b"], Pair)
        assert found["b"].right.item() == 2

    @pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64", "bool", "float16", "complex64", ">i4"])
    def test_every_kind_of_number(self, dtype):
        array = np.array([0, 1, 1]).astype(dtype)

        assert to_tensors(array).tolist() == array.tolist()

    def test_arrays_that_may_not_be_written_to_and_reversed_ones_are_copied(self):
        array = np.arange(3)
        array.flags.writeable = False

        assert to_tensors(array).tolist() == [0, 1, 2]
        assert to_tensors(array[::-1]).tolist() == [2, 1, 0]

    def test_text_is_refused(self):
        with pytest.raises(BadInput, match=r"an array of <U1 can't become a tensor\. Leave the column out"):
            to_tensors(np.array(["a"]))


@pytest.mark.parametrize("from_outside", [True, False])
def test_a_worker_that_is_killed_is_one_clear_error(from_outside):
    def transform(features, label):
        if not from_outside and label > 50:
            os.kill(os.getpid(), signal.SIGKILL)
        return features, label

    loader = StreamLoader(stream_of(shuffle=False, transform=transform), num_workers=2)
    with pytest.raises(MemfitError, match=r"worker process \d+ of the stream's loader was ended by SIGKILL before"):
        for number, _ in enumerate(loader):
            if from_outside and number == 2:
                os.kill(loader._iterator._workers[0].pid, signal.SIGKILL)


def users_loader(stream, num_workers):
    return CountedLoader(
        DataLoader(TorchStream(stream), batch_size=None, num_workers=num_workers, persistent_workers=True)
    )


@pytest.mark.parametrize("loader_of", [StreamLoader, users_loader])
def test_a_worker_that_ends_without_an_error_is_one_clear_error_too(loader_of):
    def transform(features, label):
        if label > 50:
            os._exit(0)
        return features, label

    loader = loader_of(stream_of(shuffle=False, transform=transform), num_workers=2)
    with pytest.raises(MemfitError, match=r"worker process \d+ of the stream's loader ended with exit code 0 before"):
        list(loader)


def test_an_error_of_a_transform_is_told_as_it_is():
    def transform(features, label):
        raise OSError("no such thing")

    with pytest.raises(OSError, match="no such thing"):
        next(iter(StreamLoader(stream_of(transform=transform), num_workers=1)))


class TestSharedEpochs:
    def test_each_iteration_takes_the_next_epoch(self):
        shared = SharedEpochs()
        shared.set_next(3)

        assert [shared.take(), shared.take(group=7), shared.take()] == [3, 4, 5]
        assert shared.next_epoch == 6

    def test_an_epoch_that_is_held_is_taken_again(self):
        shared = SharedEpochs()
        shared.set_next(3, is_held=True)

        assert [shared.take(), shared.take(group=7)] == [3, 3]
        shared.set_next(4)
        assert [shared.take(), shared.take()] == [4, 5]

    def test_whether_workers_have_begun(self):
        shared = SharedEpochs()
        assert not shared.is_taken
        shared.take(group=7)
        assert shared.is_taken
        shared.set_next(0)
        assert not shared.is_taken

    def test_workers_find_the_epoch_of_their_own_iterator(self):
        shared = SharedEpochs()
        for iteration in range(3):
            for group in (7, 9):
                shared.take(group, iteration)

        assert [shared.taken_by(7, iteration) for iteration in range(3)] == [0, 2, 4]
        assert [shared.taken_by(9, iteration) for iteration in range(3)] == [1, 3, 5]

    def test_old_groups_make_room_for_new_ones(self):
        shared = SharedEpochs()
        for group in range(1, 101):
            assert shared.take(group) == group - 1
            assert shared.taken_by(group, 0) == group - 1

    def test_workers_wait_for_the_first_one(self):
        shared = SharedEpochs()
        found = []
        waiting = threading.Thread(target=lambda: found.append(shared.taken_by(7, 0)))
        waiting.start()
        shared.set_next(5)
        shared.take(7)
        waiting.join()

        assert found == [5]

    def test_but_not_for_ever(self, monkeypatch):
        monkeypatch.setattr(streaming, "_BEGIN_SECONDS", 0.01)
        with pytest.raises(MemfitError, match=r"the first worker of the DataLoader has not begun the epoch\. If other"):
            SharedEpochs().taken_by(7, 0)

    def test_a_state_is_kept_as_it_is(self):
        shared = SharedEpochs()
        for state in ({"a": 1, "b": "x" * 1000}, {"a": 2}):
            shared.state = state
            assert shared.state == state

    def test_a_state_that_is_being_written_is_waited_for(self):
        shared = SharedEpochs()
        shared.state = {"a": 1}
        shared._numbers[shared._VERSION] += 1
        found = []
        waiting = threading.Thread(target=lambda: found.append(shared.state))
        waiting.start()
        waiting.join(0.05)
        assert found == []
        shared._numbers[shared._VERSION] += 1
        waiting.join()

        assert found == [{"a": 1}]

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    def test_forked_processes_share_it_and_copies_do_not(self):
        shared = SharedEpochs()
        twin = copy.deepcopy(shared)
        process = multiprocessing.get_context("fork").Process(target=shared.take)
        process.start()
        process.join()
        process.close()

        assert (shared.next_epoch, twin.next_epoch) == (1, 0)
