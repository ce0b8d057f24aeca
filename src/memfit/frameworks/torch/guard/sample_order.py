"""The order in which a loader takes samples: what it is drawn from, and how to begin it again in the middle.

A loader's order is decided by random numbers that its samplers draw when an epoch begins. Given the states of all
generators at that moment, the same order comes again, and the batches that were given out already can be dropped as
lists of numbers, before any data is loaded.
"""

import random
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader

from memfit.frameworks.torch import internals
from memfit.frameworks.torch.guard.snapshot import RandomState

_END = object()


class Sources:
    """What the order of a loader is drawn from: the program's random states, and generators of its own."""

    def __init__(self, loader: Any) -> None:
        self._owners: dict[str, Any] = {"loader": loader}
        for name in ("sampler", "batch_sampler"):
            owner = getattr(loader, name, None)
            inner = getattr(owner, "sampler", None)
            self._owners |= {n: o for n, o in ((name, owner), (f"{name}.sampler", inner)) if o is not None}

    def read(self) -> dict[str, Any]:
        """All states at this moment, as plain data and tensors."""
        return {"random": RandomState.now().states, "own": self.read_own()}

    def write(self, states: dict[str, Any]) -> None:
        """Sets everything back to what `read` gave."""
        RandomState(states["random"]).restore()
        self.write_own(states["own"])

    def read_own(self) -> dict[str, Any]:
        """The states of the loader's own generators, and the epochs that its samplers count."""
        states: dict[str, Any] = {name: read() for name, read, _ in self._generators()}
        states |= {f"{name}.epoch": owner.epoch for name, owner in self._counting()}
        return states

    def write_own(self, states: dict[str, Any], *, epochs: bool = True) -> None:
        """Sets the loader's own generators back; with `epochs` also what its samplers count."""
        for name, _, write in self._generators():
            if name in states:
                write(states[name])
        for name, owner in self._counting():
            epoch, can_be_set = states.get(f"{name}.epoch"), hasattr(owner, "set_epoch")
            if epoch is not None and can_be_set and epochs:
                owner.set_epoch(epoch)
            elif epoch is not None and not can_be_set:
                owner.epoch = epoch

    def set_epoch(self, epoch: int, last: dict[str, int]) -> dict[str, int]:
        """Tells samplers which epoch, counted from 0, begins, unless the user's code has; returns their counts.

        `last` is what the counts were left at when the last epoch began; any other count is the user's doing.
        """
        for name, owner in self._counting():
            if hasattr(owner, "set_epoch") and owner.epoch == last.get(name, 0):
                owner.set_epoch(epoch)
        return self.counts()

    def draw_seed(self) -> None:
        """Draws as a loader does that starts workers."""
        generator = getattr(self._owners["loader"], "generator", None)
        torch.empty((), dtype=torch.int64).random_(generator=generator)

    def counts(self) -> dict[str, int]:
        """The epochs that the loader's samplers count."""
        return {name: owner.epoch for name, owner in self._counting()}

    def _generators(self) -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], object]]]:
        """(name, what reads the state, what writes it)."""
        for name, owner in self._owners.items():
            for attribute, value in getattr(owner, "__dict__", {}).items():
                path = f"{name}.{attribute}"
                # PyTorch's default one is among the program's states.
                if isinstance(value, torch.Generator) and value is not torch.default_generator:
                    yield path, value.get_state, value.set_state
                elif isinstance(value, random.Random):
                    yield path, value.getstate, value.setstate
                elif isinstance(value, numpy.random.Generator):
                    bits = value.bit_generator
                    yield path, partial(getattr, bits, "state"), partial(setattr, bits, "state")

    def _counting(self) -> Iterator[tuple[str, Any]]:
        for name, owner in self._owners.items():
            if name != "loader" and type(getattr(owner, "epoch", None)) is int:
                yield name, owner


class Indices:
    """In the place of a loader's batch sampler while an iterator is made: begins later, and notes what it gives.

    It draws as a loader that has its workers already, though it starts them now (`rewinds`), or the other way round.
    """

    def __init__(self, sampler: Any, skip: int, sources: Sources, *, rewinds: bool, draws_seed: bool) -> None:
        self._sampler = sampler
        self._skip = skip
        self._sources: Sources | None = sources
        self._rewinds = rewinds
        self._draws_seed = draws_seed
        self._before: dict[str, Any] | None = None
        self._after: dict[str, Any] | None = None
        """States before and after the sampler's iterator was made, where they have to be set back to."""
        self._inner: Iterator[Any] = iter(())
        self._ahead: list[Any] = []
        self._is_begun = False
        self._given: list[int] = []
        """Checksums of the order up to each batch that the loader has asked for and not yet given out."""
        self._last = self.checksum = 0

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        # A loader that starts workers makes an iterator, draws a seed for them, and makes another iterator. Some
        # samplers draw when their iterator is made, others with its first number.
        sources = self._sources
        assert sources is not None
        if self._rewinds:
            if self._before is not None:
                sources.write(self._before)
            self._before = sources.read()
            self._inner = iter(self._sampler)
            self._after = sources.read()
            return self._numbers()
        if self._draws_seed:
            iter(self._sampler)
            sources.draw_seed()
        self._inner = iter(self._sampler)
        return self._numbers()

    def begin(self) -> int:
        """Draws the order and leaves out what is to be left out, if that hasn't happened; the checksum of that."""
        if not self._is_begun:
            self._is_begun = True
            if self._after is not None and self._sources is not None:
                self._sources.write(self._after)
            # The loader's iterator keeps this object. A reference back to the loader would be a circle, and workers
            # would live until the garbage collector comes by, maybe in another process that was forked meanwhile.
            self._sources = self._before = self._after = None
            for _ in range(self._skip):
                self._note(next(self._inner, _END))
            self.checksum = self._last
            self._ahead.append(next(self._inner, _END))
        return self.checksum

    def give_out(self) -> None:
        """The loader has given out one more batch."""
        if self._given:
            self.checksum = self._given.pop(0)

    def _numbers(self) -> Iterator[Any]:
        self.begin()
        while True:
            index = self._ahead.pop() if self._ahead else next(self._inner, _END)
            if index is _END:
                return
            self._note(index)
            self._given.append(self._last)
            yield index

    def _note(self, index: Any) -> None:
        text = "the end" if index is _END else repr(index)
        self._last = zlib.crc32(text.encode(), self._last)


def is_warm(loader: Any) -> bool:
    """Whether workers of an earlier epoch are still there, so that the loader draws no seed for new ones."""
    return bool(getattr(loader, "persistent_workers", False)) and internals.kept_iterator(loader) is not None


def open_at(loader: "DataLoader[Any]", skip: int, *, warm: bool, sources: Sources) -> tuple[Any, Indices]:
    """An iterator over a map-style loader without its first batches, and what notes its order."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    plain = loader.__dict__[name]
    has_workers = is_warm(loader)
    indices = Indices(plain, skip, sources, rewinds=warm and not has_workers, draws_seed=has_workers and not warm)
    # PyTorch forbids setting these on a live loader, but only looks them up when an iterator is made.
    loader.__dict__[name] = indices
    internals.set_index_sampler(internals.kept_iterator(loader), indices)
    try:
        iterator = iter(loader)
    finally:
        loader.__dict__[name] = plain
        internals.set_index_sampler(internals.kept_iterator(loader), plain)
    return iterator, indices
