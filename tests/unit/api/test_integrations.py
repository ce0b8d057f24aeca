"""The public names of the integrations, with a trainer of our own in place of the libraries'."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from benchmarks.guard_cases import MESSAGE, Case, Faults, Schedule, largest_difference, make
from memfit.api import integrations
from memfit.api.integrations import (
    GuardedTrainerMixin,
    LibraryGuard,
    guard_trainer,
    install_lightning,
    install_transformers,
)
from memfit.core import env
from memfit.core.errors import BadInput
from memfit.core.guarding import BrokenUpdate, CannotFit, GuardOptions
from memfit.core.run_events import RunRequest


class Accelerator:
    distributed_type = SimpleNamespace(name="NO")
    sync_gradients = True
    scaler = None

    def backward(self, loss):
        loss.backward()

    def clip_grad_norm_(self, parameters, norm):
        return torch.nn.utils.clip_grad_norm_(parameters, norm)

    def clip_grad_value_(self, parameters, value):
        torch.nn.utils.clip_grad_value_(parameters, value)

    def unwrap_model(self, model):
        return model


class Trainer:
    """As much of a `transformers.Trainer` as its guard has to do with."""

    def __init__(self, num_steps=3):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.accelerator = Accelerator()
        self.args = SimpleNamespace(optim="sgd")
        self.state = SimpleNamespace(global_step=0)
        self.num_steps = num_steps
        self.sizes = []
        self.arguments = None
        self.folder = ""

    def train(self, resume_from_checkpoint=None, trial=None):
        self.arguments = (resume_from_checkpoint, trial)
        torch.manual_seed(1)
        for _ in range(self.num_steps):
            inputs = {"inputs": torch.randn(8, 4), "labels": torch.randn(8, 2)}
            self.training_step(self.model, inputs, None)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.state.global_step += 1
            self._save_checkpoint(self.model, trial)
        return "trained"

    def compute_loss_context_manager(self):
        return torch.enable_grad()

    def compute_loss(self, model, inputs, num_items_in_batch=None):
        labels = inputs.pop("labels")
        return torch.nn.functional.mse_loss(model(inputs["inputs"]), labels)

    def _prepare_inputs(self, inputs):
        return inputs

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.sizes.append(len(inputs["inputs"]))
        loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        return loss.detach()

    def _save_checkpoint(self, model, trial=None):
        pass

    def _get_output_dir(self, trial=None):
        return self.folder


class Guarded(GuardedTrainerMixin, Trainer):
    memfit_options = GuardOptions(remember=False, micro_batch_size=3)


def test_the_mixin_runs_training_steps_in_micro_batches():
    plain, guarded = Trainer(), Guarded()

    assert plain.train() == guarded.train() == "trained"

    assert guarded.sizes[-3:] == [3, 3, 2]
    assert torch.allclose(plain.model.weight, guarded.model.weight, rtol=1e-6)


def test_a_trainer_is_as_before_after_training():
    trainer = Guarded()
    trainer.train()

    assert vars(trainer.accelerator) == {}
    assert "step" not in vars(trainer.optimizer)


def test_an_existing_trainer_becomes_guarded_and_stays_what_it_was():
    trainer = guard_trainer(Trainer(), options=GuardOptions(remember=False, micro_batch_size=4))

    trainer.train()

    assert isinstance(trainer, Trainer)
    assert type(trainer).__name__ == "Trainer"
    assert trainer.sizes[-2:] == [4, 4]
    assert guard_trainer(trainer, options=GuardOptions(remember=False)) is trainer


def test_an_option_that_is_the_librarys_is_refused():
    trainer = guard_trainer(Trainer(), GuardOptions(keep=2))

    with pytest.raises(BadInput, match="the guard of a trainer takes no keep: the library writes the checkpoints"):
        trainer.train()


def test_every_trainer_of_a_process_can_be_guarded(monkeypatch):
    # GIVEN a library whose trainers are to be guarded, installed twice
    class Other(Trainer):
        pass

    module = ModuleType("transformers.trainer")
    module.Trainer = Other
    made = []
    monkeypatch.setattr(integrations, "LibraryGuard", lambda *a, **k: made.append(LibraryGuard(*a, **k)) or made[-1])
    install_transformers(module)
    install_transformers(module)

    # WHEN one is made and trained
    trainer = Other()
    trainer.train()

    # THEN it was guarded, once
    assert len(made) == 1
    assert made[0]._driver.num_updates == 3


class Callback:
    pass


def lightning_of(seen):
    class LightningTrainer:
        def __init__(self, *callbacks):
            self.callbacks = list(callbacks)

        def fit(self, model, train_dataloaders=None, val_dataloaders=None, datamodule=None, ckpt_path=None):
            seen.append((len(self.callbacks), ckpt_path))

    module = ModuleType("lightning.pytorch")
    module.Callback, module.Trainer = Callback, LightningTrainer
    return module


def test_every_lightning_trainer_gets_one_callback():
    seen = []
    module = lightning_of(seen)
    install_lightning(module)
    install_lightning(module)
    trainer = module.Trainer()

    trainer.fit("model")
    trainer.fit("model", None, None, None, "own")

    assert seen == [(1, None), (1, "own")]
    assert type(trainer.callbacks[0]).__name__ == "LightningGuard"
    assert isinstance(trainer.callbacks[0], Callback)


def test_the_callback_is_of_the_lightning_in_use(monkeypatch):
    module = lightning_of([])
    monkeypatch.setitem(sys.modules, "pytorch_lightning", module)
    monkeypatch.delitem(sys.modules, "lightning.pytorch", raising=False)

    assert issubclass(integrations.LightningGuard, Callback)


def test_without_lightning_the_error_says_what_to_install(monkeypatch):
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)

    with pytest.raises(ImportError, match="pip install lightning"):
        _ = integrations.LightningGuard


def test_other_names_are_not_there():
    with pytest.raises(AttributeError, match="Nothing"):
        _ = integrations.Nothing


@pytest.mark.parametrize(
    ("backend", "devices", "budget"), [("tensorflow", False, 7), ("tensorflow", True, None), ("jax", False, None)]
)
def test_what_tensorflow_does_in_a_container_is_planned(monkeypatch, backend, devices, budget):
    # GIVEN a package that looks like Keras, in a container
    class Model:
        def fit(self, x):
            return "trained"

    package = SimpleNamespace(Model=Model, backend=SimpleNamespace(backend=lambda: backend))
    calls = []
    monkeypatch.setattr("memfit.api.fit.guarded_fit", lambda *given, **named: calls.append((given, named)))
    monkeypatch.setattr(integrations, "cgroup_limit_bytes", lambda: 7)
    monkeypatch.setattr(integrations, "has_devices", lambda: devices)

    integrations.install_keras(package)
    model = package.Model()
    model.fit(3)

    (((plain, *given), named),) = calls
    assert (plain(model, 1), given, named) == ("trained", [model, (3,), {}], {"budget": budget})


# The guard of a loop that is another library's, with a small library of our own.


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
    # GIVEN failures that come to micro-batches of 4 in the first step, and failures in updates afterwards; where the
    # loss is probed, both looks at its gradient fail, too
    failing = Library(Case("lstm"))
    schedule = Schedule(seed, 4, phases=("update",), rate=0.7)
    schedule.faults[0] = [("forward", 5), *[("backward", 3)] * 3]
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
    request = RunRequest(checkpoint=str(tmp_path / "checkpoints"))
    (tmp_path / "request.json").write_text(json.dumps(request.to_json()))
    monkeypatch.setenv(env.RUN_REQUEST, str(tmp_path / "request.json"))

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
