"""`memfit.max_batch`: the largest batch that fits on a device with 95%, and the largest that fits at best."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from memfit.api.devices import resolve
from memfit.api.jobs import as_job, open_estimator
from memfit.core.device import Device
from memfit.core.errors import BadBatch, BadInput, StepFailed
from memfit.core.estimate import CACHE_RELEASED, WORKSPACE_DROPPED, Estimate
from memfit.core.progress import doing
from memfit.core.replay import AllocatorOptions
from memfit.core.shown import Shown
from memfit.core.spread import COVERAGE
from memfit.core.units import format_size
from memfit.estimator.estimator import Estimator, checked_batch_size
from memfit.reports.estimate import tables

_LARGEST_BATCH = 2**24
# A device that is as full as these say fits the step, but makes it slower.
_FULL = {CACHE_RELEASED, WORKSPACE_DROPPED}
# Sizes so much smaller are looked at before one is called sure; all of the next where that takes no trace.
_FEW_NEIGHBOURS: Sequence[int] = (1, 2, 4, 8)
_NEIGHBOURS: Sequence[int] = range(1, 33)
# Each traces what the one before it found; a second one nearly always finds the same.
_MOST_ROUNDS = 8


@dataclass(frozen=True, slots=True, repr=False)
class MaxBatch(Shown):
    """The largest batch that fits with a probability of 95%, and the largest that fits if everything is as estimated.

    A size counts as sure when its estimate says so without an allocator that has to give back its cache, and every size
    below it that was looked at fits: an allocator may place a smaller batch worse than a larger one.

    Args:
        batch_size: the largest that fits with 95%; None when none does.
        estimate: the estimate at that batch size; at `limit` when none is sure, and at the smallest one tried when
            nothing fits.
        tried: (batch size, bytes that the device must provide, fits) of every size looked at, in order. For those that
            don't fit it is what an unlimited device would provide.
        limit: the largest batch size that fits at best; None when not even the smallest does.
    """

    batch_size: int | None
    estimate: Estimate
    tried: tuple[tuple[int, int, bool], ...]
    limit: int | None = None

    def summary(self) -> str:
        """The answer, and what it takes."""
        needed, usable = format_size(self.estimate.peak_bytes), format_size(self.estimate.capacity_bytes)
        sizes = tables.largest_batch(self.batch_size, self.limit)
        return f"of {self.estimate.subject}: {sizes}, {needed} of {usable} on {self.estimate.device.name}"

    def __str__(self) -> str:
        return str(tables.tried_batches(self.tried, self.batch_size, self.limit, self.estimate.device, self.estimate))


def max_batch(
    model: Any,
    *arguments: Any,
    loss: Callable[[Any, Any], Any] | None = None,
    batch: Any = None,
    optimizer: Any = None,
    device: str | Device | None = None,
    precision: str | None = None,
    mode: str | None = None,
    allocator: AllocatorOptions | None = None,
    candidates: Iterable[int] | None = None,
) -> MaxBatch:
    """The largest batch that fits with a probability of 95%, and the largest at best, from a handful of traces.

    Args:
        model: as for `estimate`.
        arguments: as for `estimate`.
        loss: as for `estimate`.
        batch: a batch of any size; its first dimension is varied.
        optimizer: as for `estimate`.
        device: as for `estimate`; its capacity must be known.
        precision: as for `estimate`.
        mode: as for `estimate`.
        allocator: as for `estimate`.
        candidates: sizes to choose from; every whole number by default.
    """
    sizes = None if candidates is None else _checked(list(candidates))
    job = as_job(model, arguments, loss, batch, optimizer=optimizer, precision=precision, mode=mode)
    target = resolve(device)
    if target.usable_bytes is None:
        raise BadInput(f"the memory of {target.title} is unknown; name a size such as device='16GiB'.")
    with doing("looking for the largest batch"):
        estimator = open_estimator(job, target, allocator)
        start = estimator.run()
        if start.batch_size is None:
            raise BadBatch(
                "the batch's tensors share no first dimension, so it can't be made larger or smaller. "
                "Give tensors whose first dimension is the batch."
            )
        return _BatchSearch(start, estimator).run(sizes)


def _checked(candidates: list[int]) -> list[int]:
    try:
        sizes = sorted({checked_batch_size(size) for size in candidates})
    except BadBatch:
        sizes = []
    if not sizes:
        raise BadInput(f"candidates must be whole numbers from 1 up, such as [16, 32, 64], but {candidates} was given.")
    return sizes


class _BatchSearch:
    """Looks for the largest batch that surely fits and the largest that fits, on the scaled timelines.

    What it finds is traced, and looked for again where the trace of that very size says otherwise.
    """

    def __init__(self, start: Estimate, estimator: Estimator) -> None:
        assert start.batch_size is not None
        self._start_size = start.batch_size
        self._estimator = estimator
        self._seen: dict[int, Estimate] = {}

    def run(self, candidates: list[int] | None) -> MaxBatch:
        for _ in range(_MOST_ROUNDS):
            self._seen = {}
            self._fits(self._start_size)
            found = self._look(candidates)
            if all(
                self._estimator.traced_at(size).peak_bytes == self._seen[size].peak_bytes
                for size in (found.batch_size, found.limit)
                if size is not None
            ):
                break
        return found

    def _look(self, candidates: list[int] | None) -> MaxBatch:
        sizes: Sequence[int] = candidates or range(1, self._first_too_large())
        limit = self._bisect(lambda i: self._fits(sizes[i]), len(sizes))
        sure = self._sure(sizes[: 0 if limit is None else limit + 1])
        tried = tuple((n, e.peak_bytes, bool(e.fits)) for n, e in sorted(self._seen.items()))
        largest = None if limit is None else sizes[limit]
        shown = next((size for size in (sure, largest) if size is not None), min(self._seen))
        return MaxBatch(sure, self._seen[shown], tried, largest)

    def _sure(self, sizes: Sequence[int]) -> int | None:
        """The largest size that is sure, below which every one that was looked at fits."""
        count = len(sizes)
        while (best := self._bisect(lambda i: self._is_sure(sizes[i]), count)) is not None:
            # What the allocator makes of sizes goes up and down: those right below must fit, too.
            neighbours = _NEIGHBOURS if self._estimator.scales(sizes[best]) else _FEW_NEIGHBOURS
            below = {best - step for step in neighbours if step <= best}
            below |= {place for place in range(best) if sizes[place] in self._seen}
            # A single sample may be refused for other reasons, such as by batch norm.
            failing = [place for place in below if sizes[place] > 1 and not self._is_passed(sizes[place])]
            if not failing:
                return sizes[best]
            count = min(failing)
        return None

    def _is_passed(self, batch_size: int) -> bool:
        """Whether a size fits that is not in question itself, and is worth a line only where it doesn't."""
        known = batch_size in self._seen
        fits = self._fits(batch_size)
        if fits and not known:
            del self._seen[batch_size]
        return fits

    def _is_sure(self, batch_size: int) -> bool:
        if not self._fits(batch_size):
            return False
        estimate = self._seen[batch_size]
        return (estimate.fit_probability or 0) >= COVERAGE and _FULL.isdisjoint(note.code for note in estimate.notes)

    def _first_too_large(self) -> int:
        """A size that doesn't fit, or is beyond all that are looked at."""
        size = self._start_size
        while self._fits(size):
            if size >= _LARGEST_BATCH:
                return size + 1
            size *= 2
        return size

    @staticmethod
    def _bisect(fits: Callable[[int], bool], count: int) -> int | None:
        """Last index of `count` that fits; None when the first doesn't."""
        low, high = -1, count
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low if low >= 0 else None

    def _fits(self, batch_size: int) -> bool:
        try:
            if batch_size not in self._seen:
                self._seen[batch_size] = self._estimator.at_batch(batch_size)
            return bool(self._seen[batch_size].fits)
        except StepFailed:
            # Batch norm, for one, refuses to train on a single sample.
            if batch_size > 1:
                raise
            return False
