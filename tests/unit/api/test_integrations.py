"""The public names of the integrations, with a trainer of our own in place of the libraries'."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from memfit.api import integrations
from memfit.api.integrations import GuardedTrainerMixin, guard_trainer, install_lightning, install_transformers
from memfit.api.library_guard import LibraryGuard
from memfit.core.errors import BadInput
from memfit.core.guarding import GuardOptions


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
