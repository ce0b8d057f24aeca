"""The guard of a loop that is another library's, with a small library of our own."""

import pytest
import torch
from torch.nn import functional as F

from benchmarks.guard_cases import MESSAGE, Case, Faults, Schedule, largest_difference, make
from memfit.api.library_guard import LibraryGuard
from memfit.core.guarding import BrokenUpdate, CannotFit, GuardOptions


def loss(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


class Library:
    """Trains in windows of two batches, each weighed by half, clips by itself, and asks the guard for the rest."""

    def __init__(self, case, num_batches=8, guarded=True, **options):
        self.made = make(case, num_batches)
        self.faults = Faults(Schedule(0, 0))
        self.values = []
        self.guard = None
        if guarded:
            self.guard = LibraryGuard(self.made.model, self.made.optimizer, GuardOptions(remember=False, **options))

    def train(self):
        torch.manual_seed(7)
        with self.faults:
            for index, batch in enumerate(self.made.batches):
                if index % 2 == 0:
                    self.faults.begin(index // 2)
                self.values.append(self.batch(batch, is_last=index % 2 == 1))
                if index % 2:
                    self.update()
        return self.made.model

    def run(self, part, factor):
        value = loss(self.made.model, part)
        (value / 2 * factor).backward()
        return value.detach() / 2

    def batch(self, batch, *, is_last):
        if self.guard is None:
            return self.run(batch, 1.0)
        return self.guard.passes(loss, batch, self.run, is_last=is_last)

    def update(self):
        if self.guard is None:
            self.clip_and_step()
        else:
            self.guard.update(self.clip_and_step, replay=True)
        self.made.optimizer.zero_grad()

    def clip_and_step(self):
        self.faults.enter("update")
        torch.nn.utils.clip_grad_norm_(self.made.model.parameters(), 0.5)
        self.made.optimizer.step()


def test_without_failures_nothing_differs():
    plain, guarded = Library(Case("transformer"), guarded=False), Library(Case("transformer"))

    assert largest_difference(plain.train(), guarded.train()) == 0
    assert torch.equal(torch.stack(plain.values), torch.stack(guarded.values))
    assert guarded.guard._driver.num_updates == 4


def test_parts_are_weighed_by_what_the_loss_is_a_mean_over():
    case = Case("transformer", "sgd", dropout=0.0, dtype=torch.float64, ragged=True)
    plain, guarded = Library(case, guarded=False), Library(case, micro_batch_size=3)

    assert 0 < largest_difference(plain.train(), guarded.train()) < 1e-12
    assert torch.stack(guarded.values) == pytest.approx(torch.stack(plain.values), rel=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_failures_leave_no_trace(seed):
    # GIVEN failures that come to micro-batches of 4 in the first step, and failures in updates afterwards
    failing = Library(Case("lstm"))
    schedule = Schedule(seed, 4, phases=("update",), rate=0.7)
    schedule.faults[0] = [("forward", 5), ("backward", 3)]
    failing.faults = Faults(schedule)

    # THEN the weights are those of a run that had micro-batches of 4 all along
    expected = Library(Case("lstm"), micro_batch_size=4).train()
    assert largest_difference(failing.train(), expected) == 0
    assert len(failing.faults.raised) >= 2


def test_what_else_passes_change_is_put_back():
    class Counter:
        count = 0

        def remember(self):
            self.kept = self.count

        def restore(self):
            self.count = self.kept

    library, counter = Library(Case("cnn")), Counter()
    library.guard.put_back(counter)
    plain_run = library.run

    def run(part, factor):
        counter.count += len(part[0])
        return plain_run(part, factor)

    library.run = run
    library.faults = Faults(Schedule(1, 4, phases=("backward",), rate=0.3))
    library.train()

    assert library.faults.raised
    assert counter.count == 8 * len(library.made.batches[0][0])


def test_when_nothing_is_left_the_error_says_so_and_the_weights_are_unchanged():
    library = Library(Case("cnn"))
    before = {name: value.clone() for name, value in library.made.model.state_dict().items()}

    def run(part, factor):
        raise RuntimeError(MESSAGE.format(size=1 << 30))

    with pytest.raises(CannotFit, match="nothing is left to try"):
        library.guard.passes(loss, library.made.batches[0], run, is_last=True)
    assert all(torch.equal(value, before[name]) for name, value in library.made.model.state_dict().items())


@pytest.mark.parametrize("replay", [True, False])
def test_an_update_that_can_never_be_made_ends_with_an_error(replay):
    library = Library(Case("cnn"))
    library.batch(library.made.batches[0], is_last=True)

    def update():
        raise RuntimeError(MESSAGE.format(size=1 << 30))

    with pytest.raises(CannotFit, match="nothing is left to try"):
        library.guard.update(update, replay=replay)


def test_an_update_that_breaks_half_way_is_never_gone_on_with():
    library = Library(Case("cnn"))
    library.batch(library.made.batches[0], is_last=True)

    def update():
        with torch.no_grad():
            next(library.made.model.parameters()).add_(1.0)
        raise RuntimeError(MESSAGE.format(size=1 << 30))

    with pytest.raises(BrokenUpdate):
        library.guard.update(update, replay=False)
    with pytest.raises(BrokenUpdate):
        library.batch(library.made.batches[1], is_last=False)


def test_an_update_without_passes_is_the_library_s_own_business():
    library, called = Library(Case("cnn")), []

    library.guard.update(lambda: called.append(1), replay=True)

    assert called == [1]
    assert library.guard._driver.num_updates == 0


def test_checkpoints_stay_the_library_s(tmp_path, monkeypatch):
    from memfit.core import run_events

    request = run_events.RunRequest(checkpoint=str(tmp_path / "checkpoints"))
    monkeypatch.setattr(run_events, "current", lambda: request)

    Library(Case("cnn"))

    assert not (tmp_path / "checkpoints").exists()


def test_a_probe_that_runs_out_of_memory_is_tried_again_with_less():
    # GIVEN a mean over tokens, and memory that runs out in the first look at how losses of parts add up
    case = Case("transformer", "sgd", dropout=0.0, dtype=torch.float64, ragged=True)
    plain, guarded = Library(case, guarded=False), Library(case, micro_batch_size=4)
    # A probe puts back lists that a loss has filled; where an iterator is stays.
    fails = iter([True])

    def failing_loss(model, batch):
        if next(fails, False):
            raise RuntimeError(MESSAGE.format(size=1 << 30))
        return loss(model, batch)

    guarded.batch = lambda batch, is_last: guarded.guard.passes(failing_loss, batch, guarded.run, is_last=is_last)

    # THEN it is found out all the same
    assert largest_difference(plain.train(), guarded.train()) < 1e-12
    assert next(fails, None) is None
