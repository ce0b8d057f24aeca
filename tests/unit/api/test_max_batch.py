import dataclasses

import pytest
import torch
from torch import nn

import memfit
from memfit.api import max_batch as _api
from memfit.api.jobs import open_estimator
from memfit.core.device import Device, Kind, Origin
from memfit.core.errors import BadInput
from memfit.core.replay import OutOfMemory
from memfit.core.spread import Spread
from tests import jobs

JOBS = [jobs.conv_job, jobs.transformer_job, jobs.contrastive_job]
UNLIMITED = Device("unlimited", "Unlimited", Kind.CUDA, None, None, Origin.ASSUMED, (8, 6))


@pytest.mark.parametrize("make", JOBS)
def test_the_largest_batch_fits_and_the_next_does_not(make):
    found = memfit.max_batch(make(), device="400MiB")

    assert found.estimate.batch_size == found.batch_size
    assert found.estimate.fits is True
    assert memfit.estimate(make(found.limit), device="400MiB").fits is True
    assert memfit.estimate(make(found.limit + 1), device="400MiB").fits is False
    assert list(found.tried) == sorted(found.tried)
    assert all(fits == (n <= found.limit) for n, _, fits in found.tried)


@pytest.mark.parametrize("make", JOBS)
def test_the_headline_leaves_room_and_the_limit_is_told_apart(make):
    found = memfit.max_batch(make(), device="400MiB")

    # THEN everything up to the safe size fits with room for what an estimate may be off by
    assert 1 < found.batch_size < found.limit
    for size in range(max(1, found.batch_size - 20), found.batch_size + 1):
        estimate = memfit.estimate(make(size), device="400MiB")
        assert estimate.fits
    assert estimate.fit_probability >= 0.95
    larger = memfit.estimate(make(found.batch_size + 1), device="400MiB")
    assert larger.fit_probability < 0.95 or "cache-released" in {note.code for note in larger.notes}
    # THEN what fits is shown with what the device really provides
    assert all(peak <= 400 * 2**20 for _, peak, fits in found.tried if fits)


class Changed:
    """An estimator whose estimates are changed by hand."""

    def __init__(self, change):
        job = jobs.conv_job(64)
        self._estimator = open_estimator(job, memfit.find_device("400MiB"))
        self._change = change

    def run(self):
        return self._change(self._estimator.run())

    def at_batch(self, batch_size):
        return self._change(self._estimator.at_batch(batch_size))

    traced_at = at_batch

    def scales(self, batch_size):
        return self._estimator.scales(batch_size)


def search(change, sizes):
    estimator = Changed(change)
    return _api._BatchSearch(estimator.run(), estimator).run(sizes)


def test_a_size_above_one_that_does_not_fit_is_not_safe():
    # GIVEN an allocator that places 20 samples worse than 21 and more
    def change(estimate):
        full = dataclasses.replace(estimate.replay, out_of_memory=OutOfMemory(1, 2, 3, 4))
        return dataclasses.replace(estimate, replay=full) if estimate.batch_size == 20 else estimate

    # WHEN the search comes upon it only beside the largest
    found = search(change, [16, 19, 20, 21, 24, 28, 30])

    # THEN what lies above it fits, and isn't safe
    assert (found.batch_size, found.limit) == (19, 30)
    assert (20, False) in {(size, fits) for size, _, fits in found.tried}


def test_where_nothing_is_sure_the_limit_is_still_told():
    # GIVEN estimates that may be off by anything
    anything = (Spread("all of it", 10**12, 10**12, "nobody knows"),)

    found = search(lambda estimate: dataclasses.replace(estimate, spreads=anything), [16, 64])

    assert (found.batch_size, found.limit) == (None, 64)
    assert found.estimate.batch_size == found.limit


def test_the_largest_batch_is_traced_itself():
    # GIVEN a search that starts at 4 samples, whose sums don't take the buffers that those of hundreds do
    device = dataclasses.replace(memfit.find_device("h100"), usable_bytes=2**30)

    found = memfit.max_batch(jobs.transformer_job(4), device=device)

    # THEN what it finds is what traces at those sizes say
    sure, largest = (
        memfit.estimate(jobs.transformer_job(size), device=device) for size in (found.batch_size, found.limit)
    )
    assert found.estimate.peak_bytes == sure.peak_bytes
    assert sure.fit_probability >= 0.95
    assert largest.fits


def test_the_largest_batch_does_not_depend_on_where_the_search_starts():
    sizes = {memfit.max_batch(jobs.conv_job(n), device="400MiB").batch_size for n in (2, 7, 500)}

    assert len(sizes) == 1


def test_the_largest_candidate_that_fits_is_chosen():
    free = memfit.max_batch(jobs.conv_job(), device="400MiB").batch_size

    chosen = memfit.max_batch(jobs.conv_job(), device="400MiB", candidates=[10 * free, 16, free - 1, 2, 16])

    assert chosen.batch_size == free - 1
    assert {n for n, _, _ in chosen.tried} <= {4, 10 * free, 16, free - 1, 2}


def test_no_batch_fits():
    found = memfit.max_batch(jobs.transformer_job(), device="256MiB")

    assert found.batch_size is None
    assert found.estimate.fits is False
    assert found.estimate.batch_size == min(n for n, _, _ in found.tried) == 1


def test_a_step_that_refuses_a_single_sample_does_not_stop_the_search():
    # GIVEN batch norm over the batch alone, which can't train on one sample
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    found = memfit.max_batch(model, lambda m, b: m(b).sum(), torch.ones(4, 8), device="200MiB")

    assert found.batch_size is None
    assert found.estimate.batch_size == 2


@pytest.mark.parametrize("candidates", [[], [0, 4], [-1], [1.5], ["8"]])
def test_candidates_are_whole_numbers(candidates):
    with pytest.raises(BadInput, match=r"whole numbers from 1 up, such as \[16, 32, 64\], but"):
        memfit.max_batch(jobs.conv_job(), device="1GiB", candidates=candidates)


def test_the_largest_batch_needs_a_capacity():
    with pytest.raises(BadInput, match=r"the memory of Unlimited is unknown; name a size such as device='16GiB'"):
        memfit.max_batch(jobs.conv_job(), device=UNLIMITED)
